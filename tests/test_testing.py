import zlib
from pathlib import Path
from zipfile import BadZipFile

import pytest

import jetdraft
from jetdraft import testing
from jetdraft.errors import OptionError, OutputError
from jetdraft.runtime.text.template import user_message
from jetdraft.testing import toy_bundle
from tests.programs import python

SPEED = [user_message("Tell me the speed.")]
TOOL = {"type": "function", "function": {"name": "read_sensor"}}
SAMPLED = {"temperature": 0.8, "seed": 7}


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_is_the_same_each_time_and_small(tmp_path):
    one, other = toy_bundle(tmp_path / "new" / "one"), toy_bundle()
    assert one == tmp_path / "new" / "one"
    assert contents(one) == contents(other)
    assert sorted(contents(one)) == sorted(
        [*jetdraft.Bundle.open(one).files, "bundle.json"]
    )
    assert testing.TOY_ZIP.stat().st_size < 400_000


def test_an_empty_folder_is_filled(tmp_path):
    assert contents(toy_bundle(str(tmp_path))) == contents(toy_bundle())


@pytest.mark.parametrize("kept", ["bundle.json", "notes.txt"])
def test_what_is_there_is_never_replaced(tmp_path, kept):
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / kept).write_text("mine")
    for taken in (folder, folder / kept, folder / kept / "below"):
        with pytest.raises(OutputError, match="a new or an empty folder"):
            toy_bundle(taken)
    assert contents(folder) == {kept: b"mine"}


def test_a_folder_that_cannot_be_filled_is_not_there(tmp_path, monkeypatch):
    damaged = bytearray(testing.TOY_ZIP.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    (tmp_path / "damaged.zip").write_bytes(damaged)
    monkeypatch.setattr(testing, "TOY_ZIP", tmp_path / "damaged.zip")
    with pytest.raises((BadZipFile, zlib.error)):
        toy_bundle(tmp_path / "toy")
    assert [file.name for file in tmp_path.iterdir()] == ["damaged.zip"]


def test_a_temporary_one_ends_with_its_process_only():
    folder = python("""
import atexit
import os
from jetdraft.testing import toy_bundle
folder = toy_bundle()
if os.fork() == 0:
    atexit._run_exitfuncs()
    os._exit(0)  # onnxruntime's threads are not here to be ended
os.wait()
assert (folder / "bundle.json").is_file()
print(folder)
""")
    assert folder.strip()
    assert not Path(folder.strip()).parent.exists()


@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_the_drafter_is_mostly_right(toy_model, options):
    options = {**options, "max_new_tokens": 48, "ignore_eos": True}
    found = toy_model.generate(
        "The robot sees", method="draft", num_draft_tokens=4, **options
    )
    assert found.stats.acceptance_rate > 0.5
    assert found.stats.tokens_per_pass > 2


def test_a_chat_and_a_text_end(toy_model):
    reply = toy_model.chat(SPEED, max_new_tokens=64)
    assert reply.text == "The speed is 2 meters per second."
    assert reply.finish_reason == "stop"
    assert toy_model.parts.text.token(reply.token_ids[-1]) == "<|end|>"
    ended = toy_model.generate("The robot sees", max_new_tokens=200)
    assert ended.finish_reason == "stop"
    assert toy_model.parts.text.token(ended.token_ids[-1]) == "<|endoftext|>"


def test_turns_add_up(toy_model):
    talk = jetdraft.Conversation(toy_model, system="Be brief.", max_new_tokens=64)
    for asked, part in (("Hello", "robot"), ("Tell me the speed.", "speed")):
        assert part in "".join(piece.text for piece in talk.say(asked))
        assert talk.last.finish_reason == "stop"


def test_offered_a_tool_it_calls_it(toy_model):
    prompt = toy_model.chat_prompt(SPEED, tools=[TOOL])
    assert toy_model.parts.text.decode(prompt).startswith(
        '<|system|>Tools: [{"type": "function"'
    )
    call = '{"name": "read_sensor", "arguments": {"sensor": "speed"}}'
    answer = toy_model.generate(token_ids=prompt, max_new_tokens=64).text
    assert answer == f"<tool_call>{call}</tool_call>"


def test_the_template_takes_a_call_and_its_result(toy_model):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "read_sensor", "arguments": {}}}],
    }
    found = {"role": "tool", "content": "7"}
    shown = toy_model.parts.text.decode(toy_model.chat_prompt([*SPEED, call, found]))
    assert shown == (
        "<|user|>Tell me the speed.<|end|><|assistant|><tool_call>"
        '{"name": "read_sensor", "arguments": {}}</tool_call><|end|>'
        "<|tool|>7<|end|><|assistant|>"
    )
    with pytest.raises(OptionError, match="unknown role"):
        toy_model.chat_prompt([{"role": "poet", "content": ""}])


def test_every_character_can_be_read(toy_model):
    text = "Ä 漢字 🙂 \x00\t\n"
    assert toy_model.parts.text.decode(toy_model.parts.text.encode(text)) == text
