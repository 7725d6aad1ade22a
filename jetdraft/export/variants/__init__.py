"""The kinds of graphs that the exporter writes, in their order."""

from jetdraft.export.variants import (
    chain_graph,
    exit_graph,
    feature_graph,
    half_graphs,
    select_graph,
    source_graph,
    stream_graph,
    tree_graph,
)

VARIANTS = (
    # Sources, streams, features and exits change the pass that is traced. The other
    # graphs are made of the chain.
    # Halves come before trees: they remove the extra outputs of the chain graph.
    # Selections are made of the tree graph.
    source_graph.VARIANT,
    stream_graph.VARIANT,
    feature_graph.VARIANT,
    exit_graph.VARIANT,
    chain_graph.VARIANT,
    half_graphs.VARIANT,
    tree_graph.VARIANT,
    select_graph.VARIANT,
)
