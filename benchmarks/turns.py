"""Time to first token of a turn: it grows with the new text, not with what was said.

    python benchmarks/turns.py BUNDLE --text TEXT --tokens 250,500,1000

For each length of a conversation so far: the same new text as the next turn, against a
conversation that begins with it, and against reading everything again. The same model,
in turns, the median of some repeats; a ratio of 1 is a turn that costs what a first one
does.
"""

import json
import statistics
from pathlib import Path

import click

import jetdraft
from jetdraft.runtime.model import Model

OPTIONS = {"max_new_tokens": 16, "ignore_eos": True}


def first_token(model: Model, ids: list[int]) -> tuple[float, int]:
    """Milliseconds until the first token, and the tokens that were not read."""
    stats = model.generate(token_ids=ids, **OPTIONS).stats
    return 1e3 * stats.time_to_first_token, stats.reused_tokens


def row(model: Model, ids: list[int], said: int, new: int, repeats: int) -> dict:
    """One length of what was said before."""
    before, added = ids[:said], ids[said : said + new]
    times: dict[str, list[float]] = {"first": [], "next": [], "again": []}
    reused = 0
    for _ in range(repeats):
        model.forget()
        times["first"].append(first_token(model, added)[0])
        model.forget()
        reply = model.generate(token_ids=before, **OPTIONS).token_ids
        whole = [*before, *reply, *added]
        ms, reused = first_token(model, whole)
        times["next"].append(ms)
        model.forget()
        times["again"].append(first_token(model, whole)[0])
    found = {name: statistics.median(each) for name, each in times.items()}
    ratio = found["next"] / found["first"]
    return {"tokens": said, "new": new, "reused": reused, "ratio": ratio, **found}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), required=True)
@click.option("--tokens", default="250,500,1000", show_default=True)
@click.option("--new", default=24, show_default=True, help="Tokens of the next turn.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    bundle: Path, text: Path, tokens: str, new: int, repeats: int, file: Path | None
) -> None:
    """Print a table, and write it to a file if asked."""
    rows = []
    with jetdraft.load(bundle) as model:
        ids = list(model.parts.text.encode(text.read_text(encoding="utf-8")))
        click.echo("said   new  kept   first ms   next ms   again ms   next / first")
        for said in map(int, tokens.split(",")):
            found = row(model, ids, said, new, repeats)
            rows.append(found)
            click.echo(
                f"{said:5} {new:5} {found['reused']:5} {found['first']:10.1f} "
                f"{found['next']:9.1f} {found['again']:10.1f} {found['ratio']:13.2f}"
            )
    if file is not None:
        file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
