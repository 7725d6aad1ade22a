"""The acceptance of drafts by position: what shows a drafter that went wrong."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.manifest import AcceptanceRecord
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.registry import methods

DRAFT_TOKENS, NEW_TOKENS = 4, 32  # In a draft, and in the text after a prompt.
MAX_PROMPTS, MAX_PROMPT_TOKENS = 12, 64
# A larger fall is no rounding: a hundred drafts have a standard deviation of 0.05.
TOLERANCE = 0.1


def measure_acceptance(model: Model, record: AcceptanceRecord) -> list[float]:
    """Return the accepted share by position, after the record's prompts and replies."""
    name, drafting = next(
        (method.name, dict(method.alone))
        for method in methods().values()
        if method.alone is not None and not method.lacks(model.bundle)
    )
    drafts, accepted = 0, [0] * DRAFT_TOKENS
    for prompt in record["prompts"]:
        stats = model.generate(
            token_ids=prompt,
            method=name,
            drafting=drafting,
            num_draft_tokens=DRAFT_TOKENS,
            max_new_tokens=record["new_tokens"],
            temperature=0.0,
            ignore_eos=True,
            exact=False,
        ).stats
        drafts += sum(stats.evaluated_by_position[:1])
        for position, count in enumerate(stats.accepted_counts):
            accepted[position] += count
    return [round(count / max(drafts, 1), 4) for count in accepted]


def compare_acceptance(model: Model) -> tuple[list[float], list[float]] | None:
    """Return the acceptance at export and now, by position; None if one is unknown."""
    drafter = model.bundle.drafter
    record = None if drafter is None else drafter.quantization.get("acceptance")
    if record is None or model.parts.draft_cache is None:
        return None
    adapter = model.parts.options.get("adapter")
    stored = model.bundle.adapters[adapter] if adapter else record["by_position"]
    return list(stored), measure_acceptance(model, record)


def with_acceptance(bundle: Bundle, prompts: Sequence[Sequence[int]]) -> Bundle:
    """Measure a saved bundle's acceptance; return the bundle with it, not saved yet."""
    capacity = bundle.target.contract.capacity
    longest = min(MAX_PROMPT_TOKENS, capacity // 2)
    record = AcceptanceRecord(
        by_position=(),
        prompts=tuple(tuple(p[:longest]) for p in prompts[:MAX_PROMPTS]),
        new_tokens=min(NEW_TOKENS, capacity - longest),
    )
    with Model(bundle) as model:  # to open it would hash gigabytes again
        record["by_position"] = tuple(measure_acceptance(model, record))
        adapters = {
            name: tuple(measure_acceptance(model.adapted(name), record))
            for name in bundle.adapters
        }
    shutil.rmtree(bundle.path / "profiles", ignore_errors=True)
    drafter = bundle.graphs[DRAFTER]
    fields: dict[str, Any] = {**drafter.quantization, "acceptance": record}
    graphs = {**bundle.graphs, DRAFTER: replace(drafter, quantization=fields)}
    return replace(bundle, graphs=graphs, adapters=adapters)


def has_fallen(stored: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the acceptance fell at any position by more than `TOLERANCE`."""
    return any(new < old - TOLERANCE for old, new in zip(stored, now, strict=False))
