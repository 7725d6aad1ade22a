"""Between text and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jetdraft.errors import BundleError, PromptError


class TextCodec:
    """The bundle's tokenizer; a bundle without one only takes and gives ids.

    codec = TextCodec(bundle.tokenizer)
    codec.decode(codec.encode("def f():"))
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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self._tokenizer)


class TextStream:
    """Turns tokens into text as they come, whole characters only.

    `push` holds back bytes until they make a character; `rest` gives what never did.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._tokenizer is None:
            return ""
        self._ids += ids
        pieces = [self._stream.step(self._tokenizer, token) for token in ids]
        text = "".join(piece for piece in pieces if piece)
        self._given += text
        return text

    def rest(self) -> str:
        """What decoding everything at once has beyond the pieces given."""
        if self._tokenizer is None:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self._given) :] if whole.startswith(self._given) else ""
