"""The inputs and outputs of graphs, declared once."""
