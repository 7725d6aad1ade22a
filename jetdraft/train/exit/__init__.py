"""The trainer of exits; `jetdraft train exit` loads its command."""

from jetdraft.train.exit.exit_verb import command

__all__ = ["command"]
