"""Prompt tokens after many rows of a sequence; the target stays as it is."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import MAX_RANKS, Prompts, PromptSettings
from jetdraft.errors import UnsupportedModelError
from jetdraft.options import Checked, setting
from jetdraft.train import task
from jetdraft.train.blocks import Blocks
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.heads import decayed_means
from jetdraft.train.teacher import rows_at

VALIDATED_PLACES = 64  # Per validation sequence, evenly spread.


@dataclass(frozen=True)
class InsertionSettings(Checked):
    """Settings of prompt tokens that are inserted into texts.

    insertions: Random places of a sequence where a step inserts what is trained.
    """

    insertions: int = setting(32, allowed=(1, 4096))
    regenerate: bool = setting(False, task.REGENERATE)


def prompt_logits(
    prompts: Prompts, model: Any, anchors: Tensor, rows: int, cache: Any
) -> Tensor:
    """Logits [b, n, gamma, vocab] after rows `anchors` int64 [b, n]; `cache` grows."""
    settings, (size, count) = prompts.settings, anchors.shape
    if settings.prefix:
        for number, layer in enumerate(cache.layers):
            prefix = dict(zip(("keys", "values"), prompts.prefix(number), strict=True))
            for name, own in prefix.items():
                before = getattr(layer, name)
                after = own.to(before.dtype).expand(size, -1, -1, -1)
                setattr(layer, name, torch.cat([before, after], 2))
    distances = torch.arange(1, settings.gamma + 1, device=anchors.device)
    distances = distances.repeat_interleave(settings.members)
    outputs = model(
        inputs_embeds=prompts.embeddings.repeat(size, count, 1),
        position_ids=(anchors[..., None] + distances).flatten(1),
        attention_mask=prompt_mask(anchors, rows, settings),
        past_key_values=cache,
        use_cache=True,
    )
    shape = count, settings.gamma, settings.members
    logits: Tensor = outputs.logits.unflatten(1, shape)
    return logits.mean(3)


def prompt_mask(anchors: Tensor, rows: int, settings: PromptSettings) -> Tensor:
    """Which rows prompt tokens see: bool [b, 1, n * m, rows + prefix + n * m].

    The m = gamma * members tokens of `anchors` int64 [b, n] see the rows up to their
    anchor, the prefix, and earlier tokens of the anchor and member.
    """
    members = settings.members
    slot = torch.arange(settings.gamma * members, device=anchors.device)
    past = torch.arange(rows, device=anchors.device) <= anchors[..., None]
    past = past.repeat_interleave(len(slot), 1)
    below = (slot <= slot[:, None]) & (slot % members == (slot % members)[:, None])
    places = torch.eye(anchors.shape[1], device=anchors.device)
    own = torch.kron(places, below.float()).bool()
    own = torch.nn.functional.pad(own, (settings.prefix, 0), value=True)
    return torch.cat([past, own.expand(len(anchors), -1, -1)], -1)[:, None]


class PromptTask(task.ProbeTask):
    """Trains prompt tokens of a `mode`; their sizes are the settings of their names."""

    mode = PromptSettings.mode
    options = task.TrainingOptions(learning_rate=1e-2)
    _model: Any = None

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        known = vars(PromptSettings()).keys()
        own = {n: value for n, value in vars(self.settings).items() if n in known}
        self.prompts = PromptSettings(mode=self.mode, **own)
        self.prompts.check()

    def shortest_sequence(self) -> tuple[int, str]:
        """Return the fewest tokens: two rows, the next token, and gamma guesses."""
        gamma = self.prompts.gamma
        return gamma + 3, f"{gamma} {self.product}"

    def check_target(self, target: Checkpoint) -> None:
        """Refuse a target with probes, or with sliding windows."""
        super().check_target(target)
        if _has_windows(target.model.config.get_text_config(decoder=True)):
            raise UnsupportedModelError(
                f"{target.source} attends in sliding windows; {self.product} need "
                "plain attention, so choose another model"
            )

    def new_drafter(self, run: task.Run) -> Prompts:
        """Make prompt tokens from frequent tokens' embeddings, a prefix from text."""
        self.prompts = replace(self.prompts, base=run.base)
        model, count = run.target.model, self.prompts.gamma * self.prompts.members
        words = run.frequent_tokens(count)
        if words is None:
            words = torch.arange(count) % run.target.vocab_size
        # A target that has written texts is on a GPU; the words are not yet.
        embeddings = model.get_input_embeddings()(words.to(model.device))
        rows = _prefix_rows(run, self.prompts.prefix) if self.prompts.prefix else ()
        return Prompts(self.prompts, embeddings, *rows)

    def weights(self, run: task.Run) -> dict[str, Tensor]:
        named = run.module.drafter.named_parameters()
        return {f"prompts.{name}": weight for name, weight in named}

    def lesson(self, run: task.Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """Return a batch, and blocks whose anchors are rows before prompt tokens."""
        self._model = run.teacher
        if not learns:
            return batch, Blocks.spread(batch, VALIDATED_PLACES)
        draws = run.sequence_generators(len(batch.ids))
        return batch, Blocks.draw(batch, self.settings.insertions, 1, 0.0, draws)

    def sums(
        self, drafter: Prompts, batch: Batch, places: Blocks, learns: bool
    ) -> task.Sums:
        """Return the sums by prompt token; they follow the rows `places.anchors`.

        The loss is KL(target || token) (2405.18628, 3.3); `right` is [gamma, RANKS].
        """
        with torch.no_grad():
            outputs = self._model(input_ids=batch.ids, use_cache=True)
        labels, length = batch.labels, batch.ids.shape[1]
        cache = outputs.past_key_values
        probes = prompt_logits(drafter, self._model, places.anchors, length, cache)
        logits = probes.float()
        # The token after the row is the root of the draft; token 1 guesses the next.
        ahead = torch.arange(1, logits.shape[2] + 1, device=labels.device)
        rows = places.anchors[..., None] + ahead
        wanted = (rows + 1).clamp(max=length - 1)
        learned = (rows_at(labels, wanted) != IGNORED) & (rows + 1 < length)
        learned = learned & places.is_real[..., None]
        p = rows_at(outputs.logits, rows.clamp(max=length - 1)).float().log_softmax(-1)
        losses = (p.exp() * (p - logits.log_softmax(-1))).sum(-1)
        best = logits.detach().topk(min(MAX_RANKS, logits.shape[-1]), -1).indices
        right = (best == p.argmax(-1, keepdim=True)) & learned[..., None]
        parts = torch.where(learned, losses, 0.0), learned, right
        return task.Sums(*(part.sum((0, 1)).float() for part in parts))

    def total(self, sums: task.Sums, places: Tensor) -> Tensor:
        """Return the mean of the tokens' mean losses; later tokens weigh less."""
        return decayed_means(sums, places).mean()

    def figures(self, run: task.Run, parts: Sequence[Any]) -> dict[str, Any]:
        """Return losses and acceptance by prompt token; sets `prompts.ranks`."""
        losses, places, right = task.sum_fields(parts, "losses", "places", "right")
        run.check_finite(losses)
        places = places.clamp(min=1)
        ranks = (right / places[:, None])[:, :MAX_RANKS].tolist()
        by_rank = tuple(tuple(round(rate, 4) for rate in rates) for rates in ranks)
        self.prompts = replace(self.prompts, ranks=by_rank)
        acceptance = [rates[0] for rates in by_rank]
        return {"losses": task.round_figures(losses / places), "acceptance": acceptance}

    def description(self, run: task.Run) -> str:
        share = 100 * run.parameters / run.target.parameters
        return f"{self.prompts.gamma} {self.product}, {share:.2g}% of the target's,"

    def settings_of_run(self, run: task.Run) -> dict[str, Any]:
        own = asdict(replace(self.prompts, ranks=()))
        insertions, regenerate = self.settings.insertions, self.settings.regenerate
        return own | {"insertions": insertions, "regenerate": regenerate}

    def contents(
        self, run: task.Run, weights: task.Tensors, figures: Any
    ) -> task.Contents:
        own = {"step": run.step, "parameters": run.parameters, "validation": figures}
        return asdict(self.prompts) | own, weights


@torch.no_grad()
def _prefix_rows(run: task.Run, count: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a text's start, [layers, kv_heads, count, d] both."""
    model = run.target.model
    ids = torch.tensor([run.corpus.training[0].ids], device=model.device)
    ids = ids.repeat(1, -(-count // ids.shape[1]))[:, :count]
    layers = model(input_ids=ids, use_cache=True).past_key_values.layers
    if len({layer.keys.shape for layer in layers}) > 1:
        raise UnsupportedModelError(
            f"{run.target.source} has layers of several head sizes, which a prefix "
            "cannot have; choose another model"
        )
    keys = torch.cat([layer.keys for layer in layers])
    return keys, torch.cat([layer.values for layer in layers])


def _has_windows(config: Any) -> bool:
    """Whether a layer of the config attends to less than all earlier rows."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    used = getattr(config, "use_sliding_window", True)
    return bool(used and getattr(config, "sliding_window", None))
