import pytest
from tokenizers import Tokenizer, decoders, models

from jetdraft.errors import BundleError, OptionError
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.stops import StopWatcher

TEXT = "def f():\n    return 'naïve — 日本語 🚀'\n"


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
    stream = TextCodec(tmp_path / "tokenizer.json").stream([0])
    assert stream.push([1]) == " two"


@pytest.fixture
def byte_fallback(tmp_path):
    """A tokenizer like Llama 2's: a character that is no token becomes its bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {letter: 256 + at for at, letter in enumerate("abcd")} | {"<unk>": 260}
    tokenizer = Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec(tmp_path / "tokenizer.json")


LONG = "a日本語🚀é🚀bcd日b本🚀cdé"


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


@pytest.mark.parametrize(
    ("prompt", "size", "more", "text"),
    [("a日🚀", -1, "bcd", "bcd"), ("a\ufffd", None, "🚀b", "🚀b")],
)
def test_what_the_prompt_began_in_vain_is_not_shown(
    byte_fallback, prompt, size, more, text
):
    """Nor is a replacement character of the prompt shown again."""
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
