"""Kill a writer of a bundle at every point: python -m tests.kills FOLDER [OLD]."""

import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # Not wanted here, and forking is faster without it.
    sys.modules["onnxruntime"] = None  # type: ignore[assignment]

from jetdraft import bundle, manifest
from jetdraft.contracts.step_contract import StepContract

CONTRACT = StepContract(100, 32, 8, "float32", ((1, 16),))


def fill(folder: Path, text: str, names: tuple[str, ...] = ("target",)) -> None:
    graphs = {}
    for name in names:
        (folder / f"{name}.onnx").write_text(f"{name} {text}")
        (folder / f"{name}.onnx.data").write_text(text * 10)
        graphs[name] = manifest.GraphEntry(f"{name}.onnx", CONTRACT, {}, "here", 1)
    bundle.Bundle(
        path=folder, graphs=graphs, eos_token_ids=(0,), provider="cpu", tools={}
    ).save()


def make(folder: Path, text: str = "made") -> Path:
    folder.mkdir()
    fill(folder, text, ("target", "drafter"))
    return folder


def content(folder: Path) -> str:
    return (bundle.Bundle.open(folder).path / "target.onnx").read_text().split()[1]


def kill_at_call(at: int) -> None:
    """Let this process be killed at its `at`-th call of a C function from now on."""
    calls = 0

    def called(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "c_call"
        if calls >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(called)


def die(work: Callable[[], object], at: int) -> bool:
    """Kill a child at its `at`-th call of a C function; True if it finished before."""
    child = os.fork()
    if child == 0:
        try:
            kill_at_call(at)
            work()
            sys.setprofile(None)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), "the child failed"
    return code == 0


def write_and_die(output: Path, text: str, at: int) -> bool:
    def write() -> None:
        with manifest.writing(output) as folder:
            fill(folder, text)

    return die(write, at)


def state(place: Path) -> tuple:
    """All that is on the disk below a folder, but for names drawn by chance."""
    return tuple(
        (
            re.sub("partial-.*?(?=/|$)", "partial", str(path.relative_to(place))),
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(place.rglob("*"))
    )


def kill_everywhere(folder: Path, before: str | None) -> tuple[int, list[str | None]]:
    """The kills until a child survived, and what the output held, each state once."""
    at, seen, finished, known = 0, [], False, set()
    while not finished:
        at += 1
        place = folder / str(at)
        place.mkdir()
        output = place / "bundle"
        if before is not None:
            make(output, before)
        finished = write_and_die(output, "new", at)
        if (left := state(place)) in known:
            shutil.rmtree(place)
            continue
        known.add(left)
        found = content(output) if output.exists() else None
        if found not in seen:
            seen.append(found)

        with manifest.writing(output) as again:
            fill(again, "later")
        assert content(output) == "later", f"killed at {at}"
        assert os.listdir(place) == ["bundle"], f"killed at {at}"
        shutil.rmtree(place)
    return at - 1, seen


if __name__ == "__main__":
    # A kill loses nothing that only waits to reach the disk, and waiting takes time.
    os.fsync = lambda file: None
    kills, found = kill_everywhere(Path(sys.argv[1]), (sys.argv[2:] or [None])[0])
    print(json.dumps({"kills": kills, "found": found}))
