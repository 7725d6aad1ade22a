import gc
import json
import shutil
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.bundle import CHAT_TEMPLATE, CONTRIB, STANDARD, Bundle
from jetdraft.devices.providers import PROVIDERS
from jetdraft.errors import (
    JetdraftError,
    LengthError,
    OptionError,
    OutputError,
    ProviderError,
)
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.text.template import user_message
from tests import cases
from tests.programs import refused_option
from tests.tiny import VOCAB_SIZE, tokenizer

TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<{{ message.role }}>{{ message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 1}


def with_template(bundle, folder, source, added=()):
    """The bundle with a template and added tokens, the second of them ends a text."""
    others = shutil.ignore_patterns("bundle.json", "profiles")
    shutil.copytree(bundle, folder, ignore=others)
    (folder / CHAT_TEMPLATE).write_text(source)
    opened = replace(Bundle.open(bundle), path=folder, files={})
    if added:
        tokenizer(added=added).save(str(folder / "tokenizer.json"))
        ends = (VOCAB_SIZE - len(added) + 1, 0)
        opened = replace(opened, eos_token_ids=ends, special_tokens={})
    opened.save()
    return folder


@pytest.fixture(scope="module")
def chatty(bundle, tmp_path_factory):
    return with_template(bundle, tmp_path_factory.mktemp("chat") / "bundle", TEMPLATE)


@pytest.fixture(scope="module")
def talker(chatty):
    return jetdraft.load(chatty, threads=1)


def test_a_chat_is_a_generation_from_the_rendered_prompt(talker):
    messages = [{"role": "system", "content": "s"}, user_message("hello")]
    end = talker.parts.text.token(0)
    ids = talker.parts.text.encode(f"<system>s{end}<user>hello{end}<assistant>")
    assert talker.chat_prompt(messages) == ids
    found = talker.chat(messages, **OPTIONS)
    assert found.token_ids == talker.generate(token_ids=ids, **OPTIONS).token_ids


def test_turns_add_up_and_keep_their_rows(talker):
    talk, read = Conversation(talker, system="be brief", **OPTIONS), 0
    for turn in range(3):
        before = list(talk.messages)
        text = "".join(piece.text for piece in talk.say(f"turn {turn}"))
        assert talk.last.text == text
        assert talk.messages[:-2] == before
        assert [m["role"] for m in talk.messages[-2:]] == ["user", "assistant"]
        # The reply of a random model is read again: its text has other tokens.
        assert talk.last.stats.reused_tokens >= read
        read = talk.last.prompt_tokens
    again = jetdraft.load(talker.bundle.path, threads=1)
    assert again.chat(talk.messages[:-1], **OPTIONS).text == talk.last.text
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_a_reply_that_is_cut_off_stays_as_far_as_it_came(talker):
    talk = Conversation(talker, **{**OPTIONS, "max_new_tokens": 60})
    pieces = talk.say("hello")
    first = next(pieces)
    talk.cancel()
    rest = "".join(piece.text for piece in pieces)
    assert talk.last.finish_reason == "cancelled"
    assert talk.messages[-1]["content"] == first.text + rest
    pieces = talk.say("more")
    next(pieces)
    pieces.close()
    assert len(talk.messages) == 4
    assert talker.generate("a", max_new_tokens=1).token_ids, "the model is free"


def test_full_buffers_say_so_or_lose_the_oldest_turns(talker):
    talk = Conversation(talker, system="s", **OPTIONS)
    long = "the self return " * 9
    for _ in range(2):
        list(talk.say(long))
    said = r"--drop-oldest \(drop_oldest=True\), or export"
    with pytest.raises(OptionError, match=said):
        talk.say(long * 6)
    kept = list(talk.messages)
    dropping = Conversation(talker, system="s", drop_oldest=True, **OPTIONS)
    dropping.messages = kept
    for turn in range(3):
        list(dropping.say(f"{turn} {long}"))
        assert dropping.messages[0]["role"] == "system"
        assert dropping.messages[1]["role"] == "user"
        assert dropping.last.finish_reason == "length"
        assert len(dropping.last.token_ids) == 12
    with pytest.raises(OptionError, match="the capacity is 256"):
        list(dropping.say(long * 9))


def test_what_can_never_fit_is_dropped_or_refused_before_it_is_encoded(
    talker, monkeypatch
):
    encoded, encode = [], talker.parts.text.encode

    def noted(text, **options):
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(talker.parts.text, "encode", noted)
    with pytest.raises(LengthError, match="characters, at most"):
        talker.chat([user_message("a" * 100_000)])
    assert not encoded
    dropping = Conversation(talker, drop_oldest=True, **OPTIONS)
    reply = {"role": "assistant", "content": "b"}
    dropping.messages = [user_message("a" * 100_000), reply]
    list(dropping.say("c"))
    assert [message["content"] for message in dropping.messages][:1] == ["c"]
    with pytest.raises(LengthError, match="characters, at most"):
        dropping.say("a" * 100_000)
    assert max(encoded) < 1000


def test_wrong_options_are_refused_at_once(talker):
    with pytest.raises(OptionError, match="'many' is not an integer"):
        Conversation(talker, max_new_tokens="many")
    with pytest.raises(OptionError, match="unknown option 'enable_thinking'"):
        Conversation(talker, enable_thinking=False)


def test_a_conversation_is_kept_in_a_file(talker, tmp_path):
    talk = Conversation(talker, **OPTIONS)
    list(talk.say("hällo"))
    talk.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == talk.messages
    other = Conversation(talker, **OPTIONS)
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages
    image = '[{"role": "user", "content": [{"type": "image"%s}]}]'
    images = (image % x for x in ("", ', "image": "x"', ', "image": "data:;base64,A"'))
    for wrong in ("{", "[]", '[{"content": "x"}]', "3", *images):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(OptionError, match="is not a saved conversation"):
            other.load(tmp_path / "wrong.json")
    with pytest.raises(OutputError, match="cannot write"):
        talk.save(tmp_path / "no" / "where.json")
    assert other.messages == talk.messages


@pytest.mark.parametrize("messages", [None, [], "hi", [3], [{"content": "x"}]])
def test_messages_that_are_none_are_refused(talker, messages):
    with pytest.raises(OptionError):
        talker.chat(messages)


def test_a_turn_that_never_began_says_nothing(talker):
    talk = Conversation(talker, **OPTIONS)
    other = talker.stream("a", max_new_tokens=50, ignore_eos=True)
    next(iter(other))
    with pytest.raises(JetdraftError, match="already generating"):
        list(talk.say("hello"))
    assert talk.messages == []
    other.close()
    list(talk.say("hello"))
    assert len(talk.messages) == 2


IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()


def test_pieces_add_up_to_the_result(model):
    options = {"max_new_tokens": 80, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    result = model.generate("def f(x):", **options)
    pieces = list(model.stream("def f(x):", **options))
    assert "".join(piece.text for piece in pieces) == result.text
    assert [i for piece in pieces for i in piece.token_ids] == result.token_ids
    drafted = sum(piece.from_draft for piece in pieces)
    assert drafted <= result.stats.accepted_tokens + 15


def test_end_of_text_stops_unless_ignored(model):
    options = {"token_ids": IDS, "temperature": 1.5, "max_new_tokens": 236, "seed": 1}
    free = model.generate(ignore_eos=True, **options).token_ids
    [eos] = model.bundle.eos_token_ids
    result = model.generate(**options)
    expected = free[: free.index(eos) + 1] if eos in free else free
    assert result.token_ids == expected
    assert result.finish_reason == ("stop" if eos in free else "length")


def test_a_prompt_that_cannot_fit_is_not_even_encoded(model, monkeypatch):
    """The vocabulary may be one that takes minutes for it."""
    monkeypatch.setattr(type(model.parts.text), "encode", None)
    most = 64 * model.bundle.target.contract.capacity
    with pytest.raises(LengthError, match=f"{most + 1} characters.*shorten it"):
        model.generate("a" * (most + 1))


def test_a_prompt_that_fills_the_capacity_leaves_nothing_to_say(model):
    ids = [1] * model.bundle.target.contract.capacity
    result = model.generate(token_ids=ids)
    assert (result.token_ids, result.finish_reason) == ([], "length")
    assert len(model.generate(token_ids=ids[1:]).token_ids) == 1


def test_width_one_is_used_only_when_not_exact(model):
    widths = []
    target = model.parts.target
    run = target.run
    target.run = lambda t, last_only=False, width=0, **more: (
        last_only or widths.append(width),
        run(t, last_only, width, **more),
    )[1]
    try:
        model.generate(token_ids=IDS, method="none", max_new_tokens=5)
        exact, widths[:] = set(widths[1:]), []  # the first reads the prompt's end
        model.generate(token_ids=IDS, method="none", max_new_tokens=5, exact=False)
    finally:
        del target.run
    assert exact == {min(model.parts.widths.exact)}
    assert set(widths[1:]) == {1}


WRONG_VALUES = (
    ({"max_new_tokens": 0}, "1 or more"),
    ({"logit_bias": {"a": 1.0}}, "ids of tokens"),
    ({"logit_bias": {1: float("nan")}}, "not a number"),
    ({"logit_bias": [1]}, "is not a mapping"),
    ({"logit_bias": {288: 1.0}}, "outside the vocabulary"),
    ({"repetition_penalty": 0.0}, "repetition penalty 0.0 is out of range"),
    ({"presence_penalty": 101.0}, "presence penalty"),
    ({"frequency_penalty": float("nan")}, "frequency penalty"),
    ({"repetition_penalty": "1"}, "not a number"),
    ({"stop": ""}, "a stop string is empty"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
    ({"stop": [3]}, "is not a list of texts"),
    ({"max_seconds": 0}, "max seconds 0"),
    ({"max_seconds": "1"}, "not a number"),
    ({"logprobs": 65}, "logprobs 65 is out of range"),
    ({"logprobs": -1}, "logprobs -1 is out of range"),
)


@cases(
    "options, words",
    ({"prompt": ""}, "empty"),
    ({"token_ids": []}, "empty"),
    *(({"token_ids": ids}, "integers") for ids in ([[1]], ["x"])),
    *(({"token_ids": [id]}, "outside the vocabulary") for id in (288, -1)),
    ({"token_ids": [1] * 257}, "capacity is 256"),
    ({}, "either"),
    ({"prompt": "a", "token_ids": [1]}, "either"),
    ({"prompt": [1, 2]}, "token_ids="),
    *(({"prompt": "a", **wrong}, words) for wrong, words in WRONG_VALUES),
)
def test_bad_input_is_refused_before_anything_runs(model, options, words):
    with pytest.raises(OptionError, match=words):
        model.stream(**options)


@cases(
    "options, reason",
    ({"provider": "cuda"}, "operators run on the CPU only; .* --provider cuda"),
    ({"provider": "tensorrt"}, "or export with --provider tensorrt"),
    ({"provider": "abacus"}, "'abacus'; choose tensorrt, cuda, webgpu, cpu"),
    ({"drafter_provider": "abacus"}, "unknown provider 'abacus'"),
    ({"drafter_provider": "cuda"}, "or export with --provider cuda"),
)
def test_a_provider_that_cannot_run_is_refused(bundle, options, reason):
    with pytest.raises(ProviderError, match=reason):
        jetdraft.load(bundle, **options)


def test_each_provider_names_the_graphs_that_it_cannot_run():
    refusals = {name: PROVIDERS[name].refusal for name in PROVIDERS}
    assert "export with --dtype fp16" in refusals["cuda"](CONTRIB, "float32")
    assert "export with --flavour standard" in refusals["tensorrt"](CONTRIB, "float16")
    assert "export with --flavour contrib" in refusals["webgpu"](STANDARD, "float32")
    assert not refusals["cuda"](CONTRIB, "float16")


def test_auto_takes_what_runs(bundle):
    assert jetdraft.load(bundle, provider="auto", threads=1).provider == "cpu"


def test_a_bundle_is_a_path():
    with pytest.raises(jetdraft.BundleError, match="a folder, not 5"):
        jetdraft.load(5)


def test_measurements_that_cannot_be_kept_are_a_warning(own):
    (own / "profiles").write_text("in the place of the folder")
    model = jetdraft.load(own, threads=1)
    with pytest.warns(UserWarning, match="could not be kept .* make the folder"):
        assert model.generate("a", max_new_tokens=3).token_ids


def test_measurements_are_kept_beside_the_bundle(bundle, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "bundle")  # others measure theirs
    with jetdraft.load(folder, threads=1) as model:
        model.measure_again()
        widths = model.parts.widths
    [profile] = (folder / "profiles").glob("cpu-1.json")
    before = profile.stat().st_mtime_ns
    with jetdraft.load(folder, threads=1) as again:
        assert again.parts.widths == widths
        stored = Curve.from_json(json.loads(profile.read_text())["curve"])
        assert again.parts.curve.passes == stored.passes
    assert profile.stat().st_mtime_ns == before


@cases(
    "given",
    {"store": 3},
    {"streams": 3},
    *({"threads": threads} for threads in (2.5, "2", 100000, 0, True)),
    ids=str,
)
def test_load_says_what_is_wrong_with_its_arguments(bundle, given):
    [name] = given
    with refused_option(name, name):
        jetdraft.load(bundle, **given)


@pytest.mark.parametrize("given", [{"user": 3}, {"table": 3}], ids=str)
def test_a_method_says_what_is_wrong_with_its_options(model, given):
    [name] = given
    with refused_option(f"{name} cannot be 3"):
        model.generate("a", drafting=given)
    with refused_option(f"unknown option '{name}'", name):
        jetdraft.load(model.bundle.path, **given)


def test_a_seed_is_drawn_where_none_is_given(model):
    options = {"token_ids": IDS, "temperature": 1.0, "max_new_tokens": 30}
    options |= {"ignore_eos": True}
    one, other = (model.generate(**options, seed=None) for _ in range(2))
    assert one.stats.seed != other.stats.seed
    assert one.token_ids != other.token_ids
    left_out = model.generate(**options)
    assert left_out.stats.seed not in (one.stats.seed, other.stats.seed)
    for result in (one, other, left_out):
        again = model.generate(**options, seed=result.stats.seed, method="none")
        assert again.token_ids == result.token_ids
        assert again.stats.to_json()["seed"] == result.stats.seed


@pytest.mark.parametrize(("temperature", "texts"), [(0.0, 1), (1.0, 2)])
def test_a_seed_chooses_a_sampled_text_alone(model, temperature, texts):
    options = {"token_ids": IDS, "max_new_tokens": 30, "ignore_eos": True}
    options["temperature"] = temperature
    results = [model.generate(**options, seed=seed) for seed in (0, 7, 7)]
    seeds = [0, 7, 7] if temperature else [None, None, None]
    assert [result.stats.seed for result in results] == seeds
    assert len({tuple(result.token_ids) for result in results}) == texts


def test_tokens_are_counted_and_a_model_and_its_result_can_be_printed(model):
    ids = model.encode("def f(é):")
    assert ids == model.prompt("def f(é):").tolist()
    assert (model.decode(ids), model.decode([])) == ("def f(é):", "")
    with pytest.raises(OptionError, match="outside the vocabulary"):
        model.decode([10**6])
    assert repr(model).startswith(f"<Model {model.bundle.path}: none, ")
    result = model.generate("def", max_new_tokens=4)
    assert f"{result}" == result.text


def test_a_closed_model_says_so(bundle, tmp_path):
    model = jetdraft.load(bundle, threads=1)
    twin = model.twin()
    stream = model.stream("a", max_new_tokens=3)
    list(stream)
    options, parts = jetdraft.Options(), weakref.ref(model.parts)
    waiting = model.stream("a", max_new_tokens=3)
    model.close()
    chat = [{"role": "user", "content": "a"}]
    file = tmp_path / "prefix.npz"
    texts = (model.generate, model.stream, model.astream, model.prompt)
    names = ("methods", "provider", "vocabulary", "planner", "template")
    calls = [
        *(partial(call, "a") for call in texts),
        *(partial(call, chat) for call in (model.chat, model.chat_prompt)),
        *(partial(getattr, model, name) for name in names),
        partial(model.generate, token_ids=[1]),
        partial(model.generate, "a", options),
        partial(model.save_prefix, file, [1]),
        partial(model.load_prefix, file),
        partial(tune, model),
        *(model.measure_again, model.forget, model.twin),
    ]
    for call in calls:
        with pytest.raises(jetdraft.JetdraftError, match="this model is closed"):
            call()
    model.cancel()  # nothing is under way
    model.close()  # like a file
    with pytest.raises(jetdraft.JetdraftError, match="this model is closed"):
        next(waiting)
    gc.collect()
    assert parts() is None, "a stream that ended keeps the buffers"
    assert len(stream.result().token_ids) == 3
    assert twin.generate("a", max_new_tokens=3).token_ids == stream.result().token_ids
