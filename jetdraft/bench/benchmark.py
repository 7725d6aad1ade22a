"""Compares methods in one process, prompt by prompt, so that noise hits all of them."""

import os
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from jetdraft.contracts.tensors import Int64s
from jetdraft.devices.detection import Meter
from jetdraft.errors import OptionError
from jetdraft.ort import ort
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.measured.survey import decoding_widths, pass_times
from jetdraft.runtime.model import Model
from jetdraft.runtime.piece import Result
from jetdraft.runtime.planning.registry import AUTO, NONE

CURVE_WIDTHS = range(1, 9)  # The widths whose pass times a report gives.


@dataclass
class Contender:
    """A method and its settings to compare: `runs[repeat][prompt]` are its stats.

    `same_text` counts the texts that plain decoding gives too, `characters` is the
    length of all texts. `joules` is the energy of all runs, None if not measured.
    """

    method: str
    num_draft_tokens: int | None
    exact: bool
    runs: list[list[Stats]] = field(default_factory=list)
    same_text: int = 0
    joules: float | None = None
    characters: int = 0

    def speeds(self) -> list[float]:
        """Decoded tokens per second of each repeat, over all prompts."""
        tokens = [sum(s.new_tokens - s.first_tokens for s in run) for run in self.runs]
        seconds = [sum(s.decode_seconds for s in run) for run in self.runs]
        return [n / max(time, 1e-9) for n, time in zip(tokens, seconds, strict=True)]

    def total(self) -> Stats:
        """The stats of all runs added up, for metrics that are ratios of counts."""
        total = Stats(self.method, self.exact, prompt_tokens=0)
        for stats in (s for run in self.runs for s in run):
            total.merge(stats)
        return total


def make_contenders(
    model: Model, methods: Sequence[str], lengths: Sequence[int]
) -> list[Contender]:
    """Return what to compare: plain decoding, not exact and exact, then each method.

    Each draft length has a row, and None, which adapts, auto's only row. Raises
    `OptionError` for a method that the bundle lacks.
    """
    choices = (AUTO, *model.methods)
    for method in methods:
        if method not in choices:
            fact = f"the bundle has no method {method!r}; choose {', '.join(choices)}"
            raise OptionError(fact, "method")
    rows = [Contender(NONE, None, exact=False), Contender(NONE, None, exact=True)]
    for method in methods:
        if method == AUTO:
            rows.append(Contender(method, None, exact=True))
        elif method != NONE:
            rows += [Contender(method, k, exact=True) for k in (*lengths, None)]
    return rows


def run(
    model: Model,
    rows: Sequence[Contender],
    prompts: Sequence[Int64s],
    repeats: int,
    tick: Callable[[], None],
    meter: Callable[[], Meter] = Meter,
    **options: Any,
) -> None:
    """Run all contenders `repeats` times over `prompts`; `rows` gets their stats.

    `options` are keywords of `Model.generate`. Each generation runs inside a new
    `meter`, before a `tick`. All ignore end-of-text, so they decode as many tokens.
    """
    options.setdefault("seed", 0)  # all contenders draw the same noise
    if not prompts:
        raise OptionError("there are no prompts; give at least one", "prompt")
    model.parts.survey.finish()
    for contender in rows:
        contender.runs = [[] for _ in range(repeats)]
        _generate(model, contender, prompts[0], {**options, "max_new_tokens": 8})
    for repeat in range(repeats):
        for prompt in prompts:
            reference: list[int] = []
            for contender in sorted(rows, key=lambda row: not row.exact):
                with meter() as energy:
                    result = _generate(model, contender, prompt, options)
                if energy.joules is not None:
                    contender.joules = (contender.joules or 0.0) + energy.joules
                reference = reference or result.token_ids
                contender.runs[repeat].append(result.stats)
                contender.same_text += result.token_ids == reference
                contender.characters += len(result.text)
                tick()


def _generate(
    model: Model, contender: Contender, prompt: Int64s, options: dict[str, Any]
) -> Result:
    model.forget()  # the contender before has decoded the same text
    names = ("method", "num_draft_tokens", "exact")
    own: dict[str, Any] = {name: getattr(contender, name) for name in names}
    return model.generate(token_ids=prompt, ignore_eos=True, **own, **options)


def make_report(model: Model, rows: Sequence[Contender]) -> dict[str, Any]:
    """Return a JSON report: metrics of all rows, pass times, machine and versions."""
    plain = next(row for row in rows if row.method == NONE and not row.exact)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    graphs = {"target": model.parts.target, "drafter": model.parts.drafter}
    pass_ms: dict[str, dict[int, float]] = {name: {} for name in graphs}
    for name, graph in graphs.items():
        if graph is not None:
            widths = [w for w in decoding_widths(graph) if w in CURVE_WIDTHS]
            pass_ms[name] = pass_times(graph, widths)
    model.forget()  # the passes overwrote the buffers
    return {
        "machine": {
            **model.parts.profiles.machine,
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": {
            "jetdraft": version("jetdraft"),
            "onnxruntime": ort.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "bundle_sha256": model.bundle.sha256,
        "rows": [
            _report_row(row, plain, model.parts.text.has_tokenizer) for row in rows
        ],
        "pass_ms": pass_ms,
        "peak_memory_bytes": peak,
    }


def _report_row(row: Contender, plain: Contender, readable: bool) -> dict[str, Any]:
    pairs = zip(row.speeds(), plain.speeds(), strict=True)
    ratios = [speed / plain_speed for speed, plain_speed in pairs if plain_speed]
    total = row.total()
    speed = float(np.median(row.speeds()))
    per_token = row.characters / max(1, total.new_tokens)
    first_seconds = [s.time_to_first_token for run in row.runs for s in run]
    return {
        "method": row.method,
        "num_draft_tokens": row.num_draft_tokens,
        "exact": row.exact,
        "tokens_per_second": speed,
        "by_prompt": [s.tokens_per_second for s in row.runs[0]],
        "characters_per_second": speed * per_token if readable else None,
        "speedup": float(np.median(ratios)) if ratios else None,
        "tokens_per_pass": total.tokens_per_pass,
        "acceptance_rate": total.acceptance_rate,
        "accepted_by_position": total.accepted_by_position,
        "time_to_first_token": float(np.median(first_seconds)),
        "outside_ms_per_round": total.outside_ms_per_round,
        "rounds_by_choice": total.rounds_by_choice,
        "tokens_per_joule": total.new_tokens / row.joules if row.joules else None,
        "same_text": row.same_text,
        "texts": sum(len(run) for run in row.runs),
    }
