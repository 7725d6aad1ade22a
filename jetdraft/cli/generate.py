"""jetdraft generate: text from a bundle."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.options import (
    bundle_argument,
    constraint_options,
    drafting_options,
    ending_options,
    integers,
    runtime_options,
    sampling_options,
)
from jetdraft.runtime.generation import Result
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import load


@click.command("generate")
@bundle_argument
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.Path(path_type=Path))
@click.option("--max-new-tokens", type=int, default=128, show_default=True)
@click.option(
    "--method",
    default="auto",
    show_default=True,
    help="auto, none, draft, lookup, stream, recall, trigram, cascade; or several: a,b",
)
@click.option(
    "--num-draft-tokens",
    type=int,
    help="Draft this many, if the method can (with several: at most); default: "
    "adaptive.",
)
@drafting_options
@constraint_options
@ending_options
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-text.")
@click.option(
    "--exact/--no-exact",
    default=True,
    help="Keep to pass widths whose rows agree bit by bit (default).",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="A file to keep requests and responses in, to draft from; default: none kept.",
)
@click.option("--user", default="", help="Whose requests of the store to use.")
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    help="A trigram table that jetdraft train trigram wrote.",
)
@click.option(
    "--explain", is_flag=True, help="Say what each method did and why drafting was off."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@runtime_options
def command(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    as_json: bool,
    explain: bool,
    branching: str | None,
    tree_parents: str | None,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
    store: Path | None,
    user: str,
    table: Path | None,
    **options: Any,
) -> int:
    """Continue PROMPT, or standard input where it is "-".

    A PROMPT that begins with a dash goes after "--".
    """
    if branching is not None:
        options["branching"] = integers(branching, "--branching")
    if tree_parents is not None:
        options["tree_parents"] = integers(tree_parents, "--tree-parents")
    text = _read_prompt(prompt, prompt_file)
    model = load(
        bundle, provider, threads, streams, store, user, table, drafter_provider
    )
    stream = model.stream(text, **options)
    interrupted = False
    try:
        for piece in stream:
            if not as_json:
                click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        interrupted = True
        stream.stats.finish_reason = "interrupted"
    result = stream.result()
    if as_json:
        click.echo(_as_json(result))
    else:
        click.echo()
        click.echo(summary(result.stats), err=True)
    if explain:
        click.echo(explanation(result.stats), err=True)
    return 130 if interrupted else 0


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError('give one of PROMPT, --prompt-file or "-"')
    if prompt is not None and prompt != "-":
        return prompt
    try:
        if prompt_file is None:
            return sys.stdin.read()
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"cannot read {prompt_file or 'standard input'} ({error}); give UTF-8 text"
        ) from error


def _as_json(result: Result) -> str:
    fields = {
        "text": result.text,
        "token_ids": result.token_ids,
        "from_draft": result.from_draft,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }
    if result.logprobs is not None:
        fields["logprobs"] = [asdict(each) for each in result.logprobs]
    return json.dumps(fields, ensure_ascii=False)


def explanation(stats: Stats) -> str:
    """What each method did, and why rounds had no draft, in a few lines."""
    # A method saves what its tokens would have taken one by one, less its own time.
    lines = [f"one by one a token takes {stats.plain_ms:.1f} ms"]
    lines += ["method     rounds  drafted  accepted   tokens     saved"]
    for name, share in sorted(stats.by_method.items(), key=lambda i: -i[1].rounds):
        lines.append(
            f"{name:10} {share.rounds:6} {share.drafted_tokens:8} "
            f"{share.accepted_tokens:9} {share.new_tokens:8} {share.saved_ms:+8.1f} ms"
        )
    lines += [f"off in {rounds} of them: {why}" for why, rounds in stats.off.items()]
    return "\n".join(lines)


def summary(stats: Stats) -> str:
    """The one line that ends a generation."""
    parts = [f"{stats.new_tokens} tokens in {stats.target_passes} passes"]
    for value, form in (
        (stats.tokens_per_pass, "{:.2f} tokens/pass"),
        (stats.acceptance_rate, "acceptance {:.2f}"),
        (stats.tokens_per_second, "{:.1f} tokens/s"),
        (stats.time_to_first_token, "first after {:.3f} s"),
    ):
        if value is not None:
            parts.append(form.format(value))
    choices = sorted(stats.rounds_by_choice.items(), key=lambda item: -item[1])
    chosen = " ".join(f"{choice} x{rounds}" for choice, rounds in choices)
    return f"[{', '.join(parts)}; {stats.method}: {chosen}; {stats.finish_reason}]"
