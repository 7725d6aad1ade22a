"""Host time of a round over a large vocabulary: everything outside `session.run`.

    python benchmarks/vocabulary.py BUNDLE --json FILE

A free proposer guesses the last tokens again. Settings run in turns; medians are shown.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft.methods import Method, MethodOptions, Proposer, Rows, Traits, registered

AGAIN = "again"
PROMPT = "Write a Python function that reverses a linked list, and explain each line."
SCHEMA = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "minLength": 400},
        "count": {"type": "integer"},
    },
    "required": ["summary", "count"],
    "additionalProperties": False,
}
SETTINGS: dict[str, Mapping[str, Any]] = {
    "greedy": {},
    "T = 1": {"temperature": 1.0},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 2, top-p 0.9": {"temperature": 2.0, "top_p": 0.9},
    "T = 1, top-k 50": {"temperature": 1.0, "top_k": 50},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "T = 1, penalties": {"temperature": 1.0, "repetition_penalty": 1.1},
    "greedy, bias": {"logit_bias": {100: 1.0, 200: -1.0}},
    "greedy, JSON": {"json_schema": SCHEMA},
    "T = 1, JSON": {"temperature": 1.0, "json_schema": SCHEMA},
}


class Again(Proposer):
    """Guesses that the last tokens come again."""

    traits = Traits(AGAIN, max_draft_tokens=31)

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """As many of the last tokens as are wanted, as a chain."""
        return Rows.chain([context[-1], *context[-budget:]])


METHOD: Method[MethodOptions] = Method(
    AGAIN, "the last tokens again", lambda parts, options: Again()
)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--width", default=5, show_default=True, help="Rows of each pass.")
@click.option("--tokens", default=48, show_default=True, help="New tokens of a text.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path, width: int, tokens: int, repeats: int, output: Path | None
) -> None:
    """Measure all settings on BUNDLE."""
    model = jetdraft.load(bundle)
    host: dict[str, list[float]] = {name: [] for name in SETTINGS}
    with registered(METHOD):
        for _ in range(repeats):
            for name, setting in SETTINGS.items():
                stats = model.generate(
                    PROMPT,
                    method=AGAIN,
                    num_draft_tokens=width - 1,
                    max_new_tokens=tokens,
                    ignore_eos="json_schema" not in setting,
                    seed=1,
                    **setting,
                ).stats
                rounds = max(stats.target_passes - 1, 1)
                outside = stats.decode_seconds - stats.session_seconds
                host[name].append(1e3 * outside / rounds)
    rows = {name: statistics.median(times) for name, times in host.items()}
    vocab = model.parts.target.contract.vocab_size
    report = {"vocabulary": vocab, "width": width, "host ms a round": rows}
    for name, milliseconds in rows.items():
        print(f"{name:22}{milliseconds:8.3f} ms")
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
