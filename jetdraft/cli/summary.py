"""What the verbs that write texts say beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model
from jetdraft.runtime.text.stops import INTERRUPTED


def announce_first_run(model: Model) -> None:
    """Print one line on standard error once a text must wait for measurements."""
    model.parts.survey.announce = lambda: click.echo(
        "first run on this machine: a few passes are measured before the text; "
        "jetdraft tune measures all",
        err=True,
    )


def write_out(
    source: Any,
    show: Callable[[Any], None],
    fields: Sequence[str],
    as_json: bool,
    explain: bool,
) -> int:
    """Show the parts of a `Stream` or a `Transcription` as they come, then its stats.

    With `as_json` only one object is printed, with these `fields` of the result.
    Ctrl-C ends the text. Returns the exit code.
    """
    code = 0
    try:
        for part in source:
            if not as_json:
                show(part)
    except KeyboardInterrupt:
        code = 130
        source.close(INTERRUPTED)
    result = source.result()
    if as_json:
        values = {name: getattr(result, name) for name in fields}
        values["stats"] = result.stats.to_json()
        # ASCII, since other encodings than UTF-8 are not JSON.
        click.echo(json.dumps(values, default=vars))
    else:
        show(None)
        click.echo(summary(result.stats), err=True)
    if explain:
        click.echo(explanation(result.stats), err=True)
    return code


def summary(stats: Stats) -> str:
    """Return the line that ends a generation."""
    parts = [f"{stats.new_tokens} tokens in {stats.target_passes} passes"]
    for value, form in (
        (stats.tokens_per_pass, "{:.2f} tokens/pass"),
        (stats.acceptance_rate, "acceptance {:.2f}"),
        (stats.tokens_per_second, "{:.1f} tokens/s"),
        (stats.time_to_first_token, "first after {:.3f} s"),
        (stats.seed, "seed {}"),
        (stats.select_kv, "{} KV rows in a pass"),
    ):
        if value is not None:
            parts.append(form.format(value))
    choices = sorted(stats.rounds_by_choice.items(), key=lambda item: -item[1])
    chosen = " ".join(f"{choice} x{rounds}" for choice, rounds in choices)
    ends = [f"{stats.method}: {chosen}", stats.finish_reason]
    if stats.lossy:
        exits = f", {stats.exited_tokens} exits" if stats.exited_tokens else ""
        ends.append(f"lossy: {stats.lossy}{exits}")
    return f"[{', '.join(parts)}; {'; '.join(ends)}]"


def explanation(stats: Stats) -> str:
    """Return what each method did, and why rounds had no draft, line by line."""
    # A method saves the time of its tokens in plain decoding, less its own time.
    lines = [f"one by one a token takes {stats.plain_ms:.1f} ms"]
    lines += ["method     rounds  drafted  accepted   tokens     saved"]
    for name, share in sorted(stats.by_method.items(), key=lambda i: -i[1].rounds):
        lines.append(
            f"{name:10} {share.rounds:6} {share.drafted_tokens:8} "
            f"{share.accepted_tokens:9} {share.new_tokens:8} {share.saved_ms:+8.1f} ms"
        )
    lines += [f"off in {rounds} of them: {why}" for why, rounds in stats.off.items()]
    return "\n".join(lines)
