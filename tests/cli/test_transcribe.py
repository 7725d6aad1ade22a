"""jetdraft transcribe: what it prints, and what it refuses."""

import json
import re

import pytest

import jetdraft as package
from tests import whispers
from tests.cli.running import assert_refused, jetdraft


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("sounds") / "tone.wav"
    file.write_bytes(whispers.wav(whispers.sound(1.5)))
    return file


def test_it_prints_segments_or_json(whisper, file):
    with package.load(whisper / "bundle", threads=1) as model:
        wanted = model.transcribe(file, language="de")
    shown = jetdraft("transcribe", whisper / "bundle", file, "--language", "de")
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == len(wanted.segments)
    assert all(re.match(r"\[[\d:.]{12} --> [\d:.]{12}\]", line) for line in lines)
    assert "tokens/pass" in shown.stderr
    shown_json = jetdraft(
        *("transcribe", whisper / "bundle", file, "--json", "--language", "de")
    )
    fields = json.loads(shown_json.stdout)
    assert fields["text"] == wanted.text
    assert fields["token_ids"] == wanted.token_ids
    assert (fields["language"], fields["seconds"]) == ("de", 1.5)
    assert [part["start"] for part in fields["segments"]] == [
        segment.start for segment in wanted.segments
    ]


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_file_that_is_cut_off_is_told(whisper, file, tmp_path):
    cut = tmp_path / "cut.wav"
    cut.write_bytes(file.read_bytes()[:-9000])
    shown = jetdraft("transcribe", whisper / "bundle", cut, "--language", "de")
    assert shown.exit_code == 0
    assert "warning: " in shown.stderr
    assert "is cut off: its header says 1.50 s" in shown.stderr


def test_bad_files_and_bundles_are_refused(whisper, bundle, file, tmp_path):
    heard, empty = whisper / "bundle", tmp_path / "empty.wav"
    empty.write_bytes(b"")
    assert_refused(jetdraft("transcribe", heard, empty), "is empty")
    missing = tmp_path / "missing.wav"
    assert_refused(jetdraft("transcribe", heard, missing), "there is no file")
    assert_refused(
        jetdraft("transcribe", heard, __file__), "is not a WAV file", "ffmpeg"
    )
    assert_refused(jetdraft("transcribe", bundle, file), "hears nothing")
    wrong = jetdraft("transcribe", heard, file, "--language", "xx")
    assert_refused(wrong, "no language 'xx'")
    assert_refused(jetdraft("generate", heard, "-p", "hi"), "jetdraft transcribe")
    result = jetdraft("chat", heard, stdin="hello\n")
    assert_refused(result, "hears, and reads no text", "jetdraft transcribe")
    # These two describe the bundle first.
    for verb in ("check", "bench"):
        result = jetdraft(verb, heard)
        assert result.exit_code == 2
        assert "error: the bundle's model hears, and reads no text" in result.stderr
