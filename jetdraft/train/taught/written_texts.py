"""Texts that the target writes itself: a drafter learns what it will have to guess."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jetdraft.errors import DataError, TrainingError
from jetdraft.files import write_text
from jetdraft.train.data import Example
from jetdraft.train.taught.continuation import continuations

PROMPT_TOKENS = 16
"""Tokens that are kept of a text without a prompt."""

SHARD = 64
"""Texts in each file."""

PATIENCE = 3600.0
"""Seconds to wait for a shard of another process."""

LOOK_EVERY = 1.0

FOLDER = "written"


@dataclass(frozen=True)
class Writing:
    """How texts are written: by a target, up to `length` tokens, with a seed.

    A text ends after one of the tokens `ends`; `batch_size` texts are written at a
    time, by the function `write`.
    """

    model: Any
    ends: Sequence[int]
    length: int
    batch_size: int
    seed: int
    write: Callable[..., list[list[int]]] = continuations


class WrittenTexts:
    """The texts that a target writes, in shards of a folder that processes share.

    Each process writes the shards that are its own, and reads those of the others when
    they are there; nobody waits in a barrier, which has a limit. A run that was stopped
    goes on after the last whole shard, on any number of processes. `identity` says what
    the texts depend on.

        texts = WrittenTexts(Path("out"), "target 7f3a", process=0, processes=2)
        examples = texts.completed(writing, examples, range(len(examples)))
    """

    def __init__(
        self, folder: Path, identity: str, process: int = 0, processes: int = 1
    ) -> None:
        self.folder = folder / FOLDER
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self.process, self.processes = process, processes

    def completed(
        self,
        writing: Writing,
        examples: Sequence[Example],
        chosen: Sequence[int],
        tick: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Example]:
        """The examples; those with a number in `chosen` are completed by the target.

        A completion is as long as the example's own or shorter; a prompt alone is
        completed to the whole length. `tick` gets the texts that this process has done,
        and all that it has to do.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # Texts of one batch should have about the same length.
        order = sorted(chosen, key=lambda number: prompt_size(examples[number]))
        shards = [order[i : i + SHARD] for i in range(0, len(order), SHARD)]
        own = range(self.process, len(shards), self.processes)
        total = sum(len(shards[number]) for number in own)
        missing = [number for number in own if not self._file(number).exists()]
        done = total - sum(len(shards[number]) for number in missing)
        tick(done, total)
        # One batch may fill several files.
        together = max(1, writing.batch_size // SHARD)
        for start in range(0, len(missing), together):
            numbers = missing[start : start + together]
            members = [member for number in numbers for member in shards[number]]
            texts: list[list[int]] = []
            for batch in _written(writing, examples, members):
                texts += batch
                tick(done + len(texts), total)
            done += len(texts)
            for number in numbers:
                count = len(shards[number])
                write_text(self._file(number), json.dumps(texts[:count]))
                texts = texts[count:]
        finished = list(examples)
        for number, members in enumerate(shards):
            for member, ids in zip(members, self._read(number), strict=True):
                size = prompt_size(examples[member])
                finished[member] = Example.completed(ids, size)
        return finished

    def forget(self) -> None:
        """Delete all texts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, shard: int) -> Path:
        return self.folder / f"{self.digest}-{shard:06}.json"

    def _read(self, shard: int) -> list[list[int]]:
        """The texts of a shard, which another process may be writing still."""
        file, began = self._file(shard), time.monotonic()
        while not file.exists():
            if self.processes == 1 or time.monotonic() - began > PATIENCE:
                raise TrainingError(
                    f"no other process wrote {file}; let all processes and machines "
                    "share the output folder"
                )
            time.sleep(LOOK_EVERY)
        try:
            texts: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} is damaged ({error}); delete it") from error
        return texts


def _written(
    writing: Writing, examples: Sequence[Example], members: Sequence[int]
) -> Iterator[list[list[int]]]:
    """The texts of the examples; a batch that does not fit into memory is halved."""
    size, start = writing.batch_size, 0
    while start < len(members):
        batch = members[start : start + size]
        try:
            texts = _continued(writing, examples, batch)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size = (size + 1) // 2
            continue
        yield texts
        start += len(batch)


def _continued(
    writing: Writing, examples: Sequence[Example], batch: Sequence[int]
) -> list[list[int]]:
    """The texts of some examples; each has a seed of its own."""
    prompts, counts = [], []
    for member in batch:
        example = examples[member]
        size = prompt_size(example)
        length = len(example.ids) if example.is_written else writing.length
        prompts.append(example.ids[:size])
        counts.append(max(1, length - size))
    seeds = [seed_of(writing.seed, member) for member in batch]
    return writing.write(writing.model, prompts, counts, set(writing.ends), seeds)


def seed_of(seed: int, number: int) -> int:
    """A seed for one of many texts."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def prompt_size(example: Example) -> int:
    """The number of tokens that stay when an example is completed anew."""
    return example.prompt_size or min(PROMPT_TOKENS, len(example.ids) // 2)
