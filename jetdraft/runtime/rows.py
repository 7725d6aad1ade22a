"""The rows of a pass, and the walk that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """A root and the draft below it.

    `tokens` and `parents` are int64 [n]; row 0 is the root, its parent -1, and a
    parent comes before its children.

        Rows.chain([5, 8, 9]).depths  # array([0, 1, 2])
    """

    tokens: Int64s
    parents: Int64s

    @classmethod
    def chain(cls, tokens: Sequence[int] | Int64s) -> Rows:
        """Each row the child of the one before."""
        array = np.asarray(tokens, dtype=np.int64)
        return cls(array, np.arange(-1, len(array) - 1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """How many rows are proposals."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Whether each row is the child of the one before."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())

    @property
    def depths(self) -> Int64s:
        """Distance to the root per row."""
        if self.is_chain:
            return np.arange(len(self.tokens))
        depths = np.zeros(len(self.tokens), np.int64)
        for row in range(1, len(self.tokens)):
            depths[row] = depths[self.parents[row]] + 1
        return depths

    def walk(self, chosen: Int64s) -> list[int]:
        """The accepted rows, root first.

        From the root, go to the child that carries the token chosen for the current
        row, as far as there is one. `chosen` is int64 [n].
        """
        path = [0]
        for row in range(1, len(self.tokens)):
            here = path[-1]
            if self.parents[row] == here and self.tokens[row] == chosen[here]:
                path.append(row)
        return path
