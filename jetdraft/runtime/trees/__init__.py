"""Shapes of draft trees; a new shape is a new module here."""

from jetdraft.runtime.trees.confident import Comb, Merged, Rerank
from jetdraft.runtime.trees.fixed import Best, Kary, Static
from jetdraft.runtime.trees.reach import Heap, ReachThreshold
from jetdraft.runtime.trees.shape import Shape, Tree

__all__ = [
    "Best",
    "Comb",
    "Heap",
    "Kary",
    "Merged",
    "Rerank",
    "Shape",
    "Static",
    "ReachThreshold",
    "Tree",
]
