"""Reads texts to train on, and makes batches of token sequences."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetdraft.errors import DataError, OptionError
from jetdraft.files import read_bytes, read_text
from jetdraft.runtime.text.template import ChatTemplate, Message

IGNORED = -100  # The label of tokens that the loss ignores.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Example:
    """Token ids of a sequence, and for each whether it is learned; prompts are not."""

    ids: list[int]
    learned: list[bool]

    @classmethod
    def completed(cls, ids: list[int], prompt_size: int) -> "Example":
        """Make an example whose tokens from index `prompt_size` on are learned."""
        return cls(ids, [place >= prompt_size for place in range(len(ids))])

    @property
    def is_written(self) -> bool:
        """Whether it has a learned token; false for a prompt alone."""
        return any(self.learned)

    @property
    def prompt_size(self) -> int:
        """The number of tokens before the first that is learned."""
        return self.learned.index(True) if self.is_written else len(self.ids)


@dataclass(frozen=True)
class Batch:
    """`ids` int64 [b, T], padded on the right, and `labels`: the ids, or `IGNORED`."""

    ids: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids.to(device), self.labels.to(device))


class Corpus:
    """Sequences to learn from and other sequences to validate with, split by a seed.

    A line of a `.jsonl` file is an object with `prompt` and `completion`, or `messages`
    of a chat, of which the last part is learned, or `text`. Where the target writes, a
    `prompt` is enough, or `messages` up to a user's. Other files are text in windows.
    """

    def __init__(
        self, sequences: Sequence[Example], share: float, seed: int, sha256: str = ""
    ) -> None:
        self.sha256 = sha256
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(sequences), generator=draw).tolist()
        count = max(1, round(share * len(order))) if len(order) > 1 else 0
        self.validation = [sequences[i] for i in order[:count]] or list(sequences)
        self.training = [sequences[i] for i in order[count:]]
        self.seed = seed
        self._epoch, self._order = -1, list[int]()

    @classmethod
    def read(
        cls,
        files: Sequence[Path],
        reader: "TextReader",
        share: float = 0.05,
        seed: int = 0,
    ) -> "Corpus":
        """Read files; a `share` of the sequences validates; raises `DataError`."""
        sequences, digest = reader.sequences(files), hashlib.sha256()
        for file in files:
            digest.update(read_bytes(file))
        return cls(sequences, share, seed, digest.hexdigest())

    def batch(self, step: int, size: int, part: int = 0, parts: int = 1) -> Batch:
        """Make a step's batch, or each `parts`-th of it, by seed and step alone."""
        numbers = range(step * size, (step + 1) * size)[part::parts]
        rows, count = list[Example](), len(self.training)
        for epoch, place in (divmod(number, count) for number in numbers):
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed + epoch + 1)
                order = torch.randperm(count, generator=generator)
                self._epoch, self._order = epoch, order.tolist()
            rows.append(self.training[self._order[place]])
        return collate(rows)


def collate(rows: Sequence[Example]) -> Batch:
    """Make a batch of examples, padded on the right to the longest of them."""
    ids = [torch.tensor(row.ids, dtype=torch.long) for row in rows]
    learned = [torch.tensor(row.learned, dtype=torch.bool) for row in rows]
    labels = [i.where(one, IGNORED) for i, one in zip(ids, learned, strict=True)]
    padded = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return Batch(pad_sequence(ids, batch_first=True), padded)


def split_batch(batch: Batch) -> list[Example]:
    """Return the examples of a batch, each up to its last learned token."""
    examples = []
    for ids, labels in zip(batch.ids, batch.labels, strict=True):
        learned = labels != IGNORED
        end = int(learned.nonzero()[-1]) + 1
        examples.append(Example(ids[:end].tolist(), learned[:end].tolist()))
    return examples


@dataclass(frozen=True)
class TextReader:
    """Reads the sequences of a `Corpus`, of `least` to `length` tokens.

    The first token of `ends` ends each text. With `prompts_alone` prompts may lack
    completions; `template` renders messages.
    """

    tokenizer: Tokenizer
    ends: Sequence[int]
    length: int
    least: int
    prompts_alone: bool = False
    template: ChatTemplate | None = None

    def sequences(self, files: Sequence[Path]) -> list[Example]:
        """Read files, at least one sequence; raises `DataError`."""
        sequences, texts = list[Example](), list[int]()
        read = 0  # without the ends of texts
        for file in files:
            if file.suffix == ".jsonl":
                sequences += self._examples(file)
            else:
                ids = self.tokenizer.encode(read_text(file)).ids
                read += len(ids)
                texts += [*ids, *self.ends[:1]]
        starts = range(0, len(texts), self.length)
        windows = (texts[start : start + self.length] for start in starts)
        sequences += [Example.completed(w, 0) for w in windows if len(w) >= self.least]
        if not sequences:
            fact = f"the data has {read} of the {self.least} tokens that a sequence "
            raise DataError(f"{fact}needs; give more text")
        return sequences

    def _examples(self, file: Path) -> list[Example]:
        """Read the examples of a file; raises `DataError` for bad or long lines."""
        examples: dict[int, Example] = {}
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if line.strip():
                examples[number] = self._example(line, f"line {number} of {file}")
        sizes = {n: len(e.ids) + (not any(e.learned)) for n, e in examples.items()}
        long = [number for number, size in sizes.items() if size > self.length]
        if long:
            longest = max(long, key=sizes.__getitem__)
            raise DataError(
                f"{len(long)} of {len(examples)} lines of {file} have more tokens than "
                f"the sequence length of {self.length}, the most in line {longest}; "
                f"give --sequence-length {sizes[longest]} or shorten them"
            )
        return list(examples.values())

    def _example(self, line: str, where: str) -> Example:
        head, tail = self._encode(line, where)
        ids = head if tail is None else [*head, *tail, *self.ends[:1]]
        least = 1 if tail is None else self.least
        if len(ids) < least:
            fact = f"{where} has {len(ids)} tokens, a sequence needs {least}"
            raise DataError(f"{fact}; give longer texts")
        if tail is not None and len(ids) == len(head):
            fact = f"{where} has an empty completion, from which nothing can be learned"
            raise DataError(f"{fact}; delete the line or complete it")
        return Example.completed(ids, len(head))

    def _encode(self, line: str, where: str) -> tuple[list[int], list[int] | None]:
        """Return the ids of prompt and completion, which may be None."""
        try:
            fields = json.loads(line)
            if "text" in fields:
                return [], self.tokenizer.encode(fields["text"]).ids
            if "messages" in fields:
                return self._chat_ids(fields["messages"])
            head: list[int] = self.tokenizer.encode(fields["prompt"]).ids
            if self.prompts_alone and "completion" not in fields:
                return head, None
            # A special token that starts a text must not come again inside it.
            tail = self.tokenizer.encode(fields["completion"], add_special_tokens=False)
            return head, tail.ids
        except OptionError as error:
            raise DataError(f"{where}: {error}") from error
        except _MALFORMED as error:
            raise DataError(
                f"{where} is not an object with prompt and completion, or text, or "
                "messages; correct it"
            ) from error

    def _chat_ids(self, messages: list[Message]) -> tuple[list[int], list[int] | None]:
        """Render a chat; returns the ids of its prompt, and of its answer or None."""
        if self.template is None:
            fact = "messages need a chat template, which the target lacks"
            raise OptionError(f"{fact}; give prompt and completion")
        is_answered = messages[-1]["role"] == "assistant"
        if not is_answered and not self.prompts_alone:
            raise ValueError("the last message is not the assistant's")
        prompt = self.template.render(messages[:-1] if is_answered else messages)
        encode, texts = self.tokenizer.encode, (prompt, messages[-1]["content"])
        head, tail = (encode(text, add_special_tokens=False).ids for text in texts)
        return head, tail if is_answered else None
