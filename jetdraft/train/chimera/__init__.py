"""The trainer of Chimera's drafters; `jetdraft train chimera` loads its command."""

from jetdraft.train.chimera.chimera_verb import command

__all__ = ["command"]
