"""What a proposer is shown: every pass of the target, of prompts and of rounds."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.runtime.drafts.rows import gapless_length

RANDOM = np.random.default_rng(11)
IDS = RANDOM.integers(0, 288, 150).tolist()
SAMPLINGS = [{}, {"temperature": 0.9, "seed": 3}]


class Recorder(Proposer):
    """Drafts a given text, and remembers what it is shown."""

    traits = Traits("recorder", max_draft_tokens=15)

    def __init__(self, truth=(), branching=False):
        self.truth = list(truth)
        self.branching = branching
        self.shown = []

    def begin(self, prompt, chooser):
        self.shown = []

    def propose(self, context, budget, parents=None):
        random = np.random.default_rng(len(context))
        parents = list(range(-1, budget))
        if self.branching:
            parents = [-1, *(int(random.integers(row + 1)) for row in range(budget))]
        right = random.integers(budget + 1)
        tokens = [context[-1]]
        for row, depth in enumerate(Rows([0] * (budget + 1), parents).depths):
            if row:
                at = len(context) + depth - 1
                good = at < len(self.truth) and (self.branching or depth <= right)
                good = good and not (self.branching and random.random() < 0.3)
                tokens.append(self.truth[at] if good else int(random.integers(288)))
        return Rows(tokens, parents)

    def observe(self, seen):
        answers = seen.answer.candidates.shape[0]
        self.shown.append((seen.length, seen.rows, list(seen.path), answers))


def run(model, prompt, recorder, tokens=40, length=4, **options):
    how = {"max_new_tokens": tokens, "num_draft_tokens": length, "ignore_eos": True}
    with registered(Method("recorder", "records", lambda parts, own: recorder)):
        result = model.generate(token_ids=prompt, method="recorder", **how, **options)
    return [*prompt, *result.token_ids]


def prefill(recorder, prompt):
    return [shown for shown in recorder.shown if shown[0] <= len(prompt)]


@pytest.mark.parametrize("length", [1, 2, 33, 100])
def test_every_pass_over_a_prompt_is_shown(model, length):
    prompt, recorder = IDS[:length], Recorder()
    model.forget()
    run(model, prompt, recorder)
    passes = prefill(recorder, prompt)
    assert [t for _, rows, _, _ in passes for t in rows.tokens] == prompt[:-1]
    assert all(rows.is_chain for _, rows, _, _ in passes)
    assert all(path == list(range(len(rows))) for _, rows, path, _ in passes)
    read = accumulate(len(rows) for _, rows, _, _ in passes)
    assert [shown[0] for shown in passes] == [rows + 1 for rows in read]
    assert {answers for *_, answers in passes} <= {1}
    assert recorder.shown[: len(passes)] == passes, "before any round"


def test_rows_that_are_kept_are_not_shown_again(model):
    first, second = Recorder(), Recorder()
    model.forget()
    run(model, IDS[:60], first)
    run(model, IDS[:100], second)
    passes = prefill(second, IDS[:100])
    assert [t for _, rows, _, _ in passes for t in rows.tokens] == IDS[60:99]
    assert passes[0][0] == 60 + len(passes[0][1]) + 1
    run(model, IDS[:100], second)
    assert prefill(second, IDS[:100]) == []


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_every_outcome_of_a_chain_is_shown(model, sampling, exact):
    prompt, options = IDS[:20], {**sampling, "exact": exact, "tokens": 150}
    recorder = Recorder(run(model, prompt, Recorder(), **options))
    text = run(model, prompt, recorder, **options)
    length = len(prompt)
    for shown, rows, path, answers in recorder.shown[len(prefill(recorder, prompt)) :]:
        assert path == list(range(len(path)))
        assert rows.tokens[: len(path)] == text[length - 1 :][: len(path)]
        assert answers == len(rows)
        length += len(path)
        assert shown == length
    accepted = {len(path) - 1 for _, _, path, _ in recorder.shown}
    assert accepted >= set(range(5)), "from none of four tokens to all of them"
    assert length == len(text)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("skips_agree", [True, False])
def test_the_path_through_a_tree_is_shown(model, sampling, skips_agree, monkeypatch):
    """Rows beyond a gap that are not proven come again in the next pass."""
    known = replace(model.parts.widths, skips_agree=skips_agree)
    monkeypatch.setattr(model.parts.survey, "_widths", known)
    prompt, options = IDS[:20], {**sampling, "tokens": 150}
    truth = run(model, prompt, Recorder(), length=7, **options)
    recorder = Recorder(truth, branching=True)
    text = run(model, prompt, recorder, length=7, **options)
    length, gaps = len(prompt), 0
    for shown, rows, path, answers in recorder.shown[len(prefill(recorder, prompt)) :]:
        assert path[0] == 0
        assert all(rows.parents[b] == a for a, b in pairwise(path))
        proven = len(path) if skips_agree else gapless_length(path)
        tokens = [rows.tokens[row] for row in path[:proven]]
        assert tokens == text[length - 1 :][:proven]
        assert answers == len(rows)
        assert shown == length + len(path)
        length += proven
        gaps += gapless_length(path) < len(path)
    assert gaps > 3
    assert length == len(text)


def test_all_proposers_are_shown_what_one_of_them_drafted(model):
    prompt, silent, chatty = IDS[:20], Recorder(), Recorder()
    chatty.truth = run(model, prompt, Recorder())
    silent.propose = lambda context, budget, parents=None: Rows.chain([context[-1]])
    silent.traits = Traits("silent", max_draft_tokens=4)
    with (
        registered(Method("silent", "nothing", lambda parts, own: silent)),
        registered(Method("recorder", "records", lambda parts, own: chatty)),
    ):
        model.generate(token_ids=prompt, method="silent,recorder", max_new_tokens=40)
    assert silent.shown == chatty.shown
    assert len(silent.shown) > 2
