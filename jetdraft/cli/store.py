"""jetdraft store: what earlier requests are kept, and forgetting them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click

from jetdraft.bundle import Bundle
from jetdraft.cli.options import bundle_argument
from jetdraft.errors import StoreError
from jetdraft.runtime.history.store import ResponseStore
from jetdraft.runtime.text.codec import TextCodec

file_argument = click.argument("file", type=click.Path(path_type=Path))
user_option = click.option("--user", default="", help="Whose entries.")


@click.group("store")
def command() -> None:
    """See or forget the requests that a store keeps to draft from."""


@command.command("list")
@bundle_argument
@file_argument
@user_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def list_entries(bundle: Path, file: Path, user: str, as_json: bool) -> None:
    """The entries in FILE, latest first; BUNDLE has the tokenizer that reads them."""
    opened = Bundle.open(bundle)
    text = TextCodec(opened.tokenizer)
    for entry in _open(opened, file, user).entries:
        prompt, response = text.decode(entry.prompt), text.decode(entry.response)
        used = datetime.fromtimestamp(entry.used).isoformat(" ", "seconds")
        if as_json:
            fields = {"used": used, "prompt": prompt, "response": response}
            click.echo(json.dumps(fields, ensure_ascii=False))
        else:
            click.echo(f"{used}  {_short(prompt)}  ->  {_short(response)}")


@command.command("clear")
@bundle_argument
@file_argument
@user_option
def clear(bundle: Path, file: Path, user: str) -> None:
    """Forget all entries of a user in FILE."""
    count = _open(Bundle.open(bundle), file, user).clear()
    click.echo(f"{count} entries forgotten", err=True)


def _open(bundle: Bundle, file: Path, user: str) -> ResponseStore:
    if not file.exists():
        raise StoreError(f"no store at {file}; give the file that --store named")
    return ResponseStore(file, bundle.tokenizer_sha256, user)


def _short(text: str, width: int = 36) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
