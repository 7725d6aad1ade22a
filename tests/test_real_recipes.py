"""examples/real/recipes.py: a stage that is interrupted has the time to save."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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
