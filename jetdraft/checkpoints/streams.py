"""Speculative streams around an unchanged decoder (Bhendawade et al., 2402.11131).

In the top layers a row may carry streams. Stream j starts from the hidden state of its
row, the carrier, plus an embedding of its own, P_j. It attends to what the carrier
attends to, to the carrier and to the streams below j. The carrier predicts the next
token, stream j the token j places after that token:

    S_j = M + P_j                              entering the first of the top layers
    S_j <- attend(S_j; M_{<=t}, S_{<=j})       in each top layer (section 2.2)
    logits of S_j through the same norm and head predict y_{t+j}

Two modes. `shared`: one LoRA for all rows of all layers, so the target is the tuned
model. `lossless`: LoRA for stream rows only, so the target stays the base model.

The paper says nothing of positions: here, stream j of a row at position p has position
p + j.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers, final_norm
from jetdraft.checkpoints.lora import add_lora, merge_lora
from jetdraft.checkpoints.probes import Probed, carried
from jetdraft.errors import CheckpointError, OptionError

SETTINGS = "streams.json"
UNFINISHED = ".unfinished"
"""A file in the folder of a training that has not ended.

In a copy of the target it says what the training adds to it: without that the copy
must not pass for the result."""

WEIGHTS = "streams.safetensors"
SHARED, LOSSLESS = "shared", "lossless"
MODES = (SHARED, LOSSLESS)
LAYOUT_OF = "layout_of_streams"
"""The attribute of attention modules with the `Layout` of the pass under way."""

_ADAPTER = "streams"


@dataclass(frozen=True)
class StreamSettings:
    """`gamma` streams in the top `layers`; ranks of LoRA and of the pruning adapter.

    `base` is the hash of the weights that the streams were trained for, see
    `weights_sha256`.
    """

    gamma: int = 4
    layers: int = 2
    mode: str = LOSSLESS
    lora_rank: int = 32
    prune_rank: int = 8
    positions: str = "row + stream"
    base: str = ""

    def check(self, model_layers: int) -> None:
        """Raise `OptionError` if a model of `model_layers` layers cannot have them."""
        if self.mode not in MODES:
            raise OptionError(
                f"unknown mode {self.mode!r}; choose {' or '.join(MODES)}"
            )
        for name, value, most in (
            ("gamma", self.gamma, 16),
            ("layers", self.layers, model_layers),
            ("lora rank", self.lora_rank, 1024),
            ("prune rank", self.prune_rank, 1024),
        ):
            if not 1 <= value <= most:
                raise OptionError(f"{name} {value} is out of range; give 1 to {most}")

    def to_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return asdict(self)


class Streams(nn.Module):
    """The embeddings of the streams, and the adapter that prunes drafts early.

    It has gamma * h + 2 * rank * h weights; h is the hidden size of the model.
    """

    def __init__(self, settings: StreamSettings, hidden: int) -> None:
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.randn(settings.gamma, hidden) * 0.02)
        self.narrow = nn.Linear(hidden, settings.prune_rank, bias=False)
        self.widen = nn.Linear(settings.prune_rank, hidden, bias=False)
        nn.init.zeros_(self.widen.weight)


class Streamed(Probed):
    """A causal LM of transformers whose rows can carry streams.

        logits, _, _ = Streamed(model, streams)(ids, positions, rows, probes, keep)

    `tuned` identifies the LoRA that was merged into the model; it is "" if no LoRA was
    merged.
    """

    def __init__(self, model: Any, streams: Streams) -> None:
        super().__init__(model, decoder_layers(model)[-streams.settings.layers :])
        self.streams = streams
        self.tuned = ""
        if streams.settings.mode == LOSSLESS:
            for factor in _first_factors(model):
                factor.register_forward_hook(self._only_probes)

    @property
    def settings(self) -> StreamSettings:
        """The settings of its streams."""
        return self.streams.settings

    @property
    def base(self) -> str:
        """The hash of the weights that the streams belong to.

        In the shared mode the merged LoRA is a part of these weights.
        """
        if self.settings.mode == LOSSLESS:
            return self.settings.base
        joined = f"{self.settings.base} {self.tuned}"
        return hashlib.sha256(joined.encode()).hexdigest()

    @property
    def task(self) -> dict[str, Tensor]:
        """All trained weights by their names: LoRA and the streams' own."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if name.startswith("streams.") or f".{_ADAPTER}." in name
        }

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        keep: Tensor,
        early: Tensor | slice | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits [b, m + r, vocab] of the rows `keep` [m] and then of the r probes.

        `input_ids` and `position_ids` are int64 [b, n]. `probe_rows` [r] are the rows
        that carry probes, or [b, r] where each sequence has its own, and `probe_ids`
        [r] their streams, from 0 on. The second result are the logits of the pruning
        adapter [b, e, vocab] at the rows `early` [e]. The third are the hidden states
        that enter the top layers, [b, n, h].
        """
        slots = probe_rows, probe_ids, probe_ids + 1
        logits, current = self.run(input_ids, position_ids, slots, keep, **options)
        below = current.below[0]
        exits = None if early is None else self._early_logits(below[:, early])
        return logits, exits, below

    def _early_logits(self, hidden: Tensor) -> Tensor:
        """The early exit: pruning adapter, frozen norm and head over hidden states."""
        hidden = hidden.detach()
        hidden = hidden + self.streams.widen(self.streams.narrow(hidden))
        head = self.model.get_output_embeddings()
        return head(final_norm(self.model)(hidden))  # type: ignore[no-any-return]

    def starts(self, hidden: Tensor) -> Tensor:
        """The hidden states of the carriers, and the embeddings of the streams."""
        current = self.current_pass
        return carried(hidden, current.carriers) + self.streams.embeddings[current.ids]

    def _place(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        current, gamma = self.current_pass, self.streams.settings.gamma
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                # Attention over whole sequences must know where the rows end.
                layout = Layout(current.rows, gamma, current.carriers)
                setattr(module, LAYOUT_OF, layout)
        return super()._place(layer, args, kwargs)

    def _only_probes(self, factor: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Let LoRA change the probes only."""
        return output * self.current_pass.is_probe[:, None].to(output.dtype)


@dataclass(frozen=True)
class Layout:
    """The rows of a layer with streams: `rows` of the text, and then the streams.

    `probe_rows` are the carriers of the streams, see `Streamed`; where all streams of a
    row are there, each carrier comes `gamma` times in turn.
    """

    rows: int
    gamma: int
    probe_rows: Tensor


# --- adapters -------------------------------------------------------------------------


def add_adapters(model: Any, settings: StreamSettings) -> None:
    """Add untrained LoRA to `model`, in place.

    It goes into all layers in the shared mode, into the top layers in the lossless one.
    """
    layers = decoder_layers(model)
    chosen = layers[-settings.layers :] if settings.mode == LOSSLESS else layers
    add_lora(model, chosen, settings.lora_rank, _ADAPTER)


def _first_factors(model: Any) -> list[nn.Module]:
    """The first matrices of all LoRA in a model; they narrow the input to the rank."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [layer.lora_A[_ADAPTER] for layer in layers]


def load_streams(
    model: Any, settings: StreamSettings, folder: Path, scale: float = 1.0
) -> Streamed:
    """Add a checkpoint's streams to its model, in place.

    In the shared mode the LoRA, times `scale`, is merged into the model's weights.
    """
    settings.check(len(decoder_layers(model)))
    add_adapters(model, settings)
    hidden = model.get_input_embeddings().embedding_dim
    streamed = Streamed(model, Streams(settings, hidden))
    try:
        tensors = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, weight in streamed.task.items():
                weight.copy_(tensors[name])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {SETTINGS} ({error}); train the streams "
            "again"
        ) from error
    if settings.mode == SHARED:
        merge_lora(model, _ADAPTER, scale)
        file = (folder / WEIGHTS).read_bytes()
        streamed.tuned = f"{hashlib.sha256(file).hexdigest()} {scale}"
    return streamed.requires_grad_(False).eval()
