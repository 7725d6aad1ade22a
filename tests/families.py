from collections.abc import Callable

import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

WORDS = ["the", "and", "a", "naïve", "日本", "🚀", "n't", "un", "do", "."]
SPECIAL = ["<s>", "</s>", "<|user|>"]
TAG = "<tool_call>"
"""A token of its own that is text like any other."""
_TO_TEXT = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen: a token may be a part of a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = [piece for w in WORDS for piece, _ in split.pre_tokenize_str(f" {w}")]
    halves = [piece[: len(piece) // 2 + 1] for piece in pieces]
    vocab = list(dict.fromkeys([*letters, *pieces, *halves]))
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As of Llama 2, Mistral and Phi-3: BPE with a token for each byte."""
    pieces = ["<unk>", *_bytes(), "▁", "▁▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    vocab = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(parts)
    tokenizer.decoder = decoders.Sequence([*_TO_TEXT, decoders.Strip(" ", 1, 0)])
    return tokenizer


def unigram() -> Tokenizer:
    """As of Gemma: byte fallback, and no space is put before a text."""
    pieces = ["<unk>", *_bytes(), "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    tokenizer = Tokenizer(
        models.Unigram([(p, -float(len(p) < 3)) for p in pieces], 0, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(_TO_TEXT)
    return tokenizer


def metaspace() -> Tokenizer:
    """As of T5: Unigram without bytes, which drops the space before a text."""
    pieces = ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    """As of BERT: words are joined by spaces, but none stands before a full stop."""
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_ends() -> Tokenizer:
    """As of the first GPT: the last piece of a word says that it is the last."""
    pieces = ["<unk>", *WORDS, *(f"{word}</w>" for word in WORDS)]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def word_level() -> Tokenizer:
    """Words alone; without a decoder they are joined by spaces."""
    vocab = {word: at for at, word in enumerate(["<unk>", *WORDS])}
    return Tokenizer(models.WordLevel(vocab, "<unk>"))


_OF_BPE = (byte_level, sentencepiece, word_ends)
FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    family.__name__: family
    for family in (*_OF_BPE, unigram, metaspace, wordpiece, word_level)
}


def made(family: str) -> Tokenizer:
    tokenizer = FAMILIES[family]()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([tokenizers.AddedToken(TAG, normalized=False)])
    return tokenizer


def _bytes() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]
