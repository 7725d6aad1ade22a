"""What a target runs, and answers: the best tokens of rows, and their logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.runtime.drafts.rows import NO_PROBING, Probes, Probing, Rows, Tokens
from jetdraft.runtime.passes.buffers import Cache, Tensor

Tensors = Mapping[str, Tensor]  # By name.
Ran = tuple["Rows", "Answer"]  # The rows of a draft that ran, and their answer.
Pick = Callable[[Int64s, Int64s], Float32s]  # The logits of pairs of row and token.


@dataclass(frozen=True)
class Answer:
    """The answer to m of the n rows of a pass; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K], `logsumexp`
    float32 [m], `logits` float32 [m, vocab], and `hidden` float32 [m, h] where the
    graph gives them. With a part of the vocabulary the candidates' logits are all
    `logits`. `features` [n, w], `carried` [n, c] and the chosen `experts` int64 [n, e],
    whose numbers tell layers apart, are of all rows. `probes` maps rows that carried
    probes to their answer. Logits, and a `logsumexp` that the graph did not give, are
    fetched or computed when they are first read.
    """

    candidates: Int64s
    candidate_logits: Float32s
    _logsumexp: Float32s | None
    _logits: Float32s
    hidden: Float32s | None = None
    features: Float32s | None = None
    carried: Float32s | None = None
    experts: Int64s | None = None
    probes: Mapping[int, Answer] = field(default_factory=dict, repr=False)
    _parts: dict[int, Answer] = field(default_factory=dict, repr=False, init=False)
    _fetch: Callable[[], None] | None = field(default=None, repr=False)
    _pick: Pick | None = field(default=None, repr=False)

    @property
    def logsumexp(self) -> Float32s:
        """log(sum(exp(logits))) of each row."""
        if self._logsumexp is not None:
            return self._logsumexp
        # Row by row, so that a row's number cannot depend on the other rows.
        pairs = zip(self.logits, self.candidate_logits[:, 0], strict=True)
        sums = [most + np.log(np.exp(row - most).sum()) for row, most in pairs]
        return np.array(sums, np.float32)

    @property
    def logits(self) -> Float32s:
        """All logits of the rows, float32 [m, vocab]; the first read may fetch them."""
        if self._fetch is not None:
            self._fetch()
        return self._logits

    def logits_at(self, rows: Int64s, ids: Int64s) -> Float32s:
        """One logit for each pair of row and token, float32 [n]."""
        if self._pick is not None:
            return self._pick(rows, ids)
        return self.logits[rows, ids]

    @property
    def vocab_size(self) -> int:
        return int(self._logits.shape[1])

    @property
    def probe_count(self) -> int:
        return sum(len(answer.candidates) for answer in self.probes.values())

    @property
    def touched(self) -> int:
        """How many experts of all layers the rows chose; 0 without experts."""
        return 0 if self.experts is None else np.unique(self.experts).size

    def first(self, rows: int) -> Answer:
        """The answer of the first `rows` rows, with the features and all probes."""
        if rows not in self._parts:
            own = {n: getattr(self, n) for n in ("features", "carried", "experts")}
            cut: Any = {n: v[:rows] for n, v in own.items() if v is not None}
            part = self.rows(slice(0, rows))
            self._parts[rows] = replace(part, probes=self.probes, **cut)
        return self._parts[rows]

    def rows(self, which: slice) -> Answer:
        """The answer of a slice of the rows, without features and probes."""
        return Answer(
            self.candidates[which],
            self.candidate_logits[which],
            None if self._logsumexp is None else self._logsumexp[which],
            self._logits[which],
            None if self.hidden is None else self.hidden[which],
            _fetch=self._fetch,
        )


def answer_of(tensors: Tensors, contract: StepContract, probes: Probes) -> Answer:
    """The answer in a binding's outputs: views, so each pass overwrites it."""
    optional = {"hidden", "features", "carried", "experts"} & tensors.keys()
    more: dict[str, Any] = {name: tensors[name].array[0] for name in optional}
    are_few = contract.draft_vocab > 0
    own = _answer_from(tensors, "", are_few and not contract.streams)
    answer = replace(own, **more)
    if not probes.total:
        return answer
    ends = list(accumulate(probes.counts))
    all_probes = _answer_from(tensors, "probe_", are_few)
    parts = {r: slice(ends[r] - probes.counts[r], ends[r]) for r in probes.carriers}
    by_row = {row: all_probes.rows(part) for row, part in parts.items()}
    return replace(answer, probes=by_row)


def _answer_from(tensors: Tensors, prefix: str, are_few: bool) -> Answer:
    """The answer in the four outputs whose names begin with `prefix`.

    Columns of a part of the vocabulary (`are_few`) are no ids, so they are left out.
    """
    names = ("candidates", "candidate_logits", "logsumexp", "logits")
    ids, values, sums, logits = (tensors[prefix + name].array[0] for name in names)
    if are_few:
        return Answer(ids, values, sums, values)
    return Answer(ids, values, sums, logits, _fetch=tensors[f"{prefix}logits"].fetch)


class Target(Protocol):
    """Runs passes over its cache and commits the rows that were right."""

    contract: StepContract

    @property
    def seconds(self) -> float: ...

    @property
    def passes(self) -> int: ...

    @property
    def cache(self) -> Cache: ...

    def run(self, tokens: Tokens, last_only: bool = False, width: int = 0) -> Answer:
        """Run one pass over a chain of tokens at the cursor, which does not move.

        With `last_only` it answers for the last row alone. Copies of the last row fill
        the pass up to `width` rows.
        """
        ...

    def verify(self, rows: Rows, width: int, probing: Probing = NO_PROBING) -> Ran:
        """Run a draft in a pass; return the rows that ran, and their answer."""
        ...

    def commit(self, path: Sequence[int], ends_at_gap: bool) -> int:
        """Commit the rows of a path of the last pass; returns how many.

        The path's rows may have gaps between them in the buffers. With `ends_at_gap`
        only the rows before the first gap are committed; else all are, moved together.
        """
        ...
