"""The trained pair and the toy: the same text, and a drafter that lives."""

import importlib
import json
import zlib
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import pytest
import torch

import jetdraft
from jetdraft import OptionError, OutputError, testing
from jetdraft.runtime.text.template import user_message
from jetdraft.testing import toy_bundle
from tests import cases, same_text
from tests.programs import python
from tests.tiny import exported_model

FOLDER = Path(__file__).parent.parent / "examples" / "pycode"
PROMPT = "class Queue:\n    def __init__(self, items):\n        self.items = "
# Below these runs' rates by a margin, see docs/log/quantization.md.
GREEDY_FLOOR = 0.50
SAMPLED_FLOOR = 0.40
# The head's, by place in a draft of three; an untrained head is right at 0.00.
HEAD_FLOORS = {0.0: (0.5, 0.4, 0.4), 0.8: (0.3, 0.2, 0.15)}
HEAD_MEGABYTES = 4
SIZES = {"capacity": 2048, "max_width": 128}
SPEED = [user_message("Tell me the speed.")]
TOOL = {"type": "function", "function": {"name": "read_sensor"}}
SAMPLED = {"temperature": 0.8, "seed": 7}


def made(folder, recipe="int4", **options):
    target, options = FOLDER / "target", {**SIZES, **options}
    return exported_model(target, folder / "bundle", recipe, **options)


@pytest.fixture(scope="module")
def pycode(tmp_path_factory):
    drafter = {"drafter": FOLDER / "drafter", "drafter_recipe": "int8"}
    return made(tmp_path_factory.mktemp("pycode"), **drafter)


@cases(
    "temperature, seed, floor, tokens",
    (0.0, 0, GREEDY_FLOOR, 1000),
    (0.8, 1, SAMPLED_FLOOR, 300),
    (1.2, 2, 0.0, 300),
)
def test_many_tokens_with_every_method(pycode, temperature, seed, floor, tokens):
    drafts = [{"method": "draft", "num_draft_tokens": length} for length in (1, 4)]
    others = {"method": "lookup", "num_draft_tokens": 4}, "auto"
    way = {"temperature": temperature, "seed": seed, "max_new_tokens": tokens}
    found = same_text(pycode, [*drafts, *others], [way], prompt=PROMPT)
    assert {len(result.token_ids) for result in found} == {tokens}
    assert all(result.stats.acceptance_rate >= floor for result in found[:2])


def test_sampled_drafts_are_coupled_to_the_target(pycode):
    """Without the shared noise, agreement at T = 1 would be about half as high."""
    how = {"method": "draft", "num_draft_tokens": 2, "max_new_tokens": 300}
    how |= {"temperature": 1.0, "ignore_eos": True}
    results = [pycode.generate(PROMPT, **how, seed=seed) for seed in range(2)]
    rates = [result.stats.acceptance_rate for result in results]
    assert sum(rates) / len(rates) >= SAMPLED_FLOOR


def test_the_standard_flavour_writes_the_same(pycode, tmp_path):
    how = {"prompt": PROMPT, "max_new_tokens": 200, "ignore_eos": True}
    found, _ = same_text(made(tmp_path, flavour="standard"), ["lookup"], **how)
    # A sampled text turns at a near tie, where kernels round otherwise.
    assert pycode.generate(method="none", **how).text == found.text


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    head = {"head": FOLDER / "head", "drafter_recipe": "int8"}
    return made(tmp_path_factory.mktemp("with-head"), **head)


@pytest.mark.parametrize("temperature", HEAD_FLOORS)
def test_the_head_is_right_often_and_never_changes_the_text(with_head, temperature):
    way = {"temperature": temperature, "seed": 1, "max_new_tokens": 96}
    draft = {"method": "eagle", "num_draft_tokens": 3}
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()[:4]
    total, *others = (
        same_text(with_head, [draft], [way], prompt=json.loads(line)["prompt"])[0].stats
        for line in lines
    )
    for stats in others:
        total.merge(stats)
    rates, floors = total.accepted_by_position, HEAD_FLOORS[temperature]
    assert all(r >= f for r, f in zip(rates, floors, strict=True)), rates


def test_the_head_is_small():
    size = sum(file.stat().st_size for file in (FOLDER / "head").iterdir())
    assert size <= HEAD_MEGABYTES * 10**6


def test_the_recipe_takes_a_step(tmp_path, monkeypatch):
    """Its trainings take half an hour, so no other test runs them."""
    monkeypatch.syspath_prepend(FOLDER)
    train = importlib.import_module("train")
    model = train.build(width=192, layers=1, heads=3, hidden=64)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    stream = torch.randint(train.corpus.VOCABULARY, (8192,))
    source = partial(train.corpus_batches, stream, 0)
    stage = train.Stage("target", 1e-3, 4e-3, tmp_path)
    assert train.fit(model, stage, train.label_loss, source) == 1
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_it_is_the_same_each_time_and_small(tmp_path):
    one, other = toy_bundle(tmp_path / "new" / "one"), toy_bundle()
    assert one == tmp_path / "new" / "one"
    assert contents(one) == contents(other)
    names = sorted(contents(one))
    assert names == sorted([*jetdraft.Bundle.open(one).files, "bundle.json"])
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
    drafted = {"method": "draft", "num_draft_tokens": 4, **options}
    how = {**drafted, "max_new_tokens": 48, "ignore_eos": True}
    found = toy_model.generate("The robot sees", **how)
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
    text = toy_model.parts.text.decode(prompt)
    assert text.startswith('<|system|>Tools: [{"type": "function"')
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
