"""The tokenizer in a GGUF file: rules that split a text, special tokens, ends."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf_tokenizer import ends_of_text, read_tokenizer
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


def test_a_file_may_have_a_template_for_tools(tmp_path):
    def change(writer):
        writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")

    file = tmp_path / "model.gguf"
    write_gguf(file, llama_config(num_hidden_layers=1), template="x", change=change)
    found = Checkpoint.load(str(file), torch.float32).chat_template
    assert found == "{% if tools is not none %}{{ tools }}{% else %}x{% endif %}"


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def fields_of(tokens, kind=NORMAL, merges=(), **more):
    """A vocabulary of letters, and tokens of one type behind them."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*"ab</s>", *tokens],
        "token_type": [NORMAL] * 6 + [kind] * len(tokens),
        "merges": list(merges),
        **more,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "</s>", "<|fim_pad|>"])
def test_an_end_by_its_name_is_one_whatever_its_type(end, kind):
    """As in llama.cpp, which calls such types a bug of the model."""
    field = fields_of(["<x>", end], kind, eos_token_id=0).get
    assert ends_of_text(field) == [0, 7]
    made = Tokenizer.from_str(read_tokenizer("file", field))
    assert made.encode(f"a{end}b").ids == [0, 7, 1]
    assert made.decode([0, 7, 1]) == "ab", "ends are not shown"
    is_shown = made.decode([6], skip_special_tokens=True) == "<x>"
    assert is_shown == (kind != CONTROL)


def test_marks_of_infilling_are_control_tokens():
    """Without an id in the file the first by its name, as in llama.cpp."""
    tokens = ["<|fim_prefix|>", "<PRE>", "<|file_sep|>"]
    field = fields_of(tokens, USER_DEFINED).get
    made = Tokenizer.from_str(read_tokenizer("file", field))
    assert made.decode([6, 7, 8]) == "<PRE>"
    assert ends_of_text(field) == [8]
    named = fields_of(tokens, USER_DEFINED, fim_sep_token_id=0, fim_pre_token_id=0).get
    assert ends_of_text(named) == [0]


def test_a_token_that_merges_build_is_no_end():
    """Qwen's </s> is a tag of HTML."""
    merges = ["< /", "</ s", "</s >"]
    field = fields_of(["</", "</s", "</s>", "<|im_end|>"], merges=merges).get
    assert ends_of_text(field) == [9]
    made = Tokenizer.from_str(read_tokenizer("file", field))
    assert made.decode([8]) == "</s>"


def test_an_end_inside_of_a_turn_is_shown():
    """OpenAI's harmony: <|end|> ends a message of several, <|return|> the turn."""
    field = fields_of(["<|end|>", "<|return|>", "<|call|>"], CONTROL).get
    assert ends_of_text(field) == [7, 8]
    made = Tokenizer.from_str(read_tokenizer("file", field))
    assert made.decode([6, 7]) == "<|end|>"
    alone = fields_of(["<|end|>", "<|return|>"], CONTROL).get
    assert ends_of_text(alone) == [6, 7]


def test_a_file_may_ask_for_an_end_behind_each_text():
    field = fields_of(["<s>"], CONTROL, bos_token_id=6, eos_token_id=0)
    for begins, ends, expected in (
        (True, True, [6, 1, 0]),
        (False, True, [1, 0]),
        (None, False, [1]),
    ):
        field["tokenizer.ggml.add_bos_token"] = begins
        field["tokenizer.ggml.add_eos_token"] = ends
        made = Tokenizer.from_str(read_tokenizer("file", field.get))
        assert made.encode("b").ids == expected


def test_sentencepiece_has_ids_where_the_file_has_none():
    tokens = ["<unk>", "<s>", "<end>", "▁", "a"]
    fields = {"model": "llama", "tokens": tokens, "scores": [0.0] * 5}
    fields["token_type"] = [2, 3, 3, 1, 1]
    field = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}.get
    made = Tokenizer.from_str(read_tokenizer("file", field))
    assert made.encode("a").ids[0] == 1
    assert ends_of_text(field) == [2]


def test_tokens_of_phi_3_take_the_spaces_behind_them():
    field = fields_of(["<|user|>", "<|endoftext|>"], CONTROL)
    for name, taken in (("Phi 3 Mini", False), ("Phi-3 Mini", True)):
        field["general.name"] = name
        made = Tokenizer.from_str(read_tokenizer("file", field.get))
        found = made.encode("<|user|> a<|endoftext|>").offsets[0]
        assert found == ((0, 9) if taken else (0, 8))
