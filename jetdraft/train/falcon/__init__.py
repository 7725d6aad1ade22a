"""The trainer of Falcon's drafters; `jetdraft train falcon` loads its command."""

from jetdraft.train.falcon.falcon_verb import command

__all__ = ["command"]
