"""Kills, full disks, vanished and read-only folders, a clock that jumps.

Whatever was being written is as it was or as it should become, never half of it.
Each case forks a process that never ran onnxruntime, so its threads are not missed.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from jetdraft.errors import JetdraftError
from jetdraft.testing import toy_bundle
from tests.fuzz import Fault, Subject
from tests.fuzz.jobs import JOBS, NEW, NOTHING, OLD, PROMPT, Job

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod")
CHANGES += ("os.listdir", "shutil.rmtree", "sqlite3.connect", "fcntl.flock")
"""Audit events around what changes the disk."""

NOBODY = 65534
MOUNTED = 256 * 1024 * 1024
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Extent(NamedTuple):
    """What an undisturbed run takes: events, seconds, bytes on the disk."""

    events: int
    seconds: float
    bytes: int


class Faults(Subject):
    """Disturbs jobs that write; a light subject leaves out those that need torch."""

    name = "faults"
    seconds = 300.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        folder.chmod(0o755)
        self.toy = toy_bundle(folder / "toy")
        self.place = folder / "case"
        kinds = [kind for kind in JOBS if not light or kind.seconds < 3]
        self.jobs = [kind(self.toy) for kind in kinds]
        self.right = _in_child(self._text)
        if not light:
            _in_child(self._checkpoint)
            import jetdraft.export.exporter
            import jetdraft.methods.stream.task  # noqa: F401  # imported once
        self._extents: dict[tuple[str, bool], Extent] = {}
        self.can_mount = _can_mount(folder)

    def run(self, draw: Random) -> str:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        if draw.random() < 0.1:
            return draw.choice((self._vanished, self._read_only, self._clock))(draw)
        job = draw.choices(self.jobs, [job.share for job in self.jobs])[0]
        old = draw.random() < 0.6 and job.replaces
        extent = self._extent(job, old)
        if draw.random() < 0.2:
            return self._full_disk(draw, job, old, extent)
        return self._killed(draw, job, old, extent)

    def _extent(self, job: Job, old: bool) -> Extent:
        if (job.name, old) not in self._extents:
            _in_child(lambda: job.prepare(self.place, old))
            before = _bytes_in(self.place)
            output = _in_child(lambda: _counted(lambda: job.run(self.place)))
            written = max(_bytes_in(self.place) - before, 4096)
            self._extents[job.name, old] = Extent(*json.loads(output), written)
            if self._state(job) != NEW:
                raise Fault(f"{job.name} was not disturbed, and wrote nothing")
            shutil.rmtree(self.place)
            self.place.mkdir()
        return self._extents[job.name, old]

    def _killed(self, draw: Random, job: Job, old: bool, extent: Extent) -> str:
        _in_child(lambda: job.prepare(self.place, old))
        how = draw.choice(("event", "event", "call", "time"))
        at = draw.random()

        def run() -> None:
            if how == "event":
                _kill_at_event(1 + int(at * extent.events))
            elif how == "call":
                # To count the calls takes long, and about 40 lie between two events.
                _kill_at_call(1 + int(40 * at * extent.events))
            else:
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, at * extent.seconds))
            job.run(self.place)

        code, output = _forked(run)
        if code not in (0, -signal.SIGKILL, -signal.SIGALRM):
            raise Fault(f"{job.name} failed before it was killed: {output}")
        self.facts["kills"] += code < 0
        self._check(job, old)
        if job.seconds < 3 and draw.random() < 0.3 and job.replaces:
            _in_child(lambda: job.run(self.place))
            if self._state(job) != NEW:
                raise Fault(f"{job.name} did not come about after a kill")
        return f"{job.name} {'killed' if code < 0 else 'ran'}"

    def _full_disk(self, draw: Random, job: Job, old: bool, extent: Extent) -> str:
        room = int(draw.random() * 1.1 * extent.bytes)
        on_disk = self.can_mount and draw.random() < 0.7
        limit = None if on_disk else max(room, 1)
        if on_disk:
            _mount(self.place, MOUNTED)
        try:
            _in_child(lambda: job.prepare(self.place, old))
            if on_disk:
                _mount(self.place, _bytes_in(self.place) + room, "remount,")
            code, output = _forked(lambda: _within(limit, lambda: job.run(self.place)))
            # A verb prints one line; what it printed before may have been progress.
            *_, last = ["", *output.strip().splitlines()]
            if code and not last.startswith("error: ") and "SAID: " not in last:
                raise Fault(f"{job.name} on a full disk: {output}")
            if on_disk:
                _mount(self.place, MOUNTED, "remount,")
            self._check(job, old)
        finally:
            if on_disk:
                subprocess.run(["umount", "-l", self.place], check=True)
        self.facts["full disks"] += 1
        return f"{job.name} {'refused on a full disk' if code else 'ran'}"

    def _check(self, job: Job, old: bool) -> None:
        state, allowed = self._state(job), {NEW, OLD if old else NOTHING}
        if job.stepwise:
            allowed |= {NOTHING, OLD} if not old else {OLD}
        if state not in allowed:
            raise Fault(f"{job.name} left {state!r} instead of one of {allowed}")

    def _state(self, job: Job) -> str:
        return _in_child(lambda: job.state(self.place))

    def _vanished(self, draw: Random) -> str:
        """A bundle's folder goes while it is loaded."""
        bundle = Path(shutil.copytree(self.toy, self.place / "bundle"))

        def use() -> str:
            import jetdraft

            with jetdraft.load(bundle, threads=1) as model:
                if draw.random() < 0.5:
                    model.generate(token_ids=PROMPT[:2], max_new_tokens=3)
                shutil.rmtree(bundle)
                for method in model.methods:
                    self._check_text(model, method)
                with suppress(JetdraftError):
                    self._check_text(model.twin(), "auto")
                with suppress(JetdraftError):
                    model.measure_again()
                    self._check_text(model, "auto")
            return "vanished folder"

        return _in_child(use)

    def _read_only(self, draw: Random) -> str:
        if os.getuid():
            return "skipped: only root can become another user"
        bundle = Path(shutil.copytree(self.toy, self.place / "bundle"))
        shutil.rmtree(bundle / "profiles", ignore_errors=True)
        self.place.chmod(0o755)

        def use() -> str:
            import jetdraft

            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            with jetdraft.load(bundle, threads=1) as model:
                self._check_text(model, draw.choice(model.methods))
                with suppress(JetdraftError):
                    model.save_prefix(bundle / "prefix.npz", PROMPT)
            with suppress(JetdraftError):
                jetdraft.load(bundle, threads=1, store=bundle / "store.sqlite")
            assert not (bundle / "profiles").exists()
            return "read-only folder"

        return _in_child(use)

    def _clock(self, draw: Random) -> str:
        """The time of day jumps by years."""
        jumps = Random(draw.random())

        def use() -> str:
            import jetdraft

            file = self.place / "store.sqlite"
            for _ in range(4):
                with mock.patch("time.time", _jumping(jumps)):
                    with jetdraft.load(self.toy, threads=1, store=file) as model:
                        for method in ("recall", "lookup", "auto"):
                            self._check_text(model, method, max_seconds=1000)
                    from tests.programs import jetdraft as command

                    listed = command("store", "list", self.toy, file)
                    if listed.exit_code not in (0, 2):
                        raise Fault(f"store list: {listed.output} {listed.exception!r}")
            return "clock that jumps"

        return _in_child(use)

    def _text(self) -> str:
        import jetdraft

        with jetdraft.load(self.toy, threads=1) as model:
            return _generated(model, "none")

    def _check_text(self, model: Any, method: str, **options: Any) -> None:
        text = _generated(model, method, **options)
        if text != self.right:
            raise Fault(f"{method} wrote {text!r} instead of {self.right!r}")

    def _checkpoint(self) -> None:
        from tests.tiny import llama_config, save_checkpoint

        config = llama_config(num_hidden_layers=2)
        save_checkpoint(self.toy.with_name("checkpoint"), config)


JUMPS = (0.0, -1e9, 1e9, -60.0, 86400.0 * 40, -1.7e9)
"""Seconds by which the clock is wrong."""


def _jumping(jumps: Random) -> Callable[[], float]:
    """A clock that is wrong, and sometimes jumps again while it is read."""
    now, offset = time.time, jumps.choice(JUMPS)

    def read() -> float:
        nonlocal offset
        if jumps.random() < 0.1:
            offset = jumps.choice(JUMPS)
        return now() + offset

    return read


def _generated(model: Any, method: str, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be kept
        result = model.generate(
            token_ids=PROMPT, method=method, max_new_tokens=12, **options
        )
    return str(result.token_ids)


def _in_child(work: Callable[[], Any]) -> str:
    """What `work` returns, in a fork; its error becomes a `Fault`."""
    code, output = _forked(work)
    if code:
        raise Fault(f"exit code {code}: {output}")
    return output


def _forked(work: Callable[[], Any]) -> tuple[int, str]:
    """The exit code of a fork that does `work`, and what it returned or printed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_run(work, writing))
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def _run(work: Callable[[], Any], writing: int) -> int:
    printed = StringIO()
    sys.stdout = sys.stderr = printed
    warnings.simplefilter("default")
    try:
        output, code = str(work()), 0
    except SystemExit as error:
        sys.setprofile(None)
        output = printed.getvalue()
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except JetdraftError as error:
        output, code = f"SAID: {' '.join(str(error).split())}", 1
    except OSError as error:
        files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
        # What these write is an attack's own.
        own = ("kills.py", "toy_drafter.py")
        is_own = error.errno in FULL and any(f.endswith(own) for f in files)
        output = traceback.format_exc() + ("SAID: the disk is full" if is_own else "")
        code = 1
    except BaseException:
        output, code = traceback.format_exc(), 1
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    with suppress(OSError):
        os.write(writing, output[-20_000:].encode("utf-8", "replace"))
    return code


def _counted(work: Callable[[], None]) -> str:
    events, start = 0, time.perf_counter()

    def audited(event: str, _arguments: object) -> None:
        nonlocal events
        events += event in CHANGES

    sys.addaudithook(audited)
    try:
        work()
    except SystemExit as ended:  # of a verb that is done
        if ended.code:
            raise
    return json.dumps([events, time.perf_counter() - start])


def _kill_at_event(at: int) -> None:
    seen = 0

    def audited(event: str, _arguments: object) -> None:
        nonlocal seen
        if event in CHANGES:
            seen += 1
            if seen >= at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audited)


def _kill_at_call(at: int) -> None:
    calls = 0

    def called(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event == "c_call"
        if calls >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(called)


def _within(most: int | None, work: Callable[[], None]) -> None:
    """Work while no file may become longer than `most` bytes."""
    if most is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    work()


def _bytes_in(folder: Path) -> int:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sum(4096 * (1 + file.stat().st_size // 4096) for file in files)


def _mount(place: Path, size: int, more: str = "") -> None:
    options = f"{more}size={max(size, 4096)},mode=755"
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
    subprocess.run(words, check=True, capture_output=True)


def _can_mount(folder: Path) -> bool:
    """Whether this process may mount a small disk."""
    place = folder / "mounted"
    place.mkdir()
    with suppress(subprocess.CalledProcessError, OSError):
        _mount(place, 4096)
        subprocess.run(["umount", place], check=True)
        return True
    return False
