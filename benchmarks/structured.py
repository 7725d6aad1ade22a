"""What a constraint costs and gives: passes, time, and whether every text is valid.

    python benchmarks/structured.py BUNDLE --json FILE

JSON schemas times prompts, each without a constraint, plainly with it, and drafted. The
constrained texts are compared token by token with plain decoding and checked with
jsonschema; the unconstrained ones have as many tokens.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import jsonschema

import jetdraft
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "pattern": "^[a-z_]{1,16}$"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
KIND = {"enum": ["int", "str", "float", "bool", "list"]}
SCHEMAS = [
    _object(name=WORD, kind=KIND),
    _object(function=WORD, arguments={"type": "array", "items": WORD, "maxItems": 4}),
    _object(tool={"enum": ["move", "turn", "stop"]}, speed=NUMBER, angle=NUMBER),
    _object(name=WORD, fields=_object(first=KIND, second=KIND, third=KIND)),
    {"type": "array", "items": _object(id=NUMBER, name=WORD), "maxItems": 4},
    _object(summary={"type": "string", "maxLength": 80}, ready={"type": "boolean"}),
    _object(version={"type": "string", "pattern": "^[0-9]{1,2}\\.[0-9]{1,2}$"}),
    {"anyOf": [_object(error=WORD), _object(value=NUMBER, unit={"enum": ["m", "s"]})]},
]
PROMPTS = [
    "# The configuration as JSON:\n",
    "def describe(self):\n    return json.dumps(",
    'CALLS = [\n    {"tool": "move", "speed": 3, "angle": 20},\n    ',
    "The answer: ",
    '"""Return the fields of a record.\n\n    >>> fields()\n    ',
]
METHODS = {
    "none": {"method": "none"},
    "lookup": {"method": "lookup", "num_draft_tokens": 4},
    "draft": {"method": "draft", "num_draft_tokens": 4},
    "auto": {"method": "auto"},
}


def measure(model: Model, seeds: int) -> dict[str, dict[str, Any]]:
    """Sums by method, with and without a constraint; raises where a text is invalid."""
    free: dict[str, Stats] = defaultdict(lambda: Stats("", True, 0))
    kept: dict[str, Stats] = defaultdict(lambda: Stats("", True, 0))
    differing, texts = 0, 0
    for seed in range(seeds):
        for schema in SCHEMAS:
            for prompt in PROMPTS:
                how = {"seed": seed, "temperature": 0.8 if seed else 0.0}
                plain: list[int] = []
                for name, method in METHODS.items():
                    given = {**how, **method, "max_new_tokens": 256}
                    found = model.generate(prompt, json_schema=schema, **given)
                    jsonschema.validate(json.loads(found.text), schema)
                    plain = plain or found.token_ids
                    differing += found.token_ids != plain
                    kept[name].merge(found.stats)
                    given["max_new_tokens"] = len(plain)
                    result = model.generate(prompt, ignore_eos=True, **given)
                    free[name].merge(result.stats)
                texts += 1
    rows = {
        name: {"free": _row(free[name]), "constrained": _row(kept[name])}
        for name in METHODS
    }
    return {"pairs": texts, "differing": differing, "rows": rows}


def _row(stats: Stats) -> dict[str, Any]:
    return {
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_second": stats.tokens_per_second,
        "forced": stats.by_method["forced"].accepted_tokens
        if "forced" in stats.by_method
        else 0,
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--seeds", default=5, show_default=True, help="The first one is greedy.")
@click.option("--threads", type=int)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(bundle: Path, seeds: int, threads: int | None, file: Path | None) -> None:
    """Print a table, and write it to a file if asked."""
    before = time.perf_counter()
    with jetdraft.load(bundle, threads=threads) as model:
        found = measure(model, seeds)
    seconds = time.perf_counter() - before
    click.echo(
        f"{found['pairs']} pairs of schema and prompt in {seconds:.0f} s, all valid, "
        f"{found['differing']} texts differ from plain decoding's"
    )
    click.echo("method    tokens/pass free, constrained   tokens/s free, constrained")
    for name, row in found["rows"].items():
        free, kept = row["free"], row["constrained"]
        click.echo(
            f"{name:8} {free['tokens_per_pass']:10.2f} {kept['tokens_per_pass']:10.2f} "
            f"{free['tokens_per_second']:18.1f} {kept['tokens_per_second']:8.1f}"
        )
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
