"""The trainer of prompt tokens; `jetdraft train ppd` loads its command from here."""

from jetdraft.train.ppd.ppd_verb import command

__all__ = ["command"]
