"""The tree graph is the chain graph with one more input, over the same weights."""

import onnx_ir as ir
import transformers

from jetdraft.bundle import Bundle
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.tiny import save_checkpoint


def test_both_graphs_read_the_same_weights(bundle):
    entry = Bundle.open(bundle).target
    chain, tree = (ir.load(bundle / file) for file in (entry.file, entry.tree_file))
    places = [
        {
            name: (value.const_value.location, value.const_value.offset)
            for name, value in model.graph.initializers.items()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        for model in (chain, tree)
    ]
    assert places[0] == places[1]
    assert {location for location, _ in places[0].values()} == {"target.onnx.data"}
    added = {v.name for v in tree.graph.inputs} - {v.name for v in chain.graph.inputs}
    assert added == {"draft_mask", "draft_start"}
    assert (bundle / entry.tree_file).stat().st_size < 200_000


def test_the_compaction_graph_has_no_weights(bundle):
    entry = Bundle.open(bundle).target
    model = ir.load(bundle / entry.compaction_file)
    assert not model.graph.initializers
    assert {node.op_type for node in model.graph} == {"Gather", "TensorScatter"}


def test_sliding_windows_leave_chains_only(tmp_path):
    config = transformers.Gemma3TextConfig(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, sliding_window=16,
        query_pre_attn_scalar=8, eos_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    target = save_checkpoint(tmp_path / "target", config, seed=0)
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16)
    bundle = export(str(target), tmp_path / "bundle", None, options)
    assert bundle.target.tree_file is None
    assert not list(bundle.path.glob("*tree*"))
