"""Proposers: where drafts come from. A new method is a new module here."""

from jetdraft.runtime.proposers.cascade import CascadeProposer
from jetdraft.runtime.proposers.draft import DraftProposer
from jetdraft.runtime.proposers.draft_tree import TreeProposer
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.proposers.recall import RecallProposer
from jetdraft.runtime.proposers.stream import StreamProposer
from jetdraft.runtime.proposers.trigram import TrigramProposer

__all__ = [
    "CascadeProposer",
    "DraftProposer",
    "LookupProposer",
    "Proposer",
    "RecallProposer",
    "StreamProposer",
    "TreeProposer",
    "TrigramProposer",
]
