"""The trainer of Kangaroo's adapters; `jetdraft train kangaroo` loads its command."""

from jetdraft.train.kangaroo.kangaroo_verb import command

__all__ = ["command"]
