"""jetdraft store: lists and clears what a store or a learning folder keeps."""

import json
from datetime import datetime
from pathlib import Path

import click

from jetdraft.bundle import Bundle
from jetdraft.cli.command import Command
from jetdraft.cli.flags import PATH, bundle_argument, json_option, user_option
from jetdraft.errors import StoreError, printable
from jetdraft.learning import lessons
from jetdraft.runtime.history.store import ResponseStore
from jetdraft.runtime.text.codec import TextCodec

file_argument = click.argument("file", type=PATH)


@click.group("store")
def command() -> None:
    """List or clear what a store or the folder of serve --learn keeps."""


@command.command("list", cls=Command)
@bundle_argument
@file_argument
@user_option
@json_option
def list_entries(bundle: Path, file: Path, user: str, as_json: bool) -> None:
    """List the entries in FILE, latest first, read with BUNDLE's tokenizer.

    Of the folder of serve --learn it lists the lessons, and says which weights
    are chosen.
    """
    opened_bundle = Bundle.open(bundle)
    text = TextCodec(opened_bundle.tokenizer)
    if lessons.has_learned(file):
        _print_folder(opened_bundle, text, file, user, as_json)
        return
    entries = [
        {
            "used": datetime.fromtimestamp(entry.used).isoformat(" ", "seconds"),
            "prompt": text.decode(entry.prompt),
            "response": text.decode(entry.response),
        }
        for entry in _open_store(opened_bundle, file, user).entries
    ]
    if as_json:
        click.echo(json.dumps({"entries": entries}))
        return
    for entry in entries:
        prompt, response = _shorten(entry["prompt"]), _shorten(entry["response"])
        click.echo(f"{entry['used']}  {prompt}  ->  {response}")


@command.command("clear", cls=Command)
@bundle_argument
@file_argument
@user_option
def clear(bundle: Path, file: Path, user: str) -> None:
    """Remove all entries of a user from FILE, or from the folder of serve --learn.

    The folder's learned weights are removed too, since they were learned from entries.
    """
    opened_bundle = Bundle.open(bundle)
    if lessons.has_learned(file):
        count = _open_lessons(opened_bundle, file).clear(user)
        # Last, so that a training which has read the lessons publishes nothing.
        lessons.WeightSets(file, lessons.drafter_sha256(opened_bundle)).clear()
    else:
        count = _open_store(opened_bundle, file, user).clear()
    click.echo(f"{count} {'entry' if count == 1 else 'entries'} removed", err=True)


def _print_folder(
    bundle: Bundle, text: TextCodec, folder: Path, user: str, as_json: bool
) -> None:
    sets = lessons.WeightSets(folder, lessons.drafter_sha256(bundle))
    sets.check()
    choice = sets.read_choice()
    kept = _open_lessons(bundle, folder)
    pairs = ((len(one.places), one.tokens.tolist()) for one in kept.read(user))
    kept_lessons = [(count, text.decode(tokens)) for count, tokens in pairs]
    others = {name: count for name, count in kept.user_counts().items() if name != user}
    if as_json:
        weights = {"weights": choice.name, "on_trial_against": choice.before}
        rows = [{"wrong_places": count, "text": words} for count, words in kept_lessons]
        click.echo(json.dumps({**weights, "lessons": rows, "others": others}))
        return
    label = lessons.label
    note = "" if choice.before is None else f", on trial against {label(choice.before)}"
    click.echo(f"weights: {label(choice.name)}{note}")
    for count, words in kept_lessons:
        click.echo(f"{count:4} wrong  {_shorten(words, 64)}")
    for name, count in others.items():
        click.echo(f"lessons of --user {printable(name)!r}: {count}")


def _open_lessons(bundle: Bundle, folder: Path) -> lessons.Lessons:
    size = bundle.target.contract.vocab_size
    return lessons.Lessons(folder, bundle.tokenizer_sha256, size)


def _open_store(bundle: Bundle, file: Path, user: str) -> ResponseStore:
    """Open a user's part of a store; raises `StoreError` if there is no such file."""
    if not file.is_file():
        fact = f"no store, lessons or learned weights at {file}"
        fix = "give the file that --store named, or the folder that --learn named"
        raise StoreError(f"{fact}; {fix}")
    return ResponseStore(file, bundle.tokenizer_sha256, user)


def _shorten(text: str, width: int = 36) -> str:
    return printable(" ".join(text.split()), width)
