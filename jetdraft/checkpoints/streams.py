"""Speculative streams around an unchanged decoder (Bhendawade et al., 2402.11131).

In the top layers a row, the carrier, may carry streams. Stream j starts from the hidden
state of its carrier plus an embedding of its own, sees what the carrier sees, the
carrier and the streams below j, and predicts the token j places after the carrier's:

    S_j = M + P_j                              entering the first of the top layers
    S_j <- attend(S_j; M_{<=t}, S_{<=j})       in each top layer (section 2.2)

`shared`: one LoRA for all rows of all layers, so the target is the tuned model.
`lossless`: LoRA for stream rows only. Here, stream j of a row at p has position p + j,
of which the paper says nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.layers import add_lora, decoder_layers, final_norm, merge_lora
from jetdraft.checkpoints.probes import ProbedModel, carrier_values
from jetdraft.checkpoints.refusals import MAX_LAYERS
from jetdraft.errors import CheckpointError
from jetdraft.options import Checked, check_ranges, range_between, setting

SETTINGS = "streams.json"
"""The file with the settings of the probes of a checkpoint."""

UNFINISHED = ".unfinished"
"""A file in the folder of a training that has not ended.

In a copy of the target it names what the training adds. Until that is saved, the copy
is refused as a checkpoint."""

WEIGHTS = "streams.safetensors"
"""The file with the trained weights of the probes."""

SHARED, LOSSLESS = "shared", "lossless"
MODES = (SHARED, LOSSLESS)
LAYOUT_ATTRIBUTE = "layout_of_streams"
"""The attribute in which attention modules keep the `Layout` of the current pass."""

_ADAPTER = "streams"
"""The name of the LoRA, and of the module with the streams' own weights."""


@dataclass(frozen=True)
class StreamSettings(Checked):
    """The fields of streams.json; `base` is a hash of the target's weights."""

    mode: str = setting(
        LOSSLESS,
        "lossless keeps the target as it is; shared trains it too. On free text "
        "jetdraft train forecast, which keeps it too, guessed better in the same time.",
        choices=MODES,
    )
    gamma: int = setting(4, "Streams per row.", (1, 16))
    layers: int = setting(2, "Top layers that have streams.", (1, MAX_LAYERS))
    lora_rank: int = setting(32, "Rank of the LoRA adapters.", (1, 1024))
    prune_rank: int = setting(
        8, "Rank of the early exit that prunes drafts.", (1, 1024)
    )
    positions: str = "row + stream"
    base: str = ""

    def check(self, model_layers: int) -> None:
        """Raise `OptionError` if a model of that many layers has too few."""
        check_ranges(self, {"layers": range_between(1, model_layers)})


class Streams(nn.Module):
    """The embeddings of the streams, and the adapter that prunes drafts early."""

    def __init__(self, settings: StreamSettings, hidden: int) -> None:
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.randn(settings.gamma, hidden) * 0.02)
        self.narrow = nn.Linear(hidden, settings.prune_rank, bias=False)
        self.widen = nn.Linear(settings.prune_rank, hidden, bias=False)
        nn.init.zeros_(self.widen.weight)


class StreamedModel(ProbedModel):
    """A causal LM of transformers whose rows can carry streams.

    `lora_id` identifies the LoRA that was merged into the model; "" for none.
    """

    trained = _ADAPTER

    def __init__(self, model: Any, streams: Streams) -> None:
        from peft.tuners.lora import LoraLayer

        super().__init__(model, decoder_layers(model)[-streams.settings.layers :])
        self.streams, self.settings = streams, streams.settings
        self.lora_id = ""
        for module in model.modules() if self.settings.mode == LOSSLESS else ():
            if isinstance(module, LoraLayer):
                # The first factor narrows the input to the rank.
                module.lora_A[_ADAPTER].register_forward_hook(self._mask_lora)

    @property
    def base(self) -> str:
        """The hash of the target's weights, in the shared mode with the merged LoRA."""
        if self.settings.mode == LOSSLESS:
            return str(self.settings.base)
        joined = f"{self.settings.base} {self.lora_id}"
        return hashlib.sha256(joined.encode()).hexdigest()

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
        """Return logits [b, m + r, vocab] of m rows and r probes, early logits, states.

        `input_ids` and `position_ids` are int64 [b, n], `keep` [m] the rows. The rows
        `probe_rows` [r] or [b, r] carry probes, and `probe_ids` [r] are their streams,
        from 0 on. Early logits [b, e, vocab] are the pruning adapter's at the rows
        `early` [e], else None. The states [b, n, h] enter the top layers.
        """
        probes = probe_rows, probe_ids, probe_ids + 1
        logits, current = self.run_pass(
            input_ids, position_ids, probes, keep, **options
        )
        below = current.below[0]
        if early is None:
            return logits, None, below
        hidden = below[:, early].detach()
        hidden = hidden + self.streams.widen(self.streams.narrow(hidden))
        head = self.model.get_output_embeddings()
        return logits, head(final_norm(self.model)(hidden)), below

    def start_states(self, hidden: Tensor) -> Tensor:
        """Return each carrier's state plus the embedding of its stream."""
        current = self.current_pass
        return (
            carrier_values(hidden, current.carriers)
            + self.streams.embeddings[current.ids]
        )

    def _position_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before a layer with probes: set positions, as `ProbedModel` does.

        It first tells the layer's attention modules which rows carry which streams.
        """
        current, gamma = self.current_pass, self.settings.gamma
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                # Attention over whole sequences must know where the rows end.
                layout = Layout(current.rows, gamma, current.carriers)
                setattr(module, LAYOUT_ATTRIBUTE, layout)
        return super()._position_probes(layer, args, kwargs)

    def _mask_lora(self, factor: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Hook: set the LoRA output of the rows to 0, so that only probes change."""
        return output * self.current_pass.is_probe[:, None].to(output.dtype)


@dataclass(frozen=True)
class Layout:
    """Which rows of a pass are text, the first `rows`, and which are streams.

    `probe_rows` int64 has each stream's text row: `gamma` times if all are there.
    """

    rows: int
    gamma: int
    probe_rows: Tensor


# --- adapters -------------------------------------------------------------------------


def add_adapters(model: Any, settings: StreamSettings) -> None:
    """Add untrained LoRA to all layers, or in the lossless mode to the top layers."""
    layers = decoder_layers(model)
    chosen = layers[-settings.layers :] if settings.mode == LOSSLESS else layers
    add_lora(model, chosen, settings.lora_rank, _ADAPTER)


def load_streams(
    model: Any, settings: StreamSettings, folder: Path, scale: float = 1.0
) -> StreamedModel:
    """Add streams to a checkpoint's model, in place; see `Checkpoint.add_probes`."""
    settings.check(len(decoder_layers(model)))
    add_adapters(model, settings)
    hidden = model.get_input_embeddings().embedding_dim
    streamed = StreamedModel(model, Streams(settings, hidden))
    fill(streamed, folder, "streams")
    if settings.mode == SHARED:
        merge_lora(model, _ADAPTER, scale)
        file = (folder / WEIGHTS).read_bytes()
        streamed.lora_id = f"{hashlib.sha256(file).hexdigest()} {scale}"
    return streamed.requires_grad_(False).eval()


def fill(probed: ProbedModel, folder: Path, what: str) -> None:
    """Load the trained weights of probes; raises `CheckpointError` unless all fit."""
    try:
        tensors = load_file(folder / WEIGHTS)
        for name, weight in probed.task.items():
            if tensors[name].shape != weight.shape:
                shapes = [list(each.shape) for each in (tensors[name], weight)]
                raise ValueError(f"{name} is {shapes[0]}, expected {shapes[1]}")
            weight.data.copy_(tensors[name])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {SETTINGS} ({error}); train the {what} "
            "again"
        ) from error
