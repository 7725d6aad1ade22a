"""The trainer of GliDe's drafters; `jetdraft train glide` loads its command."""

from jetdraft.train.glide.glide_verb import command

__all__ = ["command"]
