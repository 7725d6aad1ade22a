"""Everything about real checkpoints in one run: what a user of the pair meets.

    python examples/real/fetch.py smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b \
        -o checkpoints
    python examples/real/unpack.py checkpoints/qwen2.5-coder-1.5b.gguf -o f/target
    python examples/real/unpack.py checkpoints/qwen2.5-coder-0.5b.gguf -o f/drafter
    python benchmarks/real.py f/target f/drafter -o real

`--step` takes some of the steps only; each reads what the steps before it left in the
output folder, and writes STEP.json. `--peer` is for the step `compare`, as in
compare.py. Run nothing beside it.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import jetdraft
from jetdraft.bundle import Bundle

HERE = Path(__file__).parent
CLASSES = ("code", "questions", "story", "random", "everyday")
EMOJI = "Repeat exactly: 🦊🌧️🕰️ ひらがな Ελληνικά"


@dataclass(frozen=True)
class Setup:
    """Where things are, and how much is measured."""

    target: Path
    drafter: Path
    output: Path
    peers: tuple[str, ...]
    gguf: Path | None
    drafter_gguf: Path | None
    rounds: int
    count: int

    @property
    def bundle(self) -> Path:
        """The bundle that the step `export` writes."""
        return self.output / "pair"

    @property
    def prompts(self) -> Path:
        """The folder that the step `prompts` writes."""
        return self.output / "prompts"


def run(command: Sequence[object], log: Path) -> dict[str, float]:
    """Run a command, its output in `log`; gives its seconds and its peak memory.

    `own_mb` leaves out the pages of mapped files, which the system may drop.
    """
    started, own_kb, usage = time.perf_counter(), 0, None
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=file, stderr=subprocess.STDOUT
        )
        ended = 0
        while not ended:
            own_kb = max(own_kb, _own_kb(process.pid))
            time.sleep(0.1)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    if status:
        raise click.ClickException(f"{command[0]} failed; read {log}")
    return {
        "seconds": time.perf_counter() - started,
        "peak_mb": usage.ru_maxrss * 1024 / 1e6,
        "own_mb": own_kb * 1024 / 1e6,
    }


def _own_kb(process: int) -> int:
    """The resident memory of a process without mapped files; 0 once it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return sum(map(int, re.findall(r"RssAnon:\s+(\d+) kB", status)))


def jetdraft_command(*words: object) -> list[object]:
    """The command line of this environment's jetdraft."""
    return [sys.executable, "-m", "jetdraft", *words]


def export(setup: Setup) -> dict[str, Any]:
    """The default recipes, how long they took, and the memory that it needed."""
    log = setup.output / "export.log"
    command = jetdraft_command("export", setup.target, "--drafter", setup.drafter)
    figures: dict[str, Any] = run([*command, "-o", setup.bundle], log)
    shards = [file.stat().st_size for file in setup.target.glob("*.safetensors")]
    bound_mb = 1.5 * max(shards) / 1e6 + 2000
    lines = log.read_text().splitlines()
    recipes = [line for line in lines if line.startswith(("target: ", "drafter: "))]
    stored = sum(entry["bytes"] for entry in Bundle.open(setup.bundle).files.values())
    sizes = {"shards": len(shards), "bound_mb": bound_mb, "bundle_mb": stored / 1e6}
    return figures | sizes | {"recipes": recipes}


def prompts(setup: Setup) -> dict[str, Any]:
    """Prompts of every class."""
    script = [sys.executable, HERE / "real_prompts.py", setup.bundle]
    options = ["-o", setup.prompts, "--count", setup.count]
    return run([*script, *options], setup.output / "prompts.log")


def first(setup: Setup) -> dict[str, Any]:
    """Load, and the first piece of the first and of the second call, in seconds."""
    for profile in (setup.bundle / "profiles").glob("cpu-*.json"):
        profile.unlink()
    started = time.perf_counter()
    model = jetdraft.load(setup.bundle)
    figures: dict[str, Any] = {"load": time.perf_counter() - started}
    prompt = model.chat_prompt([{"role": "user", "content": "Why is the sky blue?"}])
    for call in ("first", "second"):
        started = time.perf_counter()
        stream = model.stream(token_ids=prompt, max_new_tokens=64, ignore_eos=True)
        next(iter(stream))
        figures[call] = time.perf_counter() - started
        stats = stream.result().stats
        figures[f"{call}_tokens_per_second"] = stats.tokens_per_second
        model.forget()  # else the second call has the first call's rows
    return figures


def shapes(setup: Setup) -> dict[str, Any]:
    """What only real checkpoints have: several ends, defaults, split characters."""
    bundle = Bundle.open(setup.bundle)
    model = jetdraft.load(setup.bundle)
    chat = [{"role": "user", "content": EMOJI}]
    stream = model.stream(
        token_ids=model.chat_prompt(chat), max_new_tokens=48, temperature=0.0
    )
    pieces = [piece.text for piece in stream]
    result = stream.result()
    return {
        "ends_of_text": list(bundle.eos_token_ids),
        "defaults": dict(bundle.generation),
        "shards": len(list(setup.target.glob("*.safetensors"))),
        "vocabulary": bundle.target.contract.vocab_size,
        "target_mb": (setup.bundle / "target.onnx.data").stat().st_size / 1e6,
        "pieces_join_to_text": "".join(pieces) == result.text,
        "broken_characters": sum("\ufffd" in piece for piece in pieces),
        "finish_reason": result.finish_reason,
    }


def memory(setup: Setup) -> dict[str, Any]:
    """Peak memory of `generate` and of `serve`, and where the bytes are, in MB."""
    bundle = Bundle.open(setup.bundle)
    parts = {
        "imports": _peak_mb([sys.executable, "-c", "import jetdraft.runtime.model"])
    }
    for name, entry in bundle.graphs.items():
        stored = [f"{file}{end}" for file in entry.files for end in ("", ".data")]
        sizes = (bundle.files[s]["bytes"] for s in stored if s in bundle.files)
        parts[f"{name} as stored"] = sum(sizes) / 1e6
        buffers = entry.contract.buffers("past")
        values = sum(
            np.prod(b.shape_for()) * np.dtype(b.dtype).itemsize for b in buffers
        )
        parts[f"{name} KV buffers"] = float(values) / 1e6
    bound = 1.25 * sum(mb for name, mb in parts.items() if name != "imports") + 250
    words = ["-p", "Why is the sky blue?", "-n", 64]
    command = jetdraft_command("generate", setup.bundle, *words)
    generate = run(command, setup.output / "generate.log")
    return {
        "generate_peak_mb": generate["peak_mb"],
        "serve_peak_mb": _served_mb(setup.bundle),
        "bound_mb": bound,
        "parts_mb": parts,
    }


def _peak_mb(command: Sequence[object]) -> float:
    return run(command, Path(os.devnull))["peak_mb"]


def _served_mb(bundle: Path) -> float:
    """The peak memory of a server that has answered one question."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = jetdraft_command("serve", bundle, "--port", port, "--name", "real")
    server = subprocess.Popen([str(word) for word in command])
    try:
        _ask(f"http://127.0.0.1:{port}/v1/chat/completions")
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.terminate()
        server.wait()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(peak) * 1024 / 1e6


def _ask(url: str) -> None:
    """Ask one question, as soon as the server listens."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": "real", "messages": messages, "max_tokens": 64})
    request = urllib.request.Request(url, body.encode())
    request.add_header("Content-Type", "application/json")
    for _ in range(600):
        try:
            urllib.request.urlopen(request).read()
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:  # it does not listen yet
            time.sleep(0.1)
        else:
            return
    raise click.ClickException(f"no answer from {url}")


def tune(setup: Setup) -> dict[str, Any]:
    """Pass times of this machine."""
    log = setup.output / "tune.log"
    figures = run(jetdraft_command("tune", setup.bundle, "--json"), log)
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    return figures | dict(json.loads(lines[-1]))


def classes(setup: Setup) -> dict[str, Any]:
    """Every method by class of prompts, with its rows as `jetdraft bench` has them."""
    report = {}
    for name in CLASSES:
        file = setup.output / f"bench-{name}.json"
        command = jetdraft_command(
            "bench", setup.bundle, "--prompts", setup.prompts / f"{name}.jsonl",
            "--methods", "draft,lookup,auto", "--lengths", "1,2,3,4,6",
            "--repeats", setup.rounds, "-n", 128, "--output", file,
        )  # fmt: skip
        run(command, setup.output / f"bench-{name}.log")
        report[name] = json.loads(file.read_text())
    return report


def vocabulary(setup: Setup) -> dict[str, Any]:
    """Host time of a round by setting."""
    file = setup.output / "host.json"
    script = [sys.executable, HERE / "vocabulary.py", setup.bundle, "--json", file]
    run(script, setup.output / "vocabulary.log")
    return dict(json.loads(file.read_text()))


def human_eval(setup: Setup) -> dict[str, Any]:
    """The solved tasks out of 40."""
    file = setup.output / "tasks.json"
    script = [sys.executable, HERE / "human_eval.py", setup.bundle, "--json", file]
    run(script, setup.output / "human_eval.log")
    return {"rows": json.loads(file.read_text())}


def compare(setup: Setup) -> dict[str, Any]:
    """Beside the peers, greedy and at T = 0.7."""
    report = {}
    pair = ["--target", setup.target, "--drafter", setup.drafter]
    for option, file in (
        ("--gguf", setup.gguf),
        ("--drafter-gguf", setup.drafter_gguf),
    ):
        pair += [option, file] if file else []
    pair += [word for peer in setup.peers for word in ("--peer", peer)]
    for temperature in (0.0, 0.7):
        file = setup.output / f"compare-{temperature}.json"
        command = [
            sys.executable, HERE / "compare.py", "--bundle", setup.bundle, *pair,
            "--prompts", setup.prompts / "everyday.jsonl", "--rounds", setup.rounds,
            "--temperature", temperature, "--json", file,
        ]  # fmt: skip
        run(command, setup.output / f"compare-{temperature}.log")
        report[f"T={temperature}"] = json.loads(file.read_text())
    return report


STEPS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    step.__name__: step
    for step in (
        export,
        prompts,
        first,
        shapes,
        memory,
        tune,
        classes,
        vocabulary,
        human_eval,
        compare,
    )
}


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.argument("drafter", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--step", "steps", multiple=True, type=click.Choice(list(STEPS)))
@click.option("--peer", "peers", multiple=True, help="NAME=PYTHON, as in compare.py.")
@click.option("--gguf", type=click.Path(path_type=Path), help="TARGET for llama.cpp.")
@click.option("--drafter-gguf", type=click.Path(path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--count", default=6, show_default=True, help="Prompts of each class.")
def main(output: Path, steps: tuple[str, ...], **options: Any) -> None:
    """Measure the pair TARGET and DRAFTER."""
    output.mkdir(parents=True, exist_ok=True)
    setup = Setup(output=output, **options)
    for name in steps or STEPS:
        report = STEPS[name](setup)
        (output / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        shown = {k: v for k, v in report.items() if not isinstance(v, (dict, list))}
        print(f"{name}: {json.dumps(shown)}", flush=True)


if __name__ == "__main__":
    main()
