"""Every registered method drafts and changes no text; see `method_bundles.MAKE`."""

import json
from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft import Conversation, OptionError
from jetdraft.bundle import TARGET, Bundle
from jetdraft.methods import OWN, methods
from tests import cases
from tests.programs import refused_option
from tests.runtime.method_bundles import MAKE
from tests.runtime.text.test_tools import record

# Its second half repeats the first, so that what is copied is found.
PROMPT = np.random.default_rng(8).integers(4, 288, 20).tolist() * 2
WAYS = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 3, "top_k": 40}}
TOKENS = 16
every_method = pytest.mark.parametrize("method", OWN)
# Methods of encoder-decoders, whose rows depend on the source.
NO_PREFIX = {"block"}


@pytest.fixture(scope="module")
def model_of(method_bundles, tmp_path_factory):
    models, folder = {}, tmp_path_factory.mktemp("stores")

    def load(method):
        bundle = method_bundles[method]
        if bundle not in models:
            store = folder / f"{bundle.name}.sqlite"
            models[bundle] = jetdraft.load(bundle, threads=1, store=store)
        return models[bundle]

    yield load
    for model in models.values():
        model.close()


def text(model, method, prompt=PROMPT, tokens=TOKENS, **options):
    how = {"method": method, "max_new_tokens": tokens, "ignore_eos": True}
    return model.generate(token_ids=prompt, **how, **options)


def drafts_of(method, step=2, lengths=(4,)):
    yield {}
    # The third of `ppd` drafts whatever passes cost on this machine.
    yield from ({"drafting": sample} for sample in methods()[method].samples[::step])
    if has_lengths(method):
        yield from ({"num_draft_tokens": length} for length in lengths)


def has_lengths(method):
    return methods()[method].options().draft_size is None


def fixed_drafts(method):
    return {"num_draft_tokens": 3} if has_lengths(method) else {}


def check_same(method, one, other):
    """Drafts of a model depend on the sequence alone, if their length is fixed."""
    assert one.token_ids == other.token_ids
    if has_lengths(method) and methods()[method].trees:
        assert one.stats.accepted_counts == other.stats.accepted_counts


def test_every_method_is_in_the_table():
    assert set(MAKE) == set(OWN) == set(methods())


@every_method
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_text_is_that_of_plain_decoding(model_of, method, way):
    model = model_of(method)
    plain = text(model, "none", tokens=40, **way)
    drafted = 0
    for draft in drafts_of(method, step=1, lengths=(1, 3, 6)):
        result = text(model, method, tokens=40, **draft, **way)
        assert result.token_ids == plain.token_ids, draft
        drafted += result.stats.drafted_tokens
    assert drafted or method == "recall"
    other = "trigram" if method == "lookup" else "lookup"
    for beside in ("auto", f"{method},{other}") if has_lengths(method) else ("auto",):
        assert text(model, beside, tokens=40, **way).token_ids == plain.token_ids


@every_method
def test_a_prompt_that_goes_another_way(model_of, method):
    model = model_of(method)
    for at in (0, 21, 39):
        prompt = [*PROMPT[:at], (PROMPT[at] + 1) % 288, *PROMPT[at + 1 :]]
        plain = text(model, "none", prompt).token_ids
        text(model, method)
        result = text(model, method, prompt)
        assert result.token_ids == plain
    longer = [*prompt, *result.token_ids[:7], 5]
    again = text(model, method, longer, **fixed_drafts(method))
    assert again.stats.reused_tokens > 30 or method in NO_PREFIX
    model.forget()
    fresh = text(model, method, longer, **fixed_drafts(method))
    assert fresh.stats.reused_tokens == 0
    check_same(method, again, fresh)
    assert fresh.token_ids == text(model, "none", longer).token_ids


@every_method
def test_a_restored_prefix(model_of, method, tmp_path):
    model, file = model_of(method), tmp_path / "prefix.npz"
    if method in NO_PREFIX:
        with pytest.raises(OptionError, match="no prefix can be kept"):
            model.save_prefix(file, PROMPT[:30])
        return
    expected = text(model, method, **fixed_drafts(method))
    model.save_prefix(file, PROMPT[:30])
    with jetdraft.load(model.bundle.path, threads=1, store=tmp_path / "store") as other:
        other.load_prefix(file)
        result = text(other, method, **fixed_drafts(method))
        assert result.stats.reused_tokens >= 30 - 12  # Falcon reads two blocks again
        check_same(method, result, expected)


@every_method
def test_the_end_of_the_buffers(model_of, method):
    model = model_of(method)
    full = text(model, "none", tokens=10_000)
    assert full.stats.finish_reason == "length"
    for draft in drafts_of(method, step=1, lengths=(2, 7)):
        assert text(model, method, tokens=10_000, **draft).token_ids == full.token_ids


@every_method
def test_a_cancelled_generation(model_of, method):
    model = model_of(method)
    plain = text(model, "none").token_ids
    how = {"method": method, "max_new_tokens": TOKENS, "ignore_eos": True}
    for stop in (1, 3):
        stream = model.stream(token_ids=PROMPT, **how)
        for number, _ in enumerate(stream, 1):
            if number == stop:
                model.cancel()
        whole = stream.stats.new_tokens == TOKENS  # a draft may hold all of the text
        assert stream.stats.finish_reason == ("length" if whole else "cancelled")
        assert text(model, method).token_ids == plain


PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3}
PENALTIES |= {"repetition_penalty": 1.4, "logit_bias": {5: 3.0, 9: -100.0}}
NAME = {"type": "string", "minLength": 5, "maxLength": 9}
PARTS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}
RULES = {
    "penalty": PENALTIES,
    "regex": {"regex": "[a-z]{9} and then [a-z]{9}", "temperature": 0.8, "seed": 3},
    "json": {"json_schema": record(name=NAME, parts=PARTS)},
}


@every_method
@pytest.mark.parametrize("rule", RULES)
def test_penalties_and_constraints(model_of, method, rule):
    model = model_of(method)
    how = {"token_ids": PROMPT[:12], "max_new_tokens": 48, **RULES[rule]}
    plain = model.generate(method="none", **how)
    if rule == "json" and plain.stats.finish_reason == "stop":
        assert set(json.loads(plain.text)) == {"name", "parts"}
    for draft in drafts_of(method):
        result = model.generate(method=method, **how, **draft)
        assert result.token_ids == plain.token_ids, draft
        assert result.text == plain.text
    both = method if method == "lookup" else f"{method},lookup"
    if has_lengths(method):
        assert model.generate(method=both, **how).token_ids == plain.token_ids


@every_method
def test_a_conversation(model_of, method):
    model = model_of(method)
    if method in NO_PREFIX or model.bundle.chat_template is None:
        pytest.skip("the bundle has no chat template, or reads a source")
    texts = []
    for name in ("none", method):
        model.forget()
        chat = Conversation(model, method=name, max_new_tokens=12, ignore_eos=True)
        texts.append(
            ["".join(p.text for p in chat.say(w)) for w in ("Hello", "So?", "A")]
        )
    assert texts[0] == texts[1]


@every_method
@cases(
    "drafting, words",
    ({"nonsense": 1}, "unknown drafting option 'nonsense'"),
    ({"verifier": 5}, "drafting option verifier cannot be 5"),
    ({"verifier": "no"}, "unknown verifier 'no'"),
    ({"tolerance": 0.5}, "verifier 'walk' has no tolerance"),
)
def test_a_bad_option_is_refused(model_of, method, drafting, words):
    with refused_option(words):
        text(model_of(method), method, drafting=drafting)


DRAWN = {"verifier": "recursive", "siblings": "with-replacement", "tree": "k-ary"}
BLOCKS, DRAFT = "dflash diffusion", "draft auto"
REFUSED = [
    (DRAFT, {"stopping": "never"}, "unknown stopping"),
    (DRAFT, {"stop_threshold": 0.5}, "give stopping too"),
    (DRAFT, {"stopping": "confidence", "stop_threshold": 1.5}, "out of range"),
    (DRAFT, {"stopping": "confidence", "stop_threshold": -0.1}, "out of range"),
    (DRAFT, {"stopping": "product", "tree": "best"}, "ends chains, not trees"),
    (DRAFT, {"stopping": "product", "stop_threshold": "x"}, "give a number"),
    (BLOCKS, {"steps": 3}, "steps 3 is out of range; give 1 or 2"),
    (BLOCKS, {"steps": 0}, "steps 0 is out of range"),
    (BLOCKS, {"steps": 2, "tree": "best"}, "leave the tree out"),
    (f"{BLOCKS} kangaroo", {"confidence": 1.5}, "1.5 is out of range; give 0 .off. to"),
    ("kangaroo", {"confidence": -0.1}, "confidence -0.1 is out of range"),
    *(("stream", {"prune_threshold": p}, "out of range") for p in (-0.1, 1.5, "x")),
    ("stream", {"prune_threshold": [0.1]}, "give a number or a text"),
    ("stream", {"prune_threshold": 0.1, "branching": [2], **DRAWN}, "that was pruned"),
    ("ppd", {"rows": 16}, "rows 16 is out of range; give 1 to 15"),
    ("ppd", {"slots": 1}, "slots 1 is out of range; give 2 to 1024"),
    ("ppd", {"rows": 3, "tree": "chain"}, "rows is for sparse trees only"),
]


@pytest.mark.parametrize(("names", "drafting", "words"), REFUSED, ids=str)
def test_an_option_of_its_own_is_refused(model_of, names, drafting, words):
    how = {"drafting": drafting, "exact": "verifier" not in drafting}
    for method in names.split():
        model = model_of("draft" if method == "auto" else method)
        with pytest.raises(OptionError, match=words) as refusal:
            text(model, method, **how)
        assert refusal.value.field in ("drafting", *drafting)


@every_method
def test_it_says_what_a_bundle_lacks(model_of, method_bundles, method):
    record = methods()[method]
    assert record.lacks(Bundle.open(method_bundles[method])) == ""
    for other in ("draft", "eagle", "kangaroo", "glide", "chimera", "falcon"):
        reason = record.lacks(Bundle.open(method_bundles[other]))
        if reason:
            with pytest.raises(OptionError) as refusal:
                text(model_of(other), method)
            assert reason in str(refusal.value)
            assert refusal.value.field == "method"


@every_method
def test_a_drafter_that_is_off(method_bundles, method, tmp_path):
    bundle, record = Bundle.open(method_bundles[method]), methods()[method]
    alone = replace(bundle, graphs={TARGET: bundle.target})
    how = {"threads": 1, "drafter_provider": "off", "store": tmp_path / "store"}
    with jetdraft.load(bundle.path, **how) as model:
        if not record.lacks(alone):
            assert text(model, method).token_ids == text(model, "none").token_ids
            return
        assert method not in model.methods
        words = r"no method .*: .* needs .* do not pass --drafter-prov"
        with refused_option(words, "method"):
            text(model, f"{method},lookup" if has_lengths(method) else method)
