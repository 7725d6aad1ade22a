import pytest
from tokenizers import Tokenizer, decoders, models

from jetdraft.errors import BundleError, OptionError
from jetdraft.runtime.text.codec import TextCodec

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
    assert stream.push(codec.encode("a🚀")[:-1]) + "|" + stream.rest() == "|a\ufffd"


def test_a_decoder_that_drops_a_leading_space_keeps_it_after_the_prompt(tmp_path):
    words = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, "\u2581one"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    stream = TextCodec(tmp_path / "tokenizer.json").stream([0])
    assert stream.push([1]) == " two"


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
