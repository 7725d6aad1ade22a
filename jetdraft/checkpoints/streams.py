"""Streams and prompt tokens: probes around an unchanged decoder.

In speculative streams (Bhendawade et al., 2402.11131) stream j of a row starts from the
row's hidden state plus an embedding, sees what the row sees, the row and streams below
j, and predicts the token j places after the row's:

    S_j = M + P_j                              entering the first of the top layers
    S_j <- attend(S_j; M_{<=t}, S_{<=j})       in each top layer (section 2.2)

`shared` has one LoRA for all rows, `lossless` LoRA for stream rows, at positions p + j.
Prompt tokens (2405.18628) enter at the bottom: prompt token j behind a row at p has
position p + j, and predicts the token at p + j + 1; logits of members are averaged.
Forecasts, as Qualcomm ships them, also see a learned prefix of keys and values.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.layers import add_lora, decoder_layers, final_norm, merge_lora
from jetdraft.checkpoints.refusals import MAX_LAYERS
from jetdraft.errors import CheckpointError, UnsupportedModelError, as_error
from jetdraft.options import Checked, between, check_range, setting


@dataclass
class Pass:
    """One pass: its rows, the s probes after them, and tensors for its hooks.

    `carriers` int64 [s] or [b, s] has the row, `ids` int64 [s] the embedding, of each
    probe or member; `is_probe` int64 [n + s] is 1 for probes.
    """

    rows: int
    carriers: Tensor
    ids: Tensor
    positions: Tensor
    is_probe: Tensor
    rotations: list[tuple[Any, Any]] = field(default_factory=list)
    below: list[Tensor] = field(default_factory=list)


class ProbedModel(nn.Module, ABC):
    """A causal LM of transformers whose rows can carry probes in its `top` layers."""

    trained: ClassVar[str]
    """A part of the name of each weight that is trained."""

    settings: Any

    def __init__(self, model: Any, top: Iterable[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.on_probes_added: Callable[[], None] = lambda: None
        self.turns: tuple[Any, Callable[[Tensor], Any]] | None = None
        """For the next pass: the rotations of its rows, and of any positions."""
        self._pass: Pass | None = None
        self.own_head: nn.Linear | None = None
        self.own_logits: Tensor | None = None
        """Of `own_head` in the last pass, [b, 1 + s, n]: of a row and s probes."""
        self._head_logits: Tensor | None = None
        first, *others = top
        first.register_forward_pre_hook(self._append_probes, with_kwargs=True)
        for layer in (first, *others):
            layer.register_forward_pre_hook(self._position_probes, with_kwargs=True)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                module.register_forward_hook(self._rotate_probes, with_kwargs=True)

    @property
    def base(self) -> str:
        return str(self.settings.base)

    @property
    def task(self) -> dict[str, Tensor]:
        """All trained weights by their names."""
        parameters = self.named_parameters()
        return {n: weight for n, weight in parameters if self.trained in n.split(".")}

    def give_head(self, own_head: nn.Linear) -> None:
        """Give the probes an LM head for a part of the vocabulary."""
        self.own_head = own_head
        lm_head = self.model.get_output_embeddings()
        lm_head.register_forward_pre_hook(self._run_own_head)
        lm_head.register_forward_hook(self._keep_logits)

    def _run_own_head(self, lm_head: nn.Module, args: tuple[Tensor]) -> Tensor | None:
        """Hook before the LM head: the probes take their own, rows take the LM head."""
        if self._pass is None or self.own_head is None:
            return None  # an early exit of the lower half
        rows = args[0].shape[1] - self._pass.ids.shape[0]
        # A row goes first, since not every operator takes empty inputs.
        self.own_logits = self.own_head(args[0][:, rows - 1 :])
        return args[0][:, :rows]

    def _keep_logits(self, lm_head: nn.Module, args: Any, logits: Tensor) -> None:
        self._head_logits = logits

    @abstractmethod
    def start_states(self, hidden: Tensor) -> Tensor:
        """Return the probes' first states [b, s, h]; the rows' states are [b, n, h]."""

    def run_pass(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probes: tuple[Tensor, Tensor, Tensor],
        keep: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Pass]:
        """Return logits [b, m + s, vocab] of m rows and then s probes, and the pass.

        Ids and positions are int64 [b, n]; `probes` carriers, embeddings and distances
        [s] each (carriers also [b, s]); `keep` [m] the rows.
        """
        carriers, ids, distances = probes
        rows = input_ids.shape[1]
        positions = carrier_values(position_ids, carriers) + distances
        # Computed from tensors on the device: a row count would be read on the host.
        is_probe = torch.cat([torch.zeros_like(position_ids[0]), torch.ones_like(ids)])
        all_positions = torch.cat([position_ids, positions], 1)
        current = Pass(rows, carriers, ids, all_positions, is_probe)
        places = torch.arange(rows, rows + ids.shape[0], device=keep.device)
        self._pass = current
        try:
            read = {"input_ids": input_ids, "position_ids": position_ids, **options}
            logits = self.model(**read, logits_to_keep=torch.cat([keep, places])).logits
        finally:
            self._pass = self.turns = None
        if self.own_head is not None and logits is not self._head_logits:
            fact = "changes its logits after the LM head"
            raise UnsupportedModelError.of(self.model, fact, "give no draft vocabulary")
        return logits, current

    @property
    def current_pass(self) -> Pass:
        """The pass that runs; only valid inside `run_pass`."""
        assert self._pass is not None, f"run the model through {type(self).__name__}"
        return self._pass

    def _append_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before the first layer with probes: append the probes' first states."""
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self.current_pass.below.append(hidden)
        starts = self.start_states(hidden)
        self.on_probes_added()
        return (torch.cat([hidden, starts], 1), *args[1:]), kwargs

    def _position_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before a layer with probes: set positions and rotations of all rows."""
        current = self.current_pass
        kwargs = {**kwargs, "position_ids": current.positions}
        for of_rows, of_rows_and_probes in current.rotations:
            if kwargs.get("position_embeddings") is of_rows:
                kwargs["position_embeddings"] = of_rows_and_probes
        return args, kwargs

    def _rotate_probes(self, rotary: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Hook after the rotary embedding: keep its rotations and those with probes."""
        current = self.current_pass
        if self.turns is not None:
            output, turned = self.turns
            current.rotations.append((output, turned(current.positions)))
            return output
        args, kwargs = list(args), dict(kwargs)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = current.positions
        else:
            args[1] = current.positions
        # Unlike a call, `forward` does not run this hook again.
        current.rotations.append((output, rotary.forward(*args, **kwargs)))
        return output


def carrier_values(rows: Tensor, carriers: Tensor) -> Tensor:
    """Return rows' values [b, n, ...] at the `carriers` [s] or [b, s]: [b, s, ...]."""
    if carriers.ndim == 1:
        # Indexing of integers would run on the host with WebGPU.
        return rows.index_select(1, carriers)
    return rows[torch.arange(len(rows), device=rows.device)[:, None], carriers]


SETTINGS = "streams.json"  # The file with the settings of the probes of a checkpoint.

# A file in the folder of a training that has not ended: it is no checkpoint yet.
UNFINISHED = ".unfinished"
WEIGHTS = "streams.safetensors"  # The file with the trained weights of the probes.
SHARED, LOSSLESS = "shared", "lossless"
MODES = (SHARED, LOSSLESS)
LAYOUT_ATTRIBUTE = "layout_of_streams"
_ADAPTER = "streams"  # The LoRA, and the module with the streams' own weights.


@dataclass(frozen=True)
class StreamSettings(Checked):
    """The fields of streams.json; `base` is a hash of the target's weights.

    mode: lossless keeps the target as it is; shared trains it too. On free text
        jetdraft train forecast, which keeps it too, guessed better in the same time.
    gamma: Streams per row.
    layers: Top layers that have streams.
    lora_rank: Rank of the LoRA adapters.
    prune_rank: Rank of the early exit that prunes drafts.
    """

    mode: str = setting(LOSSLESS, choices=MODES)
    gamma: int = setting(4, allowed=(1, 16))
    layers: int = setting(2, allowed=(1, MAX_LAYERS))
    lora_rank: int = setting(32, allowed=(1, 1024))
    prune_rank: int = setting(8, allowed=(1, 1024))
    positions: str = "row + stream"
    base: str = ""

    def check(self, model_layers: int) -> None:
        """Raise `OptionError` if a model of that many layers has too few."""
        check_range("layers", self.layers, between(1, model_layers), integer=True)


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
    """A causal LM of transformers whose rows can carry streams."""

    trained = _ADAPTER

    def __init__(self, model: Any, streams: Streams) -> None:
        from peft.tuners.lora import LoraLayer

        super().__init__(model, decoder_layers(model)[-streams.settings.layers :])
        self.streams, self.settings = streams, streams.settings
        self.lora_id = ""
        for module in model.modules() if self.settings.mode == LOSSLESS else ():
            if isinstance(module, LoraLayer):
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

        Ids and positions are int64 [b, n], `keep` [m] the rows. The rows `probe_rows`
        [r] or [b, r] carry the streams `probe_ids` [r], from 0 on. Early logits are
        [b, e, vocab] of the rows `early` [e], else None; states are [b, n, h].
        """
        probes = probe_rows, probe_ids, probe_ids + 1
        pass_of = input_ids, position_ids, probes, keep
        logits, current = self.run_pass(*pass_of, **options)
        below = current.below[0]
        if early is None:
            return logits, None, below
        hidden = below[:, early].detach()
        hidden = hidden + self.streams.widen(self.streams.narrow(hidden))
        head = self.model.get_output_embeddings()
        return logits, head(final_norm(self.model)(hidden)), below

    def start_states(self, hidden: Tensor) -> Tensor:
        """Return each carrier's state plus the embedding of its stream."""
        states = carrier_values(hidden, self.current_pass.carriers)
        return states + self.streams.embeddings[self.current_pass.ids]

    def _position_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before a layer with probes: tell attention which rows carry streams."""
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
    """The first `rows` are text; `probe_rows` int64 has each stream's text row."""

    rows: int
    gamma: int
    probe_rows: Tensor


def add_adapters(model: Any, settings: StreamSettings) -> None:
    """Add untrained LoRA to all layers, or in the lossless mode to the top layers."""
    layers = decoder_layers(model)
    chosen = layers[-settings.layers :] if settings.mode == LOSSLESS else layers
    add_lora(model, chosen, settings.lora_rank, _ADAPTER)


PROMPTS, FORECAST = "prompts", "forecast"  # Values of `mode`.
PROMPT_MODES = (PROMPTS, FORECAST)
MAX_RANKS = 8  # The most guesses of a prompt token whose acceptance rates are stored.


@dataclass(frozen=True)
class PromptSettings:
    """`gamma` prompt tokens behind a row, each with `members` embeddings.

    They see a learned `prefix` of rows. `base` is the hash of the target's weights.
    `ranks` are how often the best, second, ... guess of a token is the target's choice.
    """

    gamma: int = 3
    members: int = 1
    prefix: int = 0
    mode: str = PROMPTS
    base: str = ""
    ranks: tuple[tuple[float, ...], ...] = ()

    def check(self) -> None:
        """Raise `OptionError` for sizes that no graph can have."""
        for name, value, least, most in (
            ("prompt tokens", self.gamma, 1, 16),
            ("ensemble", self.members, 1, 64),
            ("prefix", self.prefix, int(self.mode == FORECAST), 1024),
        ):
            check_range(name, value, between(least, most), integer=True)


class Prompts(nn.Module):
    """Embeddings float [gamma * members, h], token 1's members first, and a prefix.

    `keys` (rotated) and `values` are float [layers, kv_heads, prefix, head_dim].
    """

    def __init__(
        self, settings: PromptSettings, embeddings: Tensor, *prefix: Tensor
    ) -> None:
        super().__init__()
        self.settings, parts = settings, (embeddings, *prefix)
        first, *others = (nn.Parameter(x.detach().clone().float()) for x in parts)
        keys_values: Any = others or (None, None)
        self.embeddings, (self.keys, self.values) = first, keys_values

    @classmethod
    def empty(cls, settings: PromptSettings, model: Any) -> "Prompts":
        """Make prompts of zeros, in the shapes that settings and model require."""
        config = model.config.get_text_config(decoder=True)
        rows = settings.gamma * settings.members
        embeddings = torch.zeros(rows, model.get_input_embeddings().embedding_dim)
        if not settings.prefix:
            return cls(settings, embeddings)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = config.num_hidden_layers, kv_heads, settings.prefix, head_dim
        return cls(settings, embeddings, torch.zeros(shape), torch.zeros(shape))

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's prefix: keys, values [1, kv_heads, prefix, head_dim]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[layer][None], self.values[layer][None]


class PromptedModel(ProbedModel):
    """A causal LM of transformers whose rows can carry prompt tokens."""

    trained = "prompts"

    def __init__(self, model: Any, prompts: Prompts) -> None:
        super().__init__(model, decoder_layers(model))
        self.prompts, self.settings = prompts, prompts.settings

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        keep: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return logits [b, m + r, vocab] of m rows `keep` and then of r probes.

        Ids and positions are int64 [b, n], `probe_rows` and `probe_ids` [r].
        """
        members = self.settings.members
        places = torch.arange(members, device=probe_ids.device)
        ids = probe_ids[:, None] * members + places

        def of_members(numbers: Tensor) -> Tensor:
            return numbers[:, None].expand(-1, members).reshape(-1)

        probes = of_members(probe_rows), ids.reshape(-1), of_members(probe_ids + 1)
        logits, _ = self.run_pass(input_ids, position_ids, probes, keep, **options)

        def average(logits: Tensor, rows: int) -> Tensor:
            first, others = logits[:, :rows], logits[:, rows:]
            parts = others.reshape(others.shape[0], -1, members, others.shape[2])
            return torch.cat([first, parts.float().mean(2).to(logits.dtype)], 1)

        if members == 1:
            return logits
        if self.own_logits is None:
            return average(logits, keep.shape[0])
        self.own_logits = average(self.own_logits, 1)
        return logits

    def start_states(self, hidden: Tensor) -> Tensor:
        """Return the embeddings of the prompt tokens, whatever the rows' states are."""
        starts = self.prompts.embeddings[self.current_pass.ids].to(hidden.dtype)
        return starts[None].expand(hidden.shape[0], -1, -1)


ProbeSettings = StreamSettings | PromptSettings


def load_probes(
    model: Any, settings: ProbeSettings, folder: Path, scale: float
) -> ProbedModel:
    """Add a checkpoint's probes to its model, in place; see `Checkpoint.add_probes`."""
    if isinstance(settings, PromptSettings):
        settings.check()
        prompted = PromptedModel(model, Prompts.empty(settings, model))
        return _load_weights(prompted, folder, "prompt tokens")
    settings.check(len(decoder_layers(model)))
    add_adapters(model, settings)
    hidden = model.get_input_embeddings().embedding_dim
    streamed = StreamedModel(model, Streams(settings, hidden))
    _load_weights(streamed, folder, "streams")
    if settings.mode == SHARED:
        merge_lora(model, _ADAPTER, scale)
        file = (folder / WEIGHTS).read_bytes()
        streamed.lora_id = f"{hashlib.sha256(file).hexdigest()} {scale}"
    return streamed


def _load_weights(probed: ProbedModel, folder: Path, kind: str) -> ProbedModel:
    """Load the trained weights of probes; raises `CheckpointError` unless all fit."""
    fact, fix = f"{folder / WEIGHTS} does not fit {SETTINGS}", f"train the {kind} again"
    causes = OSError, KeyError, ValueError, SafetensorError
    with as_error(CheckpointError, causes, fact, fix):
        tensors = load_file(folder / WEIGHTS)
        for name, weight in probed.task.items():
            if tensors[name].shape != weight.shape:
                shapes = [list(each.shape) for each in (tensors[name], weight)]
                raise ValueError(f"{name} is {shapes[0]}, expected {shapes[1]}")
            weight.data.copy_(tensors[name])
    return probed.requires_grad_(False).eval()
