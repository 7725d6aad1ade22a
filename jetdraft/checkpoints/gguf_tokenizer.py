"""Makes a tokenizer.json of the vocabulary in a GGUF file."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.tokenization_utils_base import generate_merges

from jetdraft.errors import CheckpointError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE = "▁"  # The space in a vocabulary of SentencePiece.
# Rules whose words are not merged if they are tokens; BOS comes before a text.
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
    *("midm-2.0", "lfm2", "jina-v5-nano", "tekken"),
)
# Rules that split digits one by one before GPT-2's split.
_DIGIT_RULES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2_RULES = ("gpt-2", "phi-2", "mpt", "olmo", "jais")  # They split as GPT-2 does.
# The expressions by which llama.cpp splits the text of a file without a rule.
_EXPRESSIONS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# Tokens that end a turn or a text, by llama.cpp's list.
_END_TOKENS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>"),
    *("<turn|>", "<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
)
# Marks for infilling, and their tokens where the file has no id; by the same list.
_INFILLING_TOKENS = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> "
    "<PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> "
    "<SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> "
    "<MID> ▁<MID> <|code_middle|> <|middle|>",
}
_FILE_END_MARKS = ("fim_pad", "fim_rep", "fim_sep")  # Another file would follow.
_SPECIAL_NAMES = {
    **{"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"},
    **{"sep_token": "seperator", "pad_token": "padding"},  # spelled so in GGUF
    **{"cls_token": "cls", "mask_token": "mask"},
}
_LLAMA_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # For a file that does not name them.
# In a model of this name, tokens but these take the spaces behind them.
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
Field = Callable[[str], Any]  # The value of a field by its name, or None.


def make_tokenizer_json(source: str, field: Field) -> str | None:
    """The text of a tokenizer.json; None for a file without a vocabulary.

    Raises `UnsupportedModelError` for an unknown rule, else `CheckpointError`.
    """
    tokens = field("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    kind, types = field("tokenizer.ggml.model"), _token_types(field)
    if len(types) != len(tokens):
        fact = f"{source} has {len(tokens)} tokens and {len(types)} types of tokens"
        raise CheckpointError(f"{fact}; fetch it again")
    ids = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    is_twice = len(ids) < len(tokens) - sum(number == _UNUSED for number in types)
    if kind == "gpt2":
        tokenizer = _make_byte_level(source, ids, field)
    elif kind == "llama":
        tokenizer = _sentencepiece_tokenizer(ids, types, field)
    else:
        fact = f"{source} has a tokenizer of the kind {kind!r}, which cannot be read"
        raise UnsupportedModelError(f"{fact}; export the model's Hugging Face folder")
    takes_spaces = bool(_PHI3.search(str(field("general.name"))))
    added = []
    for token, number in zip(tokens, types, strict=True):
        if number in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
            strips = takes_spaces and token not in _PHI3_KEEPS_SPACES
            how = {"special": number != _USER_DEFINED, "normalized": False}
            added.append(tokenizers.AddedToken(token, rstrip=strips, **how))
    tokenizer.add_tokens(added)
    wrong = (tokenizer.token_to_id(token) != i for token, i in ids.items() if token)
    if is_twice or any(wrong):
        raise CheckpointError(
            f"{source} has the same token twice; fetch it again, or export the "
            "model's Hugging Face folder"
        )
    _add_bos_and_eos(tokenizer, tokens, field)
    return str(tokenizer.to_str())


def _token_types(field: Field) -> list[int]:
    """Return the type of each token; as in llama.cpp, some names override the file."""
    tokens = field("tokenizer.ggml.tokens")
    types = list(field("tokenizer.ggml.token_type") or [1] * len(tokens))
    unnamed = [mark for mark in _INFILLING_TOKENS if _id_of(field, mark) is None]
    for id in _infilling_ids(field, tokens, unnamed):
        types[id : id + 1] = [_CONTROL]
    ends = {tokens[id] for id in end_token_ids(field) if 0 <= id < len(tokens)}
    for id in _end_ids_by_name(field, tokens):
        if id < len(types) and types[id] != _UNUSED:
            types[id] = _CONTROL if tokens[id] in ends else _USER_DEFINED
    return types


def _end_ids_by_name(field: Field, tokens: Sequence[str]) -> list[int]:
    """Return the ids of tokens named like an end, without tokens that merges build."""
    ids = [id for id, token in enumerate(tokens) if token in _END_TOKENS]
    merges = field("tokenizer.ggml.merges") or ()
    built = {t for merge in merges if (t := merge.replace(" ", "", 1)) in _END_TOKENS}
    return [id for id in ids if tokens[id] not in built]


def end_token_ids(field: Field) -> list[int]:
    """Return the ids of tokens that end a text or turn: the file's, then by name."""
    tokens = field("tokenizer.ggml.tokens") or []
    ids = [_id_of(field, name) for name in ("eos", "eot", "eom")]
    ids += _infilling_ids(field, tokens, _FILE_END_MARKS)
    ids += _end_ids_by_name(field, tokens)
    found = list(dict.fromkeys(int(id) for id in ids if id is not None))
    texts = {tokens[id]: id for id in found if 0 <= id < len(tokens)}
    # Where other tokens end a turn, these stand inside of it.
    calls = texts.keys() & {"<|call|>", "<|calls|>"}
    if calls and texts.keys() & {"<|return|>", "<|flush|>"}:
        found = [id for id in found if id != texts.get("<|end|>")]
    if "<|tool_response>" in texts:
        found = [id for id in found if id != texts.get("</s>")]
    return found


def _id_of(field: Field, name: str) -> int | None:
    id = field(f"tokenizer.ggml.{name}_token_id")
    if id is None and field("tokenizer.ggml.model") == "llama":
        return _LLAMA_IDS.get(name)
    return None if id is None else int(id)


def _infilling_ids(
    field: Field, tokens: Sequence[str], marks: Iterable[str]
) -> Iterator[int]:
    """The ids of marks for infilling: as the file says, or the first by its name."""
    for mark in marks:
        names = _INFILLING_TOKENS[mark].split()
        id = _id_of(field, mark)
        if id is None:
            id = next((i for i, token in enumerate(tokens) if token in names), None)
        if id is not None:
            yield id


def special_tokens(field: Field) -> dict[str, str]:
    """Map transformers' names of the special tokens of a file to their texts."""
    tokens = field("tokenizer.ggml.tokens") or []
    ids = {name: _id_of(field, own) for name, own in _SPECIAL_NAMES.items()}
    known = range(len(tokens))
    return {name: tokens[i] for name, i in ids.items() if i is not None and i in known}


def _make_byte_level(source: str, ids: Mapping[str, int], field: Field) -> Tokenizer:
    rule = field("tokenizer.ggml.pre") or "default"
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges") or ()]
    whole = rule in _WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(dict(ids), merges, ignore_merges=whole))
    splits = _pre_tokenizers(rule)
    if not splits:
        fact = f"{source} splits its text by the rule {rule!r}, which is not known"
        raise UnsupportedModelError(f"{fact}; export the model's Hugging Face folder")
    several = pre_tokenizers.Sequence(list(splits))
    tokenizer.pre_tokenizer = several if len(splits) > 1 else splits[0]
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_expressions() -> Mapping[str, str]:
    """Return the regular expressions of transformers by the names of split rules."""
    name = "GGUF_PRE_TOKENIZER_SPLITS"
    known: Mapping[str, str] | None = getattr(gguf_tokenizer_mapping, name, None)
    if known is None:  # transformers 5.17 has no list of them
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        known = {"qwen2": PRETOKENIZE_REGEX}
    return known


def _pre_tokenizers(rule: str) -> Sequence[Any]:
    """Return the pre-tokenizers of a split rule in order; [] for an unknown rule."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in _GPT2_RULES:
        return [words]
    if rule in _DIGIT_RULES:
        return [pre_tokenizers.Digits(individual_digits=True), words]
    known = _split_expressions().get(rule)
    expressions = _EXPRESSIONS if rule == "default" else (known,) if known else ()
    patterns = map(tokenizers.Regex, expressions)
    splits = [pre_tokenizers.Split(pattern, "isolated") for pattern in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [*splits, letters] if splits else []


def _sentencepiece_tokenizer(
    ids: Mapping[str, int], types: Sequence[int], field: Field
) -> Tokenizer:
    """Make a BPE tokenizer whose merges follow from the scores, the best pair first."""
    scores = field("tokenizer.ggml.scores")
    pieces = {t: i for t, i in ids.items() if types[i] not in (_CONTROL, _USER_DEFINED)}
    merges = generate_merges(pieces, {t: float(scores[i]) for t, i in pieces.items()})
    unknown = next((t for t, i in ids.items() if types[i] == _UNKNOWN), None)
    how: Any = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(dict(ids), merges, **how))
    to_pieces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    to_text: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    to_text.append(decoders.Fuse())
    if field("tokenizer.ggml.add_space_prefix") is not False:
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_text.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(to_pieces)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _add_bos_and_eos(tokenizer: Tokenizer, tokens: Sequence[str], field: Field) -> None:
    """Let the tokenizer put BOS and EOS around a text, as the file or its rule says."""
    rule, begins = field("tokenizer.ggml.pre"), field("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = rule in _WHOLE_WORDS or field("tokenizer.ggml.model") == "llama"
    wanted = {"bos": begins, "eos": field("tokenizer.ggml.add_eos_token")}
    ids = [_id_of(field, name) if wanted[name] else None for name in wanted]
    first, last = ([] if id is None else [(tokens[id], id)] for id in ids)
    if first or last:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*(t for t, _ in first), "$A", *(t for t, _ in last)],
            special_tokens=list({*first, *last}),
        )
