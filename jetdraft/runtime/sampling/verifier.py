"""How a row's token is chosen in view of the draft below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jetdraft.errors import VerifierError
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.noise import Doubles
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser

Rule = Callable[[Doubles, Doubles, Sequence[int], Kind], Doubles]
"""(p, q, children, kind) to the distribution of the chosen token."""


class Verifier(Protocol):
    """Chooses one token per row; the walk then accepts what was drafted.

    `kinds` are the kinds of draft that it is exact for; a `lossy` one is never exact.
    """

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> frozenset[Kind]: ...

    @property
    def lossy(self) -> bool: ...

    @property
    def single_child(self) -> bool: ...

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """A token per row; `positions` are those of the chosen tokens.

        Rows that the walk cannot come to need none.
        """
        ...


def check_kind(verifier: Verifier, kind: Kind) -> None:
    """Raise `VerifierError` if the verifier would bias this kind of draft."""
    if kind not in verifier.kinds:
        allowed = ", ".join(sorted(k.value for k in verifier.kinds))
        raise VerifierError(
            f"verifier {verifier.name!r} is not made for {kind.value} drafts, only "
            f"for {allowed}; use verifier 'walk', or --method draft with --siblings"
        )


class Walk:
    """The token that plain decoding chooses: exact for every draft, and repeatable.

    What was drafted has no say, so the text is that of plain decoding by equality.
    """

    name = "walk"
    kinds = frozenset(Kind)
    lossy = False
    single_child = False

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """`Chooser.choose` for all rows at once."""
        return chooser.choose(answer, positions)


@dataclass(frozen=True)
class Conditional:
    """Draws each row's token from pi(. | its children), given by `rule`.

    Exact in distribution for its `kinds`, unless `lossy`: the same seed gives other
    text than plain decoding does, since the draft decides which noise is used.
    """

    name: str
    kinds: frozenset[Kind]
    rule: Rule
    lossy: bool = False
    single_child: bool = False

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """One draw per row of the accepted path, -1 for all others.

        Rows without children draw from p itself.
        """
        if rows.drafted:
            check_kind(self, rows.kind)
        chosen = [-1] * len(rows)
        row: int | None = 0
        while row is not None:
            p = chooser.distribution(answer.rows(slice(row, row + 1)))
            below = rows.children(row)
            if below:
                p = self._given(p, rows.drawn_from.get(row), below, rows)
            token = p.draw(chooser.sampling.noise_seed, positions[row])
            chosen[row] = token
            row = next((child for child in below if rows.tokens[child] == token), None)
        return chosen

    def _given(
        self, p: Distribution, q: Distribution | None, below: list[int], rows: Rows
    ) -> Distribution:
        """pi over all tokens that p, q or the children have."""
        tokens = np.array([rows.tokens[row] for row in below])
        q = q or Distribution(tokens[:0], np.zeros(0))
        ids = np.unique(np.concatenate([p.ids, q.ids, tokens]))
        children = np.searchsorted(ids, tokens).tolist()
        pi = self.rule(p.over(ids), q.over(ids), children, rows.kind)
        return Distribution(ids, pi)
