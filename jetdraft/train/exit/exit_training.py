"""The training of a head for Stop and Exit (SEC, 2401.09964, 3.1 and 3.2).

For each layer i it learns what makes of the layer's state the state that the final norm
reads, by the cross entropy to the text, and a classifier of three decisions. A token of
the text has one label for each layer:

    stop      neither an exit nor the target itself predicts the token
    exit      exit i predicts it
    continue  else

The paper trains an LM head of its own for each layer, and then the classifiers with
labels of the finished heads. Here exits share the target's norm and LM head, and both
are trained at once, with the labels of the exits as they are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers, final_norm
from jetdraft.errors import OptionError
from jetdraft.runtime.passes.split.exit_head import FILE, Decision
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.head.teacher import states_at
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.precision import precision
from jetdraft.train.taught.taught_training import Stages, TaughtTraining
from jetdraft.train.training import TrainingOptions

LEAST = 2
"""The fewest tokens of a text: one is read, and one is predicted."""

DESCRIPTION = "exit.json"
"""What was trained, for how long, and how often it was right."""


class Rows(NamedTuple):
    """The learned rows of a batch: states [n, h] at each layer, and the next tokens.

    `known` bool [n] says whether the target itself predicts them.
    """

    states: list[Tensor]
    tokens: Tensor
    known: Tensor


class ExitHeads(nn.Module):
    """The exits behind some layers of a target, and their classifiers.

    Its weights have the names of `ExitHead`, followed by the layer's number.

        loss, figures = ExitHeads((2, 4), model)(rows)
    """

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

    def forward(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The loss, and counts [layers, 3 labels, 3 decisions] of the rows."""
        places = list(zip(self.layers, rows.states, strict=True))
        scores = [self._scores(layer, states) for layer, states in places]
        right = torch.stack([s.argmax(-1) == rows.tokens for s in scores])
        labels = self.labels(right, rows.known)
        chosen = [self._rates(layer, states) for layer, states in places]
        lost = [F.cross_entropy(s, rows.tokens) for s in scores]
        # The paper weighs a layer's classifier by its number.
        rated = [
            n * F.cross_entropy(rates, label)
            for n, rates, label in zip(self.layers, chosen, labels, strict=True)
        ]
        loss = torch.stack(lost).sum() + torch.stack(rated).sum() / sum(self.layers)
        decisions = torch.stack([rates.argmax(-1) for rates in chosen])
        pairs = labels * len(Decision) + decisions
        counts = [p.bincount(minlength=len(Decision) ** 2) for p in pairs]
        return loss, torch.stack(counts).view(-1, len(Decision), len(Decision))

    @staticmethod
    def labels(right: Tensor, known: Tensor) -> Tensor:
        """The label of each row at each layer, int64 [layers, n]."""
        reached = known | right.any(0)
        labels = torch.full(right.shape, int(Decision.CONTINUE), device=right.device)
        labels[right] = int(Decision.EXIT)
        labels[:, ~reached] = int(Decision.STOP)
        return labels

    def _scores(self, layer: int, states: Tensor) -> Tensor:
        """The logits of an exit, float32 [n, vocabulary]."""
        moved = states + states @ self.weight[str(layer)].T
        scores: Tensor = self.lm_head(self.norm(moved)).float()
        return scores

    def _rates(self, layer: int, states: Tensor) -> Tensor:
        """The logits of the decisions, as in `ExitHead.rates`, [n, 3]."""
        unit = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6)
        name = str(layer)
        rates: Tensor = unit @ self.classifier[name].T.float() + self.bias[name]
        return rates


class ExitTraining(TaughtTraining):
    """Trains a head whose output is a folder, for `generate --stop-and-exit`.

    ExitTraining("target", Path("head"), [Path("code.txt")], layers=(2, 4)).run(print)
    """

    product = "a head that stops and exits"
    module: ExitHeads

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        layers: Sequence[int] = (),
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        folder = RunFolder(output, FILE, DESCRIPTION, "head", self._npz)
        super().__init__(folder, options or TrainingOptions())
        self.load_target(target, "heads")
        model = self.target.model
        self.layers = _checked(layers, len(decoder_layers(model)))
        self.read_texts(data, LEAST, False, progress)
        self.module = ExitHeads(self.layers, model)
        parameters = self.module.named_parameters()
        self.weights = {n: p for n, p in parameters if p.requires_grad}

    def summary(self) -> str:
        """What is trained on how many sequences."""
        count = sum(weight.numel() for weight in self.weights.values())
        return (
            f"training {count} weights of exits behind layers "
            f"{', '.join(map(str, self.layers))} on {self.reading}"
        )

    def told(self, figures: Mapping[str, Any]) -> str:
        """How often each exit is right, and how many of its decisions are."""
        texts = [
            f"layer {layer}: {f['right']:.2f} right, {f['stops']:.2f} stops "
            f"({f['stops_right']:.2f} right), {f['exits']:.2f} exits "
            f"({f['exits_right']:.2f} right)"
            for layer, f in figures["layers"].items()
        ]
        return f"validation loss {figures['loss']:.2f}; " + "; ".join(texts)

    def settings_of_run(self) -> Mapping[str, Any]:
        """The layers, and the target's hash."""
        return {"layers": list(self.layers), "target": self.base}

    def begin(self) -> None:
        """Make the folder."""
        self.make_folder()

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The loss of the exits and of the classifiers."""
        with precision(accelerator.device):
            rows = self.rows(accelerator, batch)
            loss: Tensor = module(rows)[0]
        count = torch.tensor(len(rows.tokens), device=loss.device)
        # Processes average their gradients, and each has a part of the rows.
        share: Tensor = count * accelerator.num_processes / accelerator.reduce(count)
        return loss * share

    @torch.no_grad()
    def rows(self, accelerator: Any, batch: Batch) -> Rows:
        """The rows of a batch whose next token is learned."""
        model = self.target.model.to(accelerator.device)
        taps = [*self.layers, -1]
        *states, final = (s.float() for s in states_at(model, batch.ids, taps))
        learned = batch.labels[:, 1:] != IGNORED
        tokens = batch.labels[:, 1:][learned]
        logits = model.get_output_embeddings()(final[:, :-1][learned])
        known = logits.argmax(-1) == tokens
        return Rows([s[:, :-1][learned] for s in states], tokens, known)

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """The loss, and what each layer's decisions are worth."""
        heads, device = accelerator.unwrap_model(module), accelerator.device
        losses, counts = [], torch.zeros(len(self.layers), 3, 3, dtype=torch.int64)
        for batch in self.corpus.validation_batches(self.options.batch_size):
            loss, more = heads(self.rows(accelerator, batch.to(device)))
            losses.append(loss.item())
            counts += more.cpu()
        shares = {
            str(layer): _shares(of_layer)
            for layer, of_layer in zip(self.layers, counts.float(), strict=True)
        }
        return {"loss": sum(losses) / len(losses), "layers": shares}

    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write the weights, and a description beside them."""
        run = {**self.settings_of_run(), "step": self.step, "validation": figures}
        self.folder.save(weights, run, state, self.finished)
        if self.finished:
            self.forget_texts()

    def _npz(self, weights: dict[str, Tensor]) -> bytes:
        """The file that `ExitHead.load` reads, with the hash of the target."""
        arrays: dict[str, Any] = {n: w.float().numpy() for n, w in weights.items()}
        file = io.BytesIO()
        np.savez(file, base=np.array(self.base), **arrays)
        return file.getvalue()


def _checked(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The layers ascending, or the defaults; raises `OptionError`."""
    defaults = {max(1, count * quarter // 4) for quarter in (1, 2, 3)} - {count}
    chosen = sorted({*(layers or defaults)})
    if not chosen or chosen[0] < 1 or chosen[-1] >= count:
        raise OptionError(
            f"no exit can lie behind layers {json.dumps(chosen)} of {count}; give 1 to "
            f"{count - 1}",
            "layers",
        )
    return tuple(chosen)


def _shares(counts: Tensor) -> dict[str, float]:
    """Shares by counts float [3 labels, 3 decisions] of a layer."""
    total, by_label, by_decision = counts.sum(), counts.sum(1), counts.sum(0)
    shares = {"right": by_label[Decision.EXIT] / total}
    for name, decision in (("stops", Decision.STOP), ("exits", Decision.EXIT)):
        taken = by_decision[decision]
        shares[name] = taken / total
        shares[f"{name}_right"] = counts[decision, decision] / taken.clamp(min=1)
    return {name: round(share.item(), 4) for name, share in shares.items()}
