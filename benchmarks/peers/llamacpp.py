"""llama.cpp as a peer: plain, a draft model, and n-gram lookup.

    benchmarks/peers/build_llamacpp.sh /tmp/llamacpp
    python benchmarks/peers/llamacpp.py --binaries /tmp/llamacpp/bin --target T ...

The server takes its drafting method when it starts, so every method has a server of
its own, all on the same file; they idle while another one decodes.
"""

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import protocol
from protocol import Decoding, Method, Options

try:
    import gguf_file
except ImportError as error:
    raise SystemExit(protocol.not_installed("llamacpp").format_message()) from error

NGRAM_SIZE = 2
START_SECONDS = 120


class LlamaServer:
    """One llama-server process, stopped when the script ends."""

    def __init__(self, binary: Path, arguments: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._url = f"http://127.0.0.1:{port}"
        command = [str(binary), "--host", "127.0.0.1", "--port", port, *arguments]
        output = log.open("w")
        self._process = subprocess.Popen(command, stdout=output, stderr=output)
        atexit.register(self._process.terminate)
        self._wait(log)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return the server's answer."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _wait(self, log: Path) -> None:
        for _ in range(START_SECONDS * 10):
            if self._process.poll() is not None:
                raise click.ClickException(f"llama-server stopped: see {log}")
            try:
                self.ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
            else:
                return
        raise click.ClickException(f"llama-server did not start: see {log}")


class LlamaCpp:
    """A server per method over the same quantized files."""

    tool = "llama.cpp"

    def __init__(self, options: Options, binaries: Path, quantization: str) -> None:
        self._options = options
        self._binaries = binaries
        self._target = quantized(options, options.target, binaries, quantization)
        self._drafter = quantized(options, options.drafter, binaries, quantization)
        self.tool = f"llama.cpp {quantization}"
        self.version = version(binaries)
        self._servers = {method: self._start(method) for method in self.methods()}

    def methods(self) -> list[Method]:
        """Plain, and both proposers at each K."""
        widths = self._options.num_draft_tokens
        draft = [Method("draft", width) for width in widths]
        return [Method("plain"), *draft, *(Method("lookup", width) for width in widths)]

    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Ask a server; its own clock starts at the first generated token."""
        answer = self._servers[method].ask(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": self._options.max_new_tokens,
                "ignore_eos": True,
                "samplers": ["top_k"],
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        timings = answer["timings"]
        accepted = timings.get("draft_n_accepted")
        passes = None if accepted is None else len(answer["tokens"]) - 1 - accepted
        return Decoding(answer["tokens"], timings["predicted_ms"] / 1e3, passes)

    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """llama-bench's time of a short prompt after `prompt` other tokens."""
        widths = ",".join(map(str, protocol.WIDTHS))
        command = [str(self._binaries / "llama-bench"), "-m", str(self._target)]
        command += ["-t", str(self._options.threads), "-d", str(len(prompt))]
        command += ["-n", "0", "-p", widths, "-r", str(protocol.PASS_REPEATS)]
        command += ["-o", "json"]
        output = protocol.call(command)
        return {
            test["n_prompt"]: sorted(test["samples_ns"])[protocol.PASS_REPEATS // 2]
            / 1e6
            for test in json.loads(output)
        }

    def _start(self, method: Method) -> LlamaServer:
        threads, width = str(self._options.threads), str(method.num_draft_tokens)
        arguments = ["-m", str(self._target), "-t", threads, "-tb", threads]
        arguments += ["-c", str(self._options.capacity()), "-np", "1"]
        arguments += ["--cache-ram", "0"]
        if method.name == "draft":
            arguments += ["--spec-type", "draft-simple", "-md", str(self._drafter)]
            arguments += ["--spec-draft-n-max", width, "-td", threads, "-tbd", threads]
        if method.name == "lookup":
            arguments += ["--spec-type", "ngram-map-k", "--spec-draft-n-max", width]
            arguments += ["--spec-ngram-map-k-size-n", str(NGRAM_SIZE)]
            arguments += ["--spec-ngram-map-k-size-m", width]
        log = self._options.cache / f"llama-server-{method.name}-{width}.log"
        return LlamaServer(self._binaries / "llama-server", arguments, log)


def version(binaries: Path) -> str:
    """What llama-server says of itself."""
    command = [str(binaries / "llama-server"), "--version"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return (run.stderr + run.stdout).splitlines()[0].removeprefix("version: ")


def quantized(options: Options, checkpoint: Path, binaries: Path, kind: str) -> Path:
    """The checkpoint as GGUF, quantized by llama-quantize."""

    def run(folder: Path) -> None:
        wide, narrow = str(folder / "f16.gguf"), str(folder / "model.gguf")
        gguf_file.write(checkpoint, Path(wide))
        protocol.call([str(binaries / "llama-quantize"), wide, narrow, kind])
        Path(wide).unlink()

    folder = protocol.built(options, checkpoint, f"llamacpp-{kind.lower()}", run)
    return folder / "model.gguf"


@click.command()
@protocol.options
@click.option("--binaries", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--quantization", default="Q4_0", show_default=True)
def main(binaries: Path, quantization: str, **values: Any) -> None:
    """Measure llama.cpp on TARGET and DRAFTER."""
    options = protocol.parse(**values)
    protocol.run(LlamaCpp(options, binaries, quantization), options)


if __name__ == "__main__":
    main()
