"""Traces a pass, as a torch module, into a step graph."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir
import torch

from jetdraft.checkpoints.parameters import keep_weights, simplify
from jetdraft.checkpoints.silence import silenced
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_spec import ANSWERS, PREFIX, PROBES, ROWS, TensorSpec
from jetdraft.errors import JetdraftError, UnsupportedModelError
from jetdraft.export.step import TRACED_ROWS, Step, refusal, zeros
from jetdraft.export.tracing.fingerprint import fingerprint
from jetdraft.export.tracing.kept_traces import KeptTraces

OPSET = 23

KEPT = KeptTraces()
"""The last traces of this process."""


class _Open(torch.nn.Module):
    """A step that takes its weights as the last argument.

    The exporter would fold constants; inputs stay as they are.
    """

    step: torch.nn.Module

    def __init__(self, step: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        # As a submodule, its weights would be exported as constants.
        object.__setattr__(self, "step", step)
        self.names = names

    def forward(self, *inputs: Any) -> list[torch.Tensor]:
        """The step's outputs; the last input holds the weights."""
        *others, weights = inputs
        named = dict(zip(self.names, weights, strict=True))
        outputs: list[torch.Tensor] = torch.func.functional_call(
            self.step, named, tuple(others)
        )
        return outputs


def trace(step: Step, names: Mapping[int, str]) -> onnx_ir.Model:
    """Trace a step into a float step graph.

    Inputs and outputs have the names in the contract and in the step's extra inputs and
    outputs. The weights are read from the model when they are needed. A weight whose id
    is not in `names` belongs to streams and must not be fused or quantized: it stays an
    input, after all other inputs, until `keep_weights`. Raises `UnsupportedModelError`.

        trace(Step(checkpoint.model, contract), checkpoint.names())
    """
    _pin_rotary_frequencies(step.decoder, step.contract.capacity)
    step.eval()
    # In a step, all names begin with the attribute that holds the model.
    weights = {n.partition(".")[2]: weight for n, weight in step.named_parameters()}
    try:
        with _silent(), torch.no_grad():
            model = KEPT.get_or_make(
                fingerprint(step), lambda: _exported(step, weights)
            )
    except JetdraftError:
        raise
    except Exception as error:  # the exporter wraps every cause in its own types
        raise refusal(step.decoder, error) from error
    own_weights = {
        name: weight for name, weight in weights.items() if id(weight) in names
    }
    keep_weights(model, own_weights, names)
    simplify(model)
    return model


def _exported(step: Step, weights: Mapping[str, torch.Tensor]) -> onnx_ir.Model:
    """The graph as torch exports it, with the weights as its last inputs."""
    contract, example = step.contract, step.example()
    inputs, buffers, outputs = step.declared
    past = [zeros(spec) for spec in buffers]
    extras = [zeros(spec, TRACED_ROWS) for spec in step.extra_inputs]
    # Memory that is allocated but never read or written.
    empty = [torch.empty(w.shape, dtype=step.dtype_of(n)) for n, w in weights.items()]
    shapes = _dynamic_shapes(contract, (*inputs[: len(example)], *step.extra_inputs))
    program = torch.onnx.export(
        _Open(step, [name for name, _ in step.named_parameters()]),
        (*example, past, *extras, empty),
        dynamo=True,
        opset_version=OPSET,
        # The one parameter of `_Open.forward`.
        dynamic_shapes=(
            (
                *shapes[: len(example)],
                [None] * len(past),
                *shapes[len(example) :],
                [None] * len(empty),
            ),
        ),
        input_names=[*(spec.name for spec in (*inputs, *step.extra_inputs)), *weights],
        output_names=[*(spec.name for spec in outputs), *step.extra_outputs],
        verbose=False,
    )
    assert program is not None
    # An ONNX file cannot have a name twice.
    _rename_inner(program.model.graph)
    return program.model


def _rename_inner(graph: onnx_ir.Graph) -> None:
    """Rename inner values to which the exporter gave the name of an output."""
    output_names = {value.name for value in graph.outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in output_names and not value.is_graph_output():
                value.name = f"{value.name}.inner"


def _dynamic_shapes(
    contract: StepContract, specs: tuple[TensorSpec, ...]
) -> list[dict[int, Any] | None]:
    """The axes of each input that vary, by index.

    An axis that is not rows, answers or probes follows from these.
    """
    widest = max(TRACED_ROWS + 1, contract.max_width)
    dims = {axis: torch.export.Dim(axis, min=1, max=widest) for axis in (ROWS, ANSWERS)}
    dims[PROBES] = torch.export.Dim(PROBES, min=0, max=16 * widest)
    dims[PREFIX] = torch.export.Dim(PREFIX, min=0, max=max(2, contract.prefix))
    return [
        {
            index: dims.get(axis, torch.export.Dim.AUTO)
            for index, axis in enumerate(spec.shape)
            if isinstance(axis, str)
        }
        or None
        for spec in specs
    ]


def _pin_rotary_frequencies(model: Any, capacity: int) -> None:
    """Fix rotary frequencies that depend on the length of the text.

    Cached keys are rotated already, so their frequencies cannot change with the length.
    Raises `UnsupportedModelError` if the capacity is above the length at which the
    frequencies change.
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
def _silent() -> Iterator[None]:
    """Drop what the torch exporter prints and logs."""
    with (
        silenced(logging.ERROR),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
