"""llama.cpp as a peer: plain, a draft model, and n-gram lookup.

    python benchmarks/peers/llamacpp.py --gguf target.gguf --drafter-gguf drafter.gguf \
        --target T --drafter D --prompts P --json OUT

The wheel `xllamacpp` holds its server. A server takes its drafting method when it
starts, so every method has a server of its own; they idle while another decodes. `T`
and `D` are the same checkpoints as folders; only T's tokenizer is read.
"""

from pathlib import Path
from typing import Any

import click
import protocol
from protocol import Decoding, Method, Options

try:
    import xllamacpp
except ImportError as error:
    raise SystemExit(protocol.not_installed("llamacpp").format_message()) from error

TYPES = xllamacpp.common_speculative_type
NGRAM_SIZE = 3


class LlamaCpp:
    """A server per method over the same files."""

    tool = "llama.cpp"
    version = xllamacpp.__version__

    def __init__(self, options: Options, gguf: Path, drafter: Path | None) -> None:
        self._options = options
        self._gguf = gguf
        self._drafter = drafter
        self._servers = {method: self._start(method) for method in self.methods()}

    def methods(self) -> list[Method]:
        """Plain, and both proposers at each K."""
        return protocol.methods(self._options)

    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Ask a server; its own clock separates the prompt from the rest."""
        temperature = self._options.temperature
        answer = self._servers[method].handle_completions(
            {
                "prompt": prompt,
                "n_predict": self._options.max_new_tokens,
                "ignore_eos": True,
                "temperature": temperature,
                "samplers": ["temperature"] if temperature else ["top_k"],
                "top_k": 1,
                "seed": 0,
                "cache_prompt": False,
            }
        )
        if "timings" not in answer:
            raise click.ClickException(f"llama.cpp refused: {answer}")
        timings = answer["timings"]
        count, accepted = timings["predicted_n"], timings.get("draft_n_accepted")
        return Decoding(
            answer["choices"][0]["text"],
            count,
            timings["predicted_ms"] / 1e3,
            timings["prompt_ms"] / 1e3,
            None if accepted is None else count - 1 - accepted,
        )

    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """Unknown: the wheel has no llama-bench."""
        return {}

    def _start(self, method: Method) -> Any:
        params = xllamacpp.CommonParams()
        params.model.path = str(self._gguf)
        params.n_ctx = self._options.capacity()
        params.n_parallel, params.cache_ram_mib, params.verbosity = 1, 0, 0
        speculative = params.speculative
        threads = [params, speculative.draft]
        for own in threads:
            own.cpuparams.n_threads = self._options.threads
            own.cpuparams_batch.n_threads = self._options.threads
        if method.name == "draft":
            speculative.types = [TYPES.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            speculative.draft.mparams.path = str(self._drafter)
            speculative.draft.n_max = method.num_draft_tokens
        if method.name == "lookup":
            speculative.types = [TYPES.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            speculative.ngram_simple.size_n = NGRAM_SIZE
            speculative.ngram_simple.size_m = method.num_draft_tokens
            speculative.draft.n_max = method.num_draft_tokens
        return xllamacpp.Server(params)


@click.command()
@protocol.options
@click.option("--gguf", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--drafter-gguf", type=click.Path(exists=True, path_type=Path))
def main(gguf: Path, drafter_gguf: Path | None, **values: Any) -> None:
    """Measure llama.cpp on the GGUF files of TARGET and DRAFTER."""
    options = protocol.parse(**values)
    protocol.run(lambda: LlamaCpp(options, gguf, drafter_gguf), options)


if __name__ == "__main__":
    main()
