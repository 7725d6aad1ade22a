"""Says what a tokenizer makes of texts: characters per token (Qtok, 2410.12989).

    python tools/texts.py SOURCE english.txt german.txt --draft-vocab 32768

SOURCE is a checkpoint, or a bundle, whose draft vocabulary is then looked for.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
from tokenizers import Tokenizer

from jetdraft.bundle import DRAFTER, TARGET, TOKENIZER, Bundle
from jetdraft.cli import StandaloneCommand
from jetdraft.cli.command import option
from jetdraft.cli.flags import PATH, json_option
from jetdraft.errors import DataError, printable
from jetdraft.files import read_text
from jetdraft.manifest import MANIFEST

WHOLE_TEXT = "all"
"""The `script` of the row for a whole text."""

SIGNS = "signs"
"""The `script` of tokens without a letter: digits, punctuation, white space."""


@dataclass(frozen=True)
class TextFigures:
    """Characters and tokens of a script; the share `coverage` can be drafted."""

    text: str
    script: str
    characters: int
    tokens: int
    coverage: float | None

    @property
    def characters_per_token(self) -> float:
        """Characters of the text per token, on average."""
        return self.characters / self.tokens

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object, rounded."""
        fields = asdict(self)
        coverage = fields.pop("coverage")
        return {
            **fields,
            "characters_per_token": round(self.characters_per_token, 3),
            "coverage": None if coverage is None else round(coverage, 4),
        }

    def line(self) -> str:
        """The figures as one line for a terminal."""
        share = self.coverage
        covered = "" if share is None else f"{share:7.1%} can be drafted"
        return (
            f"{self.text:16} {self.script:12} {self.tokens:7} tokens "
            f"{self.characters_per_token:6.2f} characters/token {covered}"
        ).rstrip()


def text_figures(
    tokenizer: Path,
    files: Sequence[Path],
    draft_vocabulary: Collection[int] | None = None,
    most_frequent: int | None = None,
) -> list[TextFigures]:
    """Return rows for each file: `WHOLE_TEXT`, then its scripts by number of tokens.

    `tokenizer` is a tokenizer.json. Give a file for each language: a script is not a
    language. `coverage` is by `draft_vocabulary` or, if `most_frequent` is given, by
    that many frequent tokens of the files' first halves; it then counts the second
    halves, since a choice looks too good on its own text. Raises `DataError`.
    """
    texts = [_TokenizedText.read(file, _open_tokenizer(tokenizer)) for file in files]
    parts = texts
    if most_frequent is not None:
        chosen = Counter(token for text in texts for token in text.halves()[0].ids)
        draft_vocabulary = {token for token, _ in chosen.most_common(most_frequent)}
        parts = [text.halves()[1] for text in texts]
    return [
        figures
        for text, part in zip(texts, parts, strict=True)
        for figures in text.figures(part.coverage(draft_vocabulary))
    ]


def _open_tokenizer(tokenizer: Path) -> Tokenizer:
    """Open a tokenizer.json, without truncation and padding; raises `DataError`."""
    try:
        opened = Tokenizer.from_file(str(tokenizer))
        opened.no_truncation()  # which a training may have left in the file
        opened.no_padding()
        return opened
    except Exception as error:  # the library raises bare exceptions
        raise DataError(
            f"{tokenizer} is not a tokenizer.json; give a folder that has one"
        ) from error


@dataclass(frozen=True)
class _TokenizedText:
    """A text's tokens: their ids, lengths in characters, and scripts.

    Characters that a tokenizer skips belong to the token after them. If a byte-level
    tokenizer splits a character into tokens, the first of them has its length.
    """

    name: str
    ids: list[int]
    lengths: list[int]
    scripts: list[str]

    @classmethod
    def read(cls, file: Path, tokenizer: Tokenizer) -> _TokenizedText:
        """Read a file and tokenize it; raises `DataError` for less than two tokens."""
        text = read_text(file)
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) < 2:
            raise DataError(f"{file} has less than two tokens; give a longer text")
        ends = [0, *accumulate((end for _, end in encoding.offsets), max)]
        return cls(
            name=printable(file.name, 40),
            ids=encoding.ids,
            lengths=[end - start for start, end in pairwise(ends)],
            scripts=[_script(text[start:end]) for start, end in encoding.offsets],
        )

    def halves(self) -> tuple[_TokenizedText, _TokenizedText]:
        """Return the first and the second half of the tokens."""
        cut = len(self.ids) // 2
        first, second = (
            _TokenizedText(
                self.name, self.ids[part], self.lengths[part], self.scripts[part]
            )
            for part in (slice(cut), slice(cut, None))
        )
        return first, second

    def coverage(self, vocabulary: Collection[int] | None) -> dict[str, float]:
        """Return the share of each script's tokens in the vocabulary; {} for None."""
        if vocabulary is None:
            return {}
        known = Counter[str]()
        for token, script in zip(self.ids, self.scripts, strict=True):
            known.update(dict.fromkeys((WHOLE_TEXT, script), token in vocabulary))
        counts = Counter(self.scripts) + Counter({WHOLE_TEXT: len(self.ids)})
        return {script: known[script] / count for script, count in counts.items()}

    def figures(self, coverage: Mapping[str, float]) -> Iterator[TextFigures]:
        """Yield the figures of the whole text, then of each script; see `coverage`."""
        characters = Counter({WHOLE_TEXT: sum(self.lengths)})
        for length, script in zip(self.lengths, self.scripts, strict=True):
            characters[script] += length
        tokens = Counter(self.scripts)
        for script, count in [(WHOLE_TEXT, len(self.ids)), *tokens.most_common()]:
            share = coverage.get(script)
            yield TextFigures(self.name, script, characters[script], count, share)


def _script(piece: str) -> str:
    """Return the script of the first letter, from the letter's name in Unicode."""
    letter = next((sign for sign in piece if sign.isalpha()), None)
    if letter is None:
        return SIGNS
    return unicodedata.name(letter, "other").split()[0].lower()


@click.command("texts", cls=StandaloneCommand)
@click.argument("source", type=PATH)
@click.argument("texts", type=PATH, nargs=-1, required=True)
@option(
    "drafting --draft-vocab",
    "How much this many tokens, the most frequent in the first halves of the "
    "texts, cover of the second halves.",
    type=click.IntRange(1),
)
@json_option
def main(
    source: Path, texts: tuple[Path, ...], draft_vocab: int | None, as_json: bool
) -> None:
    """Say what the tokenizer of SOURCE makes of TEXTS, a file for each language."""
    vocabulary = None
    if draft_vocab is None and (source / MANIFEST).is_file():
        bundle = Bundle.open(source)
        ids = bundle.draft_vocabulary(TARGET if bundle.drafter is None else DRAFTER)
        vocabulary = None if ids is None else frozenset(ids.tolist())
    rows = text_figures(source / TOKENIZER, texts, vocabulary, draft_vocab)
    if as_json:
        click.echo(json.dumps([row.to_json() for row in rows]))
    else:
        click.echo("\n".join(row.line() for row in rows))


if __name__ == "__main__":
    main()
