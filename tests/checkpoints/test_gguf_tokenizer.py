"""The tokenizer in a GGUF file: rules that split a text, special tokens, ends."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf_tokenizer import read_tokenizer
from tests.ggufs import write_gguf
from tests.tiny import END_OF_TEXT, llama_config, tokenizer

TEXT = "def self.in(x):\n\treturn 1234 für 日本  \n"


@pytest.mark.parametrize(
    "rule", ["gpt-2", "default", "qwen2", "smollm", "llama-bpe", "tekken", "gpt-4o"]
)
def test_texts_come_back(tmp_path, rule):
    written = write_gguf(
        tmp_path / "model.gguf", llama_config(num_hidden_layers=1), rule=rule
    )
    found = Checkpoint.load(str(written.path), torch.float32)
    made = Tokenizer.from_str(found.tokenizer)
    ids = made.encode(TEXT + END_OF_TEXT).ids
    assert made.decode(ids, skip_special_tokens=False) == TEXT + END_OF_TEXT
    assert made.decode(ids) == TEXT, "the end of text is a special token"
    assert ids.count(0) == 1
    assert ids[-1] == 0
    assert found.eos_token_ids == (0,)
    if rule == "gpt-2":
        assert made.encode(TEXT).ids == tokenizer().encode(TEXT).ids


@pytest.mark.parametrize(
    ("rule", "begin", "first"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_text_begins_as_the_file_says(tmp_path, rule, begin, first):
    config = llama_config(num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    write_gguf(file, config, rule=rule, begin=begin)
    made = Tokenizer.from_str(Checkpoint.load(str(file), torch.float32).tokenizer)
    assert (made.encode("x").ids[0] == 0) == first


def test_numbers_are_split_by_the_rule():
    """The merge of two digits is used by the rules that leave numbers whole."""
    tokens = [*"123", "12"]
    vocabulary = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": ["1 2"],
        "token_type": [1, 1, 1, 1],
    }
    expected = {"gpt-2": ["12", "3"], "smollm": ["1", "2", "3"]}
    expected |= {"llama-bpe": ["12", "3"], "qwen2": ["1", "2", "3"]}
    for rule, pieces in expected.items():
        fields = {f"tokenizer.ggml.{k}": v for k, v in vocabulary.items()}
        fields["tokenizer.ggml.pre"] = rule
        made = Tokenizer.from_str(read_tokenizer("file", fields.get))
        assert made.encode("123").tokens == pieces, rule


def test_words_that_are_tokens_are_not_merged():
    """As Llama 3 has them; other rules build words by merges only."""
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*"ab", "ab"],
        "tokenizer.ggml.merges": [],
    }
    for rule, pieces in {"llama-bpe": ["ab"], "gpt-2": ["a", "b"]}.items():
        fields["tokenizer.ggml.pre"] = rule
        made = Tokenizer.from_str(read_tokenizer("file", fields.get))
        assert made.encode("ab").tokens == pieces


def test_sentencepiece_merges_the_best_pair_first():
    pieces = {
        **{"<unk>": (0.0, 2), "<s>": (0.0, 3), "</s>": (0.0, 3)},
        **{"<0xC3>": (0.0, 6), "<0xBC>": (0.0, 6), "▁": (-9.0, 1)},
        **{"a": (-5.0, 1), "b": (-5.0, 1), "c": (-5.0, 1)},
        **{"bc": (-1.0, 1), "ab": (-2.0, 1), "▁a": (-3.0, 1)},
    }
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": [score for score, _ in pieces.values()],
        "tokenizer.ggml.token_type": [kind for _, kind in pieces.values()],
        "tokenizer.ggml.bos_token_id": 1,
    }
    made = Tokenizer.from_str(read_tokenizer("file", fields.get))
    assert made.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert made.encode("ü</s>").tokens == ["<s>", "▁", "<0xC3>", "<0xBC>", "</s>"]
    assert made.decode(made.encode("abc ü").ids) == "abc ü"
    fields["tokenizer.ggml.add_space_prefix"] = False
    made = Tokenizer.from_str(read_tokenizer("file", fields.get))
    assert made.encode("abc").tokens == ["<s>", "a", "bc"]


def test_the_template_and_the_ends_of_a_turn(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = tmp_path / "model.gguf"
    write_gguf(
        file,
        llama_config(num_hidden_layers=1),
        template=template,
        change=lambda writer: writer.add_eot_token_id(7),
    )
    found = Checkpoint.load(str(file), torch.float32)
    assert found.chat_template == template
    assert found.eos_token_ids == (0, 7)
