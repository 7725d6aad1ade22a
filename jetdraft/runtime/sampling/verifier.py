"""The interface of verifiers, which choose a token per row, and its two kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.arrays import Float64s
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser

Rule = Callable[[Float64s, Float64s, Sequence[int], Kind], Float64s]
"""Maps (p, q, children, kind) to the distribution of the chosen token."""


class Verifier(Protocol):
    """Chooses one token per row; `Rows.walk` then accepts the rows that agree.

    `kinds` are the kinds of draft that it may verify. It keeps the target's
    distribution for drafts of these kinds, unless it is `lossy`. If `single_child`, a
    row may have only one child. `settings` names what a user can set: fields of
    `MethodOptions` that this verifier, a dataclass, has too.
    """

    name: str
    kinds: frozenset[Kind]
    lossy: bool
    single_child: bool
    settings: tuple[str, ...]

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """A token per row; `positions` are the absolute positions of these tokens.

        Rows that the walk cannot reach may get -1.
        """
        ...


def check_kind(verifier: Verifier, kind: Kind) -> None:
    """Raise `OptionError` if the verifier is not for this kind of draft."""
    if kind not in verifier.kinds:
        allowed = ", ".join(sorted(k.value for k in verifier.kinds))
        raise DraftingError(
            f"verifier {verifier.name!r} is not made for {kind.value} drafts, only "
            f"for {allowed}; use verifier=walk, or method draft with those siblings"
        )


class Walk:
    """Chooses the tokens that plain decoding chooses, whatever was drafted.

    So the text equals that of plain decoding with the same seed, for every draft.
    """

    name = "walk"
    kinds = frozenset(Kind)
    lossy = False
    single_child = False
    settings: tuple[str, ...] = ()

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """`Chooser.choose` for all rows at once."""
        return chooser.choose(answer, positions)


@dataclass
class Conditional:
    """Draws each row's token from pi(. | its children), which `rule` gives.

    The text has the distribution of plain decoding. But with the same seed it is
    another text, since the draws depend on the draft.
    """

    name: str
    kinds: frozenset[Kind]
    rule: Rule
    lossy: bool = False
    single_child: bool = False
    settings: tuple[str, ...] = ()

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """One draw per row of the accepted path, -1 for all other rows.

        A row without children draws from p itself.
        """
        if rows.drafted:
            check_kind(self, rows.kind)
        chosen = [-1] * len(rows)
        row: int | None = 0
        while row is not None:
            p = chooser.distribution(answer.rows(slice(row, row + 1)))
            children = rows.children(row)
            if children:
                p = self._pi(p, rows.drawn_from.get(row), children, rows)
            token = p.draw(chooser.sampling.seed, positions[row])
            chosen[row] = token
            row = next((i for i in children if rows.tokens[i] == token), None)
        return chosen

    def _pi(
        self, p: Distribution, q: Distribution | None, below: list[int], rows: Rows
    ) -> Distribution:
        """pi over all tokens of p, of q and of the children; `below` are their rows."""
        tokens = np.array([rows.tokens[row] for row in below])
        q = q or Distribution(tokens[:0], np.zeros(0))
        ids = np.unique(np.concatenate([p.ids, q.ids, tokens]))
        children = np.searchsorted(ids, tokens).tolist()
        pi = self.rule(p.over(ids), q.over(ids), children, rows.kind)
        return Distribution(ids, pi)
