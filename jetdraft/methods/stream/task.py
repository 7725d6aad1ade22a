"""How streams are trained, on the next n-gram (2402.11131): `jetdraft train stream`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints import streams
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.checkpoints.streams import SHARED, StreamedModel
from jetdraft.errors import CheckpointError
from jetdraft.train.attention import IMPLEMENTATION
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.task import Contents, ProbeTask, Run, Tensors, round_figures
from jetdraft.train.teacher import refuse_gguf

# The weights alpha_0 and alpha_j of the losses of main rows and of streams.
MAIN_WEIGHT, STREAM_WEIGHT = 1.0, 0.1


class StreamTask(ProbeTask):
    """Trains streams in a target's top layers."""

    Settings = streams.StreamSettings
    help = "Add speculative streams to TARGET, a checkpoint folder or hub id."
    product = kind = "streams"
    completes_prompts = False

    def shortest_sequence(self) -> tuple[int, str]:
        return self.settings.gamma + 2, f"{self.settings.gamma} streams"

    def load(self, source: str) -> tuple[Checkpoint, str]:
        refuse_gguf(source, self.kind)
        target = Checkpoint.load(source, torch.float32)
        store_weights_in(target.model, torch.float32)
        return target, ""

    def check_target(self, target: Checkpoint) -> None:
        """Raise `CheckpointError` if the target has streams, or cannot be tuned."""
        super().check_target(target)
        if target.packed is not None and self.settings.mode == SHARED:
            fact = f"{target.source} is quantized already, so its weights cannot be "
            fix = "give mode lossless, or the checkpoint before quantization"
            raise CheckpointError(f"{fact}tuned; {fix}")

    def check(self, run: Run) -> None:
        self.settings = replace(self.settings, base=run.base)
        self.settings.check(len(decoder_layers(run.target.model)))

    def new_drafter(self, run: Run) -> StreamedModel:
        """Add streams; small embeddings change the text too (docs/log/training.md)."""
        model = run.target.model
        streams.add_adapters(model, self.settings)
        model.set_attn_implementation(IMPLEMENTATION)
        hidden = model.get_input_embeddings().embedding_dim
        streamed = StreamedModel(model, streams.Streams(self.settings, hidden))
        ids = torch.tensor([run.corpus.training[0].ids])
        positions = torch.arange(ids.shape[1])[None]
        every = torch.arange(self.settings.gamma)
        first = torch.zeros_like(every)
        with torch.no_grad():
            rows = ids, positions, first, every, first[:1]
            _, _, states = streamed(*rows, use_cache=False)
            # A few entries of some rows are a hundred times as large as the median.
            streamed.streams.embeddings.normal_().mul_(states.abs().median())
        return streamed

    def pupil(self, drafter: nn.Module) -> nn.Module:
        return drafter

    def weights(self, run: Run) -> dict[str, Tensor]:
        return dict(run.module.task)

    def loss(self, run: Run, module: Any, batch: Batch) -> Tensor:
        part = compute_losses(module, batch, self.settings.gamma)
        places = run.sum_over_processes(part.places).clamp(min=1)
        # Processes average their gradients, and each has a part of the places.
        return part.total(self.settings.mode, part.places * run.processes / places)

    def validate(self, run: Run, module: Any) -> dict[str, Any]:
        gamma, batches = self.settings.gamma, run.held_out_batches()
        parts = [compute_losses(module, batch, gamma) for batch in batches]
        run.check_finite(torch.stack([part.main for part in parts]))

        def mean(name: str) -> Any:
            values = torch.stack([getattr(part, name) for part in parts]).float()
            return round_figures(values.mean(0).reshape(-1))

        losses = {"main_loss": mean("main")[0], "stream_losses": mean("streams")}
        others = {"early_loss": mean("early")[0], "acceptance": mean("acceptance")}
        return losses | others

    def headline(self, run: Run) -> str:
        counts = self.counts(run)
        own = f"{counts['streams']} weights of the streams and {counts['lora']} of LoRA"
        return f"training {own} on {run.reading_line}"

    def counts(self, run: Run) -> dict[str, int]:
        own = sum(p.numel() for p in run.module.streams.parameters())
        return {"streams": own, "lora": run.parameters - own}

    def summary_line(self, figures: Mapping[str, Any]) -> str:
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        stream_losses = " ".join(f"{loss:.2f}" for loss in figures["stream_losses"])
        return (
            f"validation loss {figures['main_loss']:.2f}, streams {stream_losses}, "
            f"predicted acceptance {rates}"
        )

    def settings_of_run(self, run: Run) -> dict[str, Any]:
        return asdict(self.settings)

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        own = {"step": run.step, "parameters": self.counts(run), "validation": figures}
        return asdict(self.settings) | own, weights


@dataclass(frozen=True)
class Losses:
    """Mean cross entropies of main rows, of streams [gamma], and of early exits.

    `places` [1 + gamma] counts rows with a label, of main rows and of streams.
    `acceptance` is the share of streams whose best token is the main row's.
    """

    main: Tensor
    streams: Tensor
    early: Tensor
    places: Tensor
    acceptance: Tensor

    def total(self, mode: str, weights: Tensor) -> Tensor:
        """Return the loss; in lossless mode the main rows cannot learn.

        `weights` [1 + gamma] are of main rows and of each stream: ones, or for one of
        several processes its share of places times their number.
        """
        of_streams = (weights[1:] * self.streams).sum()
        total = STREAM_WEIGHT * of_streams + weights[0] * self.early
        return total + MAIN_WEIGHT * weights[0] * self.main if mode == SHARED else total


def compute_losses(streamed: Any, batch: Batch, gamma: int) -> Losses:
    """Run whole sequences; rows before a learned token carry all `gamma` streams."""
    size, rows = batch.ids.shape
    at = torch.arange(rows, device=batch.ids.device)
    learned = _next_ids(batch.labels, 1)[..., 0] != IGNORED
    # In each text the learned rows come first; others fill up to the most of a text.
    count = max(1, int(learned.sum(1).max()))
    carriers = learned.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    keep = learned.any(0).nonzero()[:, 0]
    positions, carried = at.expand(size, rows), carriers.repeat_interleave(gamma, 1)
    ids = torch.arange(gamma, device=at.device).repeat(count)
    read = batch.ids, positions, carried, ids, keep
    logits, early, _ = streamed(*read, early=keep, use_cache=False)
    main, probes = logits.split([len(keep), count * gamma], 1)
    probes = probes.unflatten(1, (count, gamma))
    best = torch.zeros_like(batch.ids)
    best[:, keep] = main.detach().argmax(-1)
    # Row t predicts token t + 1, and its stream j (from 1 on) token t + 1 + j.
    wanted = _next_ids(batch.labels, 1)[:, keep]
    ahead = _take_carriers(_next_ids(batch.labels, gamma + 1)[..., 1:], carriers)
    ahead = ahead.where(_take_carriers(learned[..., None], carriers), IGNORED)
    agreed = _take_carriers(_next_ids(best, gamma), carriers)
    compared = ahead != IGNORED
    right = (probes.detach().argmax(-1) == agreed) & compared
    return Losses(
        main=_cross_entropy(main[:, :, None], wanted)[0],
        streams=_cross_entropy(probes, ahead),
        early=_cross_entropy(early[:, :, None], wanted)[0],
        places=torch.cat([(wanted != IGNORED).sum().view(1), compared.sum((0, 1))]),
        acceptance=right.sum((0, 1)) / compared.sum((0, 1)).clamp(min=1),
    )


def _take_carriers(rows: Tensor, carriers: Tensor) -> Tensor:
    """Take the rows [b, C] that carry streams out of [b, T, n]: [b, C, n]."""
    return torch.take_along_dim(rows, carriers[..., None], 1)


def _next_ids(ids: Tensor, count: int) -> Tensor:
    """Return the next `count` ids after each place: [b, T] to [b, T, count]."""
    return F.pad(ids[:, 1:], (0, count), value=IGNORED).unfold(1, count, 1)


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return means over places with a label: [b, C, s, vocab] and [b, C, s] to [s]."""
    compared = logits.flatten(0, 2).float(), wanted.flatten()
    losses = F.cross_entropy(*compared, ignore_index=IGNORED, reduction="none")
    counts = (wanted != IGNORED).sum((0, 1)).clamp(min=1)
    return losses.view(wanted.shape).sum((0, 1)) / counts
