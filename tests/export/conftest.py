from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.devices.providers import PROVIDERS
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import ONE_THREAD
from jetdraft.runtime.planning.registry import methods
from tests import tiny
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import H, rand
from tests.tiny import llama_config, save_checkpoint

SMALL = {"capacity": 64, "max_width": 16, "fast": True}
TAPS = [1, 2, 3]
OF_TAPS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": TAPS}
IDS: dict[str, Any] = {"aux_hidden_state_layer_ids": TAPS}
OUTPUTS: dict[str, Any] = {"outputs": (0, 1, 2), "num_target_layers": 3}
LACKING: dict[str, Any] = {"fc_bias": False, "embedding": False}
SIZES = {**tiny.SIZES, "num_hidden_layers": 1}
MTP: dict[str, tuple[Any, Callable[[], dict[str, Tensor]]]] = {
    # MiMo-7B: a Qwen2 layer, and the state before the embedding.
    "mimo": (transformers.Qwen2Config(**SIZES), lambda: _module(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm", bias=True)),
    # The names of Qwen3-Next and Qwen3.5, beside a target without recurrent layers.
    "qwen": (transformers.Qwen3Config(**SIZES, head_dim=16), lambda: _module(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm",
        at="mtp.layers.0.", qk_norm=True)),
    # The names of DeepSeek-V3 and GLM-4.5, beside a target without experts.
    "deepseek": (transformers.LlamaConfig(**SIZES), lambda: _module(
        "model.layers.1.", "enorm", "hnorm", "eh_proj", "shared_head.norm")),
}  # fmt: skip
COPIES = {
    "model.layers.1.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.1.shared_head.head.weight": "lm_head.weight",
}
"""Matrices of the target that DeepSeek's files have once more."""


class Kind(NamedTuple):
    method: str
    layout: Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]
    layers: int = 1
    file: str = "model.safetensors"


KINDS = {
    "eagle1": Kind("eagle", layouts.eagle1),
    "eagle1-tied": Kind("eagle", partial(layouts.eagle1, **LACKING)),
    "eagle3": Kind("eagle", partial(layouts.eagle3, **OF_TAPS), 3),
    "speculators": Kind("eagle", partial(layouts.speculators, **OF_TAPS), 3),
    "medusa": Kind("medusa", layouts.medusa, file="medusa_lm_head.pt"),
    "hydra": Kind("medusa", layouts.hydra, file="hydra_lm_head.pt"),
    "dflash": Kind("dflash", partial(layouts.dflash, **OUTPUTS), 3),
    "speculators-dflash": Kind("dflash", partial(layouts.speculators_dflash, **IDS), 3),
    **{
        f"{kind}-dspark": Kind("dflash", partial(layouts.dspark, kind, taps=TAPS), 3)
        for kind in ("authors", "nested", "speculators")
    },
    "diffusion": Kind("diffusion", layouts.diffusion),
}


def _module(prefix: str, *names: str, **layer: Any) -> dict[str, Tensor]:
    norms = {f"{name}.weight": layouts.norm() for name in names if name != names[2]}
    fc = {f"{names[2]}.weight": rand(H, 2 * H)}
    own = {prefix + name: tensor for name, tensor in (norms | fc).items()}
    return own | layouts.layer_tensors(layer.pop("at", prefix), **layer)


class Made(NamedTuple):
    bundle: Bundle
    target: str
    head: str
    tensors: dict[str, Tensor]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    folder = tmp_path_factory.mktemp("heads")

    @cache
    def target(layers: int, tied: bool) -> str:
        config = llama_config(num_hidden_layers=layers, tie_word_embeddings=tied)
        return str(save_checkpoint(folder / f"target-{layers}-{tied}", config))

    @cache
    def mtp(name: str) -> tuple[str, dict[str, Tensor]]:
        torch.manual_seed(11)
        config, layout = MTP[name]
        tensors = layout()
        file = save_checkpoint(folder / name, config) / "model.safetensors"
        own = load_file(file)
        if name == "deepseek":
            tensors |= {copy: own[first].clone() for copy, first in COPIES.items()}
        save_file(own | tensors, file, {"format": "pt"})
        return str(file.parent), tensors

    @cache
    def head(name: str) -> tuple[str, dict[str, Tensor]]:
        torch.manual_seed(3)
        config, tensors = KINDS[name].layout()
        return layouts.write(folder / name, config, tensors, KINDS[name].file), tensors

    @cache
    def make(
        name: str,
        recipe: str = "none",
        drafter: str | None = None,
        tied: bool = False,
        **options: Any,
    ) -> Made:
        source, tensors = mtp(name) if name in MTP else head(name)
        base = source if name in MTP else target(KINDS[name].layers, tied)
        recipes = Recipe.parse(recipe, 32), Recipe.parse(drafter or recipe, 32)
        settings = ExportOptions(*recipes, **{**SMALL, **options})
        output = folder / f"bundle-{make.cache_info().misses}"
        own = None if name in MTP else source  # a module is found without a name
        bundle = export(base, output, options=settings, head=own)
        return Made(bundle, base, source, tensors)

    return make


TOKENS = np.random.default_rng(6).integers(1, 288, 15).tolist()
READ, ACCEPTED, STEPS = 8, 3, 3
"""Rows of the prompt, rows of the catch-up, and rows that the head drafts itself."""


def graphs(bundle):
    opener = Opener(bundle, PROVIDERS["cpu"], ONE_THREAD)
    return opener.graph(bundle.target), opener.graph(bundle.drafter)


def check_logits(target, ids, wanted):
    """Passes over several rows, one row, and several rows again give these logits."""
    target.cache.rewind(0)
    for start, end in ((0, 9), (9, 10), (10, 20)):
        logits = target.run(ids[start:end]).logits
        np.testing.assert_allclose(logits, wanted[start:end], atol=1e-4, rtol=1e-4)
        target.cache.advance(end - start)


def check_blocks(graph, run):
    """Its rows are no context, its last token counts, and it fits behind all rows.

    `run(start, end, block)` answers for rows of the prompt that are about to be kept.
    """
    graph.cache.rewind(0)
    run(0, 5)
    graph.cache.advance(5)
    first = run(5, 8).logits.copy()
    run(5, 8, (1, 2, 3, 4))
    assert np.array_equal(run(5, 8).logits, first)
    unknown = [tiny.VOCAB_SIZE] * (graph.contract.block - 1)
    one, other = (run(5, 8, [*unknown, last]).logits[0].copy() for last in (4, 9))
    assert np.abs(one - other).max() > 1e-3
    contract = graph.contract
    graph.cache.rewind(0)
    assert contract.slots >= contract.capacity + 2 * contract.block
    width = contract.feature_input
    features = np.ones((16, width), np.float32) if width else None
    for _ in range(4):
        answer = graph.run([5] * 16, last_only=True, features=features)
        graph.cache.advance(16)
        assert np.isfinite(answer.logits).all()
    assert graph.cache.room == 0


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
        how = {"max_new_tokens": 8, "ignore_eos": True, "num_draft_tokens": 3}
        how |= {"method": method, "drafting": drafting}
        result = model.generate(token_ids=TOKENS[:READ], **how)
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
