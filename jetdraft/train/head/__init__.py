"""The trainer of heads; `jetdraft train head` loads its command from here."""

from jetdraft.train.head.verb import command

__all__ = ["command"]
