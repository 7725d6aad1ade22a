"""The kinds of graphs that the exporter writes, in their order."""

from jetdraft.export.variants import (
    chain_graph,
    half_graphs,
    stream_graph,
    tree_graph,
)

VARIANTS = (
    # Streams change what is traced; the chain is what all others are made of; and the
    # halves take from its file the extra outputs that only they need.
    stream_graph.VARIANT,
    chain_graph.VARIANT,
    half_graphs.VARIANT,
    tree_graph.VARIANT,
)
