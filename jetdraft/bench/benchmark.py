"""Comparing methods in one process, prompt by prompt, so that noise hits all alike."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetdraft.errors import OptionError
from jetdraft.ort import ort
from jetdraft.runtime.drafts.noise import Int64s
from jetdraft.runtime.measured import widths
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.graph import Graph

CURVE_WIDTHS = range(1, 9)


@dataclass
class Metering:
    """Measures no energy; `jetdraft.bench.energy.Meter` does on a Jetson."""

    joules: float | None = None

    def __enter__(self) -> Metering:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was measured."""


@dataclass
class Contender:
    """One way to decode, and the stats of its runs: `runs[repeat][prompt]`."""

    method: str
    num_draft_tokens: int | None
    exact: bool
    runs: list[list[Stats]] = field(default_factory=list)
    same_text: int = 0
    joules: float | None = None

    def speeds(self) -> list[float]:
        """Tokens per second of each repeat, over all prompts."""
        return [
            sum(s.new_tokens - s.first_tokens for s in run)
            / max(sum(s.decode_seconds for s in run), 1e-9)
            for run in self.runs
        ]

    def total(self) -> Stats:
        """All runs added up, for the metrics that are ratios of counts."""
        total = Stats(self.method, self.exact, prompt_tokens=0)
        for stats in (s for run in self.runs for s in run):
            total.merge(stats)
        return total


def contenders(
    model: Model, methods: Sequence[str], lengths: Sequence[int]
) -> list[Contender]:
    """Plain decoding twice, not exact and exact, then each method at each length.

    A length of None is the adaptive one.
    """
    known = ("auto", *model.methods)
    for method in methods:
        if method not in known:
            raise OptionError(
                f"the bundle has no method {method!r}; choose {', '.join(known)}",
                "method",
            )
    rows = [Contender("none", None, exact=False), Contender("none", None, exact=True)]
    for method in methods:
        if method == "auto":
            rows.append(Contender(method, None, exact=True))
        elif method != "none":
            rows += [Contender(method, k, exact=True) for k in (*lengths, None)]
    return rows


def run(
    model: Model,
    rows: Sequence[Contender],
    prompts: Sequence[Int64s],
    repeats: int,
    tick: Callable[[], None],
    meter: Callable[[], Metering] = Metering,
    **options: Any,
) -> None:
    """Fill `rows` with the stats of `repeats` interleaved runs over `prompts`.

    `options` are those of `Model.generate`; `tick` is called after each generation,
    each of which runs inside a `meter` of its energy. End-of-text is ignored, so that
    every contender decodes the same number of tokens.
    """
    if not prompts:
        raise OptionError("there are no prompts; give at least one", "prompt")
    for contender in rows:
        contender.runs = [[] for _ in range(repeats)]
        _generate(model, contender, prompts[0], {**options, "max_new_tokens": 8})
    for repeat in range(repeats):
        for prompt in prompts:
            reference: list[int] = []
            for contender in sorted(rows, key=lambda row: not row.exact):
                with meter() as measured:
                    ids, stats = _generate(model, contender, prompt, options)
                if measured.joules is not None:
                    contender.joules = (contender.joules or 0.0) + measured.joules
                reference = reference or ids
                contender.runs[repeat].append(stats)
                contender.same_text += ids == reference
                tick()


def _generate(
    model: Model, contender: Contender, prompt: Int64s, options: dict[str, Any]
) -> tuple[list[int], Stats]:
    model.forget()  # the contender before has decoded the same text
    result = model.generate(
        token_ids=prompt,
        method=contender.method,
        num_draft_tokens=contender.num_draft_tokens,
        exact=contender.exact,
        ignore_eos=True,
        **options,
    )
    return result.token_ids, result.stats


def report(model: Model, rows: Sequence[Contender]) -> dict[str, Any]:
    """The rows with every metric, the pass-time curves, and where it was measured."""
    plain = next(row for row in rows if row.method == "none" and not row.exact)
    graphs = {"target": model.parts.target, "drafter": model.parts.drafter}
    curves = {name: _pass_ms(graph) for name, graph in graphs.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "machine": {
            **model.parts.profiles.machine,
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": {
            "jetdraft": _version(),
            "onnxruntime": ort.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "bundle_sha256": model.bundle.sha256,
        "rows": [_row(row, plain) for row in rows],
        "pass_ms": {
            name: {w: ms for w, ms in curve.items() if w in CURVE_WIDTHS}
            for name, curve in curves.items()
        },
        "peak_memory_bytes": peak,
    }


def _pass_ms(graph: Graph | None) -> dict[int, float]:
    """The pass times of a graph by width; empty where there is no graph."""
    if graph is None:
        return {}
    return widths.pass_times(graph, widths.decoding_widths(graph))


def _version() -> str:
    from jetdraft import __version__

    return __version__


def _row(row: Contender, plain: Contender) -> dict[str, Any]:
    pairs = zip(row.speeds(), plain.speeds(), strict=True)
    ratios = [one / reference for one, reference in pairs if reference]
    total = row.total()
    first = [s.time_to_first_token for run in row.runs for s in run]
    return {
        "method": row.method,
        "num_draft_tokens": row.num_draft_tokens,
        "exact": row.exact,
        "tokens_per_second": float(np.median(row.speeds())),
        "speedup": float(np.median(ratios)) if ratios else None,
        "tokens_per_pass": total.tokens_per_pass,
        "acceptance_rate": total.acceptance_rate,
        "accepted_by_position": total.accepted_by_position,
        "time_to_first_token": float(np.median(first)),
        "outside_ms_per_round": total.outside_ms_per_round,
        "rounds_by_choice": total.rounds_by_choice,
        "tokens_per_joule": total.new_tokens / row.joules if row.joules else None,
        "same_text": row.same_text,
        "texts": sum(len(run) for run in row.runs),
    }
