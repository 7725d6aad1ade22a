"""Methods and draft lengths that run in turns, and their times as ratios.

contenders("none,draft:3,auto")    # draft:3 drafts three tokens in every round
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jetdraft import Stats

PLAIN = "plain"


class Text(Protocol):
    """A result, or a transcript."""

    text: str
    token_ids: list[int]
    stats: Stats


def contenders(names: str) -> dict[str, dict[str, Any]]:
    """The options of a generation by the name of its contender.

    "plain" is plain decoding in passes of one row, the fastest there is.
    """
    options: dict[str, dict[str, Any]] = {}
    for name in names.split(","):
        method, _, count = name.partition(":")
        length = {"num_draft_tokens": int(count)} if count else {}
        options[name] = {"method": method, **length}
        if name == PLAIN:
            options[name] = {"method": "none", "exact": False}
    return options


class Turns:
    """Runs every input with each contender before the next input, turn after turn.

    So an encoder runs once for all contenders, and a slow minute slows all of them.
    Before the first turn each contender warms up with the first input. It is an error
    if the tokens of a contender change from turn to turn.

        Turns(contenders("none,auto"), prompts, model.generate).run(3).rows()
    """

    def __init__(
        self,
        options: Mapping[str, dict[str, Any]],
        inputs: Sequence[Any],
        write: Callable[..., Text],
    ) -> None:
        self.options, self.inputs, self.write = options, inputs, write
        self.texts: dict[tuple[str, int], Text] = {}
        self.sums: dict[str, list[Stats]] = {name: [] for name in options}

    def run(self, turns: int) -> Turns:
        """Run all inputs in each of so many turns."""
        for chosen in self.options.values():
            self.write(self.inputs[0], **chosen)
        for _ in range(turns):
            self._turn()
        return self

    def _turn(self) -> None:
        sums = {name: Stats("", True, 0) for name in self.options}
        for place, what in enumerate(self.inputs):
            for name, chosen in self.options.items():
                text = self.write(what, **chosen)
                sums[name].merge(text.stats)
                before = self.texts.setdefault((name, place), text)
                assert before.token_ids == text.token_ids, f"{name} changed a text"
        for name, stats in sums.items():
            self.sums[name].append(stats)

    def said(self, name: str) -> list[Text]:
        """The texts of a contender, in the order of the inputs."""
        return [self.texts[name, place] for place in range(len(self.inputs))]

    def rows(self) -> dict[str, dict[str, Any]]:
        """A row for each contender: medians over the turns.

        `decode_speedup` is the ratio of times to the first contender in the same turn.
        `same_text` compares with the first exact contender.
        """
        first, exact = next(iter(self.options)), [n for n in self.options if n != PLAIN]
        plain = [text.token_ids for text in self.said(exact[0] if exact else first)]
        rows = {}
        for name, sums in self.sums.items():
            pairs = zip(self.sums[first], sums, strict=True)
            ratios = [one.decode_seconds / other.decode_seconds for one, other in pairs]
            last = sums[-1]
            rows[name] = {
                "decode_speedup": statistics.median(ratios),
                "decode_speedups": ratios,
                "decode_seconds": statistics.median(s.decode_seconds for s in sums),
                "tokens_per_pass": last.tokens_per_pass,
                "acceptance_rate": last.acceptance_rate,
                "drafted_tokens": last.drafted_tokens,
                "new_tokens": last.new_tokens,
                "target_passes": last.target_passes,
                "rounds_without_draft": dict(last.off),
                "same_text": [text.token_ids for text in self.said(name)] == plain,
            }
        return rows


def line(name: str, row: Mapping[str, Any]) -> str:
    """A row of the table on the screen."""
    numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
    return f"{name:8} " + "  ".join(f"{k} {v:.3g}" for k, v in numbers.items())
