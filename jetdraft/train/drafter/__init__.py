"""The trainer of drafters; `jetdraft train drafter` loads its command from here."""

from jetdraft.train.drafter.drafter_verb import command

__all__ = ["command"]
