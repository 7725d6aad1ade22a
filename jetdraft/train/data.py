"""Reads texts to train on, and makes batches of token sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from jetdraft.errors import DataError
from jetdraft.texts import read_bytes, read_text

IGNORED = -100
"""The label of tokens that the loss ignores."""


@dataclass(frozen=True)
class Example:
    """The token ids of a sequence, and for each token whether it is learned."""

    ids: list[int]
    learned: list[bool]


@dataclass(frozen=True)
class Batch:
    """`ids` int64 [b, T], padded on the right, and `labels` of the same shape."""

    ids: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(self.ids.to(device), self.labels.to(device))


class Corpus:
    """Sequences to learn from and other sequences to validate with, split by a seed.

    A `.jsonl` file has an object in each line: either `prompt` and `completion`, of
    which only the completion is learned, or `text`. Any other file is text, which is
    cut into windows.

        corpus = Corpus.read([Path("notes.txt")], tokenizer, end=0, length=256, ...)
        corpus.batch(step=0, size=8)
    """

    def __init__(
        self, sequences: Sequence[Example], share: float, seed: int, sha256: str = ""
    ) -> None:
        self.sha256 = sha256
        order = torch.randperm(
            len(sequences), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        count = max(1, round(share * len(order))) if len(order) > 1 else 0
        self.validation = [sequences[i] for i in order[:count]] or list(sequences)
        self.training = [sequences[i] for i in order[count:]]
        self.seed = seed
        self._epoch, self._order = -1, list[int]()

    @classmethod
    def read(
        cls,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        end: Sequence[int],
        length: int,
        least: int,
        share: float = 0.05,
        seed: int = 0,
    ) -> Corpus:
        """Read files; sequences have at most `length` and at least `least` tokens."""
        sequences: list[Example] = []
        texts: list[int] = []
        for file in files:
            if file.suffix == ".jsonl":
                sequences += _examples(file, tokenizer, list(end[:1]), length, least)
            else:
                texts += [*tokenizer.encode(read_text(file)).ids, *end[:1]]
        sequences += _windows(texts, length, least)
        if not sequences:
            raise DataError(
                f"the data has {len(texts)} tokens, a sequence needs {least}; give "
                "more text"
            )
        digest = hashlib.sha256(b"".join(read_bytes(file) for file in files))
        return cls(sequences, share, seed, digest.hexdigest())

    def batch(self, step: int, size: int, part: int = 0, parts: int = 1) -> Batch:
        """The batch of a step, or its part number `part` of `parts`, one for a machine.

        It depends on the seed and the step alone, so training can resume at any step.
        """
        first = step * size
        rows = [self._row(first + i) for i in range(size)]
        return collate(rows[part::parts] or rows[:1])

    def _row(self, number: int) -> Example:
        epoch, place = divmod(number, len(self.training))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch + 1)
            order = torch.randperm(len(self.training), generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        example: Example = self.training[self._order[place]]
        return example

    def validation_batches(self, size: int) -> Iterator[Batch]:
        """All validation sequences once."""
        for start in range(0, len(self.validation), size):
            yield collate(self.validation[start : start + size])


def collate(rows: Sequence[Example]) -> Batch:
    """Pad to the longest row; labels are the ids that are learned."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for index, row in enumerate(rows):
        row_ids, learned = torch.tensor(row.ids), torch.tensor(row.learned)
        ids[index, : len(row_ids)] = row_ids
        labels[index, : len(row_ids)] = row_ids.where(learned, IGNORED)
    return Batch(ids, labels)


def _windows(ids: list[int], length: int, least: int) -> Iterator[Example]:
    for start in range(0, len(ids), length):
        window = ids[start : start + length]
        if len(window) >= least:
            yield Example(window, [True] * len(window))


def _examples(
    file: Path, tokenizer: Tokenizer, end: list[int], length: int, least: int
) -> Iterator[Example]:
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            fields = json.loads(line)
            if "text" in fields:
                head, tail = [], tokenizer.encode(fields["text"]).ids
            else:
                head = tokenizer.encode(fields["prompt"]).ids
                # A special token that starts a text must not come again inside it.
                tail = tokenizer.encode(
                    fields["completion"], add_special_tokens=False
                ).ids
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{where} is not an object with prompt and completion, or text; "
                "correct it"
            ) from error
        ids = [*head, *tail, *end]
        if len(ids) < least:
            raise DataError(
                f"{where} has {len(ids)} tokens, a sequence needs {least}; give longer "
                "texts or fewer streams"
            )
        if len(ids) > length:
            raise DataError(
                f"{where} has {len(ids)} tokens, more than the sequence length of "
                f"{length}; raise --sequence-length or shorten the text"
            )
        yield Example(ids, [False] * len(head) + [True] * (len(ids) - len(head)))
