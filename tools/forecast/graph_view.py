"""A graph of a file: its operators, with versions and the types of all values."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetdraft.errors import ContractError
from jetdraft.ort import import_onnx

CONTRIB_DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Formal:
    """A declared input or output: its name, and its type or type variable."""

    name: str
    type: str
    repeats: bool = False


@dataclass(frozen=True)
class Value:
    """What an operator reads or writes; the name of a left out value is empty.

    `type` is onnxruntime's name of the elements' type, empty if it is not known.
    """

    name: str
    type: str
    formal: Formal


@dataclass(frozen=True)
class Operator:
    """A node: `version` is the opset that defined it as it is used here."""

    name: str
    kind: str
    domain: str
    version: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Its name with its domain, if that is not ai.onnx."""
        return f"{self.domain}.{self.kind}" if self.domain else self.kind

    def has_input(self, place: int) -> bool:
        """Whether the input at that place is there."""
        return place < len(self.inputs) and bool(self.inputs[place].name)

    def type_of(self, place: int) -> str:
        """The type of an input; empty if it is left out or not known."""
        return self.inputs[place].type if self.has_input(place) else ""

    def integer(self, attribute: str, default: int = 0) -> int:
        """An integer attribute."""
        return int(self.attributes.get(attribute, default))


@dataclass(frozen=True)
class GraphView:
    """Operators in the order in which they run, and what they take from outside.

    `constants` maps the initializers to their numbers of elements, `numbers` the small
    ones to their values, and `shapes` the values to shapes, None for an open axis.

        GraphView.read(Path("bundle/target.onnx")).operators[0].kind
    """

    operators: tuple[Operator, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]
    constants: Mapping[str, int]
    numbers: Mapping[str, tuple[float, ...]]
    shapes: Mapping[str, tuple[int | None, ...]]

    @classmethod
    def read(cls, file: Path) -> GraphView:
        """Read a graph without its weights.

        Raises `ContractError` for a damaged file, `ProviderError` if onnx is missing.
        """
        onnx = import_onnx()
        try:
            model = onnx.load(file, load_external_data=False)
            return _Reader(onnx, model).view()
        except Exception as error:  # protobuf's and onnx' exceptions have no base
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ContractError(
                f"{file} is not an ONNX graph that can be read ({reason}); export the "
                "bundle again"
            ) from error


SMALL = 16
"""Initializers up to this number of elements are read."""


class _Reader:
    """Gives a model's operators their versions and types."""

    def __init__(self, onnx: Any, model: Any) -> None:
        self.onnx = onnx
        self.graph = model.graph
        self.opsets = {entry.domain: entry.version for entry in model.opset_import}
        self.types: dict[str, str] = {}
        self.shapes: dict[str, tuple[int | None, ...]] = {}
        declared = (self.graph.input, self.graph.value_info, self.graph.output)
        for value in (value for group in declared for value in group):
            self._declare(value)
        for tensor in self.graph.initializer:
            self.types[tensor.name] = self.type_name(tensor.data_type)
            self.shapes[tensor.name] = tuple(tensor.dims)

    def view(self) -> GraphView:
        """The graph."""
        initializers = self.graph.initializer
        names = {tensor.name for tensor in initializers}
        return GraphView(
            operators=tuple(self._operator(node) for node in self.graph.node),
            inputs=frozenset(v.name for v in self.graph.input if v.name not in names),
            outputs=frozenset(value.name for value in self.graph.output),
            constants={tensor.name: _elements(tensor) for tensor in initializers},
            numbers={t.name: self._numbers(t) for t in initializers if _is_small(t)},
            shapes=self.shapes,
        )

    def type_name(self, number: int) -> str:
        """onnxruntime's name of an element type; empty for none."""
        name: str = self.onnx.TensorProto.DataType.Name(number)
        return "" if number == 0 else name.lower()

    def _declare(self, value: Any) -> None:
        tensor = value.type.tensor_type
        if tensor.elem_type:
            self.types[value.name] = self.type_name(tensor.elem_type)
            self.shapes[value.name] = tuple(
                axis.dim_value if axis.HasField("dim_value") else None
                for axis in tensor.shape.dim
            )

    def _numbers(self, tensor: Any) -> tuple[float, ...]:
        array = self.onnx.numpy_helper.to_array(tensor)
        return tuple(float(number) for number in array.flatten())

    def _operator(self, node: Any) -> Operator:
        domain = "" if node.domain == "ai.onnx" else node.domain
        version, inputs, outputs = self._formals(node.op_type, domain)
        attributes = {
            entry.name: self.onnx.helper.get_attribute_value(entry)
            for entry in node.attribute
        }
        read = tuple(
            Value(name, self.types.get(name, ""), formal)
            for name, formal in zip(
                node.input, _spread(inputs, len(node.input)), strict=True
            )
        )
        written = []
        for name, formal in zip(
            node.output, _spread(outputs, len(node.output)), strict=True
        ):
            if name and name not in self.types:
                self.types[name] = self._output_type(
                    node.op_type, formal, read, attributes
                )
            written.append(Value(name, self.types.get(name, ""), formal))
        name = node.name or (node.output[0] if node.output else node.op_type)
        return Operator(
            name, node.op_type, domain, version, read, tuple(written), attributes
        )

    def _formals(
        self, kind: str, domain: str
    ) -> tuple[int, Sequence[Formal], Sequence[Formal]]:
        """The version and the formal parameters; (0, none, none) if it is unknown."""
        if kind in (contrib := contrib_formals().get(domain, {})):
            return 1, *contrib[kind]
        try:
            most = self.opsets.get(domain, 1)
            schema = self.onnx.defs.get_schema(kind, most, domain)
        except self.onnx.defs.SchemaError:
            return 0, (), ()
        variadic = self.onnx.defs.OpSchema.FormalParameterOption.Variadic
        inputs, outputs = (
            [Formal(p.name, _bare(p.type_str), p.option == variadic) for p in group]
            for group in (schema.inputs, schema.outputs)
        )
        return schema.since_version, inputs, outputs

    def _output_type(
        self,
        kind: str,
        formal: Formal,
        inputs: Sequence[Value],
        attributes: Mapping[str, Any],
    ) -> str:
        """The type of an output: an attribute's, an input's, or the declared one."""
        for attribute in ("to", "output_dtype"):
            if attributes.get(attribute):
                return self.type_name(attributes[attribute])
        if kind in ("Constant", "ConstantOfShape"):
            value = attributes.get("value")
            return "float" if value is None else self.type_name(value.data_type)
        if kind in ("Shape", "Size"):  # a type variable of one type
            return "int64"
        if kind == "DequantizeLinear":
            return inputs[1].type
        same = (v.type for v in inputs if v.formal.type == formal.type and v.type)
        bound = next(same, "")
        return bound or (formal.type if _is_type(formal.type) else "")


def _is_small(tensor: Any) -> bool:
    return _elements(tensor) <= SMALL and not tensor.external_data


def _elements(tensor: Any) -> int:
    count = 1
    for axis in tensor.dims:
        count *= axis
    return count


def _spread(formals: Sequence[Formal], count: int) -> list[Formal]:
    """A formal parameter for each of `count` values: the last may repeat."""
    missing = count - len(formals)
    last = formals[-1] if formals and formals[-1].repeats else Formal("", "")
    return [*formals, *[last] * missing][:count]


def _bare(type_name: str) -> str:
    """The name of a tensor's elements; other names stay as they are."""
    bare = type_name.removeprefix("tensor(")
    return bare if bare == type_name else bare.removesuffix(")")


def _is_type(name: str) -> bool:
    """Whether the name is a type: type variables have capital letters."""
    return name == name.lower()


@functools.cache
def contrib_formals() -> Mapping[
    str, Mapping[str, tuple[Sequence[Formal], Sequence[Formal]]]
]:
    """Inputs and outputs of the operators that onnx does not define, by domain."""
    file = importlib.resources.files(__package__) / "contrib.json"
    domains = json.loads(file.read_text(encoding="utf-8"))["operators"]
    return {
        domain: {
            kind: (_parsed(inputs), _parsed(outputs))
            for kind, (inputs, outputs) in operators.items()
        }
        for domain, operators in domains.items()
    }


def _parsed(text: str) -> Sequence[Formal]:
    """Formal parameters from a text like "A:T1 B:T2*"; a star repeats."""
    parts = (part.partition(":") for part in text.split())
    return [Formal(n, t.removesuffix("*"), t.endswith("*")) for n, _, t in parts]
