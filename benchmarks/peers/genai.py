"""onnxruntime-genai as a peer: plain, a draft model, adaptive, and n-gram lookup.

    python benchmarks/peers/genai.py --target T --drafter D --prompts P --json OUT

Both decoders get `intra_op_num_threads`: without it the tool takes one thread. The
composite model may not point outside its own folder, so the built files are linked
into it. Never time a checkpoint whose intermediate size equals its vocabulary size:
the builder then writes a model that talks garbage.
"""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import protocol
from protocol import Clock, Decoding, Method, Options

try:
    import onnxruntime_genai as og
except ImportError as error:
    raise SystemExit(protocol.not_installed("genai").format_message()) from error

NGRAM_SIZE = 3
ADAPTIVE_START = 2


class GenAi:
    """Two models: the target alone and the target with its drafter."""

    tool = "onnxruntime-genai"
    version = og.__version__

    def __init__(self, options: Options, block_size: int) -> None:
        self._options = options
        self._capacity = options.capacity()
        target = build(options, options.target, block_size)
        # Without a drafter the target stands in its place, and is never asked.
        drafter = build(options, options.drafter or options.target, block_size)
        pair = protocol.built(
            options,
            options.target,
            f"genai-block{block_size}-with-{drafter.name}-threads{options.threads}",
            lambda folder: compose(target, drafter, options.threads, folder),
        )
        self._plain = og.Model(str(pair / "target"))
        self._pair = og.Model(str(pair)) if options.drafter else None
        self._tokenizer = og.Tokenizer(self._plain)

    def methods(self) -> list[Method]:
        """Plain, both proposers at each K, and the adaptive width."""
        adaptive = [Method("adaptive", ADAPTIVE_START)] if self._pair else []
        return protocol.methods(self._options, *adaptive)

    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Run the public token loop; the first call may include a whole round."""
        length, clock = len(prompt) + self._options.max_new_tokens, Clock()
        generator = self._generator(method, length)
        generator.append_tokens(prompt)
        text = self._tokenizer.create_stream()
        while not generator.is_done():
            generator.generate_next_token()
            tokens = generator.get_next_tokens()
            # Ours streams text too.
            for token in tokens:
                text.decode(token)
            clock.add([int(token) for token in tokens])
        return clock.decoding(passes(method, generator.get_speculative_stats()))

    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """Time `append_tokens` on the target, rewound to the prompt each time."""
        generator = self._generator(Method("plain"), self._capacity)
        generator.append_tokens(prompt)
        return {
            width: protocol.median_ms(
                partial(generator.append_tokens, prompt[:width]),
                partial(generator.rewind_to, len(prompt)),
            )
            for width in protocol.WIDTHS
        }

    def _sampling(self) -> dict[str, Any]:
        temperature = self._options.temperature
        if not temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": temperature, "random_seed": 0}

    def _generator(self, method: Method, length: int) -> Any:
        paired = method.name in ("draft", "adaptive")
        model = self._pair if paired else self._plain
        parameters = og.GeneratorParams(model)
        # min_length bans end-of-text up to the last token.
        parameters.set_search_options(
            max_length=length, min_length=length, **self._sampling()
        )
        if method.name != "plain":
            parameters.set_speculative_options(**speculation(method))
        return og.Generator(model, parameters)


def speculation(method: Method) -> dict[str, int | bool]:
    """The tool's own options for a method."""
    if method.name == "adaptive":
        return {"min_adaptive_k": method.num_draft_tokens}
    options: dict[str, int | bool] = {"max_draft_tokens": method.num_draft_tokens}
    if method.name == "lookup":
        # Unchained, a run of repeats is proposed one token at a time.
        options |= {"ngram_size": NGRAM_SIZE, "ngram_chained_lookup": True}
    return options


def passes(method: Method, stats: dict[str, Any]) -> int | None:
    """Target passes of one continuation; the tool does not count plain ones."""
    if method.name == "plain":
        return None
    return int(stats["target_forward_passes"] + stats["standard_fallback_steps"])


def build(options: Options, checkpoint: Path, block_size: int) -> Path:
    """The int4 model that the tool's own builder makes of a checkpoint."""

    def run(folder: Path) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(checkpoint), "-o", str(folder), "-p", "int4", "-e", "cpu"]
        command += ["-c", str(folder / "scratch")]
        command += ["--extra_options", f"block_size={block_size}", "accuracy_level=4"]
        protocol.call(command)
        shutil.rmtree(folder / "scratch", ignore_errors=True)

    sizes = json.loads((checkpoint / "config.json").read_text())
    if sizes["intermediate_size"] == sizes["vocab_size"]:
        raise click.UsageError(f"{checkpoint}: intermediate_size equals vocab_size.")
    return protocol.built(options, checkpoint, f"genai-block{block_size}", run)


def compose(target: Path, drafter: Path, threads: int, folder: Path) -> None:
    """Link target and drafter under `folder` and configure them with `threads`."""
    for name, source in {"target": target, "drafter": drafter}.items():
        shutil.copytree(source, folder / name, copy_function=os.link)
        config = folder / name / "genai_config.json"
        values = json.loads(config.read_text())
        session = values["model"]["decoder"]["session_options"]
        session["intra_op_num_threads"] = threads
        config.unlink()
        config.write_text(json.dumps(values))
    for file in target.glob("token*"):
        os.link(file, folder / file.name)
    pair = json.loads((folder / "target/genai_config.json").read_text())
    draft = json.loads((folder / "drafter/genai_config.json").read_text())
    pair["model"]["type"] = "speculative"
    pair["model"]["draft"] = draft["model"]["decoder"]
    pair["model"]["decoder"]["filename"] = "target/model.onnx"
    pair["model"]["draft"]["filename"] = "drafter/model.onnx"
    (folder / "genai_config.json").write_text(json.dumps(pair))


@click.command()
@protocol.options
@click.option("--block-size", default=32, show_default=True)
def main(block_size: int, **values: Any) -> None:
    """Measure onnxruntime-genai on TARGET and DRAFTER."""
    options = protocol.parse(**values)
    protocol.run(lambda: GenAi(options, block_size), options)


if __name__ == "__main__":
    main()
