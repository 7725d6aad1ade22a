"""A training whose teacher is the target, which stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import checkpoint_folder, weights_sha256
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.parameters import convert
from jetdraft.checkpoints.streams import SHARED
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.train.data import Batch, Example
from jetdraft.train.processes import this_process
from jetdraft.train.taught.continuation import continuations
from jetdraft.train.taught.written_texts import Writing, WrittenTexts
from jetdraft.train.training import Training

TOGETHER = 32
"""Texts that are written at a time at least; each step reads all weights once."""

MOST_TOGETHER = 256
GPU_BYTES = 16 << 30
"""A GPU writes `TOGETHER` texts for every 16 GiB of its memory."""

Stages = Callable[[str, int, int], None]
"""Gets a stage, and how much of it is done: (stage, done, total)."""


class TaughtTraining(Training):
    """What trainings share that learn from a target: the target, and its texts.

    `target` is the loaded checkpoint in float32, and `base` the hash of its weights. A
    trainer calls `load_target`, then `read_texts`.
    """

    target: Checkpoint
    base: str
    _written: WrittenTexts | None = None

    def load_target(self, source: str, learned: str) -> None:
        """Load the target; `learned` are what is trained for it, for example "heads".

        Raises `CheckpointError`, or `OptionError` for too long sequences.
        """
        if is_gguf(source):
            raise CheckpointError(
                f"{source} is a GGUF file, and {learned} are trained for a folder; "
                "give the model's Hugging Face folder"
            )
        self.target, tuned = teacher_of(source)
        self.check_target()
        self.base = weights_sha256(checkpoint_folder(source)) + tuned
        self.check_length(self.target.model)

    def check_target(self) -> None:
        """Raise `UnsupportedModelError` for a target that this training is not for."""
        if self.target.reads_source:
            raise UnsupportedModelError(
                f"{self.target.source} is an encoder-decoder, for which only jetdraft "
                "train drafter --kind block trains; give a decoder alone"
            )

    def generators(self, accelerator: Any, batch: Batch) -> list[torch.Generator]:
        """Random numbers for each sequence, by the seed and its number in the training.

        They are the same whichever process learns the sequence.
        """
        first, step = accelerator.process_index, accelerator.num_processes
        numbers = (
            self.step * self.options.batch_size + first + row * step
            for row in range(len(batch.ids))
        )
        seed = 1_000_003 * self.options.seed
        return [torch.Generator().manual_seed(seed + number) for number in numbers]

    @property
    def writer(self) -> Callable[..., list[list[int]]]:
        """The function that writes the target's texts; see `Writing`."""
        return continuations

    def read_texts(
        self, data: Sequence[Path], least: int, regenerate: bool, progress: Stages
    ) -> None:
        """Read the corpus; the target completes prompts without a completion.

        With `regenerate` it writes all completions. A text has at least `least` tokens.
        Raises `DataError`.
        """
        self.corpus = self.read(self.target, data, least, prompts_alone=True)
        count = len(self.corpus.training)
        # A corpus of one text validates with it too.
        apart = self.corpus.validation[0] is not self.corpus.training[0]
        texts = self.corpus.training + (self.corpus.validation if apart else [])
        chosen = [
            n for n, text in enumerate(texts) if regenerate or not text.is_written
        ]
        if not chosen:
            return
        self.make_folder()
        texts = self._completed(texts, chosen, progress)
        self.corpus.training = texts[:count]
        self.corpus.validation = texts[count:] or texts

    def make_folder(self) -> None:
        """Make the output folder, to which each process writes texts."""
        self.folder.create()

    def _completed(
        self, texts: list[Example], chosen: list[int], progress: Stages
    ) -> list[Example]:
        """The texts, of which the target has written the chosen, now or earlier."""
        options, state = self.options, this_process()
        parts = (options.seed, options.sequence_length, options.validation_share)
        self._written = WrittenTexts(
            self.folder.path,
            f"{self.base} {self.corpus.sha256} {parts} {len(chosen)}",
            state.process_index,
            state.num_processes,
        )
        writing = Writing(
            self.target.model.to(state.device),
            self.target.eos_token_ids,
            options.sequence_length,
            max(options.batch_size, _together(state.device)),
            options.seed,
            self.writer,
        )
        return self._written.completed(
            writing, texts, chosen, lambda done, total: progress("write", done, total)
        )

    def frequent_tokens(self, count: int) -> Tensor | None:
        """The `count` learned tokens that are most frequent, int64, ascending.

        None if the vocabulary has no more.
        """
        rows = self.target.vocab_size
        if count >= rows:
            return None
        learned = [
            token
            for example in self.corpus.training
            for token, is_learned in zip(example.ids, example.learned, strict=True)
            if is_learned
        ]
        counts = torch.bincount(torch.tensor(learned), minlength=rows)
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def forget_texts(self) -> None:
        """Delete the target's texts, which only a training that goes on needs."""
        if self._written is not None:
            self._written.forget()


def _together(device: torch.device) -> int:
    """Texts that a device writes at a time."""
    if device.type != "cuda":
        return TOGETHER
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(MOST_TOGETHER, TOGETHER * max(1, round(memory / GPU_BYTES)))


def teacher_of(source: str) -> tuple[Checkpoint, str]:
    """A target in float32, and the hash of what tuned it, empty for nothing.

    The text of streams of mode shared is that of the weights which they tune. Raises
    `CheckpointError`.
    """
    target, tuned = Checkpoint.load(source, torch.float32), ""
    if target.streams is not None and target.streams.mode == SHARED:
        streamed = target.with_streams(1.0)
        target, tuned = Checkpoint.load(source, torch.float32), f" {streamed.tuned}"
        target.model.load_state_dict(streamed.model.state_dict())
    convert(target.model, torch.float32)
    target.model.set_attn_implementation("sdpa")
    return target, tuned
