"""Shapes of draft trees: a new one is a new module here."""

from jetdraft.runtime.shapes.base import Shape, Tree
from jetdraft.runtime.shapes.confident import Comb, Merged, Rerank
from jetdraft.runtime.shapes.fixed import Best, Kary, Sparse
from jetdraft.runtime.shapes.reach import Heap, Threshold

__all__ = [
    "Best",
    "Comb",
    "Heap",
    "Kary",
    "Merged",
    "Rerank",
    "Shape",
    "Sparse",
    "Threshold",
    "Tree",
]
