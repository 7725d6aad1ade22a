"""The rows of a pass, and the walk that verifies them.

Plain lists, not arrays: a round handles a few rows, and between two passes that stream
all the weights through the caches every numpy call costs ten microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jetdraft.errors import DraftError

if TYPE_CHECKING:
    from jetdraft.runtime.distribution import Distribution

Int64s = npt.NDArray[np.int64]


class Kind(Enum):
    """How the children of a row came about, which decides who may verify them.

    `DETERMINISTIC` by their rank, `COUPLED` with the target's own noise, `REPLACED` by
    independent draws, `DISTINCT` by draws without replacement, `TOP_AND_ONE` the best
    of the drafter and, last, one drawn from the others.
    """

    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"
    REPLACED = "with-replacement"
    DISTINCT = "without-replacement"
    TOP_AND_ONE = "top-and-one"


@dataclass(frozen=True)
class Rows:
    """A root and the draft below it.

    Row 0 is the root, its parent -1, and a parent comes before its children.
    `drawn_from` has the distribution that a row's children were drawn from.

        Rows.chain([5, 8, 9]).depths  # [0, 1, 2]
    """

    tokens: list[int]
    parents: list[int]
    kind: Kind = Kind.DETERMINISTIC
    drawn_from: Mapping[int, Distribution] = field(default_factory=dict)

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
        if drafted >= self.drafted:
            return self
        end = drafted + 1
        return Rows(self.tokens[:end], self.parents[:end], self.kind, self.drawn_from)

    def children(self, row: int) -> list[int]:
        """The rows below `row`, in the order they were drafted."""
        return [i for i, parent in enumerate(self.parents) if parent == row]

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
