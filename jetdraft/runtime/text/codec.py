"""Turns text into token ids, checks them, and turns ids into text as they arrive."""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import Int64s
from jetdraft.errors import BundleError, LengthError, OptionError, as_error, refusing
from jetdraft.runtime.text.worker_process import Vocabulary

CHARACTERS_PER_TOKEN = 64  # A longer prompt is not even encoded.


class TextCodec:
    """The bundle's tokenizer, or only ids without a `file`; raises `BundleError`."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._tokenizer: Tokenizer | None = None
        self._vocabulary: Vocabulary | None = None
        self._bytes: TokenBytes | None = None
        if file is None:
            return
        # The library raises bare exceptions.
        fact = f"{file} is not a tokenizer"
        with as_error(BundleError, Exception, fact, "export the bundle again"):
            self._tokenizer = Tokenizer.from_file(str(file))
        # A training script may have left both in the file.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes = TokenBytes(self._tokenizer)

    def vocabulary(self, size: int, ends: Sequence[int]) -> Vocabulary:
        """The vocabulary for constraints, made once; raises `OptionError`."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._file, size, ends)
        return self._vocabulary

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def token(self, id: int) -> str:
        """The name of a token; "" for an unknown id or without a tokenizer."""
        name = self._tokenizer.id_to_token(id) if self._tokenizer else None
        return name or ""

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name; None for an unknown name."""
        return self._tokenizer.token_to_id(name) if self._tokenizer else None

    def to_lark(self, text: str) -> str:
        """Return a text in Lark's notation: <[id]> if it is a token, else quoted."""
        id = self.token_id(text)
        return json.dumps(text) if id is None else f"<[{id}]>"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Encode a text; `add_special` begins it with BOS; raises `OptionError`."""
        if self._tokenizer is None:
            fact = "the bundle has no tokenizer; give the prompt as token_ids"
            raise OptionError(fact, "prompt")
        fact = "the prompt is not valid Unicode; give valid UTF-8"
        with refusing(OptionError(fact, "prompt"), TypeError):
            # Unlike `encode`, a batch lets other threads run meanwhile.
            batch = self._tokenizer.encode_batch([text], add_special_tokens=add_special)
            return list(batch[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; without a tokenizer, the ids as decimal numbers."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def stream(
        self, prompt: Sequence[int], ends: Iterable[int] = (), special: bool = False
    ) -> "TextStream":
        """Make a stream of text after `prompt`, which may end inside a character.

        It hides the tokens in `ends`, and shows special tokens if `special`.
        """
        return TextStream(self._bytes, prompt, ends, special)


class TokenBytes:
    """The bytes that tokens stand for in a text; a token may be part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {id: t.content for id, t in added.items() if t.special}
        decode = tokenizer.decoder.decode if tokenizer.decoder else " ".join
        self._is_byte_level = decode(["a\u0120"]) == "a "
        self._has_byte_tokens = decode(["<0x41>"]) == "A"

    def of(self, before: Sequence[int], id: int) -> bytes | None:
        """The bytes of token `id` after the tokens `before`; None for an unknown id."""
        name = self._tokenizer.id_to_token(id)
        if name is None:
            return None
        if self._is_byte_level:
            own = [_BYTE_OF.get(letter, -1) for letter in name]
            return bytes(own) if -1 not in own else name.encode()
        byte = _BYTE_TOKEN.fullmatch(name) if self._has_byte_tokens else None
        if byte and (before or int(byte[1], 16) >= 0x80):
            return bytes([int(byte[1], 16)])
        # Special tokens are hidden by the caller, and others must not be left out here.
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        old, new = decode(before), decode([*before, id])
        return new[len(old) :].encode()


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # The name of a token that is a byte.
# Bytes by the letters of byte-level tokenizers, printable bytes first, then from 256.
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE = {letter: ord(letter) for letter in _LETTERS if ord(letter) < 256}
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE.values())
_BYTE_OF = _PRINTABLE | dict(zip(_LETTERS[len(_PRINTABLE) :], _OTHERS, strict=True))
_CONTEXT_TOKENS = 4  # Decoded before a token, so that it is not the first.


class TextStream:
    """Turns tokens into text as they arrive, whole characters only.

    Each token is read alone, so the text does not depend on how many come at once.
    Bytes that cannot become a character are shown as U+FFFD; bytes at the end are held
    back until they complete a character, or until `rest`.
    """

    def __init__(
        self,
        tokens: TokenBytes | None,
        prompt: Sequence[int],
        ends: Iterable[int],
        show_special: bool = False,
    ) -> None:
        self._tokens = tokens
        self._special = tokens.special if tokens else {}
        self._hidden = {*self._special, *ends}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []
        shown = (id for id in reversed(prompt) if self._bytes_of(id) is not None)
        for id in reversed(list(islice(shown, _CONTEXT_TOKENS))):
            self._utf8.decode(self._take_bytes(id))
        self._began_in_prompt = bool(self._utf8.getstate()[0])
        if show_special:
            self._special, self._hidden = {}, {*ends}

    def push(self, ids: Sequence[int]) -> str:
        """Read tokens; returns the text that they complete, "" without a tokenizer."""
        return "".join(self._decode_bytes(self._take_bytes(id)) for id in ids)

    def rest(self) -> str:
        """Return the text of the bytes held back, when no more tokens come."""
        text = self._utf8.decode(b"", final=True)
        return "" if self._began_in_prompt else text

    def special(self, id: int) -> str:
        """The text of a special token, which `push` hides; "" for any other token."""
        return self._special.get(id, "")

    def names(self, ids: Iterable[int]) -> dict[int, bytes | None]:
        """The exact bytes of each token if it came next; None for a hidden token."""
        return {id: self._bytes_of(id) for id in ids}

    def _bytes_of(self, id: int) -> bytes | None:
        """The bytes of a token if it came next; None if it is hidden."""
        if self._tokens is None or id in self._hidden:
            return None
        return self._tokens.of(self._before, id)

    def _take_bytes(self, id: int) -> bytes:
        data = self._bytes_of(id)
        if data is not None:
            self._before = [*self._before[1 - _CONTEXT_TOKENS :], id]
        return data or b""

    def _decode_bytes(self, data: bytes) -> str:
        """The characters that some bytes complete, but not what the prompt began."""
        text = self._utf8.decode(data[:1])
        if self._began_in_prompt and data:
            text = text.removeprefix("\ufffd")
            self._began_in_prompt = False
        return text + self._utf8.decode(data[1:])


def check_characters(count: int, capacity: int) -> None:
    """Raise `LengthError` for a text that cannot fit: encoding it may take minutes."""
    most = CHARACTERS_PER_TOKEN * capacity
    if count > most:
        fact = f"the prompt has {count} characters, at most {most} are read for a "
        fact += f"capacity of {capacity} tokens; shorten it"
        raise LengthError(fact)


def check_ids(token_ids: Any, contract: StepContract) -> Int64s:
    """Return ids as int64 [length]; raises `OptionError` or `LengthError`."""
    try:
        array = np.asarray(token_ids)
    except ValueError:
        array = np.zeros((1, 1))  # lists of several lengths
    if array.ndim == 1 and not len(array):
        raise OptionError("the prompt is empty; give at least one token", "prompt")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise OptionError("token_ids must be a list of integers", "prompt")
    ids = array.astype(np.int64)
    if len(ids) > contract.capacity:
        fact = f"the prompt has {len(ids)} tokens, the capacity is {contract.capacity}"
        raise LengthError(f"{fact}; shorten it or export with a larger --capacity")
    if ids.min() < 0 or ids.max() >= contract.vocab_size:
        wrong_id = ids[(ids < 0) | (ids >= contract.vocab_size)][0]
        fact = f"token id {wrong_id} is outside the vocabulary"
        raise OptionError(f"{fact}; ids are 0 to {contract.vocab_size - 1}", "prompt")
    return ids
