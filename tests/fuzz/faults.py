"""Kills, full disks, lost folders: what is written is old or new, never half."""

import errno
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from jetdraft.errors import JetdraftError
from jetdraft.files import write_text
from jetdraft.testing import toy_bundle
from tests.fuzz import Fault, Subject
from tests.kills import kill_at_call

PROMPT = [5, 8, 9, 40, 41]
CORPUS = "The robot sees a box. The robot sees the ball. " * 20
NOTHING, OLD, NEW = "nothing", "old", "new"

# Only jobs import onnxruntime, in forks: its threads do not survive a fork.


class Job:
    """Writes `result` in about `seconds`; `replaces` an old one, or adds `stepwise`."""

    name = result = ""
    share, seconds = 10, 1.0
    replaces, stepwise = True, False

    def __init__(self, toy: Path) -> None:
        self.toy = toy
        self.checkpoint = toy.with_name("checkpoint")

    def prepare(self, place: Path, old: bool) -> None:
        """Fill an empty folder; with `old` there is a result of an earlier run."""
        if old:
            self.run_before(place)

    def run_before(self, place: Path) -> None:
        """The earlier run."""

    def run(self, place: Path) -> None:
        """Write the new result."""

    def state(self, place: Path) -> str:
        """What there is; raises if that is neither nothing, nor old, nor new."""
        file = place / self.result
        return self.look(file) if file.exists() else NOTHING

    def look(self, file: Path) -> str:
        """What kind of result there is."""


class Export(Job):
    name, result = "export", "bundle"
    share, seconds = 3, 8.0

    def run_before(self, place):
        shutil.copytree(self.toy, place / "bundle")

    def run(self, place):
        _verb("export", self.checkpoint, "-o", place / "bundle", "--capacity", "64")

    def look(self, file):
        with _model(file) as model:
            _generate(model)
            return OLD if model.bundle.drafter is not None else NEW


class Table(Job):
    name, result = "table", "table.npz"
    replaces = False

    def prepare(self, place, old):
        (place / "corpus").write_text(CORPUS)

    def run(self, place):
        command = ("train", "trigram", place / "corpus", "--bundle", self.toy)
        _verb(*command, "-o", place / "table.npz")

    def look(self, file):
        from jetdraft.bundle import Bundle
        from jetdraft.methods.trigram.method import Counts

        toy = Bundle.open(self.toy)
        Counts.load(file, toy.tokenizer_sha256, toy.target.contract.vocab_size)
        return NEW


class Tune(Job):
    name, result = "tune", "bundle"
    share, seconds = 4, 3.0
    stepwise = True

    def prepare(self, place, old):
        shutil.copytree(self.toy, place / "bundle")
        if old:
            self.run(place)

    def run(self, place):
        _verb("tune", place / "bundle", "-t", "1")

    def look(self, file):
        with _model(file, strict=True) as model:
            _generate(model)
            return NOTHING if model.parts.profiles.read_tuning() is None else NEW


class Store(Job):
    name, result = "store", "store.sqlite"
    stepwise = True

    def run_before(self, place):
        self._generate(place, 2)

    def run(self, place):
        self._generate(place, 10)

    def _generate(self, place, count):
        with _model(self.toy, store=place / "store.sqlite") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], max_new_tokens=6)

    def look(self, file):
        with _model(self.toy, strict=True, store=file) as model:
            _generate(model)
        with closing(sqlite3.connect(file)) as database:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
            [(count,)] = database.execute("select count(*) from entries")
        return NEW if count > 3 else OLD


class Learn(Job):
    name, result = "learn", "learned/lessons.sqlite"
    stepwise = True

    def run_before(self, place):
        self._use(place, 2)

    def run(self, place):
        from tests.toy_drafter import put_on_trial, random_arrays

        self._use(place, 5)
        put_on_trial(place / "learned", self.toy, random_arrays(self.toy))
        self._use(place, 15)

    def _use(self, place, count):
        drafted = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 40}
        with _model(self.toy, learn=place / "learned") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], **drafted)

    def look(self, file):
        with _model(self.toy, strict=True, learn=file.parent) as model:
            _generate(model, method="draft")
            return NEW if len(model.parts.learning.lessons.read()) > 3 else OLD


class SavedPrefix(Job):
    name, result = "prefix", "prefix.npz"

    def run_before(self, place):
        self._save(place, PROMPT[:3])

    def run(self, place):
        self._save(place, PROMPT * 4)

    def _save(self, place, prompt):
        with _model(self.toy) as model:
            model.save_prefix(place / "prefix.npz", prompt)

    def look(self, file):
        options = {"token_ids": PROMPT * 4, "max_new_tokens": 6, "method": "none"}
        with _model(self.toy) as model:
            model.load_prefix(file)
            result = model.generate(**options)
            kept = result.stats.reused_tokens
            model.forget()
            assert model.generate(**options).text == result.text
        assert kept in (3, len(PROMPT * 4) - 1), f"{kept} rows were kept"
        return OLD if kept == 3 else NEW


class Talk(Job):
    name, result = "conversation", "talk.json"
    share = 3

    def run_before(self, place):
        write_text(place / "talk.json", '["old"]')

    def run(self, place):
        write_text(place / "talk.json", json.dumps(["new", "x" * 20_000]))

    def look(self, file):
        return str(json.loads(file.read_text())[0])


class Streams(Job):
    name, result = "streams", "streamed"
    share, seconds = 1, 25.0
    replaces = False

    def prepare(self, place, old):
        (place / "corpus").write_text(CORPUS * 4)

    def run(self, place):
        options = ("--steps", "3", "--batch-size", "1", "--sequence-length", "32")
        options += ("--layers", "1", "--gamma", "2", "--lora-rank", "2")
        command = ("train", "stream", self.checkpoint, "--data", place / "corpus")
        _verb(*command, *options, "-o", place / "streamed")

    def look(self, file):
        from safetensors.numpy import load_file

        if (file / "streams.json").exists() and not (file / "training.pt").exists():
            assert json.loads((file / "streams.json").read_text())
            assert load_file(file / "streams.safetensors")
            return NEW
        with suppress(SystemExit):  # continues where it was
            self.run(file.parent)
        assert not (file / "training.pt").exists()
        return NEW


JOBS: tuple[type[Job], ...] = (
    *(Export, Table, Tune, Store, Learn, SavedPrefix, Talk, Streams),
)


@contextmanager
def _model(bundle: Path, strict: bool = False, **options: Any) -> Iterator[Any]:
    """A loaded model; damage is said in warnings, which are errors if `strict`."""
    import jetdraft

    with warnings.catch_warnings():
        if strict:
            warnings.simplefilter("error")
        with jetdraft.load(bundle, threads=1, **options) as model:
            yield model


def _generate(model: Any, **options: Any) -> None:
    model.generate(token_ids=PROMPT, max_new_tokens=4, **options)


def _verb(*words: object) -> None:
    from jetdraft.cli import main

    main([str(word) for word in words], standalone_mode=True)


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
                kill_at_call(1 + int(40 * at * extent.events))
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


# Seconds by which the clock is wrong.
JUMPS = (0.0, -1e9, 1e9, -60.0, 86400.0 * 40, -1.7e9)


def _jumping(jumps: Random) -> Callable[[], float]:
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
        is_own = error.errno in FULL and any("toy_drafter.py" in f for f in files)
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


def _within(most: int | None, work: Callable[[], None]) -> None:
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
    place = folder / "mounted"
    place.mkdir()
    with suppress(subprocess.CalledProcessError, OSError):
        _mount(place, 4096)
        subprocess.run(["umount", place], check=True)
        return True
    return False
