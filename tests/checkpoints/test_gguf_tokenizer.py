"""The tokenizer in a GGUF file: rules that split a text, special tokens, ends."""

import pytest
import torch
from tokenizers import Tokenizer

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf_tokenizer import end_token_ids, make_tokenizer_json
from tests.ggufs import adding, write_gguf
from tests.tiny import END_OF_TEXT, llama_config, tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CONFIG = llama_config(num_hidden_layers=1)
TEXT = "def self.in(x):\n\treturn 1234 für 日本  \n"


def named(**fields):
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def fields_of(tokens, kind=NORMAL, merges=(), **more):
    """A vocabulary of letters, and tokens of one type behind them."""
    types = [NORMAL] * 6 + [kind] * len(tokens)
    fields = {"tokens": [*"ab</s>", *tokens], "token_type": types} | more
    return named(model="gpt2", merges=list(merges), **{"pre": "gpt-2"} | fields)


def built(fields):
    return Tokenizer.from_str(make_tokenizer_json("file", fields.get))


@pytest.mark.parametrize(
    "rule", ["gpt-2", "default", "qwen2", "smollm", "llama-bpe", "tekken", "gpt-4o"]
)
def test_texts_come_back(tmp_path, rule):
    written = write_gguf(tmp_path / "model.gguf", CONFIG, rule=rule)
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
    file = tmp_path / "model.gguf"
    write_gguf(file, CONFIG, rule=rule, begin=begin)
    made = Tokenizer.from_str(Checkpoint.load(str(file), torch.float32).tokenizer)
    assert (made.encode("x").ids[0] == 0) == first


@pytest.mark.parametrize(
    ("rule", "merges", "pieces"),
    [
        # The merge of two digits is used by the rules that leave numbers whole.
        ("gpt-2", ["1 2"], ["12", "3"]),
        ("smollm", ["1 2"], ["1", "2", "3"]),
        ("llama-bpe", ["1 2"], ["12", "3"]),
        ("qwen2", ["1 2"], ["1", "2", "3"]),
        # Llama 3 knows words that are tokens; other rules build them by merges only.
        ("llama-bpe", [], ["ab"]),
        ("gpt-2", [], ["a", "b"]),
    ],
)
def test_numbers_and_words_are_split_by_the_rule(rule, merges, pieces):
    text = "".join(pieces)
    fields = named(model="gpt2", pre=rule, tokens=[*text, text[:2]], merges=merges)
    assert built(fields).encode(text).tokens == pieces


def test_sentencepiece_merges_the_best_pair_first():
    pieces = {
        **{"<unk>": (0.0, UNKNOWN), "<s>": (0.0, CONTROL), "</s>": (0.0, CONTROL)},
        **{"<0xC3>": (0.0, BYTE), "<0xBC>": (0.0, BYTE), "▁": (-9.0, NORMAL)},
        **dict.fromkeys("abc", (-5.0, NORMAL)),
        **{"bc": (-1.0, NORMAL), "ab": (-2.0, NORMAL), "▁a": (-3.0, NORMAL)},
    }
    scores, types = zip(*pieces.values(), strict=True)
    fields = named(model="llama", tokens=list(pieces), bos_token_id=1)
    fields |= named(scores=scores, token_type=types)
    made = built(fields)
    assert made.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert made.encode("ü</s>").tokens == ["<s>", "▁", "<0xC3>", "<0xBC>", "</s>"]
    assert made.decode(made.encode("abc ü").ids) == "abc ü"
    fields |= named(add_space_prefix=False)
    assert built(fields).encode("abc").tokens == ["<s>", "a", "bc"]


def test_templates_and_the_ends_of_a_turn(tmp_path):
    template, file = "{% for m in messages %}{% endfor %}", tmp_path / "model.gguf"
    tools = {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    both = "{% if tools is not none %}{{ tools }}{% else %}" + template + "{% endif %}"
    for fields, expected in (({}, template), (tools, both)):
        change = adding(fields | {"tokenizer.ggml.eot_token_id": 7})
        write_gguf(file, CONFIG, template=template, change=change)
        found = Checkpoint.load(str(file), torch.float32)
        assert found.chat_template == expected
        assert found.eos_token_ids == (0, 7)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "</s>", "<|fim_pad|>"])
def test_an_end_by_its_name_is_one_whatever_its_type(end, kind):
    """As in llama.cpp, which calls such types a bug of the model."""
    field = fields_of(["<x>", end], kind, eos_token_id=0)
    assert end_token_ids(field.get) == [0, 7]
    made = built(field)
    assert made.encode(f"a{end}b").ids == [0, 7, 1]
    assert made.decode([0, 7, 1]) == "ab", "ends are not shown"
    assert (made.decode([6], skip_special_tokens=True) == "<x>") == (kind != CONTROL)


def test_marks_of_infilling_are_control_tokens():
    """Without an id in the file the first by its name, as in llama.cpp."""
    tokens = ["<|fim_prefix|>", "<PRE>", "<|file_sep|>"]
    field = fields_of(tokens, USER_DEFINED)
    assert built(field).decode([6, 7, 8]) == "<PRE>"
    assert end_token_ids(field.get) == [8]
    chosen = fields_of(tokens, USER_DEFINED, fim_sep_token_id=0, fim_pre_token_id=0)
    assert end_token_ids(chosen.get) == [0]


def test_a_token_that_merges_build_is_no_end():
    """Qwen's </s> is a tag of HTML."""
    merges = ["< /", "</ s", "</s >"]
    field = fields_of(["</", "</s", "</s>", "<|im_end|>"], merges=merges)
    assert end_token_ids(field.get) == [9]
    assert built(field).decode([8]) == "</s>"


def test_an_end_inside_of_a_turn_is_shown():
    """OpenAI's harmony: <|end|> ends a message of several, <|return|> the turn."""
    field = fields_of(["<|end|>", "<|return|>", "<|call|>"], CONTROL)
    assert end_token_ids(field.get) == [7, 8]
    assert built(field).decode([6, 7]) == "<|end|>"
    assert end_token_ids(fields_of(["<|end|>", "<|return|>"], CONTROL).get) == [6, 7]


def test_a_file_may_ask_for_an_end_behind_each_text():
    field = fields_of(["<s>"], CONTROL, bos_token_id=6, eos_token_id=0)
    for begins, ends, expected in (
        (True, True, [6, 1, 0]),
        (False, True, [1, 0]),
        (None, False, [1]),
    ):
        field["tokenizer.ggml.add_bos_token"] = begins
        field["tokenizer.ggml.add_eos_token"] = ends
        assert built(field).encode("b").ids == expected


def test_sentencepiece_has_ids_where_the_file_has_none():
    tokens = ["<unk>", "<s>", "<end>", "▁", "a"]
    field = named(model="llama", tokens=tokens, scores=[0.0] * 5)
    field |= named(token_type=[UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL])
    assert built(field).encode("a").ids[0] == 1
    assert end_token_ids(field.get) == [2]


def test_tokens_of_phi_3_take_the_spaces_behind_them():
    field = fields_of(["<|user|>", "<|endoftext|>"], CONTROL)
    for name, taken in (("Phi 3 Mini", False), ("Phi-3 Mini", True)):
        field["general.name"] = name
        found = built(field).encode("<|user|> a<|endoftext|>").offsets[0]
        assert found == ((0, 9) if taken else (0, 8))
