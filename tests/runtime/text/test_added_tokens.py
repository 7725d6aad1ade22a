import itertools
import json
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.sampling.processors import NEVER
from jetdraft.runtime.text.call_grammar import CallFormat
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.constraint import Constraint, Matcher
from jetdraft.runtime.text.tools import Tools
from tests import cases
from tests.runtime.sampling.test_chooser import answer
from tests.runtime.text.test_tools import tool
from tests.tiny import END_OF_TEXT, VOCAB_SIZE, tokenizer

SIZE = VOCAB_SIZE + 13
"""The head has more rows than the tokenizer has tokens, and no multiple of 8."""
BAR, LOW = "\uff5c", "\u2581"
HERMES = "<tool_call>", "</tool_call>"
SHAPES = {
    "Qwen2.5": (HERMES, {"special": False}),
    "special": (HERMES, {"special": True}),
    "stripping": (HERMES, {"lstrip": True, "rstrip": True, "special": False}),
    "normalized": (HERMES, {"normalized": True, "special": False}),
    "Phi-4": (("<|tool_call|>", "<|/tool_call|>"), {"special": False}),
    "Granite": (("<|tool_call|>", "<|end_tool|>"), {"special": True}),
    "Mistral": (("[TOOL_CALLS]", "[ARGS]"), {"special": True}),
    "DeepSeek": (
        tuple(f"<{BAR}tool{LOW}calls{LOW}{end}{BAR}>" for end in ("begin", "end")),
        {"special": False},
    ),
    "MiniMax": (("<minimax:tool_call>", "</minimax:tool_call>"), {"special": False}),
}
ESCAPED = str.maketrans({char: "\\" + char for char in "|[]/"})
CALL = '{"name": "f", "arguments": {}}'


def sentencepiece(added):
    """A BPE of bytes and letters with the decoder of Llama 2."""
    names = [END_OF_TEXT, *(f"<0x{byte:02X}>" for byte in range(256)), LOW]
    names += sorted(set("<tool_call>abcdefghijklmnopqrstuvwxyz[]"))
    ids = {name: id for id, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence(
        [decoders.Replace(LOW, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([END_OF_TEXT])
    made.add_tokens([*added])
    return made


def literals(text):
    spelled = text.translate(ESCAPED)
    data = {"const": f"a{text} b"}
    pattern = {"type": "string", "pattern": f"^a{spelled} b$"}
    schema = {"properties": {"x": data}, "required": ["x"], "type": "object"}
    return {
        "regex": (Constraint("regex", f"a{spelled} b|c"), "a", " b"),
        "long regex": (Constraint("regex", f"(a|{spelled}| b)+"), "a", " b"),
        "schema": (Constraint("JSON schema", json.dumps(data)), '"a', ' b"'),
        "pattern": (Constraint("JSON schema", json.dumps(pattern)), '"a', ' b"'),
        "tool": (
            Constraint("grammar", Tools([tool(schema)], "required").grammar()),
            '{"name": "f", "arguments": {"x": "a',
            ' b"}}',
        ),
        "grammar": (
            Constraint("grammar", f'start: "a" {json.dumps(text)} " b" | "c"'),
            "a",
            " b",
        ),
    }


class Text:
    def __init__(self, made, folder):
        made.save(str(folder / "tokenizer.json"))
        self.tokenizer, self.codec = made, TextCodec(folder / "tokenizer.json")
        self.vocabulary = self.codec.vocabulary(SIZE, [0])

    def ids(self, text):
        """The ids of a text, of which no token is more than a byte or a letter."""
        return [id for char in text for id in self.tokenizer.encode(char).ids]

    def allowed(self, constraint, ids):
        rows, logits = Rows.chain([7, *ids]), np.zeros((1 + len(ids), SIZE), np.float32)
        matcher = Matcher(self.vocabulary, constraint, 1)
        assert len(matcher.allowed(rows, [7])) == len(rows), "some may not come"
        masked = matcher.process(answer(logits), rows, [7]).logits
        return [set(np.flatnonzero(row > NEVER).tolist()) for row in masked]


KINDS = {"byte_level": lambda added: tokenizer(added=added), "bpe": sentencepiece}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def text_of(tmp_path_factory):
    @cache
    def make(kind, tags, **how):
        added = [AddedToken(tag, **{"normalized": False, **how}) for tag in tags]
        return Text(KINDS[kind](added), tmp_path_factory.mktemp(kind))

    return make


@pytest.fixture(params=SHAPES)
def text(request, text_of, kind):
    tags, how = SHAPES[request.param]
    if kind == "bpe" and LOW in tags[0]:
        pytest.skip("its decoder shows a space for a part of the name")
    return text_of(kind, tags, **how), tags


def test_a_literal_may_be_written_by_its_token(text):
    text, tags = text
    for tag, name in itertools.product(tags, literals("")):
        constraint, before, after = literals(tag)[name]
        first, last = text.ids(before), text.ids(after)
        token = text.tokenizer.token_to_id(tag)
        found = text.allowed(constraint, [*first, token, *last])
        assert token in found[len(first)]
        assert 0 in found[-1], "the text may end here"
        assert max(map(max, found)) < text.tokenizer.get_vocab_size()


def test_a_token_writes_its_text_alone_where_it_must_and_else_it_may_be_spelled(text):
    text, tags = text
    constraint, before, _ = literals(tags[0])["pattern"]
    token = text.tokenizer.token_to_id(tags[0])
    assert text.allowed(constraint, text.ids(before))[-1] == {token}
    constraint, before, after = literals(tags[1])["long regex"]
    assert 0 in text.allowed(constraint, text.ids(f"{before}{tags[1]}{after}"))[-1]


def test_a_special_token_needs_a_constraint_that_has_its_text(text):
    """Elsewhere its text is hidden, so that it would write nothing."""
    text, tags = text
    tokens = {text.tokenizer.token_to_id(tag) for tag in tags}
    added = text.tokenizer.get_added_tokens_decoder()
    shown = {token for token in tokens if not added[token].special}
    for free in ("(.|\n)+", "[^0]+"):
        [found] = text.allowed(Constraint("regex", free), [])
        assert found & tokens == shown
        assert 0 not in found


@cases("source", "a<\\|endoftext\\|>b", "a(<\\|endoftext\\|>)?b|a<.*>b")
def test_an_end_is_never_a_part_of_a_text(text_of, kind, source):
    text = text_of(kind, ())
    ids = text.ids(f"a{END_OF_TEXT}b")
    *before, last = text.allowed(Constraint("regex", source), ids)
    assert not any(0 in tokens for tokens in before)
    assert 0 in last


def test_a_grammar_may_name_a_token(text_of, kind):
    tags, how = SHAPES["Qwen2.5"]
    text = text_of(kind, tags, **how)
    begin, end = map(text.tokenizer.token_to_id, tags)
    constraint = Constraint("grammar", f'start: <tool_call> "a" <[{end}]>')
    a, *_ = text.ids("a")
    assert text.allowed(constraint, [begin, a, end]) == [{begin}, {a}, {end}, {0}]
    both = Constraint("grammar", 'start: "a" (<tool_call> "a" | "<tool_call>a")')
    found = text.allowed(both, [a, begin, a])
    assert begin in found[1]
    assert found[2:] == [{a}, {0}]


@pytest.mark.parametrize("shape", ["Qwen2.5", "special", "stripping", None])
@pytest.mark.parametrize("choice", ["auto", "required", "f"])
@pytest.mark.parametrize("schema", [None, {"const": 5}])
def test_a_tag_that_is_a_token_is_written_by_it(text_of, kind, shape, choice, schema):
    tags, how = SHAPES[shape or "Qwen2.5"]
    text = text_of(kind, tags, **how) if shape else text_of(kind, ())
    in_lark = [text.codec.to_lark(tag) for tag in tags]
    assert (in_lark == [f'"{tag}"' for tag in tags]) == (shape is None)
    parameters = {"type": "object", "additionalProperties": False}
    how = {"schema": schema, "lark": text.codec.to_lark}
    tools = Tools([tool(parameters)], choice, CallFormat(*HERMES), **how)
    constraint = Constraint("grammar", tools.grammar())
    tokens = [
        [token] if token else text.ids(tag)
        for tag, token in zip(tags, map(text.tokenizer.token_to_id, tags), strict=True)
    ]
    written = [*tokens[0], *text.ids(f"\n{CALL}\n"), *tokens[1]]
    again = [] if choice == "f" else [*text.ids("\n"), *written]
    found = text.allowed(constraint, [*written, *again])
    assert tokens[0][0] in found[0]
    assert 0 in found[len(written)]
    assert 0 in found[-1]
    if shape and (choice != "auto" or schema):
        # A model that has the token never read the tag in another spelling.
        assert found[0] - set(text.ids("5")) == {tokens[0][0]}
    if choice == "auto" and schema is None:
        spelled = [*text.ids(f"Hi {tags[0]}{CALL}"), *tokens[1]]
        assert 0 in text.allowed(constraint, spelled)[-1]


def test_any_number_of_added_tokens_may_write_their_texts(text_of, kind):
    tags = tuple(f"<t{n}>" for n in range(11))
    text = text_of(kind, tags, special=False)
    ids = list(map(text.tokenizer.token_to_id, tags))
    constraint = Constraint("regex", "(<t[0-9]+>)+")
    assert all(set(ids) <= tokens for tokens in text.allowed(constraint, ids))
