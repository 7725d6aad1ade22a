"""Drafting with the target's lower layers and an adapter (Kangaroo, 2404.18911)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from jetdraft.devices.providers import HALVES, check_on_cpu
from jetdraft.runtime.drafters.draft_cache import DraftCache, LedCache
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Target
from jetdraft.runtime.proposers import drafter_methods
from jetdraft.runtime.proposers.drafter_methods import PROBABILITY
from jetdraft.runtime.proposers.method import TreeOptions
from jetdraft.runtime.proposers.model_proposer import THRESHOLDS, DraftStop, confidence
from jetdraft.runtime.proposers.proposer import Proposer


@dataclass(frozen=True)
class ExitOptions(TreeOptions):
    """The shape of drafts; chains end after a probability below `confidence`."""

    confidence: Annotated[float, PROBABILITY] = THRESHOLDS["confidence"]


def _make_proposer(
    name: str, loaded: LoadedBundle, cache: DraftCache, options: ExitOptions
) -> Proposer:
    check_on_cpu(HALVES, loaded.provider, "choose --provider cpu", "method")
    entry, curve = loaded.bundle.target, loaded.curve
    assert entry.halves is not None
    below = 1.0 - entry.halves.layers / len(entry.contract.kv_shapes)
    ms = curve.drafter + below * curve.pass_ms(1)
    stop = DraftStop(confidence, options.confidence, product=False)
    how = options, ms, stop if options.confidence else None
    return drafter_methods.chain_or_tree_proposer(name, loaded, cache, *how)


def _leading_target(
    loaded: LoadedBundle, options: ExitOptions, widths: Sequence[int]
) -> Target | None:
    if not isinstance(loaded.draft_cache, LedCache) or loaded.provider != "cpu":
        return None
    loaded.leading.prepare(widths)
    return loaded.leading


METHOD = drafter_methods.drafter_method(
    "kangaroo",
    "the target's lower layers and an adapter",
    "a Kangaroo adapter",
    lambda contract, target: (
        target.halves is not None
        and contract.feature_input == target.halves.hidden_size
        and not (contract.carried_size or contract.guesses)
    ),
    make=_make_proposer,
    options=ExitOptions,
    target=_leading_target,
    alone={"confidence": 0.0},
    module=("jetdraft.methods.kangaroo.module:Kangaroo",),
    task="jetdraft.methods.kangaroo.task:KangarooTask",
)
