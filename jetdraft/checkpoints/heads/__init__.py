"""Heads: drafters that read the target's hidden states, from published checkpoints."""
