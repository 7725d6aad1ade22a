"""Quantizes a step graph's matrices, also of experts, heads and embeddings."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common

from jetdraft.errors import CheckpointError, OptionError
from jetdraft.native import DOMAIN, EXPERTS, GATHER, MULTIPLY
from jetdraft.quant import edits
from jetdraft.quant.algorithms import FEWEST, quantize
from jetdraft.quant.blocks import Blocks, Floats
from jetdraft.quant.edits import Maker
from jetdraft.quant.grids import COLUMNS, GRIDS, LAYOUT_VERSION, GridMatrix, Matrix
from jetdraft.quant.stored import GridStack
from jetdraft.recipe import ACCURACY_LEVEL, HEAD, Recipe, unit_of

# The end of the name of a table with an embedding for each layer, side by side.
LAYER_EMBEDDINGS = "embed_tokens_per_layer.weight"
NUMBERS_AT_ONCE = 1 << 26  # About how many numbers of a matrix are quantized together.


@dataclass(frozen=True)
class Quantization:
    """A recipe, and what it must know of the model.

    `head` names the head's weight. A `standard` graph has DequantizeLinear before its
    MatMul, and embeddings of floats. `moments` are of `divergence.second_moments`.
    `packed` has the checkpoint's integers by name, `rounded` measured weights until
    they are used. `borrowed` maps names of matrices to names in `lender`.
    """

    recipe: Recipe
    head: str = ""
    standard: bool = False
    moments: Mapping[str, Floats] = field(default_factory=dict)
    packed: Mapping[str, Matrix | GridStack] = field(default_factory=dict)
    borrowed: Mapping[str, str] = field(default_factory=dict)
    lender: "Quantization | None" = None
    rounded: dict[str, GridMatrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.standard:
            self.recipe.check_standard()

    def apply(
        self,
        model: ir.Model,
        progress: Callable[[int, int], None] = lambda done, total: None,
        spill: BinaryIO | None = None,
    ) -> None:
        """Quantize every constant matrix of `model` in place.

        `progress(done, total)` follows each matrix. Integers wait in the file `spill`,
        or in memory. Raises `CheckpointError` for numbers that are not finite, and
        `OptionError` for a matrix that cannot be quantized or held.
        """
        graph = model.graph
        graph.meta[edits.SPILL] = spill
        floats, choices = set(routers(graph)), list(find_choices(graph))
        floats |= {n for n in graph if str(n.name).startswith(edits.ADAPTER)}
        products = [n for n in graph if _constant_matrix(n) and n not in floats]
        total = len(choices) + len(products)
        for done, choice in enumerate(choices, start=1):
            self._replace_choice(graph, choice)
            progress(done, total)
        tables = {n.inputs[0] for n in graph if n.op_type == "Gather"}
        quantized: dict[ir.Value, PackedMatrix] = {}
        for done, node in enumerate(products, start=len(choices) + 1):
            matrix = _constant_matrix(node)
            assert matrix is not None
            source, transposed = matrix
            blocks = self._quantize(source, transposed, _checkpoint_names(source))
            make = Maker(graph, node)
            if blocks is not None and blocks.order is not None:
                order = make.array(f"{node.outputs[0].name}.order", blocks.order)
                inputs = make("Gather", node.inputs[0], order, axis=-1)
                node.replace_input_with(0, inputs)
            if isinstance(blocks, Blocks) and self.standard:
                _dequantize(make, node, source, blocks)
            elif blocks is not None:
                packed = _replace_product(make, node, source, blocks)
                if source in tables:
                    quantized[source] = packed
            progress(done, total)
        for node in [node for node in graph if node.op_type == "Gather"]:
            table = node.inputs[0]
            if table is None:
                continue
            own = quantized.get(table) or self._packed_table(graph, table)
            own = own or self._layer_table(graph, table)
            if own is not None:
                _replace_gather(Maker(graph, node), node, own)
        common.RemoveUnusedNodesPass()(model)

    def _replace_choice(self, graph: ir.Graph, choice: "Choice") -> None:
        """Replace the product of a choice, unless its stack stays floats."""
        stack = choice.stack
        matrix = self._quantize(stack, not choice.is_turned, _checkpoint_names(stack))
        if matrix is None or stack.const_value is None:
            return
        experts, *sizes = stack.const_value.shape.numpy()
        is_grid = isinstance(matrix, GridMatrix)
        check_stack(str(stack.name), is_grid, sizes[choice.is_turned])
        assert isinstance(matrix, GridMatrix)
        packed = _add_packed(graph, stack, matrix)
        make, read = Maker(graph, choice.node), (choice.rows, choice.ids)
        result = packed.operator(make, EXPERTS, *read, count=experts)
        edits.replace_values(choice.result.outputs, [result])
        graph.remove([choice.result, choice.node], safe=True)

    def _packed_table(self, graph: ir.Graph, table: ir.Value) -> "PackedMatrix | None":
        """Return the lender's packed LM head that an embedding is tied to, or None."""
        lender, name = self.lender, self.borrowed.get(_checkpoint_names(table)[0])
        if self.standard or lender is None or name != lender.head:
            return None
        blocks = lender._quantize(table, True, [name])
        return None if blocks is None else _add_packed(graph, table, blocks)

    def _layer_table(self, graph: ir.Graph, table: ir.Value) -> "PackedMatrix | None":
        """Pack the embeddings of each layer, read in parts; None for other tables."""
        name, stored = _checkpoint_names(table)[0], table.const_value
        recipe = self.recipe.of_unit(unit_of(name))
        is_other = not name.endswith(LAYER_EMBEDDINGS)
        if is_other or self.standard or recipe.bits is None or stored is None:
            return None
        if recipe.needs_moments:
            recipe = replace(recipe, algorithm="rtn")
        matrices = _matrices(stored, transposed=True, in_parts=True)
        parts: list[Any] = [quantize(matrix, recipe, None) for matrix in matrices]
        return _add_packed(graph, table, parts[0].concatenated(parts))

    def _quantize(
        self, source: Any, transposed: bool, names: list[str]
    ) -> Matrix | None:
        """A matrix as integers with scales; None if it stays a matrix of floats."""
        # Merged weights read the same input and get the recipe of the first weight.
        name = names[0]
        if self.lender is not None and name in self.borrowed:
            return self.lender._quantize(source, transposed, [self.borrowed[name]])
        if name in self.packed:
            return self._concatenate_packed(names, source.const_value.dtype.numpy())
        recipe = self.recipe.of_unit(HEAD if name == self.head else unit_of(name))
        *count, rows, columns = source.const_value.shape.numpy()
        if transposed:
            rows, columns = columns, rows
        if recipe.bits is None or min(rows, columns) < FEWEST:
            return None
        if all(each in self.rounded for each in names):
            rounded = GridMatrix.concatenated([self.rounded.pop(n) for n in names])
            size = rounded.rows, len(rounded.data)
            if size == (rows, math.prod(count) * columns):  # a cut head differs
                return rounded
        if recipe.needs_moments and name not in self.moments:
            fact = f"{recipe.algorithm} quantizes linear layers only, and {name} is in "
            raise OptionError(f"{fact}another layer; choose rtn, k_quant or hqq")
        parts: list[Any] = []
        for matrix in _matrices(source.const_value, transposed, recipe.scheme in GRIDS):
            if not np.isfinite(matrix).all():
                fact = f"the weight {name} has numbers that are not finite"
                raise CheckpointError(f"{fact}; fetch the checkpoint again")
            parts.append(quantize(matrix, recipe, self.moments.get(name)))
        whole: Matrix = parts[0] if len(parts) == 1 else parts[0].concatenated(parts)
        return whole

    def _concatenate_packed(self, names: list[str], dtype: npt.DTypeLike) -> Matrix:
        """Return the checkpoint's integers of these weights, joined by columns."""
        parts: list[Any] = [self.packed[name] for name in names]
        blocks: Matrix = parts[0].concatenated(parts)
        if isinstance(blocks, GridMatrix):
            return blocks
        if self.standard and (blocks.zeros is not None or blocks.bits not in _SIGNED):
            fact = f"the weight {names[0]} has zero points or {blocks.bits} bits, "
            fact += "which the standard flavour cannot hold"
            raise OptionError(f"{fact}; choose contrib")
        return replace(blocks, scales=blocks.scales.astype(dtype))


def check_stack(name: str, is_grid: bool, columns: int) -> None:
    """Raise `OptionError` for a form of experts that no operator multiplies."""
    if not is_grid or columns % COLUMNS:
        fact = f"{name} has experts of {columns} columns, and only llama.cpp's types "
        fact += f"hold experts, if their columns are a multiple of {COLUMNS}"
        raise OptionError(f"{fact}; choose q4_k, q8_0 or none, on the CPU")


def _matrices(
    constant: ir.TensorProtocol, transposed: bool, in_parts: bool
) -> Iterator[npt.NDArray[Any]]:
    """Yield a matrix [rows, columns], its parts, or the experts of a stack."""
    arrays: Iterator[Any]
    stored = constant.meta.get(edits.STORED if transposed else edits.TURNED)
    if len(constant.shape) == 3:
        stack = constant.meta[edits.STORED]
        arrays = (stack[expert].float().numpy() for expert in range(len(stack)))
    elif in_parts and stored is not None:
        dtype, size = constant.dtype.numpy(), NUMBERS_AT_ONCE // stored.shape[1]
        parts = stored.split(max(1, size))
        arrays = (p.float().numpy().astype(dtype, copy=False) for p in parts)
        transposed = True
    else:
        arrays = iter([constant.numpy()])
    for array in arrays:
        yield array.T if transposed else array


def _checkpoint_names(source: ir.Value) -> list[str]:
    """Return a matrix's names in its checkpoint; several if matrices were merged."""
    name = source.name or "unnamed"
    return source.metadata_props.get(edits.PARAMETER, name).splitlines()


@dataclass(frozen=True)
class PackedMatrix:
    """The constant of a quantized matrix, and its integers and scales."""

    weight: ir.Value
    blocks: Matrix
    scales: ir.Value | None = None

    def operator(
        self, make: Maker, name: str, *read: ir.Value | None, count: int = 1
    ) -> ir.Value:
        """Add a native operator of `read[0]`, `count` matrices and the other values."""
        matrix = self.blocks
        assert isinstance(matrix, GridMatrix)
        return make(
            name,
            *(read[0], self.weight, self.scales, *read[1:]),
            domain=DOMAIN,
            K=matrix.rows,
            N=len(matrix.data) // count,
            format=GRIDS.index(matrix.grid),
            layout=LAYOUT_VERSION,
        )


def _add_packed(graph: ir.Graph, source: ir.Value, blocks: Matrix) -> PackedMatrix:
    if isinstance(blocks, GridMatrix):
        integers, scales = (
            edits.initializer(graph, f"{source.name}.{blocks.grid}.{part}", array)
            for part, array in zip(("integers", "scales"), blocks.packed(), strict=True)
        )
        return PackedMatrix(integers, blocks, scales)
    name = f"{source.name}.int{blocks.bits}"
    return PackedMatrix(edits.initializer(graph, name, blocks.packed), blocks)


def _constant_matrix(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """The constant matrix of a MatMul, and whether a Transpose comes before it."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    value = node.inputs[1]
    transpose = edits.producer(value, "Transpose")
    if transpose is not None and transpose.inputs[0] is not None:
        value = transpose.inputs[0]
    constant = value.const_value
    if constant is None or len(constant.shape) != 2:
        return None
    return value, transpose is not None


def product_names(node: ir.Node) -> list[str]:
    """The checkpoint's names of the matrices that a MatMul reads; [] for others."""
    matrix = _constant_matrix(node)
    return _checkpoint_names(matrix[0]) if matrix else []


@dataclass(frozen=True)
class Choice:
    """A product of `rows` [s, k] with matrices that `ids` choose from a stack.

    The stack is [experts, n, k], or [experts, k, n] if it `is_turned`.
    """

    node: ir.Node
    result: ir.Node
    rows: ir.Value | None
    ids: ir.Value | None
    stack: ir.Value
    is_turned: bool


def find_choices(graph: ir.Graph) -> Iterator[Choice]:
    """Yield the products of a graph with matrices that are gathered from a stack."""
    for node in graph:
        if node.op_type != "MatMul":
            continue
        result = next(iter(node.outputs[0].consumers()), None)
        for turned in (False, True):
            gather = edits.producer(node.inputs[turned], "Gather")
            column = edits.producer(node.inputs[not turned], "Unsqueeze")
            if gather is None or column is None or result is None:
                continue
            (stack, ids), rows = gather.inputs[:2], column.inputs[0]
            constant = None if stack is None else stack.const_value
            if stack is not None and constant is not None and len(constant.shape) == 3:
                yield Choice(node, result, rows, ids, stack, turned)


def routers(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the products with constant matrices that choose experts."""
    values = [choice.ids for choice in find_choices(graph)]
    seen: set[ir.Value | None] = set()
    while values:
        value = values.pop()
        node = None if value is None or value in seen else value.producer()
        seen.add(value)
        if node is None or node.op_type == "Shape":
            continue
        if node.op_type in ("MatMul", "Gemm"):
            yield node
        else:
            values += node.inputs


def _replace_product(
    make: Maker, node: ir.Node, source: ir.Value, blocks: Matrix
) -> PackedMatrix:
    packed, read = _add_packed(make.graph, source, blocks), node.inputs[0]
    if isinstance(blocks, GridMatrix):
        _replace_node(make, node, packed.operator(make, MULTIPLY, read))
        return packed
    inputs = [read, packed.weight, make.array(f"{source.name}.scales", blocks.scales)]
    if blocks.packed_zeros is not None:
        inputs.append(make.array(f"{source.name}.zeros", blocks.packed_zeros))
    sizes: Any = {"K": blocks.rows, "N": len(blocks.packed), **_block_form(blocks)}
    product = make("MatMulNBits", *inputs, **sizes, accuracy_level=ACCURACY_LEVEL)
    _replace_node(make, node, product)
    return packed


def _block_form(blocks: Blocks) -> dict[str, Any]:
    """The attributes that onnxruntime's operators of blocks share."""
    form = {"bits": blocks.bits, "block_size": blocks.block_size}
    return {"domain": edits.CONTRIB_DOMAIN, **form}


def _dequantize(make: Maker, node: ir.Node, source: ir.Value, blocks: Blocks) -> None:
    """Insert a DequantizeLinear of integers [rows, columns] before the MatMul."""
    middle, dtype = 1 << (blocks.bits - 1), _SIGNED[blocks.bits]
    signed = blocks.integers.astype(np.int16) - middle
    integers = signed.reshape(len(signed), -1)[:, : blocks.rows]
    parts = {f"int{blocks.bits}": integers.T.astype(dtype), "scales": blocks.scales.T}
    arrays = {name: np.ascontiguousarray(array) for name, array in parts.items()}
    values = [make.array(f"{source.name}.{name}", x) for name, x in arrays.items()]
    floats = make("DequantizeLinear", *values, axis=0, block_size=signed.shape[2])
    node.replace_input_with(1, floats)
    for consumer in source.consumers():
        if consumer.op_type == "Gather":
            # A tied embedding reads the dequantized numbers, as in the contrib flavour.
            array = np.ascontiguousarray(blocks.floats.T)
            consumer.replace_input_with(0, make.array(f"{source.name}.rows", array))


_SIGNED: dict[int, npt.DTypeLike] = {4: ml_dtypes.int4, 8: np.int8}


def _replace_gather(make: Maker, node: ir.Node, packed: PackedMatrix) -> None:
    """Read embeddings, the columns of the LM head's matrix, out of its integers."""
    weight, blocks, ids = packed.weight, packed.blocks, node.inputs[1]
    if isinstance(blocks, GridMatrix):
        _replace_node(make, node, packed.operator(make, GATHER, ids))
        return
    # Stored twice: the two operators read scales and zeros with different ranks.
    scales = blocks.scales[..., None]
    inputs = [weight, ids, make.array(f"{weight.name}.row_scales", scales)]
    if blocks.zeros is not None:
        inputs.append(make.array(f"{weight.name}.row_zeros", blocks.zeros[..., None]))
    axes: Any = {"gather_axis": 0, "quantize_axis": 2}
    gathered = make("GatherBlockQuantized", *inputs, **_block_form(blocks), **axes)
    width = node.outputs[0].shape[-1] if node.outputs[0].shape else 0
    padded_width = scales.shape[1] * blocks.block_size
    shape = make.constant(f"{weight.name}.row", [0, 0, padded_width])
    rows = make("Reshape", gathered, shape)
    if padded_width != width:
        numbers = {"start": 0, "end": width, "axis": 2}.items()
        bounds = (make.constant(f"{weight.name}.{name}", [n]) for name, n in numbers)
        rows = make("Slice", rows, *bounds)
    _replace_node(make, node, rows)


def _replace_node(make: Maker, old: ir.Node, result: ir.Value) -> None:
    edits.replace_values(old.outputs, [result])
    make.graph.remove(old, safe=True)
