"""How a trigram table is counted: `jetdraft train trigram`; torch is not needed."""

from collections.abc import Sequence
from pathlib import Path

import click

from jetdraft.bundle import Bundle
from jetdraft.cli.command import Command, option
from jetdraft.cli.flags import PATH, output_option
from jetdraft.errors import DataError, OutputError
from jetdraft.files import check_writable, read_text
from jetdraft.methods.trigram.method import Counts
from jetdraft.runtime.text.codec import TextCodec


def write_table(corpus: Sequence[Path], bundle: Bundle, output: Path) -> Counts:
    """Count texts' trigrams into a new file; raises `DataError` or `OutputError`."""
    if output.exists():
        raise OutputError(f"{output} exists; choose another file")
    check_writable(output)
    codec = TextCodec(bundle.tokenizer)
    table = Counts.of([codec.encode(read_text(file)) for file in corpus])
    if not len(table.pairs):
        raise DataError("the corpus has fewer than three tokens; give more")
    table.save(output, bundle.tokenizer_sha256)
    return table


@click.command("trigram", cls=Command)
@click.argument("corpus", nargs=-1, required=True, type=PATH)
@option(
    "checkpoint --bundle",
    "The bundle whose tokenizer reads the corpus.",
    required=True,
    type=PATH,
)
@output_option("Write the table to this file.")
def command(corpus: tuple[Path, ...], bundle: Path, output: Path) -> None:
    """Count which tokens follow which two tokens in CORPUS, text files."""
    table = write_table(corpus, Bundle.open(bundle), output)
    sizes = f"{len(table.pairs)} pairs, {len(table.tokens)} successors"
    click.echo(f"{output}: {sizes}", err=True)
