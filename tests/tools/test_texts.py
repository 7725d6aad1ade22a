"""Characters per token by script, and what a draft vocabulary covers."""

import json

import numpy as np
import pytest

from jetdraft.bundle import Bundle
from jetdraft.errors import DataError
from tests.cli.running import assert_refused, jetdraft
from tests.tiny import tokenizer
from tools.texts import SIGNS, WHOLE_TEXT, TextFigures, main, text_figures

ENGLISH, RUSSIAN = "the self the 1 2", "да the"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return path


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str | bytes):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rows_of(file, *texts, **more) -> dict[tuple[str, str], TextFigures]:
    return {(row.text, row.script): row for row in text_figures(file, texts, **more)}


def test_every_character_and_token_counts_once(file, write):
    rows = rows_of(file, write("en", ENGLISH), write("ru", RUSSIAN))
    for name, text in (("en", ENGLISH), ("ru", RUSSIAN)):
        whole = rows.pop((name, WHOLE_TEXT))
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        assert (whole.characters, whole.tokens) == (len(text), len(ids))
        parts = [row for (of, _), row in rows.items() if of == name]
        assert sum(part.characters for part in parts) == whole.characters
        assert sum(part.tokens for part in parts) == whole.tokens
    assert {script for _, script in rows} == {"latin", "cyrillic", SIGNS}


def test_the_whole_text_counts_though_the_file_truncates(file, write, tmp_path):
    made = tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=2)
    made.save(str(tmp_path / "tokenizer.json"))
    text = write("en", ENGLISH)
    assert rows_of(tmp_path / "tokenizer.json", text) == rows_of(file, text)


def test_a_script_without_merges_takes_a_token_for_each_byte(file, write):
    rows = rows_of(file, write("ru", RUSSIAN))
    assert rows["ru", "cyrillic"].tokens == 4
    assert rows["ru", "cyrillic"].characters_per_token == 0.5
    assert rows["ru", "latin"].characters_per_token == 4.0  # " the"


def test_a_draft_vocabulary_covers_the_tokens_that_are_in_it(file, write):
    the = tokenizer().encode(" the").ids
    text = write("en", " the the self")
    row = rows_of(file, text, draft_vocabulary=the)["en", WHOLE_TEXT]
    assert row.coverage == 2 / row.tokens
    assert rows_of(file, text)["en", WHOLE_TEXT].coverage is None


def test_the_most_frequent_tokens_are_measured_on_other_text(file, write):
    """The first half repeats a token that the second half lacks."""
    row = rows_of(file, write("en", " the" * 8 + " self" * 8), most_frequent=1)
    assert row["en", WHOLE_TEXT].tokens == 16
    assert row["en", WHOLE_TEXT].coverage == 0.0
    mixed = rows_of(file, write("en", "д " + " the" * 40), most_frequent=1)
    assert mixed["en", "cyrillic"].coverage is None  # the second half has none
    both = rows_of(file, write("en", " the self" * 8), most_frequent=2)
    assert both["en", WHOLE_TEXT].coverage == 1.0


@pytest.mark.parametrize("text", ["", "1", b"\xff\xfe"])
def test_a_file_without_text_is_refused(file, write, text):
    with pytest.raises(DataError, match="x"):
        text_figures(file, [write("x", text)])


def test_what_is_no_tokenizer_is_refused(write):
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        text_figures(write("tokenizer.json", "{}"), [write("x", ENGLISH)])


def test_the_program_says_what_the_tokenizer_makes_of_texts(bundle, write, tmp_path):
    text = write("english.txt", "the self the self 12")
    lines = jetdraft(bundle, text, command=main).stdout.splitlines()
    shown = [line.split()[:2] for line in lines]
    assert shown == [["english.txt", part] for part in ("all", "latin", "signs")]
    fields = json.loads(jetdraft(bundle, text, "--json", command=main).stdout)
    assert fields[0]["characters"] == 20
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = write("english.txt", " the self" * 40)
    how = (tmp_path, text, "--draft-vocab", 1, "--json")
    assert json.loads(jetdraft(*how, command=main).stdout)[0]["coverage"] == 0.5
    assert_refused(jetdraft(bundle, tmp_path / "x", command=main), "no data file")
    (tmp_path / "tokenizer.json").unlink()
    assert_refused(jetdraft(*how, command=main), "is not a tokenizer.json")


def test_the_draft_vocabulary_of_a_bundle_is_looked_for(bundle, write, monkeypatch):
    the = tokenizer().encode(" the", add_special_tokens=False).ids
    monkeypatch.setattr(Bundle, "draft_vocabulary", lambda *_: np.array(the))
    text = write("english.txt", " the self" * 40)
    fields = json.loads(jetdraft(bundle, text, "--json", command=main).stdout)
    assert fields[0]["coverage"] == 0.5
