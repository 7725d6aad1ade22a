"""The training of a head for Stop and Exit (SEC, 2401.09964, 3.1 and 3.2).

A matrix maps the state after layer i to an input of the final norm, which makes an exit
there. A classifier at each exit learns one of three labels:

    stop      neither an exit nor the target itself predicts the token
    exit      exit i predicts it
    continue  else

The paper trains an LM head for each layer, and then the classifiers. Here exits share
the target's norm and LM head, and both are trained at once.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers, final_norm
from jetdraft.errors import OptionError
from jetdraft.options import Checked, setting
from jetdraft.runtime.passes.split.exit_head import FILE, Decision
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.machine import precision
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.task import Published, Run, Task, Tensors, TrainingOptions
from jetdraft.train.teacher import states_at

DESCRIPTION_FILE = "exit.json"
"""The file that says what was trained, for how long, and how often it was right."""


class LearnedRows(NamedTuple):
    """States [n, h] at each exit, next tokens, and whether the target predicts them."""

    states: list[Tensor]
    tokens: Tensor
    known: Tensor


class ExitHeads(nn.Module):
    """Exits after some layers of a target; its weights have the names in `ExitHead`."""

    def __init__(self, layers: Sequence[int], model: Any) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.norm, self.lm_head = final_norm(model), model.get_output_embeddings()
        size = self.lm_head.weight.shape[1]
        names = [str(layer) for layer in layers]
        self.weight, self.classifier, self.bias = (
            nn.ParameterDict({n: nn.Parameter(torch.zeros(*shape)) for n in names})
            for shape in ((size, size), (len(Decision), size), (len(Decision),))
        )

    def forward(self, rows: LearnedRows) -> tuple[Tensor, Tensor]:
        """Return the scalar loss, and counts int64 [layers, 3 labels, 3 decisions]."""
        places = list(zip(self.layers, rows.states, strict=True))
        scores = [self._scores(layer, states) for layer, states in places]
        right = torch.stack([s.argmax(-1) == rows.tokens for s in scores])
        labels = self.labels(right, rows.known)
        chosen = [self._rates(layer, states) for layer, states in places]
        losses = [F.cross_entropy(s, rows.tokens) for s in scores]
        # The paper weighs a layer's classifier by its number.
        rated = [
            n * F.cross_entropy(rates, label)
            for n, rates, label in zip(self.layers, chosen, labels, strict=True)
        ]
        loss = torch.stack(losses).sum() + torch.stack(rated).sum() / sum(self.layers)
        decisions = torch.stack([rates.argmax(-1) for rates in chosen])
        pairs = labels * len(Decision) + decisions
        counts = [p.bincount(minlength=len(Decision) ** 2) for p in pairs]
        return loss, torch.stack(counts).view(-1, len(Decision), len(Decision))

    @staticmethod
    def labels(right: Tensor, known: Tensor) -> Tensor:
        """Return labels int64 [layers, n]; `right` is bool [layers, n], `known` [n]."""
        reached = known | right.any(0)
        labels = torch.full(right.shape, int(Decision.CONTINUE), device=right.device)
        labels[right] = int(Decision.EXIT)
        labels[:, ~reached] = int(Decision.STOP)
        return labels

    def _scores(self, layer: int, states: Tensor) -> Tensor:
        """Return the logits of the exit after `layer`, float32 [n, vocabulary]."""
        moved = states + states @ self.weight[str(layer)].T
        scores: Tensor = self.lm_head(self.norm(moved)).float()
        return scores

    def _rates(self, layer: int, states: Tensor) -> Tensor:
        """Return the classifier's logits [n, 3] at a layer, as in `ExitHead.rates`."""
        unit = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
        name = str(layer)
        rates: Tensor = unit @ self.classifier[name].T.float() + self.bias[name]
        return rates


@dataclass(frozen=True)
class SecSettings(Checked):
    """Settings of the exits."""

    layers: tuple[int, ...] = setting(
        (),
        "Train exits behind these numbers of layers, for example 2,4.",
        names=("--exits",),
        metavar="LAYERS",
        unset="a quarter, a half and three quarters of the target's layers",
    )


class SecTask(Task):
    """Trains exits and their classifiers, for `generate --stop-and-exit`."""

    Settings = SecSettings
    options = TrainingOptions(learning_rate=2e-3)
    help = "Train a head that stops TARGET's text, or leaves its upper layers out."
    product = "a head that stops and exits"
    figures_file, largest_norm = "", 1.0
    has_muon, betas = False, (0.9, 0.999)

    layers: tuple[int, ...] = ()

    def shortest_sequence(self) -> tuple[int, str]:
        return 2, "a prediction"

    def folder(self, output: Path) -> RunFolder:
        return RunFolder(output, FILE, DESCRIPTION_FILE, "head", self._serialize)

    def check(self, run: Run) -> None:
        """Set `layers`; raises `OptionError` if no exit can be after one of them."""
        self._base, count = run.base, len(decoder_layers(run.target.model))
        quarters = {max(1, count * quarter // 4) for quarter in (1, 2, 3)} - {count}
        layers = sorted({*(self.settings.layers or quarters)})
        if not layers or layers[0] < 1 or layers[-1] >= count:
            raise OptionError(
                f"no exit can lie behind layers {json.dumps(layers)} of {count}; give "
                f"1 to {count - 1}",
                "layers",
            )
        self.layers = tuple(layers)

    def new_drafter(self, run: Run) -> ExitHeads:
        return ExitHeads(self.layers, run.target.model)

    def pupil(self, drafter: Any) -> nn.Module:
        """Return the exits as they are, since their `forward` computes the loss."""
        module: nn.Module = drafter
        return module

    def weights(self, run: Run) -> dict[str, Tensor]:
        named = run.module.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def loss(self, run: Run, module: Any, batch: Batch) -> Tensor:
        """Return the scalar loss of the exits and of their classifiers."""
        with precision(run.device):
            rows = self.rows(run, batch)
            loss: Tensor = module(rows)[0]
        count = torch.tensor(len(rows.tokens), device=loss.device)
        # Processes average their gradients, and each has a part of the rows.
        share: Tensor = count * run.processes / run.sum_over_processes(count)
        return loss * share

    @torch.no_grad()
    def rows(self, run: Run, batch: Batch) -> LearnedRows:
        """Run the target; returns the rows of a batch whose next token is learned."""
        model = run.teacher
        taps = [*self.layers, -1]
        *states, final = (s.float() for s in states_at(model, batch.ids, taps))
        learned = batch.labels[:, 1:] != IGNORED
        tokens = batch.labels[:, 1:][learned]
        logits = model.get_output_embeddings()(final[:, :-1][learned])
        known = logits.argmax(-1) == tokens
        return LearnedRows([s[:, :-1][learned] for s in states], tokens, known)

    def validate(self, run: Run, module: Any) -> dict[str, Any]:
        """Return the validation loss, and by layer the shares of `_decision_shares`."""
        losses, counts = [], torch.zeros(len(self.layers), 3, 3, dtype=torch.int64)
        for batch in run.held_out_batches():
            loss, more = module(self.rows(run, batch))
            losses.append(loss.item())
            counts += more.cpu()
        shares = {
            str(layer): _decision_shares(of_layer)
            for layer, of_layer in zip(self.layers, counts.float(), strict=True)
        }
        return {"loss": sum(losses) / len(losses), "layers": shares}

    def description(self, run: Run) -> str:
        return f"exits behind layers {', '.join(map(str, self.layers))}"

    def summary_line(self, figures: Mapping[str, Any]) -> str:
        texts = [
            f"layer {layer}: {f['right']:.2f} right, {f['stops']:.2f} stops "
            f"({f['stops_right']:.2f} right), {f['exits']:.2f} exits "
            f"({f['exits_right']:.2f} right)"
            for layer, f in figures["layers"].items()
        ]
        return f"validation loss {figures['loss']:.2f}; " + "; ".join(texts)

    def settings_of_run(self, run: Run) -> dict[str, Any]:
        return {"layers": list(self.layers), "target": run.base}

    def published(self, run: Run, weights: Tensors, figures: Any) -> Published:
        own = {"step": run.step, "validation": figures}
        return self.settings_of_run(run) | own, weights

    def _serialize(self, weights: dict[str, Tensor]) -> bytes:
        """Return the npz that `ExitHead.load` reads, with the target's hash."""
        arrays: dict[str, Any] = {n: w.float().numpy() for n, w in weights.items()}
        file = io.BytesIO()
        np.savez(file, base=np.array(self._base), **arrays)
        return file.getvalue()


def _decision_shares(counts: Tensor) -> dict[str, float]:
    """Return a layer's shares of rows, from its counts float [3 labels, 3 decisions].

    `right` is the share that the exit predicts, `stops` the share where it decides to
    stop, and `stops_right` the part of these with the label stop; so for `exits`.
    """
    total, by_label, by_decision = counts.sum(), counts.sum(1), counts.sum(0)
    shares = {"right": by_label[Decision.EXIT] / total}
    for name, decision in (("stops", Decision.STOP), ("exits", Decision.EXIT)):
        taken = by_decision[decision]
        shares[name] = taken / total
        shares[f"{name}_right"] = counts[decision, decision] / taken.clamp(min=1)
    return {name: round(share.item(), 4) for name, share in shares.items()}
