"""The pass as a module: a step graph is this module, traced."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir
import torch

from jetdraft.checkpoints.attention import HandThrough, StepState, attending
from jetdraft.checkpoints.parameters import keep_weights, simplify
from jetdraft.checkpoints.streamed import Streamed
from jetdraft.contract import ANSWERS, PROBES, ROWS, StepContract, TensorSpec
from jetdraft.errors import JetdraftError, UnsupportedModelError

OPSET = 23
# Different sizes, so that the tracer does not take two axes for the same.
_TRACED_ROWS, _TRACED_ANSWERS, _TRACED_PROBES = 7, 5, 6


class Step(torch.nn.Module):
    """One pass of a causal LM over fixed buffers, as the graph contract has it.

    Run eagerly it is the oracle of its own graph; the returned buffers are copies.

        outputs = Step(model, contract)(ids, positions, cursor, total, answers, buffers)
    """

    def __init__(self, model: Any, contract: StepContract) -> None:
        super().__init__()
        self.model = model
        self.contract = contract
        self.windows: set[int] = set()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        past: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Outputs in the order of `StepContract.outputs`."""
        state = _state(position_ids, cursor, total_length, past)
        with attending(state), _under_head(self.model) as hidden:
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=HandThrough(),
                use_cache=True,
                logits_to_keep=answer_rows,
            ).logits.float()
        if logits.shape[1] != answer_rows.shape[0]:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} ignores logits_to_keep; export another "
                "architecture"
            )
        self.windows = state.windows
        if len(state.present) != len(state.past):
            raise UnsupportedModelError(
                f"only {len(state.present)} of {len(state.past)} layers keep keys and "
                "values; models with recurrent or shared layers cannot be exported"
            )
        found = answers(logits, self.contract)
        if self.contract.hidden_size:
            found.append(hidden[0].float())
        return [*found, *presents(state)]


@contextlib.contextmanager
def _under_head(model: Any) -> Iterator[list[torch.Tensor]]:
    """The hidden states that a model's head is given."""
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda head, args: seen.append(args[0])
    )
    try:
        yield seen
    finally:
        handle.remove()


def _count(numbers: torch.Tensor) -> torch.Tensor:
    """How many numbers [1, n], none below 0, there are, as int32 [1].

    A shape is known on the host only, and a graph that copies it to the device cannot
    be captured as a CUDA graph.
    """
    return (numbers >= 0).to(torch.int32).sum(1, dtype=torch.int32)


def _state(
    position_ids: torch.Tensor,
    cursor: torch.Tensor,
    total_length: torch.Tensor,
    past: list[torch.Tensor],
) -> StepState:
    """What a pass over `past` gives its attention layers."""
    return StepState(
        cursor=cursor,
        # total_length may be a fixed bucket, so the last row is counted here.
        last_row=cursor + _count(position_ids) - 1,
        total_length=total_length,
        past=list(zip(past[::2], past[1::2], strict=True)),
    )


EARLY = ("hidden", "scores")
"""What streams add to the outputs while they are traced, for the halves: the hidden
states that enter the top layers, and how likely an early exit thinks each row is."""

PARENTS = "parents"


class StreamStep(torch.nn.Module):
    """One pass of a model whose rows can carry streams; see `Step`."""

    def __init__(self, streamed: Streamed, contract: StepContract) -> None:
        super().__init__()
        self.streamed = streamed
        self.contract = contract

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        attention_bias: torch.Tensor,
        probe_rows: torch.Tensor,
        probe_ids: torch.Tensor,
        past: list[torch.Tensor],
        parents: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Outputs in the order of `StepContract.outputs`, then `EARLY`.

        `parents` int64 [n] are those of the rows in a draft, the root's being itself.
        """
        state = _state(position_ids, cursor, total_length, past)

        def entered() -> None:
            state.last_row = state.last_row + _count(probe_rows[None])
            state.bias = attention_bias

        self.streamed.entered = entered
        with attending(state):
            logits, early, hidden = self.streamed(
                input_ids,
                position_ids,
                probe_rows,
                probe_ids,
                answer_rows,
                early_exit=True,
                past_key_values=HandThrough(),
                use_cache=True,
            )
        # Split last: a pass may have no probes, and not every operator takes nothing.
        found = answers(logits.float(), self.contract)
        rows = answer_rows.shape[0]
        main, probes = (
            [x[:, a:b] for x in found] for a, b in ((0, rows), (rows, None))
        )
        scores = _scores(early.float(), input_ids, parents)
        return [*main, *probes, *presents(state), hidden, scores]


def _scores(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> torch.Tensor:
    """The log probability of each row's token after its parent, float32 [1, n]."""
    found = logits[:, parents].gather(-1, tokens[..., None])[..., 0]
    return found - torch.logsumexp(logits, -1)[:, parents]


def answers(logits: torch.Tensor, contract: StepContract) -> list[torch.Tensor]:
    """What a graph says of rows whose logits are float32 [1, m, vocab]."""
    values, indices = torch.topk(logits, contract.candidates)
    return [indices, values, torch.logsumexp(logits, -1), logits]


def presents(state: StepState) -> list[torch.Tensor]:
    """The buffers after a pass, in the contract's order."""
    return [buffer for i in sorted(state.present) for buffer in state.present[i]]


def dtype_of(contract: StepContract) -> torch.dtype:
    """What a graph computes in."""
    dtype: torch.dtype = getattr(torch, contract.dtype)
    return dtype


def kv_shapes(model: Any) -> tuple[tuple[int, int], ...]:
    """(kv_heads, head_dim) per layer, seen on a real one-row pass.

    Configs name these differently in every architecture; the tensors do not lie.
    """
    one = torch.ones(1, dtype=torch.int32)
    state = StepState(cursor=one - 1, last_row=one - 1, total_length=one, past=[])
    row = torch.zeros(1, 1, dtype=torch.long)
    try:
        with attending(state), torch.no_grad():
            model(
                input_ids=row,
                position_ids=row,
                past_key_values=_MakeBuffers(state),
                use_cache=True,
            )
    except Exception as error:  # whatever an unknown architecture stumbles over
        raise refusal(model, error) from error
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(state.past) != layers or sorted(state.present) != list(range(layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps keys and values in {len(state.present)} of "
            f"its {layers} layers; recurrent and hybrid models cannot be exported"
        )
    return tuple((key.shape[1], key.shape[3]) for key, _ in state.past)


class _MakeBuffers(HandThrough):
    """Gives each layer a buffer of one row as it comes by."""

    def __init__(self, state: StepState) -> None:
        super().__init__()
        self.state = state

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.state.past.append(
            (torch.zeros_like(key_states), torch.zeros_like(value_states))
        )
        return super().update(key_states, value_states, layer_idx)


class _Open(torch.nn.Module):
    """A step whose weights are a last argument: the exporter would fold constants."""

    step: torch.nn.Module

    def __init__(self, step: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        # No submodule, or the exporter would take its weights along.
        object.__setattr__(self, "step", step)
        self.names = names

    def forward(self, *inputs: Any) -> list[torch.Tensor]:
        """What the step gives for all inputs but the last."""
        *others, weights = inputs
        given = dict(zip(self.names, weights, strict=True))
        found: list[torch.Tensor] = torch.func.functional_call(
            self.step, given, tuple(others)
        )
        return found


def trace(
    model: Any, contract: StepContract, names: Mapping[int, str]
) -> onnx_ir.Model:
    """Trace a model, or a `Streamed` one, into a float step graph.

    Inputs and outputs have the contract's names. The weights are read from `model` when
    they are needed. Those with no name in `names`, by their ids, stay inputs after all
    others until `keep_weights`: a task's, which nothing may fuse or quantize.

        trace(checkpoint.model, contract, checkpoint.names())
    """
    decoder = model.model if isinstance(model, Streamed) else model
    _pin_rotary_frequencies(decoder, contract.capacity)
    widest = max(_TRACED_ROWS + 1, contract.max_width)
    dims = {axis: torch.export.Dim(axis, min=1, max=widest) for axis in (ROWS, ANSWERS)}
    dims[PROBES] = torch.export.Dim(PROBES, min=0, max=16 * widest)
    dtype = dtype_of(contract)
    arguments = _example(dtype, contract)
    shapes = [_dynamic(spec, dims) for spec in contract.inputs[: len(arguments)]]
    past = [torch.zeros(spec.sized(), dtype=dtype) for spec in contract.buffers("past")]
    streams = isinstance(model, Streamed)
    step: torch.nn.Module = (StreamStep if streams else Step)(model, contract)
    step.eval()
    parents = [torch.zeros(_TRACED_ROWS, dtype=torch.long)] if streams else []
    early = EARLY if streams else ()
    inner = dict(step.named_parameters())
    weights = {name.partition(".")[2]: weight for name, weight in inner.items()}
    # Memory that nobody touches.
    empty = [torch.empty(weight.shape, dtype=dtype) for weight in weights.values()]
    try:
        with _silence(), torch.no_grad():
            program = torch.onnx.export(
                _Open(step, list(inner)),
                (*arguments, past, *parents, empty),
                dynamo=True,
                opset_version=OPSET,
                # The one parameter of `_Open.forward`.
                dynamic_shapes=(
                    (
                        *shapes,
                        [None] * len(past),
                        *({0: dims[ROWS]} for _ in parents),
                        [None] * len(empty),
                    ),
                ),
                input_names=[
                    *(spec.name for spec in contract.inputs),
                    *([PARENTS] if streams else []),
                    *weights,
                ],
                output_names=[*(spec.name for spec in contract.outputs), *early],
                verbose=False,
            )
    except JetdraftError:
        raise
    except Exception as error:  # the exporter wraps every cause in its own types
        raise refusal(decoder, error) from error
    assert program is not None
    _rename_inner(program.model.graph)
    named = {name: each for name, each in weights.items() if id(each) in names}
    keep_weights(program.model, named, names)
    simplify(program.model)
    return program.model


def _rename_inner(graph: onnx_ir.Graph) -> None:
    """The exporter names outputs last, and may take a name that is in use."""
    taken = {value.name for value in graph.outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in taken and not value.is_graph_output():
                value.name = f"{value.name}.inner"


def _example(dtype: torch.dtype, contract: StepContract) -> list[torch.Tensor]:
    """What to trace with: the inputs up to the buffers."""
    rows, probes = _TRACED_ROWS, _TRACED_PROBES if contract.streams else 0
    found = [
        torch.zeros(1, rows, dtype=torch.long),
        torch.arange(rows)[None],
        torch.zeros(1, dtype=torch.int32),
        torch.full((1,), rows, dtype=torch.int32),
        torch.arange(_TRACED_ANSWERS),
    ]
    if contract.biased:
        found.append(torch.zeros(contract.bias.sized(rows, 0, probes), dtype=dtype))
    if contract.streams:
        found += [torch.arange(probes) % rows, torch.zeros(probes, dtype=torch.long)]
    return found


def _dynamic(spec: TensorSpec, dims: dict[str, Any]) -> dict[int, Any] | None:
    """Which axes of an input vary; that of rows and probes together follows."""
    axes = {
        index: dims.get(axis, torch.export.Dim.AUTO)
        for index, axis in enumerate(spec.shape)
        if isinstance(axis, str)
    }
    return axes or None


def refusal(model: Any, error: BaseException) -> UnsupportedModelError:
    """The innermost reason, ours where it is ours."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedModelError):
            return cause
        innermost, cause = cause, cause.__cause__ or cause.__context__
    reason = (str(innermost).splitlines() or [type(innermost).__name__])[0]
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be exported ({reason}); "
        "export another architecture"
    )


def _pin_rotary_frequencies(model: Any, capacity: int) -> None:
    """Fix length-dependent rotary frequencies, or refuse if the length could grow.

    Rotations of cached keys cannot change afterwards, so a frequency that depends on
    the length is only exact while the length stays below the switch.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        by_layer = isinstance(kinds, dict)
        for name, kind in (kinds if by_layer else {None: kinds}).items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            parameters = module.config.rope_parameters
            parameters = parameters[name] if by_layer else parameters
            limit = parameters.get(
                "original_max_position_embeddings", module.original_max_seq_len
            )
            if capacity > limit:
                raise UnsupportedModelError(
                    f"{type(model).__name__} changes its {kind} frequencies beyond "
                    f"{limit} tokens; export with --capacity {limit} or less"
                )
            if by_layer:
                kinds[name] = "default"
            else:
                module.rope_type = "default"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The torch exporter prints and logs far more than a user can use."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
