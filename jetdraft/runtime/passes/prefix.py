"""What a target's buffers still hold of an earlier text, so that it is not read again.

A row's keys and values depend on its prefix alone, and on the last bits of the kernels
that computed it. Prompts are read in passes whose rows are those of decoding bit by bit
(`Calibration.prefills_agree`), so a row that stays is the row that would be computed:
the text cannot depend on what came before. A generation that is not exact leaves rows
that an exact one does not take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import PrunedGraph


class Prefix:
    """The tokens whose rows are in a target's buffers since its last generation.

    prefix.keep(prompt, exact=True)     # rows that may stay
    prefix.hold(sequence, exact=True)   # after a generation
    """

    def __init__(self, target: Graph | PrunedGraph) -> None:
        self.target = target
        self.forget()

    def forget(self) -> None:
        """Read the next prompt from its beginning."""
        self._tokens: Int64s = np.zeros(0, np.int64)
        self._exact = False
        self._passes = -1

    def keep(self, prompt: Sequence[int], exact: bool) -> int:
        """How many of a prompt's rows need not be computed; its last is never kept.

        None, if anybody else has run the target since.
        """
        if self.target.passes != self._passes or (exact and not self._exact):
            return 0
        return min(common(self._tokens, prompt), len(prompt) - 1)

    def restore(self, tokens: Sequence[int], exact: bool) -> None:
        """The buffers hold the rows of these tokens, put there by somebody else."""
        self._tokens = np.asarray(tokens, np.int64)
        self._exact = exact
        self._passes = self.target.passes

    def hold(self, sequence: Sequence[int], exact: bool) -> None:
        """A generation has ended, of which the buffers hold the committed rows."""
        self.restore(sequence[: self.target.cache.length], exact)


def common(one: Sequence[int] | Int64s, other: Sequence[int] | Int64s) -> int:
    """The length of the longest common beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if len(differ) else length
