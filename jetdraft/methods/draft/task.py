"""`jetdraft train draft`: a drafter model; DistillSpec (2310.08461) has the losses."""

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.layers import decoder_layers, vocabulary_tensors
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.devices import cost_model
from jetdraft.devices.cost_model import MAX_READ_SHARE, TOKENS_PER_WEIGHT
from jetdraft.errors import CheckpointError, OptionError
from jetdraft.export.draft_vocab import check_tokens
from jetdraft.options import setting
from jetdraft.recipe import Recipe
from jetdraft.train import labels as asked
from jetdraft.train import task
from jetdraft.train.data import Batch, Example, collate, split_batch
from jetdraft.train.heads import stored_tensors
from jetdraft.train.labels import BETA, DIVERGENCES, Labels, exact_labels, learned_mask
from jetdraft.train.written_texts import continuations, prompt_size, text_seed

MAX_READINGS = 50  # The most readings of a text by default; the trainer warns of more.
VALIDATED_TEXTS = 64  # All texts of a large corpus would take longer than the training.
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
TEXT = "text"  # The loss of a drafter that learns from the text alone.
LOSSES = (*DIVERGENCES, TEXT)


@dataclass(frozen=True)
class ModelSettings(task.DrafterSettings):
    """Settings of a drafter that is a model of its own.

    layers: Layers of a new drafter.
    hidden_size: Width of a new drafter.
    start: Start from this checkpoint, which has the target's tokenizer.
    from_layers: Start from these layers of the target in this order, for example
        0,5,11, with its embedding, final norm and LM head.
    beta: Weight of the target in the loss js.
    on_policy_share: Share of each batch that the drafter completes itself.
    draft_vocab: Tokens that the drafter can draft, the most frequent in the data.
    cache: Keep what the target says of each text in this folder.
    cache_tokens: Most likely tokens that the cache keeps of each place.
    """

    layers: int | None = setting(
        None, allowed=(1, 1000), unset="as many as cost 5 % of a pass"
    )
    hidden_size: int | None = setting(
        None, allowed=(8, 10**6), unset="what costs 5 % of a pass"
    )
    start: str | None = setting(None, names=("--from",), metavar="CHECKPOINT")
    from_layers: tuple[int, ...] = setting((), metavar="LAYERS")
    loss: str = setting(
        asked.FORWARD_KL,
        f"How the drafter is compared with the target: {', '.join(LOSSES)}; text is "
        "the cross entropy without a target.",
        choices=LOSSES,
    )
    beta: float | None = setting(None, allowed=(0.01, 0.99), unset=f"{BETA}")
    on_policy_share: float = setting(0.0, allowed=(0.0, 1.0), unset="0")
    draft_vocab: int | None = setting(
        None, allowed=(1, 10**7), group="drafting", unset="all"
    )
    cache: Path | None = setting(None, unset="compute it in each step")
    cache_tokens: int = setting(64, allowed=(1, 10**6))

    def __post_init__(self) -> None:
        super().__post_init__()
        has_start = self.start is not None or bool(self.from_layers)
        asks_target = self.loss != TEXT and not self.on_policy_share
        fact = fix = ""
        if self.start is not None and self.from_layers:
            fact = "a drafter starts from a checkpoint or from the target's layers"
            fix = "give --from or --from-layers, not both"
        elif has_start and (self.layers or self.hidden_size):
            fact = "a drafter that starts from weights has their sizes"
            fix = "leave --layers and --hidden-size out"
        elif self.beta is not None and self.loss != asked.JENSEN_SHANNON:
            fact = f"loss {self.loss} has no beta"
            fix = f"leave --beta out, or give --loss {asked.JENSEN_SHANNON}"
        elif self.loss == TEXT and self.on_policy_share:
            fact = "the loss text asks no target, so a drafter cannot learn from its "
            fact += "own texts"
            fix = "leave --on-policy-share out, or give another --loss"
        elif self.cache is None and self.cache_tokens != type(self).cache_tokens:
            fact, fix = "--cache-tokens needs a folder", "give --cache too"
        elif self.cache is not None and not asks_target:
            fact = "the cache keeps what the target says of texts that come again"
            fix = "leave --cache out with --on-policy-share and with --loss text"
        if fact:
            raise OptionError(f"{fact}; {fix}")


class ModelSums(NamedTuple):
    """Loss [1] and count [1] of a batch's learned tokens, and log probabilities."""

    losses: Tensor
    places: Tensor
    scores: Tensor


class ModelTask(task.Task):
    """Trains a model in the folder of a checkpoint, for `export --drafter`."""

    Settings = ModelSettings
    options = task.TrainingOptions(steps=None)
    help = "Train a small model that drafts for TARGET, a checkpoint folder or hub id."
    product, kind, folder_holds = "a drafter", "drafters", "drafter"
    figures_file, least_tokens, largest_norm = "drafter.json", 2, 1.0

    ids: Tensor | None = None
    _cache: asked.LabelCache | None = None

    def shortest_sequence(self) -> tuple[int, str]:
        return 2, "a drafter"

    def check(self, run: task.Run) -> None:
        """Make the drafter `model`, before the target writes for hours."""
        settings, rows = self.settings, run.target.vocab_size
        if settings.draft_vocab is not None and settings.draft_vocab >= rows:
            raise OptionError(
                f"a draft vocabulary of {settings.draft_vocab} tokens is not a part of "
                f"the target's {rows}; give 1 to {rows - 1}, or leave it out"
            )
        if settings.from_layers:
            self.model = copy_with_layers(run.target, settings.from_layers)
        elif settings.start is not None:
            self.model = self._load_start(run.target, settings.start)
        else:
            sizes = settings.layers, settings.hidden_size
            config = advised_config(run.target, *sizes, settings.draft_vocab)
            self.model = LlamaForCausalLM(config)
        store_weights_in(self.model, torch.float32)
        self.model.set_attn_implementation("sdpa")

    def _load_start(self, target: Checkpoint, source: str) -> Any:
        """Load the drafter's start and set `ids`; raises `PairError`, `OptionError`."""
        rows, checkpoint = target.vocab_size, Checkpoint.load(source, torch.float32)
        check_tokens(target, checkpoint)
        if checkpoint.vocab_size != rows:
            checkpoint.model.resize_token_embeddings(rows, mean_resizing=False)
        self.ids = checkpoint.draft_ids
        if self.ids is not None:
            self.ids = self.ids[self.ids < rows]
        if self.ids is not None and self.settings.draft_vocab is not None:
            fact = f"{source} has its own draft vocabulary of {len(self.ids)} tokens"
            raise OptionError(f"{fact}, which stays; leave --draft-vocab out")
        return checkpoint.model

    def new_drafter(self, run: task.Run) -> Any:
        """Return `model`, and set `ids`, the draft vocabulary, by the texts."""
        if self.settings.draft_vocab is not None:
            self.ids = run.frequent_tokens(self.settings.draft_vocab)
        return self.model.requires_grad_(True)

    def tables(self, run: task.Run) -> set[str]:
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        of_ends = {id(end.weight) for end in ends}
        return {name for name, w in run.weights.items() if id(w) in of_ends}

    def advised_steps(self, run: task.Run) -> int:
        """Return the steps for `TOKENS_PER_WEIGHT`, or for `MAX_READINGS` if fewer."""
        size, length = run.options.batch_size, run.options.sequence_length
        steps = TOKENS_PER_WEIGHT * run.parameters // (size * length)
        return max(1, min(steps, MAX_READINGS * len(run.corpus.training) // size))

    def batch(self, run: task.Run, batch: Batch) -> Batch:
        """Let the drafter complete a share of the texts; returns the new batch."""
        share = self.settings.on_policy_share
        numbers = run.sequence_numbers(len(batch.ids))
        chosen = [n for n in numbers if int((n + 1) * share) > int(n * share)]
        if not chosen:
            return batch
        rows = [numbers.index(number) for number in chosen]
        texts = split_batch(batch)
        sizes = [prompt_size(texts[row]) for row in rows]
        model = self.model.to(run.device).eval()
        written = continuations(
            model,
            [texts[row].ids[:size] for row, size in zip(rows, sizes, strict=True)],
            [len(texts[row].ids) - s for row, s in zip(rows, sizes, strict=True)],
            set(run.target.eos_token_ids),
            [text_seed(run.options.seed, number) for number in chosen],
            None if self.ids is None else self.ids.to(run.device),
        )
        model.train()
        for row, size, ids in zip(rows, sizes, written, strict=True):
            texts[row] = Example.completed(ids, size)
        return collate(texts)

    def lesson(self, run: task.Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """Return a batch, and its labels, or None where the text is enough."""
        needs_labels = not learns or self.settings.loss != TEXT
        return batch, self.labels(run, batch) if needs_labels else None

    def sums(
        self, drafter: Any, batch: Batch, labels: Labels | None, learns: bool
    ) -> ModelSums:
        """Compare the drafter with the labels of a batch, or with its text."""
        ids = None if self.ids is None else self.ids.to(batch.ids.device)
        scores = asked.log_probabilities(drafter, batch, ids)
        if self.settings.loss == TEXT or labels is None:
            tokens, of_text = batch.ids[:, 1:][learned_mask(batch)], scores
            if ids is not None:  # only tokens that can be drafted count
                known = torch.isin(tokens, ids)
                tokens, of_text = torch.searchsorted(ids, tokens[known]), scores[known]
            losses = -of_text.gather(-1, tokens[:, None]).sum()
        else:
            compared, beta = DIVERGENCES[self.settings.loss], self.settings.beta or BETA
            apart = compared(labels.wanted, labels.binned(scores), beta)
            losses = (labels.mass * apart).sum()
        places = torch.tensor([float(len(scores))], device=scores.device)
        return ModelSums(losses[None], places, scores)

    def labels(self, run: task.Run, batch: Batch) -> Labels:
        """Return the target's labels of a batch, computed or read from the cache."""
        folder = self.settings.cache
        if self._cache is None and folder is not None:
            known = None if self.ids is None else self.ids.tolist()
            digest = hashlib.sha256(str(known).encode()).hexdigest()
            kept, process = self.settings.cache_tokens, run.accelerator.process_index
            owner = f"{run.base} {digest}"
            self._cache = asked.LabelCache(folder, owner, kept, process)
        cache = self._cache
        labels = cache.read(batch) if cache else None
        if labels is not None:
            return labels
        ids = None if self.ids is None else self.ids.to(run.device)
        labels = exact_labels(run.teacher, batch, ids)
        return cache.write(batch, labels) if cache else labels

    def validate(self, run: task.Run, module: Any) -> dict[str, Any]:
        """Return the loss, and acceptance by place of sampled and greedy drafts."""
        losses, count = torch.zeros(1), 0
        sampled, greedy = list[Tensor](), list[Tensor]()
        batches = max(1, VALIDATED_TEXTS // run.options.batch_size)
        for batch in itertools.islice(run.held_out_batches(), batches):
            _, labels = self.lesson(run, batch, False)
            sums = module(batch, labels)
            losses, count = losses + sums.losses.cpu(), count + len(sums.scores)
            sizes = learned_mask(batch).sum(-1).tolist()
            sampled += torch.split(labels.accepted(sums.scores).cpu(), sizes)
            greedy += torch.split(labels.agreed(sums.scores).float().cpu(), sizes)
        if self._cache is not None:
            self._cache.flush()
        run.check_finite(losses)
        rates = asked.rates_by_place(sampled), asked.rates_by_place(greedy)
        return {
            "loss": round(losses.item() / max(1, count), 4),
            "acceptance": rates[0],
            "agreement": rates[1],
            "tokens_per_pass": [round(asked.tokens_per_pass(r), 3) for r in rates],
        }

    def headline(self, run: task.Run) -> str:
        config = self.model.config.get_text_config(decoder=True)
        size, count = run.options.batch_size, run.parameters
        tokens = run.steps * size * run.options.sequence_length
        is_often = run.steps * size > len(run.corpus.training) * MAX_READINGS
        advice = "; give more texts or fewer --steps" if is_often else ""
        return (
            f"training a drafter of width {config.hidden_size}, layers: "
            f"{config.num_hidden_layers}, {count} weights{self._describe_cost(run)}, "
            f"on up to {tokens} tokens ({tokens / count:.3g} a weight, advised "
            f"{TOKENS_PER_WEIGHT}), from {run.reading_line}{advice}"
        )

    def _describe_cost(self, run: task.Run) -> str:
        target, rows = run.target.model.config, self.ids
        size = None if rows is None else len(rows)
        try:
            share = cost_share(self.model.config.to_dict(), target.to_dict(), size)
        except CheckpointError:
            return ""
        return f", a step at {share:.1%} of a pass (advised {MAX_READ_SHARE:.0%})"

    def summary_line(self, figures: Mapping[str, Any]) -> str:
        rates = (figures["acceptance"], figures["agreement"])
        sampled, greedy = (" ".join(f"{rate:.2f}" for rate in own) for own in rates)
        return (
            f"validation loss {figures['loss']:.3f}, accepted by place at T = 1 "
            f"{sampled}, greedy {greedy}, so {figures['tokens_per_pass'][0]:.2f} and "
            f"{figures['tokens_per_pass'][1]:.2f} tokens a pass"
        )

    def settings_of_run(self, run: task.Run) -> dict[str, Any]:
        # The folder may move, but labels that are cut to the best tokens are others.
        is_cached = self.settings.cache is not None
        own = asdict(self.settings) | {"cache": is_cached, "target": run.base}
        return own | {"from_layers": list(self.settings.from_layers)}

    def begin(self, run: task.Run) -> None:
        """Create the run folder, with the target's tokenizer and its settings."""
        run.folder.create()
        run.folder.write(TOKENIZER, run.target.tokenizer or "")
        settings = run.source / TOKENIZER_SETTINGS
        if settings.is_file():
            run.folder.write(settings.name, settings.read_text(encoding="utf-8"))

    def contents(
        self, run: task.Run, weights: task.Tensors, figures: Any
    ) -> task.Contents:
        dtype, tensors = stored_tensors(weights, self.settings.half, lambda name: name)
        fields = json.loads(self.model.config.to_json_string(use_diff=True))
        fields |= {"architectures": [type(self.model).__name__], "dtype": dtype}
        if self.ids is not None:
            tensors |= vocabulary_tensors(self.ids, run.target.vocab_size)
        return fields, tensors


COST_CONTEXT = 1024  # Tokens in both caches, for the cost of a step.
HEAD_SIZES = (64, 32, 16, 8)  # The first that divides the width is taken.
WIDTH_STEP = 64  # New widths are multiples of it.
# A drafter is wide rather than deep, since each layer launches its kernels.
MAX_LAYERS = 4
WIDTH_PER_LAYER = 96


def cost_share(
    drafter: Mapping[str, Any], target: Mapping[str, Any], draft_vocab: int | None
) -> float:
    """Return the bytes that a draft step reads, as a share of a target pass's.

    It plans int4 for the target, int8 for the drafter. Raises `CheckpointError`.
    """
    small = cost_model.Dimensions.of(dict(drafter))
    if draft_vocab is not None:
        rows = max(draft_vocab, drafter["vocab_size"])
        small = replace(small, head=small.head * draft_vocab // rows)
    recipe = Recipe()
    whole = cost_model.Dimensions.of(dict(target))
    pairs = (small, Recipe.for_drafter(recipe)), (whole, recipe)
    decoders = (cost_model.LoadedDecoder(*pair) for pair in pairs)
    read, most = (decoder.pass_bytes(COST_CONTEXT) for decoder in decoders)
    return read / most


def new_config(target: Checkpoint, layers: int, hidden_size: int) -> LlamaConfig:
    """Make the config of a Llama with the target's vocabulary; raises `OptionError`."""
    text = target.model.config.get_text_config(decoder=True)
    sizes = [size for size in HEAD_SIZES if hidden_size % size == 0]
    if not sizes:
        fact = f"hidden size {hidden_size} is not a multiple of {HEAD_SIZES[-1]}"
        raise OptionError(f"{fact}; give for example a multiple of {WIDTH_STEP}")
    heads = hidden_size // sizes[0]
    shared = [n for n in range(1, max(1, heads // 3) + 1) if heads % n == 0]
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // WIDTH_STEP) * WIDTH_STEP,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared[-1],
        head_dim=sizes[0],
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids) or None,
        pad_token_id=None,
    )


def advised_config(
    target: Checkpoint,
    layers: int | None,
    hidden_size: int | None,
    draft_vocab: int | None,
) -> LlamaConfig:
    """Return the config of the largest drafter within `MAX_READ_SHARE`, or the least.

    Raises `CheckpointError` for a target that cannot be planned.
    """
    whole = target.model.config.to_dict()
    most = int(target.model.get_output_embeddings().weight.shape[1])
    widths = [hidden_size] if hidden_size else range(WIDTH_STEP, most + 1, WIDTH_STEP)
    for depth in [layers] if layers else range(MAX_LAYERS, 0, -1):
        least = 0 if hidden_size or layers or depth == 1 else WIDTH_PER_LAYER * depth
        configs = [new_config(target, depth, w) for w in widths if w >= least]
        for config in reversed(configs):
            if cost_share(config.to_dict(), whole, draft_vocab) <= MAX_READ_SHARE:
                return config
    return new_config(target, layers or 1, hidden_size or WIDTH_STEP)


def copy_with_layers(target: Checkpoint, layers: tuple[int, ...]) -> Any:
    """Copy the target with these layers only, in this order; raises `OptionError`."""
    own = decoder_layers(target.model)
    if any(not 0 <= layer < len(own) for layer in layers):
        raise OptionError(
            f"the layers {list(layers)} are not all layers of this target; give "
            f"--from-layers with numbers from 0 to {len(own) - 1}"
        )
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    model = type(target.model)(config)
    modules = target.model.named_modules()
    prefix = next(name for name, module in modules if module is own) + "."
    weights = target.model.state_dict()
    kept = {name: w for name, w in weights.items() if not name.startswith(prefix)}
    for number, layer in enumerate(layers):
        weights = own[layer].state_dict()
        kept |= {f"{prefix}{number}.{name}": w for name, w in weights.items()}
    model.load_state_dict(kept)
    return model
