"""Trains a drafter model: new, from a checkpoint, or from the target's layers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import map_of
from jetdraft.checkpoints.folder import checkpoint_folder
from jetdraft.checkpoints.parameters import convert
from jetdraft.errors import CheckpointError, OptionError, TrainingError
from jetdraft.export.draft_vocab import check_tokens
from jetdraft.train.data import Batch, Example, collate, examples_of
from jetdraft.train.drafter.advice import SHARE, advised_tokens, cost_share
from jetdraft.train.drafter.divergences import BETA, DIVERGENCES
from jetdraft.train.drafter.label_cache import LabelCache
from jetdraft.train.drafter.labels import Labels, exact_labels
from jetdraft.train.drafter.model_settings import TEXT, ModelSettings
from jetdraft.train.drafter.new_drafter import advised_config, first_layers, new_model
from jetdraft.train.drafter.predicted import by_place, tokens_per_pass
from jetdraft.train.drafter.pupil import Pupil, learned
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.continuation import continuations
from jetdraft.train.taught.muon import Muon
from jetdraft.train.taught.taught_training import Stages, TaughtTraining
from jetdraft.train.taught.tensor_cache import check_cache
from jetdraft.train.taught.written_texts import prompt_size, seed_of
from jetdraft.train.training import TrainingOptions

FIGURES = "drafter.json"
"""What was trained, for how long, and how often it was right."""

OFTEN = 50
"""The most readings of a text by default; the trainer warns of more."""

VALIDATED = 64
"""The most texts of a validation; all of a large corpus would take longer than the
training."""

TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"


class ModelTraining(TaughtTraining):
    """A training whose output is a checkpoint folder, for `export --drafter`.

        ModelTraining("target", Path("drafter"), [Path("notes.txt")]).run(print)

    `progress` gets a stage, and how many of its texts are written.
    """

    betas = (0.9, 0.95)
    module: Pupil
    product = "a drafter"

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: ModelSettings | None = None,
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        self.settings = settings or ModelSettings()
        if self.settings.cache is not None:
            check_cache(self.settings.cache)
        folder = RunFolder(output, "model.safetensors", "config.json", "drafter")
        super().__init__(folder, options or TrainingOptions(steps=None))
        self.load_target(target, "drafters")
        self.source = checkpoint_folder(target)
        self.ids: Tensor | None = None
        torch.manual_seed(self.options.seed)
        model = self._begun()
        convert(model, torch.float32)
        model.set_attn_implementation("sdpa")
        # Only now, since the target may write for hours.
        self.read_texts(data, 2, self.settings.regenerate, progress)
        if self.settings.draft_vocab is not None:
            self.ids = self.frequent_tokens(self.settings.draft_vocab)
        self.module = Pupil(model.requires_grad_(True), self.ids)
        self.weights = dict(model.named_parameters())
        self._cache: LabelCache | None = None

    def _begun(self) -> Any:
        """The drafter before its first step."""
        settings, rows = self.settings, self.target.vocab_size
        if settings.draft_vocab is not None and settings.draft_vocab >= rows:
            raise OptionError(
                f"a draft vocabulary of {settings.draft_vocab} tokens is not a part of "
                f"the target's {rows}; give 1 to {rows - 1}, or leave it out"
            )
        if settings.from_layers:
            return first_layers(self.target, settings.from_layers)
        if settings.start is not None:
            return self._started(settings.start)
        sizes = settings.layers, settings.hidden_size
        return new_model(advised_config(self.target, *sizes, settings.draft_vocab))

    def _started(self, source: str) -> Any:
        """The checkpoint that the drafter starts from, with its draft vocabulary.

        It gets as many rows as its target. Raises `PairError` for another tokenizer,
        `OptionError` for two vocabularies.
        """
        rows, checkpoint = (
            self.target.vocab_size,
            Checkpoint.load(source, torch.float32),
        )
        check_tokens(self.target, checkpoint)
        if checkpoint.vocab_size != rows:
            checkpoint.model.resize_token_embeddings(rows, mean_resizing=False)
        self.ids = checkpoint.draft_ids
        if self.ids is not None:
            self.ids = self.ids[self.ids < rows]
        if self.ids is not None and self.settings.draft_vocab is not None:
            raise OptionError(
                f"{source} has its own draft vocabulary of {len(self.ids)} tokens, "
                "which stays; leave --draft-vocab out"
            )
        return checkpoint.model

    @property
    def parameters(self) -> int:
        """The number of trained weights; a tied weight counts once."""
        return sum(weight.numel() for weight in self.weights.values())

    def advised_steps(self) -> int:
        """The steps that see as many tokens as the law of over-training advises.

        They read no text more than `OFTEN` times.
        """
        size = self.options.batch_size
        steps = advised_tokens(self.parameters) // (size * self.options.sequence_length)
        return max(1, min(steps, OFTEN * len(self.corpus.training) // size))

    def summary(self) -> str:
        """The drafter's size and cost, and the tokens that it will see."""
        config = self.module.model.config.get_text_config(decoder=True)
        batch = self.options.batch_size * self.options.sequence_length
        tokens, most = self.steps * batch, len(self.corpus.training) * OFTEN
        is_often = self.steps * self.options.batch_size > most
        advice = "; give more texts or fewer --steps" if is_often else ""
        return (
            f"training a drafter of width {config.hidden_size}, layers: "
            f"{config.num_hidden_layers}, {self.parameters} weights{self._cost()}, on "
            "up to "
            f"{tokens} tokens ({tokens / self.parameters:.3g} a weight, advised "
            f"{advised_tokens(1)}), from {self.reading}{advice}"
        )

    def _cost(self) -> str:
        """What a draft step costs, in words; nothing for what cannot be planned."""
        drafter, target = self.module.model.config, self.target.model.config
        rows = None if self.ids is None else len(self.ids)
        try:
            share = cost_share(drafter.to_dict(), target.to_dict(), rows)
        except CheckpointError:
            return ""
        return f", a step at {share:.1%} of a pass (advised {SHARE:.0%})"

    def told(self, figures: Mapping[str, Any]) -> str:
        """The loss, and how often drafts are accepted, by their place."""
        sampled, greedy = (
            " ".join(f"{rate:.2f}" for rate in figures[name])
            for name in ("acceptance", "agreement")
        )
        return (
            f"validation loss {figures['loss']:.3f}, accepted by place at T = 1 "
            f"{sampled}, greedy {greedy}, so {figures['tokens_per_pass'][0]:.2f} and "
            f"{figures['tokens_per_pass'][1]:.2f} tokens a pass"
        )

    def settings_of_run(self) -> dict[str, Any]:
        """The settings of the drafter, and the target's hash."""
        # The folder may move, but labels that are cut to the best tokens are others.
        is_cached = self.settings.cache is not None
        own = asdict(self.settings) | {"cache": is_cached, "target": self.base}
        return own | {"from_layers": list(self.settings.from_layers)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers, AdamW for embedding, head and norms."""
        tables = {
            id(module.weight)
            for module in (
                self.module.model.get_input_embeddings(),
                self.module.model.get_output_embeddings(),
            )
        }
        weights = self.weights.values()
        inner = [w for w in weights if w.ndim == 2 and id(w) not in tables]
        chosen = {id(weight) for weight in inner}
        others = [weight for weight in weights if id(weight) not in chosen]
        return [
            Muon(inner, lr=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.0, betas=self.betas),
        ]

    def begin(self) -> None:
        """Make the folder, with the target's tokenizer."""
        self.folder.create()
        self.folder.write(TOKENIZER, self.target.tokenizer or "")
        settings = self.source / TOKENIZER_SETTINGS
        if settings.is_file():
            self.folder.write(settings.name, settings.read_text(encoding="utf-8"))

    def batch(self, accelerator: Any) -> Batch:
        """The sequences of the next step; a share of them as the drafter goes on."""
        batch = super().batch(accelerator)
        share, size = self.settings.on_policy_share, self.options.batch_size
        first, step = accelerator.process_index, accelerator.num_processes
        numbers = [
            self.step * size + first + row * step for row in range(len(batch.ids))
        ]
        chosen = [n for n in numbers if int((n + 1) * share) > int(n * share)]
        if not chosen:
            return batch
        rows = [numbers.index(number) for number in chosen]
        seeds = [seed_of(self.options.seed, number) for number in chosen]
        return self._on_policy(batch, rows, seeds, accelerator.device)

    def _on_policy(
        self, batch: Batch, rows: list[int], seeds: list[int], device: torch.device
    ) -> Batch:
        """The batch, of which the drafter has completed some rows."""
        texts = examples_of(batch)
        sizes = [prompt_size(texts[row]) for row in rows]
        model = self.module.model.to(device).eval()
        written = continuations(
            model,
            [texts[row].ids[:size] for row, size in zip(rows, sizes, strict=True)],
            [len(texts[row].ids) - s for row, s in zip(rows, sizes, strict=True)],
            set(self.target.eos_token_ids),
            seeds,
            None if self.ids is None else self.ids.to(device),
        )
        model.train()
        for row, size, ids in zip(rows, sizes, written, strict=True):
            texts[row] = Example.completed(ids, size)
        return collate(texts)

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The mean over the places of all processes."""
        scores = module(batch)
        places = accelerator.reduce(
            torch.tensor(float(len(scores)), device=scores.device), "sum"
        )
        lost = self._lost(accelerator, batch, scores)
        # Processes average their gradients, and each has a part of the sum.
        loss: Tensor = lost / places.clamp(min=1) * accelerator.num_processes
        return loss

    def _lost(self, accelerator: Any, batch: Batch, scores: Tensor) -> Tensor:
        """The loss summed over the places of a batch."""
        if self.settings.loss == TEXT:
            return -self._of_text(batch, scores).sum()
        return self._compared(self._labels(accelerator, batch), scores)

    def _compared(self, labels: Labels, scores: Tensor) -> Tensor:
        """The divergence, summed; places whose tokens cannot be drafted count less."""
        divergence = DIVERGENCES[self.settings.loss]
        beta = self.settings.beta or BETA
        apart = divergence(labels.wanted, labels.binned(scores), beta)
        return (labels.mass * apart).sum()

    def _of_text(self, batch: Batch, scores: Tensor) -> Tensor:
        """Log probabilities of the text's own tokens, those that can be drafted."""
        tokens = batch.ids[:, 1:][learned(batch)]
        if self.ids is not None:
            ids = self.ids.to(tokens.device)
            known = torch.isin(tokens, ids)
            tokens, scores = torch.searchsorted(ids, tokens[known]), scores[known]
        return scores.gather(-1, tokens[:, None])

    def _labels(self, accelerator: Any, batch: Batch) -> Labels:
        """What the target says of a batch, computed or read from the cache."""
        cache = self._cache_of(accelerator)
        labels = cache.read(batch) if cache else None
        if labels is not None:
            return labels
        model = self.target.model.to(accelerator.device)
        ids = None if self.ids is None else self.ids.to(accelerator.device)
        labels = exact_labels(model, batch, ids)
        return cache.write(batch, labels) if cache else labels

    def _cache_of(self, accelerator: Any) -> LabelCache | None:
        """The cache of this process."""
        folder = self.settings.cache
        if self._cache is None and folder is not None:
            ids = None if self.ids is None else self.ids.tolist()
            digest = hashlib.sha256(str(ids).encode()).hexdigest()
            owner = f"{self.base} {digest}"
            kept, process = self.settings.cache_tokens, accelerator.process_index
            self._cache = LabelCache(folder, owner, kept, process)
        return self._cache

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """The loss, and the acceptance of sampled and of greedy drafts, by place."""
        lost, count = 0.0, 0
        sampled, greedy = list[Tensor](), list[Tensor]()
        pupil, size = accelerator.unwrap_model(module), self.options.batch_size
        batches = self.corpus.validation_batches(size)
        for batch in itertools.islice(batches, max(1, VALIDATED // size)):
            on_device = batch.to(accelerator.device)
            scores = pupil(on_device)
            labels = self._labels(accelerator, on_device)
            lost += self._lost(accelerator, on_device, scores).item()
            count += len(scores)
            sizes = learned(batch).sum(-1).tolist()
            sampled += torch.split(labels.accepted(scores).cpu(), sizes)
            greedy += torch.split(labels.agreed(scores).float().cpu(), sizes)
        if self._cache is not None:
            self._cache.flush()
        if not math.isfinite(lost):
            raise TrainingError(self.failure())
        rates = by_place(sampled), by_place(greedy)
        return {
            "loss": round(lost / max(1, count), 4),
            "acceptance": rates[0],
            "agreement": rates[1],
            "tokens_per_pass": [round(tokens_per_pass(r), 3) for r in rates],
        }

    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write a checkpoint folder, and the figures beside it."""
        dtype = torch.float16 if self.settings.half else torch.float32
        config = self.module.model.config
        fields = json.loads(config.to_json_string(use_diff=True))
        fields |= {
            "architectures": [type(self.module.model).__name__],
            "dtype": str(dtype).removeprefix("torch."),
        }
        tensors = {name: w.to(dtype).contiguous() for name, w in weights.items()}
        if self.ids is not None:
            tensors |= map_of(self.ids, self.target.vocab_size)
        run = {**self.settings_of_run(), "step": self.step, "validation": figures}
        self.folder.write(FIGURES, json.dumps(run, indent=2) + "\n")
        self.folder.save(tensors, fields, state, self.finished)
        if self.finished:
            self.forget_texts()
