"""Chooses tokens from the logits of a pass: filters, penalties, verifiers."""
