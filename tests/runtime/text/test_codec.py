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


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("cut", [0, 1, 5, 9])
def test_only_what_follows_the_prompt_comes(codec, size, cut):
    ids = codec.encode(TEXT)
    stream = codec.stream(ids[:cut])
    text = "".join(
        stream.push(ids[at : at + size]) for at in range(cut, len(ids), size)
    )
    begun = codec.stream([])
    assert begun.push(ids[:cut]) + text + stream.rest() == TEXT


def test_bytes_that_never_become_a_character_come_at_the_end(codec):
    stream = codec.stream([])
    assert stream.push(codec.encode("a🚀")[:-1]) + "|" + stream.rest() == "a|\ufffd"


def test_a_decoder_that_drops_a_leading_space_keeps_it_after_the_prompt(tmp_path):
    words = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, "\u2581one"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    stream = TextCodec(tmp_path / "tokenizer.json").stream([0])
    assert stream.push([1]) == " two"


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


def whole_characters(text, size):
    """As much of the beginning as whole characters fit in so many bytes."""
    return text.encode()[:size].decode(errors="ignore")


def test_a_character_that_begins_in_the_prompt_comes_whole(tmp_path):
    codec = byte_fallback(tmp_path)
    ids = codec.encode(LONG)
    assert len(ids) == len(LONG.encode())
    for cut in range(1, len(ids)):
        stream = codec.stream(ids[:cut])
        text = "".join(stream.push([token]) for token in ids[cut:]) + stream.rest()
        assert whole_characters(LONG, cut) + text == LONG, cut


def test_a_character_that_a_byte_level_prompt_begins_comes_whole(codec):
    ids, cuts = codec.encode(TEXT), 0
    for cut in range(1, len(ids)):
        stream = codec.stream(ids[:cut])
        text = "".join(stream.push([token]) for token in ids[cut:])
        before = codec.decode(ids[:cut])
        cuts += before.endswith("\ufffd")
        assert before.rstrip("\ufffd") + text == TEXT
    assert cuts


def test_bytes_that_the_prompt_began_in_vain_are_not_shown(tmp_path):
    codec = byte_fallback(tmp_path)
    stream = codec.stream(codec.encode("a日🚀")[:-1])
    assert "".join(stream.push(codec.encode(letter)) for letter in "bcd") == "bcd"


def test_a_replacement_character_of_the_prompt_is_not_shown_again(tmp_path):
    codec = byte_fallback(tmp_path)
    stream = codec.stream(codec.encode("a\ufffd"))
    assert "".join(map(stream.push, (codec.encode("🚀"), codec.encode("b")))) == "🚀b"


def test_a_stop_string_may_begin_in_the_prompt(tmp_path):
    codec = byte_fallback(tmp_path)
    ids = codec.encode("a🚀bcd")
    watcher = StopWatcher(codec.stream(ids[:4]), (), ["🚀b"])
    assert watcher.keep(ids[4:]) == ids[4:6]
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
