import argparse
import ctypes
import glob
import importlib
import os
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from unittest.mock import MagicMock

import click
import pdoc
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from pdoc.doc import Class, Function, Module
from PIL import Image

import jetdraft
from jetdraft.cli import main
from jetdraft.export import request
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.testing import toy_bundle
from tests import cases
from tests.cli.test_help import COMMANDS
from tests.documents import (
    BOARD,
    DOCUMENTS,
    PYTHON,
    ROOT,
    SHELL,
    blocks,
    commands,
    phrases,
    words_of,
)
from tests.programs import module_of, printed, succeed
from tests.runtime import test_pictures as pictures
from tests.server.serving import started
from tests.tiny import exported

TRAINED = "stream ppd forecast draft block dflash eagle kangaroo glide falcon chimera"
MADE = "prompted forecasting with-falcon with-chimera with-glide with-adapter flan"
MADE += " long with-block with-head streams adapted"
# How commands begin that are held against the real parser but not run, and why.
ONLY_PARSED = {
    **{f"jetdraft train {n}": "takes minutes; tests/train" for n in TRAINED.split()},
    **{
        f"jetdraft generate bundles/{n}": "needs an export; tests/export, tests/train"
        for n in MADE.split()
    },
    "jetdraft export": "takes minutes and torch; tests/export, scripts/demo",
    "python -m tools.recipes": "exports a checkpoint several times; tests/tools",
    "jetdraft train use": "needs a drafter's checkpoint; tests/train",
    "jetdraft store clear bundles/pycode learned": "needs lessons; tests/cli",
    "jetdraft store list bundles/pycode learned": "needs lessons; tests/cli",
    "jetdraft bench bundles/faster": "needs a trained drafter; tests/train",
    "jetdraft transcribe bundles/whisper": "needs an export; tests/cli",
    "jetdraft embed bundles/embedding": "needs an export; tests/export",
    "jetdraft chat BUNDLE": "needs a chat template; tests/cli",
    "python tools/texts.py TARGET": "needs texts; tests/tools",
    "jetdraft doctor": "ends with 2 on a machine with faults; tests/devices",
    "python -m tools.forecast": "ends with 2, the toy is in float; tests/tools",
    "jetdraft serve": "does not end; test_a_client_asks_the_server starts it",
    "python benchmarks/": "takes minutes alone on a machine; tests/benchmarks",
    "python examples/real/fetch.py": "downloads gigabytes; tests/test_unpack.py",
    "python examples/tasks/tune.py folders/flan-t5-small": "takes minutes",
    "python examples/tasks/public.py": "downloads; tests/test_examples.py",
    "python examples/real/recipes.py": "trains for hours; its commands are held below",
}
# What no program of ours reads. `pip install` and `scripts/` have tests below.
OF_THE_SHELL = {"python3 -m venv", "source", "pip wheel", "scp"}
# How blocks begin that show a picture, a formula, a file or an output.
NO_COMMAND = {
    BOARD: ["sudo "],  # tests/test_public.py installs by them
    "docs/architecture.md": [
        *("cli/generate.py ", "row = root", "methods/<name>", "[build-system]")
    ],
    "docs/embedding.md": ['<tool_call>{"name"'],
    "docs/devices.md": ["ms(width) = ", "bandwidth 0.819"],
    "docs/quantization.md": ["target: q8_0"],
    "docs/streaming.md": ["rows      the root", '{"prompt": '],
    "docs/training.md": ["accelerate launch "],
}
# Packages that a benchmark compares with; its options need none of them.
PEERS = ["xllamacpp"]
# Options in sentences that belong to other programs.
OTHER_OPTIONS = {
    "--extra-index-url": "pip",
    "--force-reinstall": "pip",
    "--coverage": "tools/advice.py",
    "--text": "benchmarks/human_eval.py, tools/recipes",
    "--picture": "tools/recipes",
}
ROBOT = {"type": "object", "properties": {"go": {"type": "boolean"}}}
# What the programs of the documents take for granted, beside `model`.
NAMES = {"jetdraft": jetdraft, "schema": ROBOT, "lark": 'start: "left" | "right"'}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "benchmarks", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "TARGET").symlink_to(ROOT / "examples/pycode/target")
    (folder / "DRAFTER").symlink_to(ROOT / "examples/pycode/drafter")
    (folder / "Qwen3-1.7B").symlink_to(ROOT / "examples/pycode/target")
    (folder / "bundles").mkdir()
    toy_bundle(folder / "bundles/pycode")
    toy_bundle(folder / "bundle")
    pictures.save(folder / "eyes", "qwen3_vl")
    exported(folder / "eyes", folder / "bundles/eyes", capacity=256)
    Image.fromarray(pictures.picture(0)).save(folder / "meter.jpg")
    return folder


@pytest.fixture(scope="module")
def model(reader):
    with jetdraft.load(reader / "bundles/pycode", threads=1) as model:
        yield model


def parse(words):
    command, rest = main, list(words)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        command = command.get_command(click.Context(command), name)
        assert command, f"no command {name!r}"
    command.make_context(command.name, rest)


class ParsedError(Exception):
    """Ends a program when its words were read."""


def parse_script(file, words):
    package, *rest = words or [""]
    name = package if file == "-m" else Path(file).stem
    with pytest.MonkeyPatch.context() as patch:
        for peer in PEERS:
            patch.setitem(sys.modules, peer, MagicMock(**{f"{peer}.__file__": peer}))
        patch.setattr(ctypes, "CDLL", MagicMock())  # a peer's library
        if file == "-m":
            module, words = importlib.import_module(f"{package}.__main__"), rest
        else:
            module = module_of(file, patch)
        if isinstance(module.main, click.Command):
            # The files of a command that is not run need not be here.
            patch.setattr(click.Path, "convert", lambda self, value, *rest: Path(value))
            module.main.make_context(name, list(words))
        elif hasattr(module, "argparse"):
            parse_arguments(module.main, words, patch)
        else:
            assert not words, f"{file} takes no arguments"


def parse_arguments(program, words, patch):
    read = argparse.ArgumentParser.parse_args

    def stop(parser):
        read(parser, list(words))
        raise ParsedError

    patch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(ParsedError):
        program()


def run(words):
    expanded = [name for word in words for name in glob.glob(word) or [word]]
    if expanded[0] == "jetdraft":
        assert succeed(*expanded[1:]).output.strip()
        return
    printed(sys.executable, *expanded[1:])


def starts(words, beginnings):
    line = " ".join(words)
    return any(line.startswith(beginning) for beginning in beginnings)


def check_scripts(words):
    if words[:2] == ["pip", "install"]:
        [wanted] = re.findall(r"\[(.*)\]", words[-1])
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert {*wanted.split(",")} <= {*project["optional-dependencies"]}
        assert words[1:-1] == ["install"]
        return True
    if words[0].startswith("scripts/"):
        assert os.access(ROOT / words[0], os.X_OK)
        return True
    return starts(words, OF_THE_SHELL)


def test_every_block_is_a_command_a_program_or_known():
    assert not [
        (block.place, block.text.partition("\n")[0])
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language not in {SHELL, PYTHON}
        and not starts([block.text], NO_COMMAND.get(document, ()))
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_do_what_they_say(document, reader, monkeypatch):
    monkeypatch.chdir(reader)
    for place, words in commands(document):
        try:
            if check_scripts(words):
                continue
            if not starts(words, ONLY_PARSED):
                run(words)
            elif words[0] == "jetdraft":
                parse(words[1:])
            else:
                parse_script(words[1], words[2:])
        except BaseException as error:
            error.add_note(f"{place}: {' '.join(words)}")
            raise


def test_recipes_are_commands_that_exist(tmp_path, monkeypatch):
    """They take hours, so nobody should learn at the end that an option has changed."""
    monkeypatch.syspath_prepend(ROOT / "examples/pycode")
    recipes = module_of("examples/real/recipes.py", monkeypatch)
    inputs = recipes.Inputs(tmp_path, tmp_path, tmp_path, 1)
    kinds = [(make, inputs) for make in recipes.NAMES.values()]
    on_gpu = replace(inputs, gpu=True)
    kinds += [(recipes.NAMES[name], on_gpu) for name in recipes.FOR_A_GPU]
    for make, given in kinds:
        for stage in make(given):
            _, program, *words = map(str, stage.command)
            if program == "-m":
                parse(words[1:])
            else:
                parse_script(program, words)


def test_each_reason_has_a_command():
    lines = [words for document in DOCUMENTS for _, words in commands(document)]
    for beginning in [*ONLY_PARSED, *OF_THE_SHELL]:
        assert any(starts(words, [beginning]) for words in lines), beginning


def option_names(command):
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_in_sentences_exist(document):
    known = {name for verb in COMMANDS.values() for name in option_names(verb)}
    for phrase in phrases(document):
        of_verb = known | {*OTHER_OPTIONS}
        if verb := re.match(r"jetdraft (train \w+|store \w+|[a-z]+)", phrase):
            if verb[1] in ("train NAME", "train", "store"):
                continue
            assert verb[1] in COMMANDS, phrase
            of_verb = option_names(COMMANDS[verb[1]])
        elif not phrase.startswith("--"):
            continue
        assert {w for w in phrase.split() if w.startswith("--")} <= of_verb, phrase


@pytest.mark.parametrize("document", DOCUMENTS)
def test_benchmarks_in_sentences_exist(document):
    for phrase in phrases(document):
        if phrase.startswith("python "):
            _, file, *words = words_of(phrase)
            parse_script(file, words)


PROGRAMS = {
    block.place: block
    for document in DOCUMENTS
    for block in blocks(document)
    if block.language == PYTHON
}
CLIENT = next(place for place in PROGRAMS if place.startswith("docs/server.md"))


@pytest.mark.parametrize("place", [place for place in PROGRAMS if place != CLIENT])
def test_programs_run(place, reader, model, monkeypatch):
    monkeypatch.chdir(reader)
    monkeypatch.syspath_prepend(ROOT / "tests/plugins/package")
    names = {**NAMES, "model": model}
    exec(compile(PROGRAMS[place].text, place, "exec"), names)
    assert names.keys() > {*NAMES, "model"} or "model.generate" in PROGRAMS[place].text


def test_a_client_asks_the_server(reader, monkeypatch):
    monkeypatch.chdir(reader)
    [words] = [words for _, words in commands("docs/server.md") if "serve" in words]
    with started(*words[2:]) as (_, address):
        text = PROGRAMS[CLIENT].text.replace("http://127.0.0.1:8080", address)
        assert address in text
        names = {}
        exec(compile(f"{text}\nclient.close()", CLIENT, "exec"), names)
    assert names["client"].is_closed()


def table(file: str) -> dict[str, list[str]]:
    """The other cells of each row of a file's table of methods, by method."""
    lines = (ROOT / file).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| method | dra"))
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name.strip("`")] = cells
    return rows


def test_every_method_has_its_summary_and_its_own_options():
    rows = table("docs/drafting.md")
    assert list(rows) == [NONE, *methods(), AUTO]
    shared = MethodOptions.option_names()
    for name, method in methods().items():
        own = [key for key in method.options.option_names() if key not in shared]
        keys = ", ".join(f"`{key}`" for key in own)
        assert rows[name] == [method.summary, keys], name


def test_every_result_is_named_by_a_page():
    pages = [page for page in ROOT.rglob("*.md") if ".venv" not in page.parts]
    text = "\n".join(page.read_text() for page in pages)
    names = {*re.findall(r"[\w.*-]+\.json\b", text)}
    results = [file.name for file in (ROOT / "benchmarks/results").iterdir()]
    assert not [f for f in results if not any(fnmatch(f, name) for name in names)]


SCRIPT = Path(__file__).parents[1] / "scripts" / "site"
[COMMAND] = re.findall(
    r"pdoc --output-directory \S+ (.+)", SCRIPT.read_text().replace("\\\n", "")
)
MODULES = shlex.split(COMMAND)
# The one public name that is a package too, with a page of its own.
EXPORT = "export"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder


@cases(
    "page, names",
    ("jetdraft", [name for name in jetdraft.__all__ if name != EXPORT]),
    ("jetdraft", ["Model.generate", "Stream.cancel", "Stats.tokens_per_pass"]),
    ("jetdraft/errors", ["JetdraftError", "OptionError"]),
    ("jetdraft/export/request", [EXPORT]),
    ("jetdraft/methods", ["Method", "Proposer.propose", "registered"]),
    ("jetdraft/recipe", ["Recipe.parse"]),
)
def test_public_names_are_shown(pages, page, names):
    shown = (pages / f"{page}.html").read_text()
    assert [name for name in names if f'id="{name}"' not in shown] == []


def test_the_first_page_leads_to_the_others(pages):
    assert 'href="jetdraft/export.html"' in (pages / "jetdraft.html").read_text()
    assert "jetdraft" in MODULES
    shown = {file.relative_to(pages).with_suffix("") for file in pages.rglob("*.html")}
    assert {Path(name.replace(".", "/")) for name in MODULES if name[0] != "!"} <= shown


def test_everything_that_can_be_called_has_a_docstring():
    # pdoc leaves out the docstrings that dataclasses make up.
    names = [name for name in jetdraft.__all__ if name != EXPORT]
    public = [Module(jetdraft).get(name) for name in names]
    public.append(Module(request).get(EXPORT))
    methods = [
        member
        for one in public
        if isinstance(one, Class)
        for member in one.own_members
        if isinstance(member, Function) and not member.name.startswith("_")
    ]
    assert methods
    assert [one.fullname for one in public + methods if not one.docstring] == []


HOOK = "deploy/site/pages.py"


def built(root, output):
    config = load_config(str(root / "mkdocs.yml"), site_dir=str(output), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return output


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    for folder in ("docs", "deploy/site", "figures", "build/reference"):
        (root / folder).mkdir(parents=True)
    settings = (ROOT / "mkdocs.yml").read_text()
    (root / "mkdocs.yml").write_text(settings.partition("nav:\n")[0])
    shutil.copy(ROOT / HOOK, root / HOOK)
    (root / "README.md").write_text("# First\n\n[page](docs/page.md#part)\n")
    (root / "docs/page.md").write_text(
        "# Page\n\n## Part\n\n[first](../README.md) [all](../figures) "
        "[figure](../figures/a.json)\n"
    )
    (root / "figures/a.json").write_text("{}")
    (root / "build/reference/jetdraft.html").write_text("<p>reference</p>")
    return root


def links(page):
    return re.findall(r'href="([^"#:]+\.(?:html|json)[^"]*)"', page.read_text())


def test_links_lead_out_of_the_documents(repository, tmp_path):
    site = built(repository, tmp_path / "site")
    assert "docs/page.html#part" in links(site / "index.html")
    shown = links(site / "docs/page.html")
    assert {"../index.html", "../figures/index.html", "../figures/a.json"} <= {*shown}
    assert "a.json" in links(site / "figures/index.html")
    assert (site / "figures/a.json").read_text() == "{}"
    assert (site / "reference/jetdraft.html").exists()


@cases("link", "docs/nothing.md", "docs/page.md#nothing", "nothing.json", "nothing")
def test_a_link_that_leads_nowhere_is_an_error(repository, tmp_path, link):
    (repository / "README.md").write_text(f"# First\n\n[broken]({link})\n")
    with pytest.raises(Abort):
        built(repository, tmp_path / "site")
