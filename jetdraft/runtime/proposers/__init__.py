"""Proposers: where drafts come from. A new method is a new module here."""

from jetdraft.runtime.proposers.base import Proposer
from jetdraft.runtime.proposers.draft import DraftProposer
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.recall import RecallProposer
from jetdraft.runtime.proposers.stream import StreamProposer
from jetdraft.runtime.proposers.tree import TreeProposer

__all__ = [
    "DraftProposer",
    "LookupProposer",
    "Proposer",
    "RecallProposer",
    "StreamProposer",
    "TreeProposer",
]
