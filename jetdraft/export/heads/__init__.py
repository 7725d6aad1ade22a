"""Heads become the drafter of a bundle."""
