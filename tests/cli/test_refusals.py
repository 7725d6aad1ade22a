import json
import os
import shlex
from pathlib import Path

import click
import pytest

from jetdraft.bundle import MANIFEST
from jetdraft.testing import toy_bundle
from tests import cases
from tests.cli.test_help import COMMANDS, options
from tests.programs import assert_refused, jetdraft

GENERATE = "generate {bundle} -p ' the self' -n 24 -t 1 "
BENCH = "bench {bundle} --max-new-tokens=12 --repeats=2 --threads=1 "
SERVE = "serve --port 0 "
# Files in the folder {tmp}.
FILES = {"text": b"text", "binary": b"\xff\xfe\xff", "latin": b"\xff", "no-json": b"{"}
FILES |= {"wrong-type": b'{"properties": {"a": {"type": "x"}}}'}
FILES |= {"wrong-grammar": b"start: /a/ )"}
REFUSED = [
    ("generate {bundle}", "give one prompt: TEXT"),
    ("generate {bundle} -p text --prompt-file {tmp}/text", "give one prompt: TEXT"),
    ("generate {bundle} --prompt-file {tmp}/nothing", "cannot read"),
    ("generate {bundle} --prompt-file {tmp}/binary", "UTF-8"),
    ("generate {bundle} -p ''", "the prompt is empty"),
    ("generate {toy} -p ''", "the prompt is empty"),
    ("generate {toy} -p '' --raw", "the prompt is empty"),
    # What the shell's invalid bytes become in an argument.
    ("generate {bundle} -p 'def \udcff' -n 24 -t 1", "UTF-8"),
    ("generate {toy} -p 'def \udcff' -n 24 -t 1", "UTF-8"),
    ("generate {toy} -p 'def \udcff' --raw -n 24 -t 1", "UTF-8"),
    ("generate {bundle} -n 24 -t 1 -p " + "x" * 257, ("257", "256")),
    (GENERATE + "--stop ''", "stop string is empty"),
    (GENERATE + "--repetition-penalty -1", "repetition penalty"),
    (GENERATE + "--json-schema {tmp}/no-json", "not JSON"),
    (GENERATE + "--json-schema {tmp}/wrong-type", "/properties/a"),
    (GENERATE + "--grammar {tmp}/wrong-grammar", "1(12)"),
    (GENERATE + "--grammar {tmp}/nothing", "cannot read"),
    (GENERATE + "--grammar {tmp}/latin", "cannot read"),
    (GENERATE + "--provider=abacus", "unknown provider 'abacus'"),
    (GENERATE + "--provider=cuda", "or export with --provider cuda"),
    (GENERATE + "--provider=tensorrt", "or export with --provider tensorrt"),
    (GENERATE + "--drafter-provider=abacus", "unknown provider 'abacus'"),
    (GENERATE + "--drafter-provider off --method draft", "no method 'draft'"),
    (GENERATE + "--method magic", ("'magic'", "auto, none, lookup")),
    (
        "generate {lone} -p x --method draft",
        ("no method 'draft'", "export with --drafter"),
    ),
    ("generate {tmp}/nothing -p x", "no bundle at"),
    ("generate {tmp} -p x", "has no bundle.json"),
    ("train stream {tmp}/nothing --data {tmp}/text -o {tmp}/out", "no checkpoint at"),
    ("check --no-run {tmp}/nothing", "no bundle at"),
    ("check --no-run {tmp}", "has no bundle.json"),
    ("check {bundle} --provider abacus", "choose tensorrt, cuda, webgpu, cpu"),
    (
        "plan {bundle} --device orin-nano-4gb",
        ("is a bundle, and a plan reads checkpoints", "was exported from"),
    ),
    ("bench {lone} --methods draft", ("'draft'", "auto, none, lookup")),
    (BENCH + "--prompts {tmp}/nothing", "cannot read"),
    (BENCH + "--prompts {tmp}/latin", "UTF-8"),
    (BENCH + "-o {tmp}/no/out.json", "out.json"),
    (BENCH + "-o /dev/null", "a device"),
    (SERVE + "{toy} --host 0.0.0.0", "--api-key"),
    (SERVE + "{toy} --host 256.1.1.1 --api-key k", "cannot listen"),
    (SERVE + "{tmp}/nothing", "no bundle at"),
    (SERVE + "{toy} --method stream", "no method"),
    (SERVE + "{toy} --models 0", "--models"),
    (SERVE + "{toy} --max-wait nan", "max wait nan is out of range; give more than 0"),
    (SERVE + "{tmp} --allow-origin *", "origin"),
    (SERVE + "{tmp} --allow-origin localhost:3000", "origin"),
    (SERVE + "{tmp} --allow-origin http://localhost:3000/", "origin"),
    *((line, "") for line in ("magic", "--magic", "generate")),
]
RANGES = {
    "generate": [
        *("num-draft-tokens=0", "num-draft-tokens=-1", "num-draft-tokens=16"),
        *("num-draft-tokens=two", "temperature=-0.1", "temperature=nan"),
        *("temperature=inf", "top-p=0", "top-p=1.1", "top-p=nan", "top-k=-1"),
        *("min-p=-0.1", "min-p=1.1", "max-new-tokens=0", "threads=0", "seed=x"),
    ],
    "bench": [
        *("lengths=0", "lengths=1,16", "lengths=two", "lengths=", "repeats=0"),
        *("max-new-tokens=0", "temperature=-1", "top-p=2", "methods=magic"),
        *("methods=none,,lookup", "methods=", "provider=abacus", "threads=0"),
    ],
}
NO_INTEGERS = ['"text"', "5", "[1.5]", "[true]", "[[1]]", "[[1], [2, 3]]"]
NO_INTEGERS += [f"[{'9' * 20}]"]
PROMPTS = [
    ("", "no prompts"),
    ("not json", "not a prompt"),
    ("[1, 2]", "not a prompt"),
    ("{}", "give either"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"token_ids": []}', "prompt is empty"),
    ('{"prompt": "x", "token_ids": [1]}', "give either"),
    ('{"prompt": 5}', "text"),
    *((f'{{"token_ids": {ids}}}', "integers") for ids in NO_INTEGERS),
    ('{"token_ids": [288]}', "288"),
    ('{"token_ids": [-1]}', "-1"),
    (json.dumps({"token_ids": [1] * 257}), "256"),
    ("[" * 100_000, "not a prompt"),
]


@pytest.fixture(scope="module")
def places(bundle, lone_bundle, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("refused")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    toy = toy_bundle(tmp_path_factory.mktemp("toy") / "bundle")
    return {"bundle": bundle, "lone": lone_bundle, "toy": toy, "tmp": folder}


def run(line: str, places: dict[str, Path], **more: object):
    return jetdraft(*(word.format(**places) for word in shlex.split(line)), **more)


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_a_line_is_refused(places, line, said):
    assert_refused(run(line, places), *([said] if isinstance(said, str) else said))


@cases("verb, option", *((verb, o) for verb, found in RANGES.items() for o in found))
def test_option_out_of_range_is_refused(places, verb, option):
    prompt = " -p x" if verb == "generate" else ""
    result = run(f"{verb} {{bundle}}{prompt} --{option}", places)
    name = option.partition("=")[0]
    said = (name, name.replace("-", " ")) if verb == "generate" else ("",)
    assert_refused(result, *said, of=any)


@cases(
    "option, said",
    ("stop-threshold=0.5", "stop-threshold needs a stopping rule"),
    ("tree-parents=0,1", "tree=static and tree-parents go together"),
    ("none=1", "stopping, stop-threshold"),
    ("verifier=typical", "add --no-exact\n"),
    ("user=ann", "give --store FILE too"),
    ("tree=my_tree", "unknown tree 'my_tree'"),
)
def test_options_of_drafting_are_named_as_they_are_typed(places, option, said):
    line = "generate {bundle} -p def --method draft --drafting "
    assert_refused(run(line + option, places), said)


@pytest.mark.parametrize(("text", "said"), PROMPTS, ids=range(len(PROMPTS)))
def test_bad_prompts_are_refused(bundle, tmp_path, text, said):
    (tmp_path / "prompts.jsonl").write_text(text)
    flags = ("--prompts", tmp_path / "prompts.jsonl", "--threads=1")
    assert_refused(jetdraft("bench", bundle, *flags), said)


@cases(
    "stdin, said",
    ("", "the prompt is empty"),
    (b"\xff\xfe\xff", "UTF-8"),
    ("a" * 1001, "more th"),
)
def test_standard_input_that_is_no_prompt(bundle, monkeypatch, stdin, said):
    monkeypatch.setattr("jetdraft.cli.console.MAX_INPUT_CHARS", 1000)
    assert_refused(jetdraft("generate", bundle, "-p", "-", stdin=stdin), said)


@pytest.mark.parametrize("option", ["--prompt-file", "--json-schema", "--grammar"])
def test_a_device_that_never_ends_is_not_read_to_its_end(bundle, monkeypatch, option):
    monkeypatch.setattr("jetdraft.cli.console.MAX_INPUT_CHARS", 1000)
    result = jetdraft("generate", bundle, option, "/dev/zero")
    assert_refused(result, "/dev/zero has more than 1000 characters")


@cases(
    "name, damage, said",
    ("drafter.onnx", Path.unlink, "drafter.onnx is missing"),
    ("target.onnx.data", lambda file: os.truncate(file, 9), "target.onnx.data has"),
    (MANIFEST, lambda file: file.write_text("{}"), "is damaged; export or copy"),
)
def test_a_damaged_bundle_is_refused(copied_bundle, name, damage, said):
    """A few of the damages of test_bundle.py, as every verb says them."""
    damage(copied_bundle / name)
    for line in ("generate {} -p x", "bench {}", "check --no-run {}"):
        assert_refused(jetdraft(*line.format(copied_bundle).split()), said)


WRITTEN = {"--output", "--cache"}
PLACES = [
    (words, flag)
    for words, command in COMMANDS.items()
    for option in options(command)
    for flag in WRITTEN & {*option.opts}
]


def given(words, flag, bundle, nothing):
    for param in COMMANDS[words].params:
        value = bundle if param.name == "bundle" else nothing
        if isinstance(param, click.Argument):
            yield value
        elif param.required and flag not in param.opts:
            yield from (param.opts[-1], value)


def test_there_are_such_options():
    verbs = {words.split()[0] for words, _ in PLACES}
    assert verbs == {"export", "bench", "train", "embed"}
    assert len([flag for words, flag in PLACES if "train" in words]) >= 13


@pytest.mark.parametrize(("words", "flag"), PLACES)
@pytest.mark.parametrize("place", ["/proc/out", "file/out"])
def test_it_is_refused_first(words, flag, place, bundle, tmp_path, monkeypatch):
    """Before it says that the target is missing, which would be read first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    needed = list(given(words, flag, bundle, "nothing"))
    if flag == "--cache":
        needed += ["-o", "out"]
    result = jetdraft(*words.split(), *needed, flag, place)
    assert_refused(result, place, "choose another" if place[0] == "/" else "")
    assert os.listdir(tmp_path) == ["file"]
