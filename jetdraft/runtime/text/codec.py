"""Turns text into token ids, and token ids into text as they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from jetdraft.errors import BundleError, OptionError
from jetdraft.runtime.text.constraint import Vocabulary


class TextCodec:
    """The bundle's tokenizer. Without a `file`, prompts and texts are token ids only.

    Raises `BundleError` if the file is not a tokenizer.

    codec = TextCodec(bundle.tokenizer)
    codec.stream(codec.encode("def")).push([5, 6])
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tokenizer: Tokenizer | None = None
        if file is not None:
            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare exceptions
                raise BundleError(
                    f"{file} is not a tokenizer ({error}); export the bundle again"
                ) from error

    @cache  # noqa: B019 (a codec lives as long as its models)
    def vocabulary(self, size: int, ends: tuple[int, ...]) -> Vocabulary:
        """The `size` tokens as constraints need them; read at the first call."""
        return Vocabulary(self._file, size, list(ends))

    @property
    def readable(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def token(self, id: int) -> str:
        """The name of a token; "" for an unknown id or without a tokenizer."""
        name = self._tokenizer.id_to_token(id) if self._tokenizer else None
        return name or ""

    def _byte(self, id: int) -> int:
        """The byte that a token like <0xE2> stands for; 0 for other tokens."""
        name = _BYTE.fullmatch(self.token(id))
        return int(name[1], 16) if name else 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt; `special` adds tokens such as beginning-of-text.

        Raises `OptionError`.
        """
        if self._tokenizer is None:
            raise OptionError(
                "the bundle has no tokenizer; give the prompt as token_ids", "prompt"
            )
        try:
            # Unlike `encode`, a batch lets other threads run meanwhile.
            batch = self._tokenizer.encode_batch([text], add_special_tokens=special)
            return list(batch[0].ids)
        except TypeError as error:
            raise OptionError(
                "the prompt is not valid Unicode; give valid UTF-8", "prompt"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; without a tokenizer, the ids as decimal numbers."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """An incremental decoder for the tokens after `prompt`.

        The character that a prompt ends in belongs to the text after it.
        """
        tail = list(prompt[-_TAIL:])
        tokens = [self._byte(token) for token in tail]
        first = next((i for i, byte in enumerate(tokens) if not _goes_on(byte)), 0)
        begun = _begun(tokens)
        return TextStream(self._tokenizer, tail[-begun:] if begun else tail[first:])


def _goes_on(byte: int) -> bool:
    """Whether a byte is inside a character of UTF-8, not its first."""
    return 0x80 <= byte < 0xC0


def _begun(tokens: Sequence[int]) -> int:
    """How many bytes at the end are the beginning of a character that lacks some."""
    for count, byte in enumerate(reversed(tokens), start=1):
        if not _goes_on(byte):
            size = (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0) + 1
            return count if count < size else 0
    return 0


_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""The name of a token that is a byte. Such tokens in a row are decoded together, and if
a byte is missing at either end, none of them becomes a character."""

_TAIL = 8
"""Tokens of the prompt that are decoded with the output: some decoders treat the first
token of a text differently, for example they drop its leading space."""


class TextStream:
    """Turns tokens into text as they arrive, whole characters only.

    `push` holds back bytes until they complete a character; `rest` gives the bytes that
    never completed a character. Each push decodes the tokens since the last whole
    character, and before them the tokens of the push before: without the text of those
    it could not tell where the new text starts.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt
        # Tokens before `_shown` have become text; decoding starts at `_anchor`.
        self._anchor, self._shown = 0, len(prompt)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" without a tokenizer."""
        self._ids += ids
        before, whole, start = self._texts()
        if whole.endswith(_INCOMPLETE) or len(whole) <= start:
            return ""
        if start == len(before):  # else a character goes on there
            self._anchor = self._shown
        self._shown = len(self._ids)
        return whole[start:]

    def rest(self) -> str:
        """The remaining text, when no more tokens come."""
        _, whole, start = self._texts()
        return whole[start:]

    def _texts(self) -> tuple[str, str, int]:
        """The text from the anchor to `_shown`, and from the anchor to the end.

        With them, the place in the latter where the new text starts.
        """
        if self._tokenizer is None:
            return "", "", 0
        shown = self._ids[self._anchor : self._shown]
        before, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (shown, self._ids[self._anchor :])
        )
        if before.endswith(_INCOMPLETE):
            pairs = enumerate(zip(before, whole, strict=False))
            place = (at for at, (old, new) in pairs if old != new)
            return before, whole, next(place, min(len(before), len(whole)))
        return before, whole, len(before)


_INCOMPLETE = "\ufffd"
