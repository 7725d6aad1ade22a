"""transformers as a peer: plain, an assistant model, and prompt lookup, in bfloat16.

    python benchmarks/peers/transformers_peer.py --target T --drafter D ...

There is no int4 on a CPU here; this is the reference that everybody starts from.
"""

from functools import partial
from typing import Any

import click
import protocol
from protocol import Clock, Decoding, Method, Options

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.generation.streamers import BaseStreamer
except ImportError as error:
    raise SystemExit(protocol.not_installed("transformers").format_message()) from error


class Listener(BaseStreamer):  # type: ignore[misc]
    """Feeds the clock; the first call brings the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt and then with every token or accepted run."""
        if self._prompt_seen:
            self._clock.add(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token; nothing is left to do."""


class Transformers:
    """The target and its assistant in one process."""

    tool = "transformers"
    version = transformers.__version__

    def __init__(self, options: Options, dtype: str, device: str) -> None:
        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        load = partial(AutoModelForCausalLM.from_pretrained, dtype=dtype)
        self.tool = f"transformers {dtype}"
        self._options = options
        self._device = device
        self._target = load(options.target).to(device)
        drafter = options.drafter
        self._drafter = None if drafter is None else load(drafter).to(device)
        self._passes = 0
        self._target.register_forward_hook(self._count)

    def methods(self) -> list[Method]:
        """Plain, and both proposers at each K."""
        return protocol.methods(self._options)

    @torch.inference_mode()
    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Generate with a streamer that notes when each token came."""
        count = self._options.max_new_tokens
        self._passes = 0
        clock = Clock()
        self._target.generate(
            torch.tensor([prompt], device=self._device),
            attention_mask=torch.ones(1, len(prompt), device=self._device),
            do_sample=self._options.temperature > 0,
            temperature=self._options.temperature or None,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            streamer=Listener(clock),
            **self._speculation(method),
        )
        return clock.decoding(self._passes - 1)

    @torch.inference_mode()
    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """Time the forward pass, with the cache cropped to the prompt each time."""
        cache = DynamicCache(config=self._target.config)
        on = {"device": self._device}
        self._target(torch.tensor([prompt], **on), past_key_values=cache)
        return {
            width: protocol.median_ms(
                partial(
                    self._target,
                    torch.tensor([prompt[:width]], **on),
                    past_key_values=cache,
                ),
                partial(cache.crop, -width),
            )
            for width in protocol.WIDTHS
        }

    def _speculation(self, method: Method) -> dict[str, Any]:
        if method.name == "lookup":
            return {"prompt_lookup_num_tokens": method.num_draft_tokens}
        if method.name == "plain":
            return {}
        assert self._drafter is not None
        settings = self._drafter.generation_config
        settings.num_assistant_tokens = method.num_draft_tokens
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        return {"assistant_model": self._drafter}

    def _count(self, *_: Any) -> None:
        self._passes += 1


@click.command()
@protocol.options
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--device", default="cpu", show_default=True)
def main(dtype: str, device: str, **values: Any) -> None:
    """Measure transformers on TARGET and DRAFTER."""
    options = protocol.parse(**values)
    protocol.run(lambda: Transformers(options, dtype, device), options)


if __name__ == "__main__":
    main()
