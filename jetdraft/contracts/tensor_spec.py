"""One input or output of a graph."""

from __future__ import annotations

from dataclasses import dataclass

ROWS, ANSWERS, PROBES, PREFIX, ALL = "n", "m", "r", "p", "n+b"
"""The names of the dynamic axes: the rows of a pass, the rows it answers for, its
probes, the rows of their prefix, and the slots of all these together."""

SLOTS = "s"
"""The name of the axis of slots in buffers of another graph, which may have more."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: name, numpy dtype name, shape with named dynamic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sized(
        self,
        rows: int = 0,
        answers: int = 0,
        probes: int = 0,
        members: int = 1,
        prefix: int = 0,
    ) -> tuple[int, ...]:
        """The shape in a pass of `rows` rows and `probes` probes.

        `answers` of the rows are answered for. `members` and `prefix` are those of the
        contract.
        """
        prefix = prefix if probes else 0
        sizes = {
            ROWS: rows,
            ANSWERS: answers,
            PROBES: probes,
            PREFIX: prefix,
            ALL: rows + prefix + probes * members,
            SLOTS: rows + 1,  # of buffers that are lent, to trace with
        }
        return tuple(
            sizes[axis] if isinstance(axis, str) else axis for axis in self.shape
        )
