"""Compares quantization recipes of a checkpoint: python -m tools.recipes --help."""
