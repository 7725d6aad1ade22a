import pytest

from jetdraft.errors import BundleError, PromptError
from jetdraft.runtime.text import TextCodec

TEXT = "def f():\n    return 'naïve — 日本語 🚀'\n"


@pytest.fixture
def codec(bundle):
    return TextCodec(bundle / "tokenizer.json")


def test_round_trip(codec):
    assert codec.decode(codec.encode(TEXT)) == TEXT


def test_the_stream_gives_whole_characters_only(codec):
    stream, pieces = codec.stream(), []
    for token in codec.encode(TEXT):
        pieces.append(stream.push([token]))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) + stream.rest() == TEXT
    assert stream.rest() == ""


def test_bytes_that_never_become_a_character_come_at_the_end(codec):
    ids = codec.encode("a🚀")[:-1]
    stream = codec.stream()
    text = stream.push(ids)
    assert text == "a"
    assert text + stream.rest() == codec.decode(ids)


def test_without_a_tokenizer_only_ids_work():
    codec = TextCodec(None)
    assert codec.decode([1, 2]) == ""
    assert codec.stream().push([1]) == ""
    with pytest.raises(PromptError, match="token_ids"):
        codec.encode("text")


def test_a_damaged_tokenizer_is_a_bundle_error(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(BundleError, match="not a tokenizer"):
        TextCodec(file)
