"""Traces a pass, as a torch module, into a step graph; equal passes are traced once."""

import contextlib
import hashlib
import io
import itertools
import logging
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import onnx
import onnx_ir
import torch

from jetdraft.checkpoints.parameters import fold_graph, make_inputs_constant
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import ANSWERS, PREFIX, PROBES, ROWS, SEEN, TensorSpec
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.step import TRACED_ROWS, Step, exporting, zeros
from jetdraft.ort import silenced

OPSET = 23  # The ai.onnx opset of traced graphs.
MAX_TRACES = 4  # The most graphs that are kept; without weights they are small.


class KeptTraces:
    """A cache of the last traced graphs: ONNX files as bytes, by fingerprint."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def get_or_make(self, key: str | None, make: Callable[[], Any]) -> Any:
        """Return the kept graph of that key; make it if there is no graph or no key."""
        if key is None:
            return make()
        file = self.read(key)
        if file is None:
            file = onnx_ir.to_proto(make()).SerializeToString()
            self.write(key, file)
        return onnx_ir.from_proto(onnx.ModelProto.FromString(file))

    def read(self, key: str) -> bytes | None:
        """Return the file of that key; None if it is not kept."""
        return self._files.get(key)

    def write(self, key: str, file: bytes) -> None:
        """Keep a file, in place of the oldest if there are `MAX_TRACES`."""
        while len(self._files) >= MAX_TRACES:
            del self._files[next(iter(self._files))]
        self._files[key] = file


KEPT_TRACES = KeptTraces()  # The last traces of this process.


class _StepWithWeights(torch.nn.Module):
    """A step that takes its weights as inputs; torch would fold them as constants."""

    step: torch.nn.Module

    def __init__(self, step: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        # As a submodule, its weights would be exported as constants.
        object.__setattr__(self, "step", step)
        self.names = names

    def forward(self, *inputs: Any) -> list[torch.Tensor]:
        """Return the step's outputs; the last input is a list of the weights."""
        *others, weights = inputs
        outputs: list[torch.Tensor] = torch.func.functional_call(
            self.step, dict(zip(self.names, weights, strict=True)), tuple(others)
        )
        return outputs


def trace(step: Step, names: Mapping[int, str]) -> onnx_ir.Model:
    """Trace a step into a graph in floats; raises `UnsupportedModelError`.

    Weights with ids in `names` become constants; others stay the last inputs.
    """
    _pin_rotary_frequencies(step.decoder, step.contract.capacity)
    step.eval()
    # In a step, all names begin with the attribute that holds the model.
    weights = {n.partition(".")[2]: weight for n, weight in step.named_parameters()}
    with (
        exporting(step.decoder),  # torch's exporter wraps every cause in its own types
        silenced(logging.ERROR),  # and it logs, prints and warns
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
        torch.no_grad(),
    ):
        make = partial(_export_step, step, weights)
        model: onnx_ir.Model = KEPT_TRACES.get_or_make(fingerprint(step), make)
    own = {name: weight for name, weight in weights.items() if id(weight) in names}
    make_inputs_constant(model, own, names)
    fold_graph(model)
    return model


def _export_step(step: Step, weights: Mapping[str, torch.Tensor]) -> onnx_ir.Model:
    contract, example = step.contract, step.example_inputs()
    inputs, buffers, outputs = step.declared_tensors
    past = [zeros(spec) for spec in buffers]
    extras = [zeros(spec, TRACED_ROWS) for spec in step.extra_inputs]
    empty = [torch.empty(w.shape, dtype=step.dtype_of(n)) for n, w in weights.items()]
    shapes = _dynamic_shapes(contract, (*inputs[: len(example)], *step.extra_inputs))
    own, others = shapes[: len(example)], shapes[len(example) :]
    program = torch.onnx.export(
        _StepWithWeights(step, [name for name, _ in step.named_parameters()]),
        (*example, past, *extras, empty),
        dynamo=True,
        opset_version=OPSET,
        # The one parameter of `_StepWithWeights.forward`.
        dynamic_shapes=((*own, [None] * len(past), *others, [None] * len(empty)),),
        input_names=[*(spec.name for spec in (*inputs, *step.extra_inputs)), *weights],
        output_names=[*(spec.name for spec in outputs), *step.extra_outputs],
        verbose=False,
    )
    assert program is not None
    # The exporter may name an inner value like an output, which a file cannot have.
    names = {value.name for value in program.model.graph.outputs}
    for node in program.model.graph:
        for value in node.outputs:
            if value.name in names and not value.is_graph_output():
                value.name = f"{value.name}.inner"
    return program.model


def _dynamic_shapes(
    contract: StepContract, specs: tuple[TensorSpec, ...]
) -> list[dict[int, Any] | None]:
    widest = max(TRACED_ROWS + 1, contract.max_width)
    dims = {axis: torch.export.Dim(axis, min=1, max=widest) for axis in (ROWS, ANSWERS)}
    dims[SEEN] = torch.export.Dim(SEEN, min=0, max=widest)
    dims[PROBES] = torch.export.Dim(PROBES, min=0, max=16 * widest)
    dims[PREFIX] = torch.export.Dim(PREFIX, min=0, max=max(2, contract.prefix))
    shapes, auto = (enumerate(spec.shape) for spec in specs), torch.export.Dim.AUTO
    named = ([(i, axis) for i, axis in own if isinstance(axis, str)] for own in shapes)
    return [{i: dims.get(axis, auto) for i, axis in axes} or None for axes in named]


def _pin_rotary_frequencies(model: Any, capacity: int) -> None:
    """Fix frequencies that change with the length beyond the capacity, or refuse."""
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
            original = "original_max_position_embeddings"
            limit = parameters.get(original, module.original_max_seq_len)
            if capacity > limit:
                fact = f"changes its {kind} frequencies beyond {limit} tokens"
                fix = f"export with --capacity {limit} or less"
                raise UnsupportedModelError.of(model, fact, fix)
            if by_layer:
                kinds[name] = "default"
            else:
                module.rope_type = "default"


class UnknownStateError(Exception):
    """Raised for an object whose state cannot be read completely."""


def fingerprint(step: torch.nn.Module) -> str | None:
    """Return a hash, equal only for steps of the same graph; None if it is unknown."""
    writer = _FingerprintWriter()
    try:
        writer.write(step)
    except (UnknownStateError, RecursionError):
        return None
    return writer.digest.hexdigest()


class _FingerprintWriter:
    """Writes objects into a digest; an object seen before is written as a number."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.classes: set[type] = set()
        self.hooks: dict[int, int] = {}
        # What has a number must live, or another object could get its id.
        self.references: list[Any] = []

    def write(self, value: Any) -> None:
        """Write one object with all that it holds; raise `UnknownStateError`."""
        if isinstance(value, _PLAIN_TYPES):
            self._add(type(value).__name__, repr(value))
        elif id(value) in self.numbers:
            self._add("again", str(self.numbers[id(value)]))
        else:
            self.numbers[id(value)] = len(self.numbers)
            self.references.append(value)
            writers = (w for kinds, w in _WRITERS if isinstance(value, kinds))
            next(writers, _FingerprintWriter.write_object)(self, value)

    def write_all(self, kind: str, values: Iterable[Any]) -> None:
        self._add(kind, "")
        for value in values:
            self.write(value)
        self._add("end", "")

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write a tensor's type, and its bytes if the graph has it as a constant."""
        self._add("tensor", f"{type(tensor)} {tuple(tensor.shape)} {tensor.dtype}")
        if tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                raise UnknownStateError
            return
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.digest.update(flat.numpy().tobytes())

    def write_function(self, function: types.FunctionType) -> None:
        """Write where a function's code is, what it closes over, and its defaults."""
        code = function.__code__
        self._add("function", f"{function.__module__}.{function.__qualname__}")
        self._add("code", f"{code.co_filename} {code.co_firstlineno}")
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [function.__defaults__, function.__kwdefaults__]
        self.write_all("closure", [*cells, *defaults])

    def write_set(self, values: Any) -> None:
        """Write a set of plain values sorted, since its order differs by process."""
        if not all(isinstance(value, _PLAIN_TYPES) for value in values):
            raise UnknownStateError
        self.write_all("set", sorted(values, key=repr))

    def write_object(self, value: Any) -> None:
        """Write an object by its fields; raise if it may have state outside of them."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE_FLAG]
        slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        if bases != [object] or slots or not hasattr(value, "__dict__"):
            raise UnknownStateError
        self._add("object", f"{kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            if base not in self.classes:
                self.classes.add(base)
                for name, method in vars(base).items():
                    if isinstance(method, types.FunctionType):
                        code = method.__code__
                        place = f"{code.co_filename} {code.co_firstlineno}"
                        self._add("method", f"{name} {place}")
        fields = {n: v for n, v in vars(value).items() if n not in _UNREAD_FIELDS}
        for name in fields if isinstance(value, torch.nn.Module) else ():
            if name.startswith(_HOOK_FIELDS):
                # torch counts the hooks of a process; here a step's are counted.
                hooks, count = fields[name].items(), self.hooks
                fields[name] = {count.setdefault(h, len(count)): v for h, v in hooks}
        self.write_all("fields", itertools.chain(*fields.items()))

    def _add(self, kind: str, text: str) -> None:
        self.digest.update(f"{kind}:{len(text)}:{text};".encode())


_HEAP_TYPE_FLAG = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is written in Python.
# Fields of transformers' models that no pass reads; they are left out.
_UNREAD_FIELDS = {"_name_or_path", "name_or_path", "generation_config"}
_HOOK_FIELDS = ("_forward_hooks", "_forward_pre_hooks")  # Fields keyed by hooks.
_PLAIN_TYPES = (str, int, float, bool, type(None), bytes, Enum)
_NAMED_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)

_WRITERS: list[tuple[Any, Callable[[_FingerprintWriter, Any], None]]] = [
    (torch.Tensor, _FingerprintWriter.write_tensor),
    (_NAMED_TYPES, lambda writer, value: writer.write(repr(value))),
    (type, lambda writer, value: writer.write(f"{value.__module__}.{value}")),
    ((list, tuple), lambda writer, value: writer.write_all("list", value)),
    ((set, frozenset), _FingerprintWriter.write_set),
    (Mapping, lambda w, v: w.write_all("mapping", itertools.chain(*v.items()))),
    (types.FunctionType, _FingerprintWriter.write_function),
    (types.MethodType, lambda w, v: w.write_all("method", [v.__func__, v.__self__])),
    (partial, lambda w, v: w.write_all("partial", [v.func, v.args, v.keywords])),
    (
        types.BuiltinFunctionType,
        lambda w, v: w.write(f"{v.__module__}.{v.__qualname__}"),
    ),
]
