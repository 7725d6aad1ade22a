import json
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from jetdraft.bundle import is_token_name
from jetdraft.checkpoints.gguf import GgufFile
from jetdraft.checkpoints.gguf_tokenizer import special_tokens
from jetdraft.errors import BundleError, OptionError
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.stops import STOP, StopWatcher
from tests import cases
from tests.families import FAMILIES, SPECIAL, TAG, WORDS, made
from tests.runtime.text.test_template import CHATS, own_prompt, transformers_prompt

CASES = settings(max_examples=40, deadline=None)
every_family = pytest.mark.parametrize("family", FAMILIES)
FOLDER = os.environ.get("JETDRAFT_TEMPLATES")
FILES = [
    file
    for pattern in ("tokenizer_config.json", "*.gguf")
    for file in (sorted(Path(FOLDER).rglob(pattern)) if FOLDER else ())
]
TEXT = "def f():\n    return 'naïve — 日本語 🚀'\n"
LONG = "a日本語🚀é🚀bcd日b本🚀cdé"


@cache
def opened(family):
    file = Path(mkdtemp()) / "tokenizer.json"
    tokenizer = made(family)
    tokenizer.save(str(file))
    return tokenizer, TextCodec(file)


def drawn(test):
    return every_family(CASES(given(data=st.data())(test)))


def draw_ids(data, tokenizer, least=0):
    size = tokenizer.get_vocab_size()
    rare = st.sampled_from([size, *range(size - len(SPECIAL) - 1, size)])
    token = st.one_of(st.integers(0, size - 1), rare)
    words = st.lists(st.sampled_from(WORDS), min_size=least, max_size=4)
    encoded = words.map(lambda text: tokenizer.encode(" ".join(text)).ids)
    return data.draw(st.lists(token, min_size=least, max_size=14) | encoded)


def draw_rounds(data, ids):
    rounds, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        rounds.append(ids[at : at + size])
        at += size
    return rounds


def watched(codec, prompt, rounds, ends=(), stop=()):
    """What is kept and shown of rounds, why the text ends, and the texts of tokens."""
    watcher = StopWatcher(codec.stream(prompt, ends), ends, stop)
    kept, text, texts = [], "", []
    for tokens in rounds:
        if watcher.reason:
            break
        kept += watcher.read(tokens)
        text += watcher.take()
        texts += watcher.texts
    return kept, text + watcher.rest(), watcher.reason, texts


@drawn
def test_the_text_does_not_depend_on_the_rounds(family, data):
    tokenizer, codec = opened(family)
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    ends = data.draw(st.sampled_from([(), (ids or [0])[-1:], (0, 5)]))
    whole = watched(codec, prompt, [[id] for id in ids])[1]
    start = data.draw(st.integers(0, len(whole)))
    text = whole[start : start + data.draw(st.integers(1, 4))]
    stop = data.draw(st.sampled_from([(), (text or "x",), (SPECIAL[2],)]))
    plain = watched(codec, prompt, [[id] for id in ids], ends, stop)
    assert watched(codec, prompt, draw_rounds(data, ids), ends, stop) == plain
    assert not any(word in plain[1] for word in stop)


@drawn
def test_the_text_is_the_tokenizers_own_where_that_has_whole_characters(family, data):
    tokenizer, codec = opened(family)
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    text = watched(codec, prompt, draw_rounds(data, ids))[1]
    if "\ufffd" not in before + whole:
        assert before + text == whole


@drawn
def test_the_names_of_tokens_join_to_the_text(family, data):
    tokenizer, codec = opened(family)
    prompt, ids = draw_ids(data, tokenizer), draw_ids(data, tokenizer)
    stream, names = codec.stream(prompt), []
    for token in ids:
        names.append(stream.names([token])[token])
        stream.push([token])
    hidden = {tokenizer.token_to_id(word) for word in SPECIAL}
    shown = set(range(tokenizer.get_vocab_size())) - hidden
    assert [name is not None for name in names] == [token in shown for token in ids]
    kept, text, _, texts = watched(codec, prompt, [[id] for id in ids])
    if not tokenizer.decode(prompt).endswith("\ufffd"):
        assert b"".join(name or b"" for name in names).decode(errors="replace") == text
    assert text.startswith("".join(texts))
    assert len(texts) == len(kept)


@every_family
def test_a_stop_text_may_be_a_special_token(family):
    tokenizer, codec = opened(family)
    user, tag = (tokenizer.token_to_id(word) for word in (SPECIAL[2], TAG))
    ids = [5, 6, 5]
    for stop in ((SPECIAL[2],), ("er|>",)):
        kept, text, reason, _ = watched(codec, [], [[*ids, user, tag]], (), stop)
        assert (kept, reason) == ([*ids, user], STOP)
        assert text == watched(codec, [], [ids])[1]


@every_family
def test_an_end_of_text_is_hidden_because_it_ends_the_text(family):
    tokenizer, codec = opened(family)
    tag = tokenizer.token_to_id(TAG)
    assert TAG in watched(codec, [], [[tag]])[1]
    assert watched(codec, [], [[tag, tag]], [tag]) == ([tag], "", STOP, [""])
    assert codec.stream([], [tag]).names([tag]) == {tag: None}


def test_byte_tokens_that_are_cut_are_shown_as_bytes_are():
    tokenizer, codec = opened("sentencepiece")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "\né🚀".encode()]
    for count in range(1, len(ids) + 1):
        text = "\né🚀".encode()[:count].decode(errors="replace")
        assert watched(codec, [5], [ids[:count]])[1] == text


def test_a_truncating_and_padding_tokenizer_takes_prompts_whole(tmp_path):
    tokenizer = made("byte_level")
    text = "the and a " * 8
    count = len(tokenizer.encode(text).ids)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path / "tokenizer.json")
    assert len(codec.encode(text)) == count
    assert len(codec.encode("a")) == 1


def published(file):
    if file.suffix == ".gguf":
        field = GgufFile(str(file)).field
        return [field("tokenizer.chat_template")], special_tokens(field)
    config = json.loads(file.read_text())
    template = config.get("chat_template")
    if (beside := file.with_name("chat_template.jinja")).is_file():
        template = beside.read_text()
    tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if is_token_name(name) and isinstance(token, (str, dict))
    }
    several = template if isinstance(template, list) else [{"template": template}]
    return [each["template"] for each in several if each["template"]], tokens


@pytest.mark.skipif(not FILES, reason="JETDRAFT_TEMPLATES names no templates")
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_published_template_renders_as_transformers_does(file, chat):
    templates, tokens = published(file)
    if not templates:
        pytest.skip("no chat template")
    for source in templates:
        expected = transformers_prompt(source, tokens, chat)
        assert own_prompt(source, tokens, chat) == expected


@pytest.fixture
def codec(bundle):
    return TextCodec(bundle / "tokenizer.json")


def test_the_stream_gives_whole_characters_only(codec):
    stream, pieces = codec.stream([]), []
    for token in codec.encode(TEXT):
        pieces.append(stream.push([token]))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) == TEXT
    assert stream.rest() == ""
    stream = codec.stream([])
    assert stream.push(codec.encode("a🚀")[:-1]) + "|" + stream.rest() == "a|\ufffd"


def test_a_decoder_that_drops_a_leading_space_keeps_it_after_the_prompt(tmp_path):
    words = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, "\u2581one"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(tmp_path / "tokenizer.json").stream([0]).push([1]) == " two"


@pytest.fixture
def byte_fallback(tmp_path):
    """A tokenizer like Llama 2's: a character that is no token becomes its bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {letter: 256 + at for at, letter in enumerate("abcd")} | {"<unk>": 260}
    how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab, [], **how))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path / "tokenizer.json")


def test_a_character_that_begins_in_the_prompt_comes_whole(byte_fallback):
    codec = byte_fallback
    ids = codec.encode(LONG)
    assert len(ids) == len(LONG.encode())
    for cut in range(1, len(ids)):
        stream = codec.stream(ids[:cut])
        text = "".join(stream.push([token]) for token in ids[cut:]) + stream.rest()
        assert LONG.encode()[:cut].decode(errors="ignore") + text == LONG, cut


def test_a_character_that_a_byte_level_prompt_begins_comes_whole(codec):
    ids, cuts = codec.encode(TEXT), 0
    for cut in range(1, len(ids)):
        stream = codec.stream(ids[:cut])
        text = "".join(stream.push([token]) for token in ids[cut:])
        before = codec.decode(ids[:cut])
        cuts += before.endswith("\ufffd")
        assert before.rstrip("\ufffd") + text == TEXT
    assert cuts


@cases(
    "prompt, size, more, text",
    ("a日🚀", -1, "bcd", "bcd"),
    ("a\ufffd", None, "🚀b", "🚀b"),
)
def test_what_a_prompt_began_in_vain_is_hidden(byte_fallback, prompt, size, more, text):
    stream = byte_fallback.stream(byte_fallback.encode(prompt)[:size])
    pieces = (stream.push(byte_fallback.encode(letter)) for letter in more)
    assert "".join(pieces) == text


def test_a_stop_string_may_begin_in_the_prompt(byte_fallback):
    codec = byte_fallback
    ids = codec.encode("a🚀bcd")
    watcher = StopWatcher(codec.stream(ids[:4]), (), ["🚀b"])
    assert watcher.read(ids[4:]) == ids[4:6]
    assert (watcher.reason, watcher.take() + watcher.rest()) == ("stop", "")


def test_without_a_tokenizer_only_ids_work():
    codec = TextCodec(None)
    assert codec.stream([1]).push([1]) == ""
    with pytest.raises(OptionError, match="token_ids"):
        codec.encode("text")


def test_a_damaged_tokenizer_is_a_bundle_error(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(BundleError, match="not a tokenizer"):
        TextCodec(file)
