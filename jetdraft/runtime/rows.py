"""The rows of a pass, and the walk that verifies them.

Plain lists, not arrays: a round handles a few rows, and between two passes that stream
all the weights through the caches every numpy call costs ten microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """A root and the draft below it.

    Row 0 is the root, its parent -1, and a parent comes before its children.

        Rows.chain([5, 8, 9]).depths  # [0, 1, 2]
    """

    tokens: list[int]
    parents: list[int]

    @classmethod
    def chain(cls, tokens: list[int]) -> Rows:
        """Each row the child of the one before."""
        return cls(tokens, list(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> int:
        """How many rows are proposals."""
        return len(self.tokens) - 1

    def first(self, drafted: int) -> Rows:
        """The root and the first `drafted` rows below it."""
        return Rows(self.tokens[: drafted + 1], self.parents[: drafted + 1])

    @property
    def is_chain(self) -> bool:
        """Whether each row is the child of the one before."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> list[int]:
        """Distance to the root per row."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def walk(self, chosen: Sequence[int]) -> list[int]:
        """The accepted rows, root first.

        From the root, go to the child that carries the token chosen for the current
        row, as far as there is one. `chosen` has a token per row.
        """
        path = [0]
        for row in range(1, len(self.tokens)):
            here = path[-1]
            if self.parents[row] == here and self.tokens[row] == chosen[here]:
                path.append(row)
        return path
