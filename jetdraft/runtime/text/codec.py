"""Turns text into token ids, and token ids into text as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from jetdraft.errors import BundleError, OptionError
from jetdraft.runtime.text.vocabulary import Vocabulary


class TextCodec:
    """The bundle's tokenizer. Without a `file`, prompts and texts are token ids only.

    Raises `BundleError` if the file is not a tokenizer.

    codec = TextCodec(bundle.tokenizer)
    codec.stream(codec.encode("def")).push([5, 6])
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tokenizer: Tokenizer | None = None
        self._vocabulary: Vocabulary | None = None
        if file is not None:
            try:
                self._tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare exceptions
                raise BundleError(
                    f"{file} is not a tokenizer ({error}); export the bundle again"
                ) from error

    def vocabulary(self, size: int, ends: Sequence[int]) -> Vocabulary:
        """The `size` tokens as constraints need them, the same at each call."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._file, size, ends)
        return self._vocabulary

    @property
    def readable(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def token(self, id: int) -> str:
        """The name of a token; "" for an unknown id or without a tokenizer."""
        name = self._tokenizer.id_to_token(id) if self._tokenizer else None
        return name or ""

    @property
    def bos_token(self) -> str:
        """The token that the tokenizer puts before every text; "" if there is none."""
        ids = self.encode("") if self._tokenizer else []
        return self.token(ids[0]) if ids else ""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a prompt; `special` adds tokens such as beginning-of-text.

        Raises `OptionError`.
        """
        if self._tokenizer is None:
            raise OptionError(
                "the bundle has no tokenizer; give the prompt as token_ids", "prompt"
            )
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
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
        """An incremental decoder for the tokens after `prompt`."""
        return TextStream(self._tokenizer, list(prompt[-_TAIL:]))


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
        before, whole = self._texts()
        if whole.endswith(_INCOMPLETE) or len(whole) <= len(before):
            return ""
        self._anchor, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]

    def rest(self) -> str:
        """The remaining text, when no more tokens come."""
        before, whole = self._texts()
        return whole[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """The text from the anchor to `_shown`, and from the anchor to the end."""
        if self._tokenizer is None:
            return "", ""
        shown = self._ids[self._anchor : self._shown]
        before, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (shown, self._ids[self._anchor :])
        )
        return before, whole


_INCOMPLETE = "\ufffd"
