"""What a pass says of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jetdraft.contract import StepContract
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.probes import Probes
from jetdraft.runtime.passes.tensor import Tensor


@dataclass(frozen=True)
class Answer:
    """What a pass says of m of its n rows; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K],
    `logsumexp` float32 [m], `logits` float32 [m, vocab], `hidden` float32 [m, h] where
    the graph gives them. `features` float [n, w] and `carried` float [n, c] have one
    row per row of the pass, answered or not. `probes` maps each row that carried probes
    to the answer of its probes. The logits are fetched from the device when they are
    first read.
    """

    candidates: Int64s
    candidate_logits: Float32s
    logsumexp: Float32s
    _logits: Float32s
    hidden: Float32s | None = None
    features: Float32s | None = None
    carried: Float32s | None = None
    probes: Mapping[int, Answer] = field(default_factory=dict, repr=False)
    _parts: dict[int, Answer] = field(default_factory=dict, repr=False)
    _source: Tensor | None = field(default=None, repr=False)

    @property
    def logits(self) -> Float32s:
        """All logits of the rows."""
        if self._source is not None:
            self._source.fetch()
        return self._logits

    @property
    def vocab_size(self) -> int:
        """The number of tokens to choose from."""
        return int(self._logits.shape[1])

    @property
    def probe_count(self) -> int:
        """The number of probes of the pass."""
        return sum(len(answer.candidates) for answer in self.probes.values())

    def first(self, rows: int) -> Answer:
        """The answer of the first rows; the slices are made only once."""
        if rows not in self._parts:
            self._parts[rows] = replace(
                self.rows(slice(0, rows)),
                probes=self.probes,
                features=None if self.features is None else self.features[:rows],
                carried=None if self.carried is None else self.carried[:rows],
            )
        return self._parts[rows]

    def rows(self, which: slice) -> Answer:
        """The answer of some rows, without features and probes."""
        return Answer(
            self.candidates[which],
            self.candidate_logits[which],
            self.logsumexp[which],
            self._logits[which],
            None if self.hidden is None else self.hidden[which],
            _source=self._source,
        )


def answer_of(
    tensors: Mapping[str, Tensor], contract: StepContract, probes: Probes
) -> Answer:
    """The answer that a binding's outputs hold."""
    answer = replace(
        _answer(tensors, ""),
        hidden=_rows_of(tensors, "hidden"),
        features=_rows_of(tensors, "features"),
        carried=_rows_of(tensors, "carried"),
    )
    if not probes.total:
        return answer
    all_probes, per_row = _answer(tensors, "probe_"), probes.streams
    return replace(
        answer,
        probes={
            row: all_probes.rows(slice(index * per_row, (index + 1) * per_row))
            for index, row in enumerate(probes.carriers)
        },
    )


def _rows_of(tensors: Mapping[str, Tensor], name: str) -> Float32s | None:
    """An optional output [1, rows, size] as [rows, size]."""
    return tensors[name].array[0] if name in tensors else None


def _answer(tensors: Mapping[str, Tensor], prefix: str) -> Answer:
    candidates, values, logsumexp, logits = (
        tensors[prefix + name]
        for name in ("candidates", "candidate_logits", "logsumexp", "logits")
    )
    return Answer(
        candidates.array[0],
        values.array[0],
        logsumexp.array[0],
        logits.array[0],
        _source=logits,
    )
