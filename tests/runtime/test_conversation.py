"""Conversations: what a template makes of messages, and turns that go on."""

import json
import shutil
from dataclasses import replace

import pytest

import jetdraft
from jetdraft.bundle import CHAT_TEMPLATE, Bundle
from jetdraft.errors import JetdraftError, LengthError, OptionError, OutputError
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.text.template import ChatTemplate, user_message
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


def test_a_template_can_change_nothing():
    unsafe = "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"
    for source in unsafe:
        with pytest.raises(OptionError):
            ChatTemplate(source, {}).render([user_message("a")])


@pytest.mark.parametrize("source", ["{% if %}", "{{ a | nothing }}", "{% for x %}"])
def test_a_broken_template_is_refused_with_its_line(source):
    with pytest.raises(OptionError, match="line 2"):
        ChatTemplate(f"a\n{source}", {})


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
    with pytest.raises(OptionError, match="let the oldest turns be dropped"):
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
    dropping.messages = [
        user_message("a" * 100_000),
        {"role": "assistant", "content": "b"},
    ]
    list(dropping.say("c"))
    assert [message["content"] for message in dropping.messages][:1] == ["c"]
    with pytest.raises(LengthError, match="characters, at most"):
        dropping.say("a" * 100_000)
    assert max(encoded) < 1000


def test_wrong_options_are_refused_where_turns_are_dropped(talker):
    talk = Conversation(talker, drop_oldest=True, max_new_tokens="many")
    with pytest.raises(OptionError, match="'many' is not an integer"):
        list(talk.say("Hello"))


def test_a_conversation_is_kept_in_a_file(talker, tmp_path):
    talk = Conversation(talker, **OPTIONS)
    list(talk.say("hällo"))
    talk.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == talk.messages
    other = Conversation(talker, **OPTIONS)
    other.load(tmp_path / "talk.json")
    assert other.messages == talk.messages
    for wrong in ("{", "[]", '[{"content": "x"}]', "3"):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(OptionError):
            other.load(tmp_path / "wrong.json")
    with pytest.raises(OutputError, match="cannot write"):
        talk.save(tmp_path / "no" / "where.json")
    assert other.messages == talk.messages


@pytest.mark.parametrize("messages", [None, [], "hi", [3], [{"content": "x"}]])
def test_messages_that_are_none_are_refused(talker, messages):
    with pytest.raises(OptionError):
        talker.chat(messages)


def test_without_a_template_a_chat_is_refused(model):
    with pytest.raises(OptionError, match="no chat template"):
        model.chat([user_message("hello")])


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
