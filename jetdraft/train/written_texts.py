"""Texts that the target writes itself: a drafter learns what it will have to guess."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetdraft.errors import DataError, TrainingError, as_error
from jetdraft.files import write_text
from jetdraft.train.data import Example

PROMPT_TOKENS = 16  # Tokens that are kept of a text without a prompt.
SHARD_TEXTS = 64  # Texts in a shard.
WAIT_SECONDS = 3600.0  # The most seconds of a wait for a shard of another process.
LOOK_SECONDS = 1.0  # The seconds between two looks for such a shard.


@torch.no_grad()
def continuations(
    model: Any,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    ends: Collection[int],
    seeds: Sequence[int],
    ids: Tensor | None = None,
) -> list[list[int]]:
    """Sample a text that continues each prompt; returns prompts and texts joined.

    Text i has up to `counts[i]` tokens, an end in `ends`, and `seeds[i]`; `ids` int64
    [n] can be chosen, None for all.
    """
    tokens, seen = _pad(prompts, model.device, "left")
    positions = (seen.cumsum(-1) - 1).clamp(min=0)

    def logits(latest: Tensor, grows: list[bool], cache: Any) -> Any:
        nonlocal seen, positions
        if cache is not None:
            seen = torch.cat([seen, torch.ones_like(latest)], dim=1)
            # A text that has ended may lie at the end of the model's positions.
            positions = positions[:, -1:] + torch.tensor(grows)[:, None].to(seen)
        rows = {"attention_mask": seen, "position_ids": positions, "logits_to_keep": 1}
        return model(input_ids=latest, **rows, past_key_values=cache, use_cache=True)

    return _sample(logits, tokens, prompts, counts, ends, seeds, ids)


@torch.no_grad()
def source_continuations(
    model: Any,
    sources: Sequence[list[int]],
    counts: Sequence[int],
    ends: Collection[int],
    seeds: Sequence[int],
    start: Sequence[int],
) -> list[list[int]]:
    """Like `continuations`, by an encoder-decoder; leaves out the `start` of texts."""
    ids, seen = _pad(sources, model.device, "right")
    encoded = model.get_encoder()(ids, attention_mask=seen)
    first = torch.tensor([list(start)] * len(sources), device=model.device)

    def logits(latest: Tensor, grows: list[bool], cache: Any) -> Any:
        read = {"encoder_outputs": encoded, "attention_mask": seen, "use_cache": True}
        return model(**read, decoder_input_ids=latest, past_key_values=cache)

    return _sample(logits, first, sources, counts, ends, seeds)


def _sample(
    run: Callable[[Tensor, list[bool], Any], Any],
    latest: Tensor,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    ends: Collection[int],
    seeds: Sequence[int],
    ids: Tensor | None = None,
) -> list[list[int]]:
    """Sample token by token; `run` computes outputs for the latest tokens [b, n]."""
    longest = max(counts)
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows = [torch.rand(longest, generator=d, dtype=torch.float64) for d in draws]
    chances = torch.stack(rows).to(latest.device)
    texts, left = [list(prompt) for prompt in prompts], list(counts)
    grows, cache = [count > 0 for count in counts], None
    for number in range(longest):
        outputs = run(latest, grows, cache)
        cache = outputs.past_key_values
        logits = outputs.logits[:, -1] if ids is None else outputs.logits[:, -1][:, ids]
        totals = logits.double().softmax(-1).cumsum(-1)
        # The token where the cumulative probability passes the chance.
        passed = chances[:, number, None] * totals[:, -1:]
        places = torch.searchsorted(totals, passed, right=True)
        places = places.clamp(max=logits.shape[-1] - 1)
        latest = places if ids is None else ids[places]
        for row, token in enumerate(latest[:, 0].tolist()):
            if grows[row]:
                texts[row].append(token)
                left[row] -= 1
                grows[row] = token not in ends and left[row] > 0
        if not any(grows):
            break
    return texts


def _pad(texts: Sequence[list[int]], device: Any, side: str) -> tuple[Tensor, Tensor]:
    """Return texts int64 [b, longest], padded on `side`, and a mask with 1 for text."""
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    seen = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids.to(device), seen.to(device)


@dataclass(frozen=True)
class WrittenTexts:
    """The texts that a target writes, in shards of a folder that processes share.

    They have up to `length` tokens and an end in `ends`. A process waits for the files
    of the others. A run resumes after the last whole shard. `identity` is what the
    texts depend on.
    """

    folder: Path
    identity: str
    model: Any
    ends: Sequence[int]
    length: int
    batch_size: int
    seed: int
    write: Callable[..., list[list[int]]] = continuations
    process: int = 0
    processes: int = 1

    def complete(
        self,
        examples: Sequence[Example],
        chosen: Sequence[int],
        tick: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Example]:
        """Return the examples; the target completes the examples at `chosen`.

        `tick` gets how many texts this process has written, and how many it writes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        order = sorted(chosen, key=lambda number: prompt_size(examples[number]))
        shards = [order[i : i + SHARD_TEXTS] for i in range(0, len(order), SHARD_TEXTS)]
        own = range(self.process, len(shards), self.processes)
        total = sum(len(shards[number]) for number in own)
        missing = [number for number in own if not self._shard_file(number).exists()]
        done = total - sum(len(shards[number]) for number in missing)
        tick(done, total)
        together = max(1, self.batch_size // SHARD_TEXTS)
        for start in range(0, len(missing), together):
            numbers = missing[start : start + together]
            members = [member for number in numbers for member in shards[number]]
            texts: list[list[int]] = []
            for batch in self._write_batches(examples, members):
                texts += batch
                tick(done + len(texts), total)
            done += len(texts)
            for number in numbers:
                count = len(shards[number])
                write_text(self._shard_file(number), json.dumps(texts[:count]))
                texts = texts[count:]
        finished = list(examples)
        for number, members in enumerate(shards):
            for member, ids in zip(members, self._read_shard(number), strict=True):
                finished[member] = Example.completed(ids, prompt_size(examples[member]))
        return finished

    def delete(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _shard_file(self, shard: int) -> Path:
        digest = hashlib.sha256(self.identity.encode()).hexdigest()[:12]
        return self.folder / f"{digest}-{shard:06}.json"

    def _read_shard(self, shard: int) -> list[list[int]]:
        """Return the texts of a shard; waits while another process writes it."""
        file, began = self._shard_file(shard), time.monotonic()
        while not file.exists():
            if self.processes == 1 or time.monotonic() - began > WAIT_SECONDS:
                raise TrainingError(
                    f"no other process wrote {file}; let all processes and machines "
                    "share the output folder"
                )
            time.sleep(LOOK_SECONDS)
        fact = f"{file} is damaged"
        with as_error(DataError, (OSError, ValueError), fact, "delete it"):
            texts: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))
        return texts

    def _write_batches(
        self, examples: Sequence[Example], members: Sequence[int]
    ) -> Iterator[list[list[int]]]:
        """Yield whole texts of `members`; a batch too large for memory is halved."""
        size, start = self.batch_size, 0
        while start < len(members):
            batch = members[start : start + size]
            chosen = [examples[member] for member in batch]
            prompts = [example.ids[: prompt_size(example)] for example in chosen]
            lengths = [len(e.ids) if e.is_written else self.length for e in chosen]
            counts = [max(1, n - len(p)) for n, p in zip(lengths, prompts, strict=True)]
            seeds = [text_seed(self.seed, member) for member in batch]
            try:
                texts = self.write(self.model, prompts, counts, set(self.ends), seeds)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = (size + 1) // 2
                continue
            yield texts
            start += len(batch)


def text_seed(seed: int, number: int) -> int:
    """Return the seed of text `number` in a training with this seed."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def prompt_size(example: Example) -> int:
    """Return how many tokens of an example stay when the target completes it."""
    return example.prompt_size or min(PROMPT_TOKENS, len(example.ids) // 2)
