"""The pass as a torch module, with probes: streams (2402.11131) or prompt tokens."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from jetdraft.checkpoints.attention import PassThroughCache, StepState, attending
from jetdraft.checkpoints.heads.draft_module import lm_head_rows
from jetdraft.checkpoints.layers import Taps, decoder_layers, watch_input
from jetdraft.checkpoints.parameters import convert_while_running
from jetdraft.checkpoints.recurrence import States
from jetdraft.checkpoints.streams import ProbedModel, PromptedModel, StreamedModel
from jetdraft.contracts.step_contract import PARENTS, SCORES, STATE_ROWS, StepContract
from jetdraft.contracts.tensors import CANDIDATES, HIDDEN, TensorSpec
from jetdraft.errors import JetdraftError, UnsupportedModelError

# Different sizes, so that the tracer does not merge two axes into one.
TRACED_ROWS, TRACED_ANSWERS, TRACED_PROBES, TRACED_SEEN = 7, 5, 6, 4
CUT = "cut_hidden"  # An extra output: the hidden states at the cut.
_FUSION_PREFIX = "features"  # Begins the names of a fusion's weights.
Specs = tuple[TensorSpec, ...]


class Step(torch.nn.Module):
    """One pass of a causal LM over fixed buffers, as the graph contract declares it.

    In torch it returns copies of the buffers. A `cut` adds the states that enter the
    top layers, `taps` add features; `ids` int64 [n] are LM head rows, None for all.
    """

    extra_inputs: tuple[TensorSpec, ...] = ()
    extra_outputs: tuple[str, ...] = ()

    def __init__(
        self,
        model: Any,
        contract: StepContract,
        cut: int = 0,
        ids: Tensor | None = None,
        taps: Taps | None = None,
    ) -> None:
        super().__init__()
        self.model, self.contract, self.cut, self.ids = model, contract, cut, ids
        self.taps = torch.nn.ModuleDict({} if taps is None else {_FUSION_PREFIX: taps})
        self.windows: dict[int, int] = {}
        if cut:
            self.extra_outputs = (CUT,)

    @property
    def decoder(self) -> Any:
        return self.model

    @property
    def declared_tensors(self) -> tuple[Specs, Specs, Specs]:
        """The declared inputs, the inputs that are buffers, and the outputs."""
        contract = self.contract
        past = *contract.buffers("past"), *contract.state_tensors("past")
        return contract.inputs, past, contract.outputs

    def example_inputs(self) -> list[Tensor]:
        """Return values to trace with for the inputs before the buffers."""
        rows = torch.arange(TRACED_ROWS)
        counts = TRACED_ROWS, TRACED_ANSWERS, TRACED_PROBES
        sizes = *counts, self.contract.members, self.contract.prefix, TRACED_SEEN
        values = {
            "position_ids": rows[None],
            "total_length": torch.tensor([TRACED_ROWS], dtype=torch.int32),
            "answer_rows": rows[:TRACED_ANSWERS],
            "probe_rows": rows[:TRACED_PROBES],
            STATE_ROWS.name: rows[:2],
        }
        inputs, buffers, _ = self.declared_tensors
        others = inputs[: len(inputs) - len(buffers)]
        return [values.get(spec.name, zeros(spec, *sizes)) for spec in others]

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Return the contract's outputs, then extra outputs; inputs have that order."""
        input_ids, position_ids, cursor, total_length, answer_rows, *rows, past = inputs
        buffers = len(self.contract.buffers("past"))
        state = make_state(position_ids, cursor, total_length, past[:buffers])
        if self.contract.states:
            state.states = States(rows[-1], past[buffers:])
        # Passes in torch, which read text alone, leave the pictures out.
        if len(rows) == bool(self.contract.states):
            return self.outputs(state, input_ids, position_ids, answer_rows)
        seen = len(self.contract.picture_inputs)
        if self.contract.whole_pictures:
            state.picture = rows[seen]
        with seeing(self.model, input_ids, position_ids, *rows[:seen]) as words:
            return self.outputs(state, words, position_ids, answer_rows)

    def outputs(self, state: StepState, *rows: Tensor) -> list[Tensor]:
        """Run a pass with the arguments of `logits`; return what `forward` returns."""
        head, cut, features = (list[Tensor]() for _ in range(3))
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(attending(state))
            lm_head = self.model.get_output_embeddings()
            hooks.enter_context(watch_input(lm_head, head.append))
            if self.cut:
                first = decoder_layers(self.model)[-self.cut]
                hooks.enter_context(watch_input(first, cut.append))
            for taps in self.taps.values():
                features = hooks.enter_context(cast(Taps, taps).watching(self.model))
            logits = self.logits(state, *rows)
        if logits.shape[1] != rows[-1].shape[0]:
            raise UnsupportedModelError.of(self.model, "ignores logits_to_keep")
        self.windows = state.windows
        if len(state.present) != len(state.past):
            raise UnsupportedModelError(
                f"only {len(state.present)} of {len(state.past)} layers keep keys and "
                "values; see docs/models.md"
            )
        hidden = [head[0].float()] if self.contract.hidden_size else []
        if self.contract.experts:
            features.append(torch.cat(state.experts, 1)[None])
        found = [*answers(logits, self.ids), *hidden, *features]
        return [*found, *present_buffers(state), *state.states.present, *cut]

    def logits(
        self, state: Any, input_ids: Tensor, position_ids: Tensor, answer_rows: Tensor
    ) -> Tensor:
        """Run the model; return the logits of the answered rows, float32 [1, m, n]."""
        cache = {"past_key_values": PassThroughCache(), "use_cache": True}
        rows = {"position_ids": position_ids, "logits_to_keep": answer_rows}
        logits: Tensor = self.model(input_ids=input_ids, **rows, **cache).logits
        return logits.float()

    @property
    def unquantized_weights(self) -> dict[str, Tensor]:
        """The weights that stay floats: a fusion reads the model's largest numbers."""
        return {name: weight.data for name, weight in self.taps.named_parameters()}

    def dtype_of(self, weight: str) -> torch.dtype:
        """Return the type that the graph has for the weight of that name."""
        if weight.startswith(f"{_FUSION_PREFIX}."):
            return torch.float32  # states overflow float16
        return dtype_of(self.contract)


@contextlib.contextmanager
def seeing(
    model: Any, ids: Tensor, positions: Tensor, table: Tensor, *turns: Tensor
) -> Iterator[Tensor]:
    """In the block, let a model read rows of pictures; yield ids that it can embed.

    Ids beyond the embeddings stand for rows of `table` [n, size]. What rows have beyond
    an embedding is added after the first layers (DeepStack, 2406.04334). Cosines and
    sines [slots, d / 2], if given, turn the rows at `positions` (M-RoPE, 2409.12191).
    The rows of a `ProbedModel` may have probes behind them.
    """
    probed = model if isinstance(model, ProbedModel) else None
    model = model if probed is None else probed.model
    embed = model.get_input_embeddings()
    first, width = embed.weight.shape
    rows = table[(ids - first).clamp(min=0)]
    is_row = (ids >= first)[..., None]

    def see(number: int, module: Any, given: Any, states: Tensor) -> Tensor:
        part = rows[..., number * width : (number + 1) * width]
        if probed is None or not probed.current_pass.below:
            return torch.where(is_row, part if number == 0 else states + part, states)
        text, probes = states[:, : ids.shape[1]], states[:, ids.shape[1] :]
        return torch.cat([torch.where(is_row, text + part, text), probes], 1)

    def turned(at: Tensor) -> list[Tensor]:
        return [torch.cat([turn[at]] * 2, -1) for turn in turns]

    own = turned(positions)
    with contextlib.ExitStack() as hooks:
        seers = [embed, *decoder_layers(model)]
        for number, module in enumerate(seers[: table.shape[1] // width]):
            hook = partial(see, number)
            hooks.enter_context(module.register_forward_hook(hook))
        if turns and probed is not None:
            probed.turns = own, turned
        elif turns:
            (rotary,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
            hooks.enter_context(rotary.register_forward_hook(lambda *_: own))
        # Gemma 4 reads padding's embeddings of each layer for a picture.
        padding = model.config.get_text_config().pad_token_id or 0
        yield ids.masked_fill(ids >= first, max(padding, 0))


def zeros(spec: TensorSpec, *sizes: int) -> Tensor:
    """Return zeros for a declaration; `sizes` are passed to `TensorSpec.shape_for`."""
    return torch.zeros(spec.shape_for(*sizes), dtype=getattr(torch, spec.dtype))


def count_on_device(numbers: Tensor) -> Tensor:
    """Count the columns of `numbers` [1, n] as int32 [1]; no number is below 0.

    A sum on the device, since a CUDA graph copies no shape from the host; n is not 0.
    """
    return (numbers >= 0).to(torch.int32).sum(1, dtype=torch.int32)


def make_state(
    position_ids: Tensor, cursor: Tensor, total_length: Tensor, past: list[Tensor]
) -> StepState:
    """Make the state that the attention layers share in a pass over `past`."""
    return StepState(
        cursor=cursor,
        # Counted, since total_length may be a fixed size beyond the last row.
        last_row=cursor + count_on_device(position_ids) - 1,
        total_length=total_length,
        past=list(zip(past[::2], past[1::2], strict=True)),
    )


def answers(logits: Tensor, ids: Tensor | None) -> list[Tensor]:
    """Return candidates, their logits, logsumexp, and `logits` [1, m, n] itself.

    `ids` int64 [n] are the tokens of the columns, None for all.
    """
    values, places = torch.topk(logits, min(CANDIDATES, logits.shape[2]))
    sums = log_sum_exp(logits, values[..., :1])[..., 0]
    # WebGPU gathers integers of 32 bits only.
    candidates = places if ids is None else ids.int()[places].long()
    return [candidates, values, sums, logits]


PACKET = 16  # The most numbers that a processor takes a logarithm of at once.


def log_sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """Return log(sum(exp)) of rows, [..., 1]; ReduceLogSumExp is slow on the CPU."""
    total = (logits - largest).exp().sum(-1, keepdim=True)
    # Copies fill a packet, so that no last bit depends on the number of rows.
    return largest + (total * torch.ones(PACKET)).log()[..., :1]


def present_buffers(state: StepState) -> list[Tensor]:
    """Return the buffers after a pass, in the order of the contract."""
    return [buffer for i in sorted(state.present) for buffer in state.present[i]]


def dtype_of(contract: StepContract) -> torch.dtype:
    """The type that a graph computes in."""
    dtype: torch.dtype = getattr(torch, contract.dtype)
    return dtype


class Sizes(NamedTuple):
    """What a `StepContract` says of a model's layers."""

    kv_shapes: tuple[tuple[int, int], ...]
    states: tuple[tuple[int, ...], ...] = ()
    experts: int = 0


def buffer_sizes(model: Any) -> Sizes:
    """Return what a pass of a row shows of a model's layers."""
    row = torch.zeros(1, 1, dtype=torch.long)

    def run(cache: Cache) -> None:
        model(input_ids=row, position_ids=row, past_key_values=cache, use_cache=True)

    state = run_one_row(model, run)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    numbers, states = sorted(state.windows), state.states
    if not layers or (not states.present and numbers != list(range(layers))):
        fact = f"attends in {len(numbers)} of its {layers} layers"
        raise UnsupportedModelError.of(model, fact)
    return Sizes(
        tuple((key.shape[1], key.shape[3]) for key, _ in state.past),
        tuple(tuple(after.shape[1:]) for after in states.present),
        sum(chosen.shape[1] for chosen in state.experts),
    )


def run_one_row(model: Any, run: Callable[[Cache], object]) -> StepState:
    """Let `run` run the model on one row; return the state with the layers' buffers."""
    one = torch.ones(1, dtype=torch.int32)
    state = StepState(cursor=one - 1, last_row=one - 1, total_length=one, past=[])
    with exporting(model), attending(state), torch.no_grad():
        run(PassThroughCache())
    return state


@contextlib.contextmanager
def exporting(model: Any) -> Iterator[None]:
    """Raise an error as the `JetdraftError` behind it, or as one about the model."""
    try:
        yield
    except Exception as error:  # an unknown architecture may raise anything
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, JetdraftError):
                raise cause from error
            innermost, cause = cause, cause.__cause__ or cause.__context__
        reason = (str(innermost).splitlines() or [type(innermost).__name__])[0]
        fact = f"cannot be exported ({reason})"
        raise UnsupportedModelError.of(model, fact) from error


class ProbeStep(Step):
    """One pass of a model whose rows can carry probes, which may see a prefix.

    `ids` int64 [n] are the tokens that probes choose among, None for all.
    """

    model: ProbedModel

    def __init__(
        self, probed: ProbedModel, contract: StepContract, ids: Tensor | None
    ) -> None:
        super().__init__(probed, contract, ids=ids)
        if ids is not None:
            own = lm_head_rows(probed.model.get_output_embeddings(), ids)
            convert_while_running(own, dtype_of(contract))
            probed.give_head(own)

    @property
    def decoder(self) -> Any:
        return self.model.model

    @property
    def unquantized_weights(self) -> dict[str, Tensor]:
        """The weights of the probes, which stay floats, by name."""
        return self.model.task

    def forward(self, *inputs: Any) -> list[Tensor]:
        input_ids, position_ids, cursor, total_length, answer_rows, *others = inputs
        draft_mask, draft_start, probe_rows, probe_ids, *rest = others
        prefix = rest.pop(0) if self.contract.prefix else None
        pictures = [rest.pop(0) for _ in self.contract.picture_inputs]
        past, *extras = rest
        state = make_state(position_ids, cursor, total_length, past)
        state.rows = input_ids.shape[1]

        def set_bias_and_prefix() -> None:
            # Counted with the rows, since CUDA sums no axis of size 0.
            filled = self.model.current_pass.positions
            if prefix is not None:
                filled = torch.cat([filled, prefix[None]], 1)
            state.last_row = cursor + count_on_device(filled) - 1
            slots = torch.arange(1, self.contract.slots + 1)
            lines = slots - draft_start.to(torch.int64)
            hidden = draft_mask.to(dtype_of(self.contract)) * HIDDEN
            state.bias = hidden[lines.clamp(0, self.contract.draft_slots)].T[None, None]
            if prefix is not None:
                prompts = cast(PromptedModel, self.model).prompts
                state.prefix = [
                    (keys.index_select(2, prefix), values.index_select(2, prefix))
                    for keys, values in map(prompts.prefix, range(len(state.past)))
                ]

        self.model.on_probes_added = set_bias_and_prefix
        eyes: Any = contextlib.nullcontext(input_ids)
        if pictures:
            eyes = seeing(self.model, input_ids, position_ids, *pictures)
        cache = {"past_key_values": PassThroughCache(), "use_cache": True}
        with attending(state), eyes as words:
            given = words, position_ids, probe_rows, probe_ids, answer_rows
            logits, *extra_outputs = self.run_model(given, *extras, **cache)
        found, own = answers(logits.float(), None), self.model.own_logits
        # Split the results: not every operator takes empty inputs, as without probes.
        joined = found if own is None else answers(own.float(), self.ids)
        rows = answer_rows.shape[0] if own is None else 1
        first, probes = (
            # As floats, since WebGPU slices no integers.
            [x.to(torch.float32)[:, start:end].to(x.dtype) for x in joined]
            for start, end in ((0, rows), (rows, None))
        )
        of_rows = first if own is None else found
        return [*of_rows, *probes, *present_buffers(state), *extra_outputs]

    def run_model(self, rows: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
        """Run the model; return the logits, to which a subclass adds extra outputs."""
        return [self.model(*rows, **options)]


class StreamStep(ProbeStep):
    """One pass with streams; it also outputs states and scores for an early exit."""

    extra_inputs = (PARENTS,)
    extra_outputs = (CUT, SCORES.name)

    def __init__(
        self, streamed: StreamedModel, contract: StepContract, ids: Tensor | None
    ) -> None:
        super().__init__(streamed, contract, ids)
        self.cut = streamed.settings.layers

    def run_model(  # type: ignore[override]  # its graph has one more input
        self, rows: tuple[Tensor, ...], parents: Tensor, **extra: Any
    ) -> list[Tensor]:
        """Return logits, states at the cut, and scores of rows with these parents."""
        logits, early, hidden = self.model(*rows, early=slice(None), **extra)
        # Each row's log probability after its parent, float32 [1, n].
        early, tokens = early.float(), rows[0]
        chosen = early[:, parents].gather(-1, tokens[..., None])[..., 0]
        return [logits, hidden, chosen - torch.logsumexp(early, -1)[:, parents]]


def write_probe_weights(file: Path, probed: ProbedModel, dtype: str) -> None:
    """Write an npz of the probes' weights, by names in the graph, and hash `base`."""
    arrays = {n: w.detach().numpy().astype(dtype) for n, w in probed.task.items()}
    arrays["base"] = np.array(probed.base)
    np.savez(file, **arrays)  # type: ignore[arg-type]
