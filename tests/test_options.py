"""An annotated field is a flag, a keyword and a row of the reference."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

import click
import pytest
from click.testing import CliRunner

import jetdraft
from jetdraft.cli.command import Command, record_flags
from jetdraft.cli.export import command as export_command
from jetdraft.export.request import ExportRequest, export
from jetdraft.options import Flag, declared_options, takes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of every kind."""

    name: Annotated[str, Flag("runtime", "A name.")]
    size: Annotated[int, Flag("runtime", "A size.", least=1, most=9)] = 4
    share: Annotated[float | None, Flag("runtime", "A share.", above=0)] = None
    bits: Annotated[int | None, Flag("runtime", "Bits.", choices=(4, 8))] = None
    files: Annotated[tuple[Path, ...], Flag("runtime", "Files.")] = ()
    exact: Annotated[bool, Flag("runtime", "Exact.")] = True
    fast: Annotated[bool, Flag("runtime", "Fast.", names=("-f", "--fast"))] = False
    inner: int = 7


class Given(TypedDict, total=False):
    """Options that may be left out."""

    seed: Annotated[int | None, Flag("runtime", "A seed.")]
    other: int


def run(record, *words, **more):
    """What a command gets for its flags, or what it says."""
    got = []

    @click.command("c", cls=Command)
    @record_flags("record", record, **more)
    def command(record):
        got.append(record)

    result = CliRunner().invoke(command, words)
    return got[0] if got else result.output


def test_flags_become_the_record():
    assert run(Settings, "--name", "a") == Settings(name="a")
    words = "--name a --size 9 --share 0.5 --bits 8 --files x --files y --no-exact -f"
    assert run(Settings, *words.split()) == Settings(
        name="a", size=9, share=0.5, bits=8, files=(Path("x"), Path("y")),
        exact=False, fast=True,
    )  # fmt: skip
    assert run(Settings, only=("name",), name="b") == Settings(name="b")
    assert run(Given) == {}
    assert run(Given, "--seed", "3") == {"seed": 3}


@pytest.mark.parametrize(
    "words",
    ["", "--name a --size 10", "--name a --size 0", "--name a --share 0",
     "--name a --bits 5", "--name a --inner 3"],
)  # fmt: skip
def test_wrong_flags_are_refused(words):
    assert "Error: " in run(Settings, *words.split())


def test_keywords_become_the_record():
    @takes(Settings)
    def show(settings: Settings) -> str:
        """Show it."""
        return f"{settings.name} {settings.size}"

    assert show(name="a", size=2) == "a 2"
    assert list(inspect.signature(show).parameters) == list(Settings.__annotations__)
    assert inspect.getdoc(show).startswith("Show it.\n\n- `name`: A name.\n- `size`")
    with pytest.raises(TypeError):
        show(nam="a")


def test_an_option_of_export_is_declared_once():
    names = {option.name for option in declared_options(ExportRequest)}
    flags = {param.name for param in export_command.params} - {"target", "output"}
    assert flags == names
    assert names < set(inspect.signature(jetdraft.export).parameters)
    assert all(f"- `{name}`: " in export.__doc__ for name in names)
