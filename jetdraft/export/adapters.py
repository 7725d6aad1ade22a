"""LoRA (2106.09685): reads folders of peft, and adds them to the products of a graph.

The weights file of a target has the matrices of all adapters. A graph for each adapter
and the graph without them read this file, and so share the target's weights.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.folder import as_checkpoint_error
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.parsing import read_json_file
from jetdraft.quant.edits import ADAPTER, Maker, replace_values
from jetdraft.quant.weights import product_names

# A float32 [in, rank] and B [rank, out] of LoRA, by the names of weights; B is scaled.
Pairs = Mapping[str, tuple[Tensor, Tensor]]
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
# Settings of peft that change more than the product of A and B.
_REFUSED = ("use_dora", "alpha_pattern", "alora_invocation_tokens")


def read_adapter(folder: Path, model: Any) -> Pairs:
    """Read a folder of peft for a model; raises `CheckpointError` if it does not fit.

    Its linear layers add x A B to their product of the rows x.
    """
    with as_checkpoint_error(str(folder)):
        config = dict(read_json_file(folder / "adapter_config.json"))
        kinds = [field for field in _REFUSED if config.get(field)]
        if config.get("peft_type") != "LORA" or kinds:
            fact = f"{folder} has {', '.join(kinds) or 'no LoRA'}, and only plain LoRA "
            fact += "of linear layers changes a bundle's target"
            raise CheckpointError(f"{fact}; merge it into the checkpoint")
        alpha, is_rooted = float(config["lora_alpha"]), config.get("use_rslora")
        parts = load_file(folder / "adapter_model.safetensors")
        layers, pairs = dict(model.named_modules()), dict[str, tuple[Tensor, Tensor]]()
        for key in parts:
            found, start = _KEY.fullmatch(key), key.partition(".lora_")[0]
            name = found[1] if found else ""
            low, high = (parts.get(f"{start}.lora_{side}.weight") for side in "AB")
            if low is None or high is None or not _fits(layers.get(name), low, high):
                fact = f"{folder} has the weight {printable(key, 100)}, which fits no "
                fix = "give an adapter of this target"
                raise CheckpointError(f"{fact}linear layer of the target; {fix}")
            scale = alpha / (math.sqrt(len(low)) if is_rooted else len(low))
            pairs[f"{name}.weight"] = low.T.float(), high.T.float() * scale
    return pairs


def _fits(layer: nn.Module | None, low: Tensor, high: Tensor) -> bool:
    """Whether A [rank, in] and B [out, rank] of finite numbers are LoRA of a layer."""
    if not isinstance(layer, nn.Linear):
        return False
    sizes = len(low), layer.in_features, layer.out_features, len(low)
    is_finite = math.isfinite(low.float().sum() + high.float().sum())
    return is_finite and (*low.shape, *high.shape) == sizes


def add_adapters(
    graph: ir.Graph, adapters: Mapping[str, Pairs], model: Any, dtype: str
) -> None:
    """Add x A B of each adapter to the products of a graph in floats, in place.

    The graph is of `model`. `keep_adapter` takes all but one adapter out again. Raises
    `UnsupportedModelError` for a weight that no product reads.
    """
    missing = {name for pairs in adapters.values() for name in pairs}
    make = Maker(graph)
    for number, node in enumerate(list(graph)):
        names, product = product_names(node), node.outputs[0]
        missing.difference_update(names)
        for adapter, pairs in adapters.items():
            if pairs.keys().isdisjoint(names):
                continue
            start, change = f"{ADAPTER}{adapter}/{number}", node.inputs[0]
            for side, matrix in zip("ab", _joined(pairs, names, model), strict=True):
                name = f"{start}.{side}"
                read = change, make.array(name, matrix.numpy().astype(dtype))
                (change,) = make.add(ir.node("MatMul", read, name=name))
            total = ir.node("Add", [product, change], name=start)
            replace_values([product], make.add(total))
            total.replace_input_with(0, product)
            product.name = product.name or f"{start}.product"
    if missing:
        fact = f"the weight {min(missing)} is read by no product of the graph, so LoRA "
        fact += "cannot be added to it at run time"
        raise UnsupportedModelError(f"{fact}; merge it into the checkpoint")
    graph.sort()


def _joined(pairs: Pairs, names: list[str], model: Any) -> tuple[Tensor, Tensor]:
    """Return A [in, ranks] and B [ranks, out] of a product with several weights."""
    sizes = [model.get_parameter(name).shape for name in names]
    none = [(torch.zeros(rows, 0), torch.zeros(0, columns)) for columns, rows in sizes]
    of_names = zip(names, none, strict=True)
    low, high = zip(*(pairs.get(n, zero) for n, zero in of_names), strict=True)
    return torch.cat(low, 1), torch.block_diag(*high)  # type: ignore[no-untyped-call]


def keep_adapter(model: ir.Model, adapter: str) -> None:
    """Take all adapters but one out of a graph, in place; "" for all of them."""
    for node in [n for n in model.graph if n.op_type == "Add"]:
        name = str(node.name)
        if name.startswith(ADAPTER) and not name.startswith(f"{ADAPTER}{adapter}/"):
            replace_values(node.outputs, [v for v in node.inputs[:1] if v])
    common.RemoveUnusedNodesPass()(model)
