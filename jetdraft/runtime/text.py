"""Between text and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from jetdraft.errors import BundleError, PromptError


class TextCodec:
    """The bundle's tokenizer; a bundle without one only takes and gives ids.

    codec = TextCodec(bundle.tokenizer)
    codec.stream(codec.encode("def")).push([5, 6])
    """

    def __init__(self, file: Path | None) -> None:
        self._tokenizer: Tokenizer | None = None
        if file is not None:
            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare exceptions
                raise BundleError(
                    f"{file} is not a tokenizer ({error}); export the bundle again"
                ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens of the template included."""
        if self._tokenizer is None:
            raise PromptError(
                "the bundle has no tokenizer; give the prompt as token_ids"
            )
        try:
            return list(self._tokenizer.encode(text).ids)
        except TypeError as error:
            raise PromptError(
                "the prompt is not a text of whole characters; give UTF-8"
            ) from error

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """An incremental decoder of what follows `prompt`."""
        return TextStream(self._tokenizer, list(prompt[-_TAIL:]))


_TAIL = 8
"""Tokens of the prompt that decoding starts from: some decoders treat the first token
of a text unlike the others, as in dropping its leading space."""

_SEVERAL = 16
"""Tokens that are decoded again at every push, before the oldest are let go."""


class TextStream:
    """Turns tokens into text as they come, whole characters only.

    `push` holds back bytes until they make a character; `rest` gives what never did.
    The last few tokens are decoded again each time, and what was given is cut off.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt
        self._whole = len(prompt)
        self._given = self._decode()

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty without a tokenizer."""
        self._ids += ids
        text = self._decode()
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        if len(self._ids) > _SEVERAL:
            # Whole characters end where the last piece began.
            del self._ids[: self._whole]
            text = self._decode()
        self._whole, self._given = len(self._ids), text
        return new

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._decode()[len(self._given) :]

    def _decode(self) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text


_INCOMPLETE = "\ufffd"
