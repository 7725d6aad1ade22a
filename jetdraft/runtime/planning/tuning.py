"""What passes and proposers cost on this machine, measured with care and kept.

Loading a bundle measures the target's curve in a moment; this takes longer, goes wider,
and times every proposer. It is kept beside the bundle with the machine it belongs to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.files import replacing
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers import Proposer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

WIDEST_MEASURED = 32
TURNS = 7
LONGEST_MS = 1e6
DRAFTED = 4
"""Tokens per draft when proposers are timed."""


@dataclass(frozen=True)
class Tuning:
    """Milliseconds: of chain and tree passes by width, and per drafted token.

    `compaction_ms` is that of moving an accepted branch together; 0 and empty where
    the target does not branch.

        tune(model.target, model.planner.proposers).chain_ms[4]
    """

    chain_ms: dict[int, float]
    tree_ms: dict[int, float]
    draft_ms: dict[str, float]
    compaction_ms: float

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Tuning:
        """Read `asdict`'s object; JSON turned the widths into text."""
        return cls(
            chain_ms={int(w): float(ms) for w, ms in fields["chain_ms"].items()},
            tree_ms={int(w): float(ms) for w, ms in fields["tree_ms"].items()},
            draft_ms={str(n): float(ms) for n, ms in fields["draft_ms"].items()},
            compaction_ms=float(fields["compaction_ms"]),
        )


def tune(
    target: Graph,
    proposers: dict[str, Proposer],
    tick: Callable[[], None] = lambda: None,
) -> Tuning:
    """Measure; the widths take turns and the shortest time counts, as noise only adds.

    `tick` is called `steps(proposers)` times.
    """
    context = _context(target)
    widths = _widths(target)
    start = min(len(context) // 2, target.contract.capacity - widths[-1] - 1)
    target.cache.rewind(0)
    for at in range(0, start, target.contract.max_width):
        part = context[at : min(start, at + target.contract.max_width)]
        target.run(part, last_only=True)
        target.cache.advance(len(part))
    tree = target.contract.tree
    chain_ms, tree_ms = dict[int, float](), dict[int, float]()
    for _ in range(TURNS):
        for width in widths:
            tokens = context[:width]
            ms = _ms(partial(target.run, tokens), target)
            chain_ms[width] = min(ms, chain_ms.get(width, ms))
            if tree and width > 1:
                # The root's children: rows that do not see each other.
                depths, seen = [0] + [1] * (width - 1), [[], *[[0]] * (width - 1)]
                ms = _ms(partial(target.run_branches, tokens, depths, seen), target)
                tree_ms[width] = min(ms, tree_ms.get(width, ms))
        tick()
    compaction = _compaction(target) if tree else 0.0
    draft_ms = {}
    for name, proposer in proposers.items():
        draft_ms[name] = _draft_ms(proposer, context)
        tick()
    target.cache.rewind(0)
    return Tuning(chain_ms, tree_ms, draft_ms, compaction)


def steps(proposers: dict[str, Proposer]) -> int:
    """How often `tune` ticks."""
    return TURNS + len(proposers)


def _widths(target: Graph) -> range:
    most = min(target.contract.max_width, target.contract.capacity // 4)
    return range(1, min(WIDEST_MEASURED, most) + 1)


def _context(target: Graph) -> list[int]:
    """Tokens that repeat themselves, so that every proposer finds something."""
    random = np.random.default_rng(0)
    size = min(64, target.contract.capacity // 4)
    once: list[int] = random.integers(0, target.contract.vocab_size, size).tolist()
    return once * 2


def _ms(run: Callable[[], Any], timed: Graph | Cache) -> float:
    """What was added to the time in sessions, as the controller learns it too."""
    before = timed.seconds
    run()
    return 1e3 * (timed.seconds - before)


def _compaction(target: Graph) -> float:
    length = target.cache.length

    def move() -> None:
        target.cache.compact([0, 2])
        target.cache.rewind(length)

    return min(_ms(move, target.cache) for _ in range(TURNS))


def _draft_ms(proposer: Proposer, context: Sequence[int]) -> float:
    """Per drafted token, in drafts of a few, each after one more token of a text."""
    middle = len(context) // 2
    proposer.begin(context[:middle], Chooser(Sampling()))
    spent, drafted = [], 0
    for end in range(middle + 1, len(context) - DRAFTED):
        start = time.perf_counter()
        found = proposer.propose(context[:end], DRAFTED).drafted
        if found:
            spent.append((time.perf_counter() - start) / found)
            drafted += found
    return 1e3 * float(np.median(spent)) if drafted else 0.0


def load(file: Path, machine: dict[str, Any]) -> Tuning | None:
    """What was measured on this machine; None if nothing was kept.

    Raises `ValueError` with the other machine if it was measured elsewhere, or if the
    file is malformed.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        found, where = Tuning.from_json(stored["tuning"]), stored["machine"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is malformed") from error
    if not _is_plausible(found):
        raise ValueError("its times cannot be")
    if where != machine:
        raise ValueError(f"it was measured elsewhere: {_difference(where, machine)}")
    return found


def _is_plausible(found: Tuning) -> bool:
    """Whether all passes take time, and nothing takes a quarter of an hour."""
    passes = [*found.chain_ms.values(), *found.tree_ms.values()]
    others = [*found.draft_ms.values(), found.compaction_ms]
    within = all(0 < ms < LONGEST_MS for ms in passes)
    return bool(passes) and within and all(0 <= ms < LONGEST_MS for ms in others)


def _difference(where: Any, machine: dict[str, Any]) -> str:
    known = where if isinstance(where, dict) else {}
    return ", ".join(
        f"{name} {known.get(name)!r} instead of {value!r}"
        for name, value in machine.items()
        if known.get(name) != value
    )


def store(
    file: Path, machine: dict[str, Any], versions: dict[str, str], tuning: Tuning
) -> None:
    """Keep it beside the bundle; the file appears whole. Raises `OSError`."""
    fields = {"machine": machine, "versions": versions, "tuning": asdict(tuning)}
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as partial:
        partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def draw(tuning: Tuning, file: Path) -> bool:
    """The curves as a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in (("chain", tuning.chain_ms), ("tree", tuning.tree_ms)):
        if curve:
            axes.plot(list(curve), list(curve.values()), marker=".", label=name)
    axes.set_xlabel("rows in a pass")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file, format="png")
    return True
