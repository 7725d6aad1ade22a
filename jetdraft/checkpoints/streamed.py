"""Speculative streams around an unchanged decoder (Bhendawade et al., 2402.11131).

In the top layers a row may carry streams. Stream j starts from its carrier's hidden
state plus an embedding of its own, P_j, sees what the carrier sees, the carrier and the
streams below j, and predicts the token j places after the one that the carrier does:

    S_j = M + P_j                              entering the first of the top layers
    S_j <- attend(S_j; M_{<=t}, S_{<=j})       in each of them (section 2.2)
    logits of S_j through the same norm and head predict y_{t+j}

Two modes. `shared`: one LoRA for all rows of all layers, so the target is the tuned
model. `lossless`: LoRA for stream rows only, so the target stays the base.

Positions, which the paper leaves open: stream j of a row at p stands at p + j.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.errors import (
    CheckpointError,
    JetdraftError,
    OptionError,
    UnsupportedModelError,
)

SETTINGS = "streams.json"
UNFINISHED = ".unfinished"
"""Marks a folder that a training still writes."""

WEIGHTS = "streams.safetensors"
SHARED, LOSSLESS = "shared", "lossless"
MODES = (SHARED, LOSSLESS)
ROWS_OF = "rows_before_streams"
GAMMA_OF = "streams_per_carrier"
"""Attributes of attention modules: the number of rows that are not streams, and the
number of streams per carrier."""

_ADAPTER = "streams"


@dataclass(frozen=True)
class StreamSettings:
    """`gamma` streams in the top `layers`; ranks of LoRA and of the pruning adapter.

    `base` is the hash of the weights they were trained for, see `weights_sha256`.

        StreamSettings(gamma=4, layers=2, mode="lossless")
    """

    gamma: int = 4
    layers: int = 2
    mode: str = LOSSLESS
    lora_rank: int = 32
    prune_rank: int = 8
    positions: str = "row + stream"
    base: str = ""

    def check(self, model_layers: int) -> None:
        """Raise `OptionError` if a model of `model_layers` cannot have them."""
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
        """A JSON object."""
        return asdict(self)


class Streams(nn.Module):
    """The embeddings of the streams, and the adapter that prunes drafts early.

    gamma * h + 2 * rank * h weights, h being the model's hidden size.
    """

    def __init__(self, settings: StreamSettings, hidden: int) -> None:
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.randn(settings.gamma, hidden) * 0.02)
        self.narrow = nn.Linear(hidden, settings.prune_rank, bias=False)
        self.widen = nn.Linear(settings.prune_rank, hidden, bias=False)
        nn.init.zeros_(self.widen.weight)


class Streamed(nn.Module):
    """A causal LM of transformers whose rows can carry streams.

    Hooks on its layers add the streams. The model's own code sees the rows only; at the
    first of the top layers the probes join them, with their own rotations.

        logits, _, _ = Streamed(model, streams)(ids, positions, rows, ids, keep)

    `entered` is called when the probes have joined. `tuned` names the weights that were
    merged into the model; it is empty if none were.
    """

    def __init__(self, model: Any, streams: Streams) -> None:
        super().__init__()
        self.model = model
        self.streams = streams
        self.entered: Callable[[], None] = lambda: None
        self.tuned = ""
        self._pass: _Pass | None = None
        layers = decoder_layers(model)
        top = layers[len(layers) - streams.settings.layers :]
        top[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        for layer in top:
            layer.register_forward_pre_hook(self._place, with_kwargs=True)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                module.register_forward_hook(self._rotate, with_kwargs=True)
        if streams.settings.mode == LOSSLESS:
            for factor in _first_factors(model):
                factor.register_forward_hook(self._only_probes)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        keep: Tensor,
        early_exit: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits [b, m + r, vocab] of the rows `keep` [m] and then of the r probes.

        `input_ids` and `position_ids` are int64 [b, n], `probe_rows` and `probe_ids`
        [r]: the row that carries each probe, and its stream, from 0 on. With
        `early_exit` also the logits of the pruning adapter, [b, n, vocab]. Last, the
        hidden states that enter the top layers, [b, n, h].
        """
        rows, probes = input_ids.shape[1], probe_rows.shape[0]
        positions = position_ids[:, probe_rows] + probe_ids + 1
        together = torch.cat([position_ids, positions], 1)
        # Made of tensors on the device: a number of rows would come from the host.
        among = [torch.zeros_like(position_ids[0]), torch.ones_like(probe_rows)]
        self._pass = _Pass(rows, probe_rows, probe_ids, together, torch.cat(among))
        probed = torch.arange(rows, rows + probes, device=keep.device)
        try:
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                logits_to_keep=torch.cat([keep, probed]),
                **options,
            ).logits
            below = self._pass.below[0]
            early = self._early_logits(below) if early_exit else None
        finally:
            self._pass = None
        return logits, early, below

    def _early_logits(self, hidden: Tensor) -> Tensor:
        """The states where streams enter, through the frozen norm and head."""
        hidden = hidden.detach()
        hidden = hidden + self.streams.widen(self.streams.narrow(hidden))
        head = self.model.get_output_embeddings()
        return head(final_norm(self.model)(hidden))  # type: ignore[no-any-return]

    @property
    def _running(self) -> _Pass:
        assert self._pass is not None, "run the model through Streamed"
        return self._pass

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """The probes start from their carriers' hidden states."""
        running = self._running
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        running.below.append(hidden)
        starts = hidden[:, running.probe_rows]
        starts = starts + self.streams.embeddings[running.probe_ids]
        self.entered()
        return (torch.cat([hidden, starts], 1), *args[1:]), kwargs

    def _place(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give the layer the positions and rotations of rows and probes."""
        running = self._running
        kwargs = {**kwargs, "position_ids": running.positions}
        for rows_only, together in running.rotations:
            if kwargs.get("position_embeddings") is rows_only:
                kwargs["position_embeddings"] = together
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                # Attention over whole sequences must know where the rows end.
                setattr(module, ROWS_OF, running.rows)
                setattr(module, GAMMA_OF, self.streams.settings.gamma)
        return args, kwargs

    def _rotate(self, rotary: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Compute the rotations of rows and probes beside those of the rows."""
        args, kwargs = list(args), dict(kwargs)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = self._running.positions
        else:
            args[1] = self._running.positions
        self._running.rotations.append((output, rotary.forward(*args, **kwargs)))

    def _only_probes(self, factor: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self._running.is_probe[:, None].to(output.dtype)


@dataclass
class _Pass:
    """One pass: its rows, their probes, and the tensors that its hooks see.

    `positions` are the positions of rows and probes, `is_probe` is 1 for probes.
    `rotations` has pairs of the model's own rotations and the rotations of all, `below`
    the hidden states under the top layers.
    """

    rows: int
    probe_rows: Tensor
    probe_ids: Tensor
    positions: Tensor
    is_probe: Tensor
    rotations: list[tuple[Any, Any]] = field(default_factory=list)
    below: list[Tensor] = field(default_factory=list)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers, bottom first."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {count} layers; streams cannot be added"
    )


def final_norm(model: Any) -> nn.Module:
    """The norm between the last layer and the head."""
    decoder = model.get_decoder()
    norms: list[nn.Module] = [
        module
        for module in decoder.children()
        if "norm" in type(module).__name__.lower()
    ]
    if not norms:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no norm before its head; streams cannot be "
            "added"
        )
    return norms[-1]


# --- adapters -------------------------------------------------------------------------


def add_adapters(model: Any, settings: StreamSettings) -> None:
    """Add untrained LoRA to all layers of `model` or to the top ones, in place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise JetdraftError(
            f"streams need {error.name}; pip install 'jetdraft[cpu,train]'"
        ) from error
    layers = decoder_layers(model)
    chosen = layers[-settings.layers :] if settings.mode == LOSSLESS else layers
    linear = {
        id(module)
        for layer in chosen
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    }
    names = [name for name, module in model.named_modules() if id(module) in linear]
    if not names:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layers that LoRA could go into; "
            "streams cannot be added"
        )
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_rank, target_modules=names
    )
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def _first_factors(model: Any) -> list[nn.Module]:
    """The layers of all LoRA in a model that narrow the input to the rank."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [layer.lora_A[_ADAPTER] for layer in layers]


def merge_adapters(model: Any, scale: float) -> None:
    """Add `scale` times the LoRA to the weights, in place (R-Adapter, 2408.05749)."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.set_scale(_ADAPTER, scale)
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def stream_weights(streamed: Streamed) -> dict[str, Tensor]:
    """All trained weights by their names in `streamed`: LoRA and the streams' own."""
    return {
        name: parameter
        for name, parameter in streamed.named_parameters()
        if name.startswith("streams.") or f".{_ADAPTER}." in name
    }


def read_settings(folder: Path) -> StreamSettings | None:
    """The settings of a checkpoint with streams; None for one without."""
    file = folder / SETTINGS
    if not file.is_file():
        if (folder / UNFINISHED).is_file():
            raise CheckpointError(
                f"{folder} is a training that has saved no streams yet; let it go on"
            )
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        names = StreamSettings.__dataclass_fields__
        return StreamSettings(**{name: fields[name] for name in names})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); train the streams again"
        ) from error


def load_streams(
    model: Any, settings: StreamSettings, folder: Path, scale: float = 1.0
) -> Streamed:
    """Put a checkpoint's streams around its model, in place.

    LoRA of the shared mode is merged into the weights, times `scale`.
    """
    settings.check(len(decoder_layers(model)))
    add_adapters(model, settings)
    hidden = model.get_input_embeddings().embedding_dim
    streamed = Streamed(model, Streams(settings, hidden))
    try:
        stored = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, weight in stream_weights(streamed).items():
                weight.copy_(stored[name])
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {SETTINGS} ({error}); train the streams "
            "again"
        ) from error
    if settings.mode == SHARED:
        merge_adapters(model, scale)
        file = (folder / WEIGHTS).read_bytes()
        streamed.tuned = f"{hashlib.sha256(file).hexdigest()} {scale}"
    return streamed.requires_grad_(False).eval()
