"""Runs subjects for long, each in a process of its own that may crash or hang.

The process says which case it begins, so a case that kills it is known. A fault is
printed with the command that repeats it, and the run continues behind it.
"""

import argparse
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz import BLOCK, SUBJECTS, Subject, case, place_of, subject_named

# A process with more memory counts as a fault.
MAX_BYTES = 6_000_000_000
# Faults of one kind that are printed.
SHOWN = 3
# The first word of the process that tries cases, and is watched.
WORK = "work"
# Seconds in which a subject must be ready, and in which it must close.
STARTING, CLOSING = 300.0, 30.0


def work(name: str, first: int, count: int, light: bool) -> None:
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed is no message

    def tell(kind: str, number: int, **more: Any) -> None:
        print(json.dumps({"kind": kind, "number": number, **more}), file=channel)

    with (
        TemporaryDirectory(prefix=f"jetdraft-{name}-") as folder,
        subject_named(name)(Path(folder), light) as subject,
    ):
        for number in range(first, first + count):
            if (number - first) % BLOCK == 0:
                subject.refresh()
            tell("begin", number)
            _try(subject, number, tell)
        tell("begin", first + count)
        try:
            subject.finish()
        except Exception as error:
            _tell_fault(error, first + count, tell)
        tell("done", first + count, facts=subject.facts)


def _try(subject: Subject, number: int, tell: Any) -> None:
    try:
        outcome = subject.run(case(subject, number))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        _tell_fault(error, number, tell)
        subject.refresh()
    else:
        tell("end", number, outcome=outcome, facts=subject.facts)


def _tell_fault(error: BaseException, number: int, tell: Any) -> None:
    text = "".join(traceback.format_exception(error))
    tell("fault", number, place=place_of(error), text=text[-4000:])


@dataclass
class Report:
    subject: type[Subject]
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def fault(self, place: str, text: str, first: int, number: int) -> None:
        self.faults[place] += 1
        if self.faults[place] > SHOWN:
            return
        name = self.subject.name
        print(f"\nFAULT {place}\n{text.rstrip()}\nscripts/fuzz --case {name}:{number}")
        if number > first:
            print(f"or, if it needs the cases before: --case {name}:{first}-{number}")
        sys.stdout.flush()

    def line(self) -> str:
        subject = self.subject
        counts = ", ".join(f"{n:,} {what}" for what, n in self.outcomes.most_common())
        facts = "".join(f"; {n:,} {what}" for what, n in sorted(self.facts.items()))
        return (
            f"{subject.name}: {self.tried * subject.unit:,} {subject.things} in "
            f"{self.seconds:.0f} s: {counts or 'no outcome'}{facts}; "
            f"{sum(self.faults.values())} faults"
        )


def supervise(
    subject: type[Subject],
    first: int,
    count: int,
    seconds: float = float("inf"),
    light: bool = False,
) -> Report:
    report, start, number = Report(subject), time.monotonic(), first
    end = start + seconds
    while number < first + count and time.monotonic() < end:
        number = _one_process(report, number, first + count - number, end, light)
    report.seconds = time.monotonic() - start
    return report


def _one_process(
    report: Report, first: int, count: int, end: float, light: bool
) -> int:
    """Run a process until it is done or dies; gives the next number to try."""
    subject, number = report.subject, first
    command = [sys.executable, "-m", "tests.fuzz.driver", WORK, subject.name]
    command += [str(first), str(count), str(int(light))]
    block, begun, facts = first, False, dict[str, int]()
    try:
        with _running(command, {} if light else subject.environment()) as process:
            for message in _messages(process, subject.seconds, end):
                kind, number = message["kind"], message.get("number", number)
                if kind == "begin":
                    begun = True
                    block = number - (number - first) % BLOCK
                elif kind == "end":
                    report.tried += 1
                    report.outcomes[message["outcome"]] += 1
                    facts = message["facts"]
                elif kind == "fault":
                    report.tried += number < first + count
                    report.fault(message["place"], message["text"], block, number)
                elif kind == "done":
                    facts = message["facts"]
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(CLOSING)  # it closes what it has begun
                    return number
                elif kind == "time":
                    return first + count
                else:
                    place = f"{kind} of the process"
                    report.tried += begun
                    report.fault(place, "the process was ended", block, number)
                    if not begun:
                        raise SystemExit(f"{subject.name} does not start")
        return number + 1
    finally:
        report.facts.update(facts)


@contextmanager
def _running(
    command: list[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with TemporaryDirectory(
        prefix="jetdraft-fuzz-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)  # a case may become another user
        own = {**os.environ, **environment, "TMPDIR": folder}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=own, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _messages(
    process: subprocess.Popen[bytes], limit: float, end: float
) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    last, rest, begun = time.monotonic(), b"", False
    while True:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        if ready:
            data = os.read(process.stdout.fileno(), 1 << 16)
            last, lines = time.monotonic(), (rest + data).split(b"\n")
            rest, begun = lines.pop(), True
            yield from map(json.loads, lines)
            if not data:
                yield {"kind": f"crash (exit code {process.wait()})"}
                return
        if time.monotonic() > end:
            yield {"kind": "time"}
            return
        if time.monotonic() - last > (limit if begun else STARTING):
            yield {"kind": "hang"}
            return
        if _bytes_of(process.pid) > MAX_BYTES:
            yield {"kind": "memory"}
            return


def _bytes_of(pid: int) -> int:
    with suppress(OSError, IndexError):
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def main(arguments: list[str]) -> int:
    # A fault may quote what no encoding can hold.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser("scripts/fuzz", description=__doc__)
    parser.add_argument(
        "what", nargs="*", help=f"seconds for each, and names: {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--count", type=int, help="cases of each; tokens of a soak")
    parser.add_argument("--case", help="repeat a case, for example same-text:12345")
    parser.add_argument("--first", type=int, help="the number of the first case")
    options = parser.parse_intermixed_args(arguments)
    if options.case is not None:
        return _repeat(parser, options.case)
    names = [word for word in options.what if not word.replace(".", "").isdigit()]
    numbers = [float(word) for word in options.what if word not in names]
    if unknown := set(names) - set(SUBJECTS):
        parser.error(f"unknown subject {unknown.pop()}; choose {', '.join(SUBJECTS)}")
    seconds = numbers[0] if numbers else 60.0
    first = options.first
    if options.count is not None:
        first, seconds = first or 0, numbers[0] if numbers else float("inf")
    elif first is None:
        first = secrets.randbelow(10**9)
        print(f"--first {first}")
    reports = []
    for subject in map(subject_named, names or SUBJECTS):
        count = 10**9
        if options.count is not None:
            count = -(-options.count // subject.unit)
        reports.append(supervise(subject, first, count, seconds))
    print("\n" + "\n".join(report.line() for report in reports))
    return int(any(report.faults for report in reports))


def _repeat(parser: argparse.ArgumentParser, wanted: str) -> int:
    name, _, numbers = wanted.partition(":")
    first, _, last = numbers.partition("-")
    if name not in SUBJECTS or not (first + last).isdigit():
        parser.error(f"no case {wanted!r}; give, for example, same-text:12345")
    count = int(last or first) - int(first) + 1
    os.environ["JETDRAFT_FUZZ_VERBOSE"] = "1"
    report = supervise(subject_named(name), int(first), count, float("inf"))
    print(report.line())
    return int(bool(report.faults))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORK]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
    else:
        sys.exit(main(sys.argv[1:]))
