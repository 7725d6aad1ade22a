"""Counting a trigram table in a corpus; no torch needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetdraft.bundle import Bundle
from jetdraft.errors import DataError, OutputError
from jetdraft.runtime.text import TextCodec
from jetdraft.runtime.trigram import Counts


def count(corpus: Sequence[Path], bundle: Bundle, output: Path) -> Counts:
    """Read text files with a bundle's tokenizer and write the table to `output`.

    Raises `DataError` or `OutputError`; the table appears whole or not at all.

        count([Path("notes.txt")], Bundle.open("bundle"), Path("notes.npz"))
    """
    codec = TextCodec(bundle.tokenizer)
    table = Counts.of([codec.encode(_text(file)) for file in corpus])
    if not len(table.pairs):
        raise DataError("the corpus has fewer than three tokens; give more")
    partial = output.with_name(f"{output.name}.partial")
    try:
        table.save(partial, bundle.tokenizer_sha256)
        partial.replace(output)
    except OSError as error:
        raise OutputError(
            f"cannot write {output} ({error.strerror}); choose another file"
        ) from error
    return table


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"no corpus file {file}; give an existing one") from error
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not text ({error}); give UTF-8") from error
