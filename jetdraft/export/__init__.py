"""Checkpoints become graphs here; torch, transformers and optimum live only here."""
