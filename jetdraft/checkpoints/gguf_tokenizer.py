"""Makes a tokenizer.json of the vocabulary in a GGUF file.

The file has tokens, their types, merges or scores, and the name of the rule that splits
a text before the merges (`tokenizer.ggml.pre`). llama.cpp has a list of these rules;
this is a part of it. A rule that is not known is refused, since a wrong split gives
other tokens without any sign of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.tokenization_utils_base import generate_merges

from jetdraft.errors import CheckpointError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Types of tokens that are no pieces of words."""

_SPACE = "▁"
"""The space in a vocabulary of SentencePiece."""

_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano"),
)
"""Rules whose words are not merged if they are tokens; BOS comes before a text."""

_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""What llama.cpp does for a file that names no rule."""

_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<end_of_turn>", "<|end|>", "<|return|>", "<|endofturn|>", "<|end_of_turn|>"),
)
"""Tokens that end a turn or a text in the chat templates of known models."""

_NAMES = {
    **{"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"},
    **{"sep_token": "seperator", "pad_token": "padding"},  # spelled so in GGUF
    **{"cls_token": "cls", "mask_token": "mask"},
}
"""The special tokens of transformers, and their names in a file."""

Field = Callable[[str], Any]
"""The value of a field by its name; None for a field that the file lacks."""


def read_tokenizer(source: str, field: Field) -> str | None:
    """The text of a tokenizer.json; None for a file without a vocabulary.

    Raises `UnsupportedModelError` for a kind of tokenizer or a rule that is not known,
    `CheckpointError` for a vocabulary that contradicts itself.
    """
    tokens = field("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind = field("tokenizer.ggml.model")
    types = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{source} has {len(tokens)} tokens and {len(types)} types of tokens; "
            "fetch it again"
        )
    ids = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    is_twice = len(ids) < len(tokens) - sum(number == _UNUSED for number in types)
    if kind == "gpt2":
        tokenizer = _byte_level(source, ids, field)
    elif kind == "llama":
        tokenizer = _sentencepiece(ids, types, field)
    else:
        raise UnsupportedModelError(
            f"{source} has a tokenizer of the kind {kind!r}, which cannot be read; "
            "export the model's Hugging Face folder"
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=number == _CONTROL, normalized=False)
            for token, number in zip(tokens, types, strict=True)
            if number in (_CONTROL, _USER_DEFINED) and token
        ]
    )
    wrong = (tokenizer.token_to_id(token) != i for token, i in ids.items() if token)
    if is_twice or any(wrong):
        raise CheckpointError(
            f"{source} has the same token twice; fetch it again, or export the "
            "model's Hugging Face folder"
        )
    _add_beginning(tokenizer, tokens, field)
    return str(tokenizer.to_str())


def ends_of_text(field: Field) -> list[int]:
    """The ids of all tokens that end a text or a turn, the file's own first."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [field(f"tokenizer.ggml.{name}") for name in names]
    tokens = field("tokenizer.ggml.tokens") or []
    types = field("tokenizer.ggml.token_type") or []
    for i, (token, number) in enumerate(zip(tokens, types, strict=False)):
        if token in _ENDS and number in (_CONTROL, _USER_DEFINED):
            ids.append(i)
    return list(dict.fromkeys(int(i) for i in ids if i is not None))


def special_tokens(field: Field) -> dict[str, str]:
    """The texts of the special tokens that a file names, by transformers' names."""
    tokens = field("tokenizer.ggml.tokens") or []
    ids = {
        name: field(f"tokenizer.ggml.{own}_token_id") for name, own in _NAMES.items()
    }
    return {
        name: tokens[i]
        for name, i in ids.items()
        if i is not None and 0 <= i < len(tokens)
    }


def _byte_level(source: str, ids: Mapping[str, int], field: Field) -> Tokenizer:
    rule = field("tokenizer.ggml.pre") or "default"
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges") or ()]
    whole = rule in _WHOLE_WORDS or rule == "tekken"
    tokenizer = Tokenizer(models.BPE(dict(ids), merges, ignore_merges=whole))
    splits = _splits(rule)
    if not splits:
        raise UnsupportedModelError(
            f"{source} splits its text by the rule {rule!r}, which is not known; "
            "export the model's Hugging Face folder"
        )
    several = len(splits) > 1
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence(list(splits)) if several else splits[0]
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _expressions() -> Mapping[str, str]:
    """The expressions of transformers by their rules."""
    name = "GGUF_PRE_TOKENIZER_SPLITS"
    known: Mapping[str, str] | None = getattr(gguf_tokenizer_mapping, name, None)
    if known is None:  # transformers 5.17 has no list of them
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        known = {"qwen2": PRETOKENIZE_REGEX}
    return known


def _splits(rule: str) -> Sequence[Any]:
    """The steps that split a text; none for an unknown rule."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in _GPT2:
        return [words]
    if rule in _DIGITS:
        return [pre_tokenizers.Digits(individual_digits=True), words]
    known = _expressions().get(rule)
    expressions = _DEFAULT if rule == "default" else (known,) if known else ()
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [*splits, letters] if splits else []


def _sentencepiece(
    ids: Mapping[str, int], types: Sequence[int], field: Field
) -> Tokenizer:
    """BPE whose merges follow from the scores: the best pair is merged first."""
    scores = field("tokenizer.ggml.scores")
    pieces = {t: i for t, i in ids.items() if types[i] not in (_CONTROL, _USER_DEFINED)}
    merges = generate_merges(pieces, {t: float(scores[i]) for t, i in pieces.items()})
    unknown = next((t for t, i in ids.items() if types[i] == _UNKNOWN), None)
    model = models.BPE(
        dict(ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    to_pieces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    to_text.append(decoders.Fuse())
    if field("tokenizer.ggml.add_space_prefix") is not False:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _add_beginning(tokenizer: Tokenizer, tokens: Sequence[str], field: Field) -> None:
    """Let the tokenizer put BOS before a text if the file or its rule says so."""
    rule, beginning = field("tokenizer.ggml.pre"), field("tokenizer.ggml.bos_token_id")
    wanted = field("tokenizer.ggml.add_bos_token")
    if wanted is None:
        by_rule = rule in _WHOLE_WORDS or rule == "tekken"
        wanted = by_rule or field("tokenizer.ggml.model") == "llama"
    if not wanted or beginning is None:
        return
    token = tokens[beginning]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], special_tokens=[(token, beginning)]
    )
