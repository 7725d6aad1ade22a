"""The same passes of a head in torch and in its graph: prompt, catch-up, own steps."""

import numpy as np
import torch
from transformers import DynamicCache

import jetdraft
from jetdraft.devices.providers import PROVIDERS
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import ONE_THREAD
from jetdraft.runtime.planning.registry import methods

TOKENS = np.random.default_rng(6).integers(1, 288, 15).tolist()
READ, ACCEPTED, STEPS = 8, 3, 3
"""Rows of the prompt, rows of the catch-up, and rows that the head drafts itself."""


def graphs(bundle):
    opener = Opener(bundle, PROVIDERS["cpu"], ONE_THREAD)
    return opener.graph(bundle.target), opener.graph(bundle.drafter)


def drafts_of(bundle, method, **drafting):
    drafts = []
    with jetdraft.load(bundle.path, threads=1) as model:
        record = methods()[method]
        proposer = model.planner.proposer(record, record.options(**drafting))
        propose = proposer.propose

        def spy(context, budget, parents=None):
            rows = propose(context, budget, parents)
            drafts.append(([*context], rows.tokens[1:]))
            return rows

        proposer.propose = spy
        result = model.generate(
            token_ids=TOKENS[:READ], method=method, max_new_tokens=8, ignore_eos=True,
            num_draft_tokens=3, drafting=drafting,
        )  # fmt: skip
    assert [*TOKENS[:READ], *result.token_ids][: len(drafts[-1][0])] == drafts[-1][0]
    return drafts, result.stats


def in_torch(head, features):
    cache, logits, carried = DynamicCache(), [], []
    first = 0
    with torch.no_grad():
        for rows in (READ, ACCEPTED, *[1] * STEPS):
            part = features[first : first + rows]
            if first >= len(features):
                part = carried[-1][-1:]
            positions = torch.arange(first, first + rows)[None]
            tokens = torch.tensor([TOKENS[first + 1 : first + 1 + rows]])
            hidden, back = head(tokens, part[None], positions, cache)
            logits.append(head.lm_head(hidden)[0])
            carried.append(back[0])
            first += rows
    return torch.cat(logits).numpy(), torch.cat(carried).numpy()


def in_graphs(target, drafter):
    answer = target.run(TOKENS[:READ], last_only=True)
    features = answer.features.copy()
    target.cache.advance(READ)
    answer = target.run(TOKENS[READ : READ + ACCEPTED])
    features = np.concatenate([features, answer.features])
    candidates, values, carried, first = [], [], [], 0
    for rows in (READ, ACCEPTED, *[1] * STEPS):
        part = features[first : first + rows] if first < len(features) else carried[-1]
        tokens = TOKENS[first + 1 : first + 1 + rows]
        answer = drafter.run(tokens, features=part[-rows:])
        drafter.cache.advance(rows)
        candidates.append(answer.candidates.copy())
        values.append(answer.candidate_logits.copy())
        carried.append(answer.carried.copy())
        first += rows
    return features, *map(np.concatenate, (candidates, values, carried))
