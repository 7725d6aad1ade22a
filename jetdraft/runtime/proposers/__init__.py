"""Proposers: where drafts come from. A new method is a new module here."""

from jetdraft.runtime.proposers.base import Proposer
from jetdraft.runtime.proposers.draft import DraftProposer
from jetdraft.runtime.proposers.lookup import LookupProposer

__all__ = ["DraftProposer", "LookupProposer", "Proposer"]
