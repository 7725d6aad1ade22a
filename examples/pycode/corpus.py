"""The corpus: the standard library's own source, its split and its tokenizer."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END = "<|endoftext|>"
VOCABULARY = 4096
WINDOW = 512
PROMPT = 128
HELD_OUT_SHARE = 0.05
# Tests are three fifths of the library's bytes; half of them leaves an even mix.
TEST_SHARE = 0.5
# Tables and prose rather than code.
SKIPPED = {"site-packages", "encodings", "pydoc_data", "__pycache__"}
TESTS = {"test", "tests", "idle_test"}


def stdlib() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _bucket(name: str, purpose: str) -> float:
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_test(name: str) -> bool:
    """Tell whether a file belongs to one of the library's test packages."""
    return not TESTS.isdisjoint(name.split("/"))


def is_held_out(name: str) -> bool:
    """Tell whether training must not see a file."""
    return _bucket(name, "held-out") < HELD_OUT_SHARE


def _is_wanted(name: str) -> bool:
    parts = name.split("/")
    if not SKIPPED.isdisjoint(parts) or parts[-1].startswith("_sysconfigdata"):
        return False
    return not is_test(name) or _bucket(name, "test") < TEST_SHARE


def _sources() -> Iterator[tuple[str, str]]:
    root = stdlib()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not _is_wanted(name):
            continue
        try:
            # newline="" keeps the text exactly as it is on disk.
            with path.open(encoding="utf-8", newline="") as file:
                yield name, file.read()
        except UnicodeDecodeError:
            # The test packages hold files that are broken on purpose.
            continue


def read() -> tuple[dict[str, str], dict[str, str]]:
    """Return the training files and the held-out files, each text only once."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in _sources():
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        (held_out if is_held_out(name) else train)[name] = text
    return train, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer that both models share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the texts as one stream of tokens, each closed by the end token."""
    end = tokenizer.token_to_id(END)
    encodings = tokenizer.encode_batch(texts)
    return torch.tensor([i for e in encodings for i in (*e.ids, end)])


def windows(stream: Tensor) -> Tensor:
    """Cut a stream into windows, each with one token more to predict."""
    return stream.unfold(0, WINDOW + 1, WINDOW)


def _prompt(tokenizer: Tokenizer, text: str) -> str:
    # A line's start a third of the way in lies past licence and docstring.
    start = text.index("\n", len(text) // 3) + 1
    return str(tokenizer.decode(tokenizer.encode(text[start:]).ids[:PROMPT]))


def prompts(tokenizer: Tokenizer, held_out: dict[str, str], count: int) -> list[str]:
    """Cut prompts from the longer held-out files, library modules first."""
    long = [name for name, text in held_out.items() if len(text) > 4000]
    names = sorted(long, key=lambda name: (is_test(name), _bucket(name, "prompt")))
    return [_prompt(tokenizer, held_out[name]) for name in names[:count]]
