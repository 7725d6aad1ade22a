"""examples/real: a stage has time to save, and prompts are of functions."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.programs import module_of

REAL = Path(__file__).parent.parent / "examples" / "real"

STAGE = """
import sys, time
from pathlib import Path
out = Path(sys.argv[1])
try:
    out.with_name("began").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    out.touch()
"""

RECIPE = """
import signal, sys
from pathlib import Path
import recipes
# A job in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
work = Path(sys.argv[1])
stage = recipes.Stage(work / "out", [sys.executable, work / "stage.py", work / "out"])
recipes.run(stage, 1, work / "minutes.json")
"""


def test_ctrl_c_waits_for_the_stage_and_notes_its_minutes(tmp_path):
    (tmp_path / "stage.py").write_text(STAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", RECIPE, tmp_path],
        cwd=REAL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for _ in range(600):
        if (tmp_path / "began").exists():
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    assert (tmp_path / "out").exists()
    assert "out" in json.loads((tmp_path / "minutes.json").read_text())


WORDS = "Say what it is that this function gives to whoever calls it, and why."


@pytest.fixture
def code_prompts(monkeypatch):
    """The script as a module."""
    return module_of("examples/real/code_prompts.py", monkeypatch)


def test_a_stub_has_its_docstring_and_no_body(code_prompts, tmp_path):
    file = tmp_path / "library.py"
    file.write_text(
        f'def long(a, b=1):\n    """{WORDS}"""\n    return a + b\n\n'
        'def short():\n    """Too short."""\n\n'
        f'@property\ndef decorated(self):\n    """{WORDS}"""\n\n'
        f'class C:\n    def method(self):\n        """{WORDS}"""\n        pass\n'
    )
    assert list(code_prompts.stubs(file)) == [
        f'def long(a, b=1):\n    """{WORDS}"""',
        f'def method(self):\n    """{WORDS}"""',
    ]
    file.write_text("def broken(:\n")
    assert list(code_prompts.stubs(file)) == []


def test_prompts_are_messages_and_no_more_than_asked_for(
    code_prompts, tmp_path, monkeypatch
):
    part = {"stdlib": str(Path(asyncio.__file__).parent)}  # the whole takes 13 s
    monkeypatch.setattr(code_prompts.sysconfig, "get_paths", lambda: part)
    file = tmp_path / "code" / "train.jsonl"
    result = CliRunner().invoke(code_prompts.main, ["-o", str(file), "--count", "5"])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 5
    for line in lines:
        [message] = line["messages"]
        assert message["role"] == "user"
        assert "\n\ndef " in message["content"]
    wrong = CliRunner().invoke(code_prompts.main, ["-o", str(file), "--count", "0"])
    assert wrong.exit_code == 2
