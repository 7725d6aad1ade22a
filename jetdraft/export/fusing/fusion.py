"""Rewrites of a traced step graph: they save nodes and never change a result.

Each is optional: where its pattern does not match, the graph stays as it was traced.

- rotary: GroupQueryAttention rotates query and key itself, with cosine and sine tables
  of `capacity` rows; this replaces Transpose, RotaryEmbedding, Transpose before it.
  With `beside` one contrib RotaryEmbedding does it for each of them, since attention
  on WebGPU counts positions from the cursor on, which is wrong for branches
- projections: MatMuls that share their input become one MatMul; query, key and value
  then enter attention packed
- norms: residual Add and RMSNormalization become SkipSimplifiedLayerNormalization
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import rewrite

from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.attentions import attend_as_two, attentions
from jetdraft.export.fusing.norms import fuse_norms
from jetdraft.export.fusing.projections import (
    merge_projections,
    pack_projections,
    split_gemms,
)
from jetdraft.export.fusing.reshapes import drop_identity_reshapes
from jetdraft.export.fusing.rotation import (
    RotaryTables,
    RotationInHalves,
    fuse_rotation,
)


def fuse(
    model: ir.Model,
    contract: StepContract,
    forms: Mapping[str, object] | None = None,
    beside: bool = False,
) -> None:
    """Apply every rewrite to `model`, in place.

    `forms` maps matrices, by their names in the checkpoint, to `Blocks.form`; only
    matrices with equal forms are merged. `beside` keeps the rotation out of attention.
    """
    rewrite(model, [RotationInHalves.rule()])
    # Each layer computes the same cosine; merge them, so that all share one table.
    common.CommonSubexpressionEliminationPass()(model)
    tables = RotaryTables(model, contract.slots)
    for node in attentions(model.graph):
        fuse_rotation(model.graph, node, tables, beside)
    drop_identity_reshapes(model.graph)
    split_gemms(model.graph)
    merge_projections(model.graph, forms or {})
    for node in attentions(model.graph):
        pack_projections(node)
    fuse_norms(model.graph)
    if contract.spare_slots and not contract.block:
        attend_as_two(model.graph)
    common.RemoveUnusedNodesPass()(model)
    model.graph.sort()
