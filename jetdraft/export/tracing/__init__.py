"""A pass in torch becomes a graph."""
