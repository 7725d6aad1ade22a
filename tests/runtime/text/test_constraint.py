import json
import re
from unittest.mock import Mock

import jsonschema
import numpy as np
import pydantic
import pytest

import jetdraft
from jetdraft.errors import ConstraintError, OptionError
from jetdraft.methods import Method, Proposer, Traits, registered
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.proposers.proposer import ForcedProposer
from jetdraft.runtime.sampling.processors import NEVER
from jetdraft.runtime.text.constraint import Constraint, Matcher
from jetdraft.runtime.text.worker_process import Pipe, Vocabulary
from tests import cases, same_text
from tests.programs import python
from tests.runtime.sampling.test_chooser import answer as answer_of
from tests.runtime.text.test_tools import record
from tests.tiny import END_OF_TEXT, save_tokenizer

ROBOT = record(
    action={"enum": ["move", "turn", "stop"]},
    speed={"type": "integer", "minimum": 0, "maximum": 99},
    names={"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    ready={"type": "boolean"},
)
WAYS = [
    {"json_schema": ROBOT},
    {"regex": "(yes|no|perhaps), [a-z]{2,12}\\."},
    {"grammar": 'start: item (", " item){1,5}\nitem: /[a-z]{1,4}/ "=" /[0-9]{2}/\n'},
]
METHODS = [
    {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 7},
    {"method": "draft,lookup"},
    {"method": "auto"},
]
"""`test_conformance.py` has each method alone."""

BROKEN = {"type": "string", "pattern": "(("}
CIRCULAR = {"type": "object", "properties": {}}
CIRCULAR["properties"]["a"] = CIRCULAR


def holds(way, text):
    if "json_schema" in way:
        jsonschema.validate(json.loads(text), way["json_schema"])
        return True
    if "regex" in way:
        return re.fullmatch(way["regex"], text)
    return re.fullmatch(r"[a-z]{1,4}=\d\d(, [a-z]{1,4}=\d\d){1,5}", text)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
def test_the_same_text_with_every_method(model, way, temperature):
    options = {"temperature": temperature, "max_new_tokens": 120, **way, "seed": 1}
    options |= {"prompt": "robot:", "ignore_eos": False}
    for found in same_text(model, METHODS, [options]):
        assert found.finish_reason == "stop"
        assert holds(way, found.text), found.text


def schemas(count):
    random = np.random.default_rng(11)

    def schema(depth):
        kind = random.integers(0, 7 if depth else 5)
        name = "".join(random.choice(list("abcxyz"), random.integers(1, 5)))
        if kind == 0:
            return {"type": "integer", "minimum": 0, "maximum": 9999}
        if kind == 1:
            return {"type": "string", "maxLength": int(random.integers(0, 9))}
        if kind == 2:
            return {"enum": [name, 7, None, True]}
        if kind == 3:
            return {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}
        if kind == 4:
            return {"const": {"fixed": [name]}}
        if kind == 5:
            return {"type": "array", "items": schema(depth - 1), "maxItems": 2}
        names = [f"{name}{i}" for i in range(random.integers(1, 4))]
        properties = {name: schema(depth - 1) for name in names}
        required = names[: random.integers(0, len(names) + 1)]
        return {**record(**properties), "required": required}

    return [schema(2) for _ in range(count)]


def test_schemas_of_chance_are_kept(model):
    forced = 0
    for seed, schema in enumerate(schemas(60)):
        how = {"temperature": 1.0, "seed": seed, "max_new_tokens": 200}
        found = model.generate(f"{seed}:", json_schema=schema, **how)
        assert found.finish_reason == "stop", schema
        jsonschema.validate(json.loads(found.text), schema)
        forced += "forced" in found.stats.by_method
    assert forced > 6


def test_what_must_come_is_drafted_for_free(own, steady_passes):
    how = {"json_schema": {"const": "abcdefghijklmnopqrstuvwxyz"}}
    with jetdraft.load(own, threads=1) as model:
        plain = model.generate("x", method="none", **how)
        forced = model.generate("x", method="auto", **how)
    assert forced.text == plain.text == '"abcdefghijklmnopqrstuvwxyz"'
    assert forced.stats.accepted_tokens == forced.stats.drafted_tokens > 20
    assert forced.stats.target_passes < plain.stats.target_passes / 3


def test_beside_penalties_biases_stops_and_logprobs(model):
    options = {"json_schema": ROBOT, "repetition_penalty": 1.3, "temperature": 0.8}
    options |= {"seed": 4, "max_new_tokens": 150, "logprobs": 2, "top_p": 0.9}
    plain = model.generate("a", method="none", **options)
    assert holds(WAYS[0], plain.text)
    found = model.generate("a", method="draft", **options)
    assert found.token_ids == plain.token_ids
    assert all(each.logprob <= 0 for each in found.logprobs)
    cut = model.generate("a", **options, stop=', "speed"')
    assert cut.text == plain.text.partition(', "speed"')[0]


def test_another_verifier_keeps_the_constraint(model):
    drawn = {"siblings": "with-replacement", "verifier": "rejection"}
    drawn |= {"tree": "k-ary", "branching": [1, 1, 1]}
    how = {"method": "draft", "drafting": drawn, "exact": False, **WAYS[0]}
    found = model.generate("a", temperature=0.9, seed=2, max_new_tokens=150, **how)
    assert holds(WAYS[0], found.text)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Vocabulary(folder / "tokenizer.json", 300, [0])


def ids(text):
    """Of the tiny tokenizer: end-of-text, then the bytes as they are sorted."""
    return [0 if part == END_OF_TEXT else ord(part) - 32 for part in text]


def answer(rows):
    logits = np.random.default_rng(0).normal(size=(rows, 300))
    return answer_of(logits.astype(np.float32), 5)


def test_each_row_is_masked_after_its_own_path(vocabulary):
    matcher = Matcher(vocabulary, Constraint("regex", "ab|cd?"), start=1)
    a, b, c, d = ids("abcd")
    rows = Rows([9, a, c, b, b], [-1, 0, 0, 1, 2])
    given = answer(5)
    masked = matcher.process(given, rows, [9]).logits
    allowed = [set(np.flatnonzero(row > NEVER)) for row in masked]
    assert allowed[:4] == [{a, c}, {b}, {d, 0}, {0}]
    np.testing.assert_array_equal(masked[4], given.logits[4], "b may not follow c")
    assert matcher.allowed(rows, [9]).tokens == [9, a, c, b]
    assert matcher.allowed(Rows.chain([9, a, 0]), [9]).tokens == [9, a]
    assert matcher.allowed(Rows.chain([9, c, 0]), [9]).tokens == [9, c, 0]
    again = matcher.process(answer(2), Rows.chain([c, d]), [9, c]).logits
    assert set(np.flatnonzero(again[0] > NEVER)) == {d, 0}
    with pytest.raises(OptionError, match="cannot be followed"):
        matcher.process(answer(1), Rows.chain([b]), [9, c, b])


def test_what_is_withdrawn_is_forgotten(vocabulary):
    """A context may end with tokens that are not proven yet."""
    matcher = Matcher(vocabulary, Constraint("regex", "abcdef|xyz"), start=2)
    propose = ForcedProposer(matcher).propose
    a, b, x = ids("abx")
    assert propose([7, 7], 5).tokens == [7]
    assert propose([7, 7, a, b], 2).tokens == [b, *ids("cd")]
    assert propose([7, 7, x], 9).tokens == [x, *ids("yz")]
    assert propose([7, 7, b], 9).tokens == [b], "that cannot come"
    assert propose([7, 7, *ids("abcdef")], 9).tokens == ids("f")


@cases(
    "wrong, words",
    ({"json_schema": "{"}, "not JSON .*line 1"),
    ({"json_schema": "[1]"}, "is not an object"),
    ({"json_schema": {"type": "strin"}}, "its root: Invalid type"),
    (
        {"json_schema": {"properties": {"a": {"items": {"type": "strin"}}}}},
        "at /properties/a/items: Invalid type: strin",
    ),
    (
        {"json_schema": {"anyOf": [{"type": "null"}, BROKEN]}},
        "at /anyOf/1: unclosed group",
    ),
    ({"json_schema": {"uniqueItems": True}}, "uniqueItems.*; leave these keys out"),
    ({"regex": "ab(c"}, "at character 3: unclosed group"),
    ({"regex": "x{2,1}"}, "character 2: invalid repetition"),
    ({"regex": "abcdef\\1"}, "character 7: backreferences"),
    ({"grammar": "start: foo"}, r'at 1\(8\): unknown name: "foo"'),
    ({"grammar": "start: /a/ )"}, r"at 1\(12\): expecting"),
    ({"json_schema": {"x-guidance": 5}}, "is not an object"),
    ({"json_schema": {"properties": 5}}, "refused at its root"),
    ({"json_schema": '{"a":' * 9999}, "not JSON"),
    ({"regex": "\udc80"}, "not a text"),
    ({"regex": "a", "grammar": "b"}, "regex and grammar exclude"),
    ({"regex": 3}, "not a text; give a text$"),
    ({"json_schema": dict}, "give .* class of pydantic"),
    ({"ignore_eos": True, "regex": "a"}, "ends by itself"),
    ({"json_schema": CIRCULAR}, "not JSON .*[Cc]ircular"),
    ({"json_schema": {"const": {1, 2}}}, "not JSON .*set is not JSON serial"),
    ({"json_schema": {"const": float("nan")}}, "not JSON"),
    ({"json_schema": {"maximum": 2**64}}, "does not fit in 64 bits"),
    ({"json_schema": {"maximum": 10**5000}}, "not JSON"),
    ({"json_schema": {"properties": {"\ud800": {"type": "x"}}}}, "lone surrogate"),
    ({"json_schema": {"\ud800": "\ud800"}}, "lone surrogate"),
    ({"json_schema": '{"a": "\ud800"}'}, "not a text"),
    ({"json_schema": "[" * 100_000}, "nested deeper"),
    ({"json_schema": {"properties": {"\n" * 3: {"type": "strin"}}}}, "Invalid type"),
)
def test_wrong_constraints_are_refused_at_once(model, wrong, words):
    with pytest.raises(OptionError, match=words) as found:
        model.stream("a", **wrong)
    message = str(found.value)
    assert message.encode()
    assert "\n" not in message
    assert len(json.dumps(message)) < 1000
    assert found.value.field == next(iter(wrong))


NEAR = [2**53, 10**17, 10**18, 2**60, 2**63, 2**64]
NUMBERS = {near + more for near in NEAR for more in (-2, -1, 0, 1, 2, 3)}


@pytest.mark.parametrize("sign", [1, -1])
@cases(
    "keyword, right, wrong",
    ("const", [0], [-1, 1]),
    ("minimum", [0, 1], [-1]),
    ("maximum", [-1, 0], [1]),
    ("exclusiveMinimum", [1], [0, -1]),
    ("exclusiveMaximum", [-1], [0, 1]),
)
def test_a_number_is_exact_or_refused(vocabulary, keyword, sign, right, wrong):
    refused = []
    for number in (sign * number for number in sorted(NUMBERS)):
        try:
            constraint = Constraint.of(json_schema={"type": "integer", keyword: number})
            matcher = Matcher(vocabulary, constraint, start=1)
            matcher.prepare()
        except OptionError as error:
            refused.append(str(error))
            continue
        for more in (*right, *wrong):
            rows = Rows.chain([9, *ids(str(number + more)), 0])
            may_come = len(matcher.allowed(rows, [9])) == len(rows)
            assert may_come is (more in right)
    words = "cannot be kept exactly|does not fit in 64 bits|for integer range"
    assert all(re.search(words, line) for line in refused)
    assert len(refused) < len(NUMBERS)


def test_limits_of_the_library_are_said_in_our_words():
    words = "lexer precomputation failed; either increase limits.initial_lexer_fuel"
    worker = Mock(**{"receive_reply.return_value": ({"error": words}, b"")})
    vocabulary = Mock(**{"start_worker.return_value": worker})
    matcher = Matcher(vocabulary, Constraint("regex", "a"), 0)
    with pytest.raises(ConstraintError, match="takes too much time or memory; make it"):
        matcher.prepare()


@pytest.mark.parametrize("method", ["none", "lookup", "draft"])
def test_the_library_s_limits_end_in_an_error_and_no_text(model, monkeypatch, method):
    monkeypatch.setattr("jetdraft.runtime.text.constraint.MAX_STATES", 60)
    with pytest.raises(OptionError, match=r"cannot be followed|refused"):
        model.generate("a", regex="[ -~]*a[ -~]{40}!", method=method)
    assert model.generate("a", max_new_tokens=3).token_ids


# Behind "y" each character makes new states of the expression, behind "x" few do.
TRAP = "x{1,40}|y[ -~]*a[ -~]{40}!"


class Trapped(Proposer):
    """Drafts "yaaaa", which may come and which the text never takes."""

    traits = Traits("trapped", max_draft_tokens=5)

    def __init__(self, ids):
        self.ids = ids

    def propose(self, context, budget, parents=None):
        return Rows.chain([context[-1], *self.ids[:budget]])


@pytest.mark.parametrize("states", [60, 200])
def test_a_limit_below_a_rejected_draft_ends_no_text(model, monkeypatch, states):
    monkeypatch.setattr("jetdraft.runtime.text.constraint.MAX_STATES", states)
    [x] = model.parts.text.encode("x")
    trap = model.parts.text.encode("y" + "a" * 9)
    options = {"regex": TRAP, "logit_bias": {x: 50.0}, "max_new_tokens": 30}
    plain = model.generate("a", method="none", **options)
    assert plain.text.startswith("xx")
    method = Method("trapped", "a trap", lambda parts, options: Trapped(trap))
    with registered(method):
        drafted = model.generate("a", method="trapped", num_draft_tokens=5, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted_tokens


class Costly(Pipe):
    """A worker that ends as soon as it looks below a draft, or after `looks`."""

    looks = 0

    def send(self, seconds, must_end, name, *request):
        below = name in ("forced", "allowed") or len(request[1]) > 1
        if name != "compile" and below:
            Costly.looks -= 1
            if Costly.looks < 0:
                raise self._close_with_error()
        super().send(seconds, must_end, name, *request)


@pytest.mark.parametrize("looks", [0, 1, 3, 20])
def test_time_and_memory_below_a_draft_do_not_end_the_text(model, monkeypatch, looks):
    """Plain decoding would never have looked there."""
    options = {"json_schema": ROBOT, "max_new_tokens": 120}
    plain = model.generate("a", method="none", **options)
    monkeypatch.setattr("jetdraft.runtime.text.worker_process.Pipe", Costly)
    for method in ("lookup", "draft", "auto"):
        Costly.looks = looks
        drafted = model.generate("a", method=method, num_draft_tokens=4, **options)
        assert drafted.token_ids == plain.token_ids
        assert drafted.finish_reason == "stop"


def test_no_bias_is_below_what_may_not_come(model):
    biases = dict.fromkeys(range(1, model.bundle.target.contract.vocab_size), -1e31)
    assert model.generate("a", regex="yes", logit_bias=biases).text == "yes"


def test_twins_share_what_was_read_of_the_vocabulary(model):
    assert model.twin().vocabulary is model.vocabulary


def test_nothing_is_constrained_without_tokenizer_or_end(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="no tokenizer"):
        Vocabulary(None, 300, [0])
    file = save_tokenizer(tmp_path) / "tokenizer.json"
    with pytest.raises(OptionError, match="no end-of-text"):
        Vocabulary(file, 300, [])
    small = Vocabulary(file, 9, [0])
    for _ in range(2):  # nobody finds the process that did not start
        with pytest.raises(OptionError, match="cannot be constrained"):
            small.start_worker()
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OptionError, match="on Linux only; leave"):
        Vocabulary(file, 300, [0])


def test_without_the_library_it_says_what_to_install(bundle):
    code = (
        "import sys, jetdraft\n"
        "sys.modules['llguidance'] = None\n"
        "model = jetdraft.load(sys.argv[1], threads=1)\n"
        "try: model.generate('a', regex='b')\n"
        "except jetdraft.JetdraftError as error: print(error)\n"
    )
    assert "pip install 'jetdraft[structured]'" in python(code, bundle)


def test_a_class_of_pydantic_is_its_schema():
    Move = pydantic.create_model("Move", speed=(int, ...), name=(str, "a"))
    given = Constraint.of(json_schema=Move)
    assert given == Constraint.of(json_schema=Move.model_json_schema())
