"""Two versions of jetdraft in turns on the same prompts: is one of them slower?

    git worktree add /tmp/old REV
    python benchmarks/versions.py --old /tmp/old --old-bundle A --new-bundle B \
        --prompts examples/pycode/prompts.jsonl --output versions.json

Each version runs in a process of its own, which waits while the other decodes, so that
noise hits both alike. Each exports its own bundle of the same checkpoints. The rows are
ratios new / old of the same prompt and turn: tokens per second, and milliseconds per
round outside `session.run`. The texts must be the same. `--old-python` compares two
versions of onnxruntime; tune both bundles first, so that no survey runs meanwhile.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

WAYS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "draft:4": {"method": "draft", "num_draft_tokens": 4},
    "lookup:4": {"method": "lookup", "num_draft_tokens": 4},
    "auto": {"method": "auto"},
}
IMPORT = """
import sys, time
start = time.perf_counter()
import jetdraft
print(time.perf_counter() - start, sum(n.startswith("jetdraft") for n in sys.modules),
      len(sys.modules))
"""


def work() -> None:
    """Decode what each line of standard input asks for; runs in either version."""
    import jetdraft

    bundle, threads = sys.argv[2], int(sys.argv[3])
    start = time.perf_counter()
    model = jetdraft.load(bundle, threads=threads)
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        model.forget()
        result = model.generate(**json.loads(line), ignore_eos=True)
        stats = result.stats
        answer = {
            "ids": result.token_ids,
            "tokens_per_second": stats.tokens_per_second,
            "outside_ms": stats.outside_ms_per_round,
            "tokens_per_pass": stats.tokens_per_pass,
            "first": stats.time_to_first_token,
        }
        print(json.dumps(answer), flush=True)


class Version:
    """One version of the package at work in a process."""

    def __init__(self, tree: Path, bundle: Path, threads: int, python: str) -> None:
        self.tree, self._python = tree.resolve(), python
        command = [python, __file__, "work", str(bundle.resolve()), str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        )
        self.load_seconds: float = self._read()["load_seconds"]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.tree)}

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def generate(self, **options: Any) -> dict[str, Any]:
        """The ids and figures of one generation."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        return self._read()

    def import_times(self, turns: int = 7) -> tuple[float, int, int]:
        """The shortest import in ms, and the modules of the package and in all."""
        runs = [
            subprocess.run(
                [self._python, "-c", IMPORT],
                check=True,
                capture_output=True,
                text=True,
                cwd=self.tree,
                env=self._environment(),
            ).stdout.split()
            for _ in range(turns)
        ]
        shortest = min(float(seconds) for seconds, _, _ in runs)
        return 1e3 * shortest, int(runs[0][1]), int(runs[0][2])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Pairs:
    """What both versions measured on the same prompts and turns."""

    same_text: int = 0
    old: list[dict[str, Any]] = field(default_factory=list)
    new: list[dict[str, Any]] = field(default_factory=list)

    def add(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """One pair."""
        self.same_text += old["ids"] == new["ids"]
        self.old.append(old)
        self.new.append(new)

    def row(self) -> dict[str, Any]:
        """Medians of both versions and of the ratios of each pair."""
        figures: dict[str, Any] = {"pairs": len(self.old), "same_text": self.same_text}
        for name in ("tokens_per_second", "outside_ms", "tokens_per_pass", "first"):
            old = [answer[name] for answer in self.old]
            new = [answer[name] for answer in self.new]
            ratios = [n / o for n, o in zip(new, old, strict=True) if o]
            figures[name] = {
                "old": statistics.median(old),
                "new": statistics.median(new),
                "ratio": statistics.median(ratios),
            }
        return figures


@click.command()
@click.option("--old", required=True, type=click.Path(path_type=Path))
@click.option("--new", default=".", type=click.Path(path_type=Path))
@click.option("--old-python", default=sys.executable, help="The old one's Python.")
@click.option("--old-bundle", required=True, type=click.Path(path_type=Path))
@click.option("--new-bundle", required=True, type=click.Path(path_type=Path))
@click.option("--prompts", required=True, type=click.Path(path_type=Path))
@click.option("--max-new-tokens", default=96)
@click.option("--repeats", default=3)
@click.option("--count", default=6, help="Prompts to use.")
@click.option("--threads", default=2)
@click.option("--output", type=click.Path(path_type=Path))
def main(
    old: Path,
    new: Path,
    old_python: str,
    old_bundle: Path,
    new_bundle: Path,
    prompts: Path,
    max_new_tokens: int,
    repeats: int,
    count: int,
    threads: int,
    output: Path | None,
) -> None:
    """Measure and print a table."""
    lines = prompts.read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["prompt"] for line in lines]
    versions = {
        "old": Version(old, old_bundle, threads, old_python),
        "new": Version(new, new_bundle, threads, sys.executable),
    }
    report: dict[str, Any] = {"import": {}, "load_seconds": {}, "rows": {}}
    for name, version in versions.items():
        report["import"][name] = version.import_times()
        report["load_seconds"][name] = version.load_seconds
    print("import: ms, modules of jetdraft, modules in all", report["import"])
    for temperature in (0.0, 0.8):
        for way, options in WAYS.items():
            pairs = Pairs()
            for turn in range(repeats):
                for seed, prompt in enumerate(texts):
                    asked = {
                        "prompt": prompt,
                        "max_new_tokens": max_new_tokens,
                        "temperature": temperature,
                        "seed": seed,
                        **options,
                    }
                    # The versions take turns in going first.
                    order = ["old", "new"] if (turn + seed) % 2 else ["new", "old"]
                    answers = {n: versions[n].generate(**asked) for n in order}
                    pairs.add(answers["old"], answers["new"])
            row = pairs.row()
            report["rows"][f"{way} T={temperature}"] = row
            speed, outside = row["tokens_per_second"], row["outside_ms"]
            print(
                f"{way:9} T={temperature}  tokens/s {speed['old']:7.2f} "
                f"{speed['new']:7.2f} {speed['ratio']:.3f}x   outside ms "
                f"{outside['old']:.3f} {outside['new']:.3f} {outside['ratio']:.3f}x   "
                f"same text {row['same_text']}/{row['pairs']}",
                flush=True,
            )
    for version in versions.values():
        version.close()
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work()
    else:
        main()
