"""Which tokens follow which two: counted in a corpus, and learned on the way.

The table of ADED (2407.12021): the successors of a pair with their shares, and on top
of them what the last tokens of each round add. Sorted arrays and a binary search, since
dictionaries of a corpus would take ten times the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jetdraft.errors import StoreError
from jetdraft.files import read_arrays

MOST_SUCCESSORS = 12
"""Kept per pair, the most frequent ones."""

WINDOW = 16
"""Last tokens of the context that a round learns from."""

STEP, MOST_WEIGHT = 0.04, 3.0
"""What a round adds to a successor that it saw, and where that ends."""

MOST_LEARNED = 65536
"""Pairs that are learned on the way; then the oldest are forgotten."""


@dataclass(frozen=True)
class Counts:
    """A corpus: `pairs` uint64 [n] ascending, each pair's two ids in 32 bits each.

    Pair i has the successors `tokens[offsets[i]:offsets[i + 1]]` (uint32, the most
    frequent first), whose float32 `weights` are shares of all that followed it.
    """

    pairs: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> Counts:
        """Count the trigrams of documents.

        Counts.of([[5, 8, 9, 5, 8, 2]]).successors(5, 8)    # {9: 0.5, 2: 0.5}
        """
        kinds, times = _counted(documents)
        first = np.flatnonzero(np.r_[True, np.diff(kinds[0]) > 0])
        pair = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(times)]))
        shares = times / np.add.reduceat(times, first)[pair] if len(times) else times
        # By pair, then the most frequent first; of those only the first dozen.
        order = np.lexsort((-times, pair))
        place = np.arange(len(order)) - first[pair]
        kept = order[place < MOST_SUCCESSORS]
        sizes = np.bincount(pair[kept], minlength=len(first))
        return cls(
            pairs=kinds[0][first] if len(times) else kinds[0],
            offsets=np.r_[0, np.cumsum(sizes)].astype(np.uint32),
            tokens=kinds[1][kept].astype(np.uint32),
            weights=shares[kept].astype(np.float32),
        )

    def successors(self, one: int, two: int) -> dict[int, float]:
        """What followed a pair, and how often; nothing for an unknown one."""
        pair = np.uint64(one << 32 | two)
        at = int(np.searchsorted(self.pairs, pair))
        if at == len(self.pairs) or self.pairs[at] != pair:
            return {}
        part = slice(int(self.offsets[at]), int(self.offsets[at + 1]))
        found = zip(
            self.tokens[part].tolist(), self.weights[part].tolist(), strict=True
        )
        return dict(found)

    def save(self, file: Path, tokenizer: str) -> None:
        """Write an npz with the hash of the tokenizer whose ids these are."""
        with file.open("wb") as handle:
            np.savez(handle, tokenizer=np.array(tokenizer), **vars(self))

    @classmethod
    def load(cls, file: Path, tokenizer: str, vocab_size: int) -> Counts:
        """Read `save`'s file; raise `StoreError` if it is for another tokenizer."""
        refusal = StoreError(
            f"cannot read a table from {file}; give one that jetdraft train trigram "
            "wrote"
        )
        arrays = read_arrays(file, refusal)
        owner = str(arrays.pop("tokenizer", ""))
        if arrays.keys() != cls.__dataclass_fields__.keys():
            raise refusal
        if owner != tokenizer:
            raise StoreError(
                f"the table {file} belongs to another tokenizer; train one for this "
                "bundle"
            )
        found = cls(**arrays)
        if not found.is_whole(vocab_size):
            raise refusal
        return found

    def is_whole(self, vocab_size: int) -> bool:
        """Whether the arrays fit each other, and every token the vocabulary."""
        kinds = {"pairs": "u8", "offsets": "u4", "tokens": "u4", "weights": "f4"}
        if any(
            getattr(self, name).dtype != np.dtype(kind) or getattr(self, name).ndim != 1
            for name, kind in kinds.items()
        ):
            return False
        ends = self.offsets.astype(np.int64)
        return bool(
            len(ends) == len(self.pairs) + 1
            and (ends[0], ends[-1]) == (0, len(self.tokens))
            and len(self.weights) == len(self.tokens)
            and (np.diff(ends) > 0).all()
            and (self.pairs[1:] > self.pairs[:-1]).all()
            and (self.tokens < vocab_size).all()
            and np.isfinite(self.weights).all()
            and (self.weights > 0).all()
        )


def _counted(
    documents: Iterable[Sequence[int]],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """All trigrams as [2, n], pair and successor, in order, and how often each was."""
    none = np.zeros(0, np.uint64)
    pairs, tokens = [none], [none]
    for document in documents:
        ids = np.asarray(document, np.uint64)
        pairs.append(ids[:-2] << np.uint64(32) | ids[1:-1])
        tokens.append(ids[2:])
    both = np.stack([np.concatenate(pairs), np.concatenate(tokens)])
    order = np.lexsort((both[1], both[0]))
    both = both[:, order]
    new = np.r_[True, np.any(np.diff(both) != 0, axis=0)] if both.size else []
    first = np.flatnonzero(new)
    return both[:, first], np.diff(np.r_[first, both.shape[1]]).astype(np.float64)


class Trigrams:
    """A corpus' counts and what decoding adds to them.

    trigrams = Trigrams()
    trigrams.learn([5, 8, 9, 5, 8])
    trigrams.successors(5, 8)    # {9: 0.04}
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self.has_corpus = counts is not None
        self.counts = counts or Counts.of([])
        self._learned: dict[tuple[int, int], dict[int, float]] = {}

    def learn(self, context: Sequence[int]) -> None:
        """Take in the end of a context, once a round."""
        last = context[-WINDOW:]
        for one, two, three in zip(last, last[1:], last[2:], strict=False):
            known = self._learned.pop((one, two), None)
            known = self.counts.successors(one, two) if known is None else known
            known[three] = min(known.get(three, 0.0) + STEP, MOST_WEIGHT)
            if len(known) > MOST_SUCCESSORS:
                others = (token for token in known if token != three)
                del known[min(others, key=known.__getitem__)]
            self._learned[one, two] = known
        while len(self._learned) > MOST_LEARNED:
            del self._learned[next(iter(self._learned))]

    def forget(self) -> None:
        """Go back to what the corpus says."""
        self._learned.clear()

    def successors(self, one: int, two: int) -> dict[int, float]:
        """What may follow a pair, and its weight."""
        known = self._learned.get((one, two))
        return self.counts.successors(one, two) if known is None else known
