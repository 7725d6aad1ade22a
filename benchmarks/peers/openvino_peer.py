"""OpenVINO GenAI as a peer: plain, a draft model, and prompt lookup.

    python benchmarks/peers/openvino_peer.py --target T --drafter D --prompts P ...

All methods use the continuous-batching backend, which lookup needs. By default the
CPU plugin quantizes activations and the KV cache to 8 bits, and the embedding stays
int8; `--exact` asks for float32 arithmetic around the same int4 weights.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import protocol
from protocol import Clock, Decoding, Method, Options

try:
    import openvino as ov
    import openvino_genai as ovg
except ImportError as error:
    raise SystemExit(protocol.not_installed("openvino").format_message()) from error

MAX_NGRAM_SIZE = 3
CACHE_GIBIBYTES = 1
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
}


class Listener(ovg.StreamerBase):  # type: ignore[misc]
    """Feeds the clock as tokens arrive."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def write(self, token: int | Sequence[int]) -> Any:
        """Called for every token, or for several at once."""
        self._clock.add([token] if isinstance(token, int) else token)
        return ovg.StreamingStatus.RUNNING

    def end(self) -> None:
        """Called after the last token; nothing is left to do."""


class OpenVino:
    """Three pipelines over the same int4 weights."""

    tool = "openvino-genai"
    version = ovg.__version__

    def __init__(self, options: Options, exact: bool) -> None:
        self._options = options
        self._target = export(options, options.target)
        self._properties: dict[str, str | int] = dict(EXACT if exact else {})
        self._properties["INFERENCE_NUM_THREADS"] = options.threads
        self._pipelines = {
            "plain": self._pipeline(),
            "lookup": self._pipeline(prompt_lookup=True),
        }
        if options.drafter is not None:
            drafter = export(options, options.drafter)
            draft = ovg.draft_model(str(drafter), "CPU", **self._properties)
            self._pipelines["draft"] = self._pipeline(draft_model=draft)

    def methods(self) -> list[Method]:
        """Plain, and both proposers at each K."""
        return protocol.methods(self._options)

    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Generate with a streamer that notes when each token came."""
        config = ovg.GenerationConfig()
        config.do_sample = self._options.temperature > 0
        if config.do_sample:
            config.temperature = self._options.temperature
            config.rng_seed = 0
        config.apply_chat_template = False
        config.max_new_tokens = self._options.max_new_tokens
        config.ignore_eos = True  # its lookup does not obey min_new_tokens
        if method.name != "plain":
            config.num_assistant_tokens = method.num_draft_tokens
        if method.name == "lookup":
            config.max_ngram_size = MAX_NGRAM_SIZE
        clock = Clock()
        result = self._pipelines[method.name].generate(
            ov.Tensor(np.array([prompt])), config, Listener(clock)
        )
        return clock.decoding(passes(result))

    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """Time the exported graph itself, prefilled again for every pass."""
        core = ov.Core()
        file = str(self._target / "openvino_model.xml")
        graph = core.compile_model(file, "CPU", self._properties)
        request = graph.create_infer_request()

        def prefill(width: int) -> None:
            """The first pass of a new width is slow: leave it out."""
            request.reset_state()
            request.infer(rows(prompt, past=0))
            request.infer(rows(prompt[:width], past=len(prompt)))

        return {
            width: protocol.median_ms(
                partial(request.infer, rows(prompt[:width], len(prompt) + width)),
                partial(prefill, width),
            )
            for width in protocol.WIDTHS
        }

    def _pipeline(self, **kind: Any) -> Any:
        scheduler = ovg.SchedulerConfig()
        scheduler.cache_size = CACHE_GIBIBYTES
        scheduler.enable_prefix_caching = False
        return ovg.LLMPipeline(
            str(self._target),
            "CPU",
            scheduler_config=scheduler,
            **kind,
            **self._properties,
        )


def rows(token_ids: list[int], past: int) -> dict[str, Any]:
    """The exported graph's inputs for tokens that follow `past` others."""
    end = past + len(token_ids)
    return {
        "input_ids": np.array([token_ids]),
        "attention_mask": np.ones((1, end), np.int64),
        "position_ids": np.arange(past, end)[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def passes(result: Any) -> int | None:
    """Target passes after the first token, where the tool counts its drafts."""
    metrics = result.extended_perf_metrics
    if metrics is None:
        return None
    return len(result.tokens[0]) - 1 - int(metrics.get_num_accepted_tokens())


def export(options: Options, checkpoint: Path) -> Path:
    """The int4 model that optimum-intel makes of a checkpoint."""

    def run(folder: Path) -> None:
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export"]
        command += ["openvino", "--model", str(checkpoint)]
        command += ["--task", "text-generation-with-past", "--weight-format", "int4"]
        command += ["--sym", "--group-size", "128", "--group-size-fallback", "adjust"]
        protocol.call([*command, "--ratio", "1.0", str(folder)])

    return protocol.built(options, checkpoint, "openvino-int4-group128", run)


@click.command()
@protocol.options
@click.option("--exact", is_flag=True, help="Float32 arithmetic and KV cache.")
def main(exact: bool, **values: Any) -> None:
    """Measure OpenVINO GenAI on TARGET and DRAFTER."""
    options = protocol.parse(**values)
    protocol.run(lambda: OpenVino(options, exact), options)


if __name__ == "__main__":
    main()
