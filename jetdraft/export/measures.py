"""What an export measures before it writes: texts, moments, and recipes left open."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.layers import Taps
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import OptionError
from jetdraft.export.draft_vocab import frequent_tokens
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.graphs import Progress
from jetdraft.quant import choice as choices
from jetdraft.quant.blocks import Floats
from jetdraft.quant.choice import choose_drafter_recipe
from jetdraft.quant.divergence import Divergence, Windows, own_attention, second_moments
from jetdraft.quant.grids import GridMatrix
from jetdraft.recipe import KERNELS, RUNGS, Recipe
from jetdraft.runtime.text.template import ChatTemplate, user_message

# Asked of every model; a model without a chat template continues them.
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that checks whether a number is prime.",
    "Explain in a few sentences how a bicycle stays upright.",
    "Tell me a short story about a robot and a cat.",
    "Give me a list of ten healthy breakfasts.",
    "Translate to German: The train leaves at noon.",
    "What should I do when my phone does not charge?",
    "Summarize the plot of Romeo and Juliet.",
    "What is 17 times 23? Think step by step.",
    "Write a polite mail that moves a meeting to Thursday.",
    "Turn this into JSON: Anna is 31 years old and lives in Oslo.",
    "Which planets have rings, and why?",
)
REPLY_TOKENS = 24  # Few: a large checkpoint takes seconds for each.
TEMPERATURE = 0.8  # The temperature at which replies are sampled.


def sample_text(
    checkpoint: Checkpoint, progress: Callable[[int, int], None] = lambda *state: None
) -> Windows:
    """Sample replies of the model to `QUESTIONS`, with a fixed seed, as windows."""
    prompts = question_prompts(checkpoint)
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with own_attention(checkpoint.model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        ids = _sample_replies(checkpoint.model, ids, mask, progress)
    # The model's answer to token i is row i, so the last token is not compared.
    return Windows(ids[:, longest - shortest : -1], scored=REPLY_TOKENS)


def question_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """Return the questions as token ids; arbitrary ids where there is no tokenizer."""
    if checkpoint.tokenizer is None:
        return [[row % checkpoint.vocab_size] for row in range(len(QUESTIONS))]
    encoder = Tokenizer.from_str(checkpoint.tokenizer)
    texts: list[str] = []
    if checkpoint.chat_template is not None:
        with contextlib.suppress(OptionError):  # it takes no single message
            chat = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
            texts = [chat.render([user_message(question)]) for question in QUESTIONS]
    bare = not texts  # a template names special tokens itself
    prompts = [encoder.encode(t, add_special_tokens=bare) for t in texts or QUESTIONS]
    return [prompt.ids or [0] for prompt in prompts]


def _sample_replies(
    model: Any, ids: Tensor, mask: Tensor, progress: Callable[[int, int], None]
) -> Tensor:
    """Append `REPLY_TOKENS` sampled tokens to each row of `ids`; no row ends early."""
    past, rows = None, ids
    for done in range(1, REPLY_TOKENS + 1):
        output = model(
            input_ids=rows,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -rows.shape[1] :],
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        logits = output.logits[:, -1].float() / TEMPERATURE
        rows = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat([ids, rows], 1)
        mask = torch.cat([mask, torch.ones_like(rows)], 1)
        progress(done, REPLY_TOKENS)
    return ids


@dataclass
class Measures:
    """What an export measures on the calibration text, or on a text of the target.

    `kl` is by model and recipe, `overlaps` are acceptances with the drafter's recipe
    and without, `rounded` matrices. Drafts have tokens `ids` int64 [n], None for all.
    """

    checkpoints: Mapping[str, Checkpoint]
    contracts: Mapping[str, StepContract]
    options: ExportOptions
    report: Progress
    head: DraftModule | None = None
    ids: Tensor | None = None
    kl: dict[str, float] = field(default_factory=dict)
    overlaps: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, dict[str, GridMatrix]] = field(default_factory=dict)
    _moments: dict[str, dict[str, Floats]] = field(default_factory=dict)
    _divergences: dict[str, Divergence] = field(default_factory=dict)

    @cached_property
    def windows(self) -> Windows:
        """The calibration text, or a text of the target; raises `DataError`."""
        target, file = self.checkpoints[TARGET], self.options.calibration
        if file is not None:
            return Windows.of(file, target.tokenizer, self.contracts[TARGET].capacity)
        return sample_text(target, partial(self.report, "write text"))

    def moments(self, name: str) -> dict[str, Floats]:
        """Return second moments by weight name; llama.cpp's types take a diagonal."""
        options, checkpoint = self.options, self.checkpoints[name]
        recipe, is_open = options.recipe_of(name), options.recipe is None
        if name == DRAFTER:
            is_open = self._needs_drafter_recipe
        is_open &= options.kernel_of(name) == KERNELS[0]
        wanted = (is_open or recipe.has_grids) and checkpoint.packed is None
        if not recipe.needs_moments and (options.fast or not wanted):
            return {}
        if name not in self._moments:
            given = checkpoint.model, self.windows, not recipe.needs_moments
            tell = partial(self.report, f"measure the {name}'s inputs")
            self._moments[name] = second_moments(*given, tell)
        return self._moments[name]

    def settle_recipes(self) -> ExportOptions:
        """Measure and choose each recipe that is left open; return the new options."""
        target, recipe = self.checkpoints[TARGET], self.options.recipe
        if self.options.limit is not None:
            recipe = self._find_mix(target)
        elif recipe is None:
            recipe = self._choose_recipe(target)
        self.options = replace(self.options, recipe=recipe, limit=None)
        if self._needs_drafter_recipe:
            with contextlib.suppress(OptionError):  # matrices that no unit contains
                choice = self._choose_drafter_recipe(target)
                self.report("measure drafter", 1, 1)
                self.options = replace(self.options, drafter_recipe=choice.recipe)
                for name in ("overlap", "full_overlap"):
                    self.overlaps[name] = round(getattr(choice, name), 4)
        for name, divergence in self._divergences.items():
            if self.checkpoints[name].streams is None:  # probes may change weights
                self.rounded[name] = divergence.rounded(self.options.recipe_of(name))
        self._divergences.clear()
        return self.options

    def draft_vocabulary(self, count: int) -> Tensor:
        """The `count` most frequent tokens that all models have, int64, ascending."""
        known = min(checkpoint.vocab_size for checkpoint in self.checkpoints.values())
        target = self.checkpoints[TARGET].model
        return frequent_tokens(target, self.windows, count, known)

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the prompts after which the acceptance is measured."""
        if self.options.calibration is None:
            return question_prompts(self.checkpoints[TARGET])
        ids = self.windows.ids
        return ids[:, : max(1, ids.shape[1] // 2)].tolist()

    def _find_mix(self, target: Checkpoint) -> Recipe:
        assert self.options.limit is not None
        if target.packed is not None:
            fact = f"{target.source} is quantized already, so its layers cannot get "
            raise OptionError(f"{fact}more bits; leave the limit out")
        divergence, recipe = self._divergence(TARGET), self.options.recipe_of(TARGET)
        find = choices.Sensitivity(divergence, recipe).find_mix
        tell = partial(self.report, "measure layers")
        with own_attention(target.model):
            mix, self.kl[TARGET] = find(self.options.limit, tell)
        return mix

    def _choose_recipe(self, target: Checkpoint) -> Recipe:
        kernel = self.options.kernel_of(TARGET)
        safe = Recipe.parse(RUNGS[kernel][-1])
        if target.packed is not None:
            return safe  # for the matrices that are floats still
        try:
            divergence = self._divergence(TARGET)
        except OptionError:  # matrices that no unit contains
            return safe
        with own_attention(target.model):
            chosen = choices.choose_recipe(divergence, kernel, self.report)
        recipe, self.kl[TARGET] = chosen
        return recipe

    @property
    def _needs_drafter_recipe(self) -> bool:
        return (
            (DRAFTER in self.checkpoints or self.head is not None)
            and self.options.drafter_recipe is None
            and not self.options.fast
            and self.options.recipe_of(TARGET).bits is not None
            and all(c.packed is None for c in self.checkpoints.values())
        )

    def _choose_drafter_recipe(self, target: Checkpoint) -> choices.DrafterChoice:
        recipe, windows = self.options.recipe_of(TARGET), self.windows
        kernel = self.options.kernel_of(DRAFTER)
        if self.head is None:
            models = self._divergence(TARGET), self._divergence(DRAFTER)
            self.report("measure drafter", 0, 1)
            drafter = self.checkpoints[DRAFTER].model
            with own_attention(target.model), own_attention(drafter):
                return choose_drafter_recipe(*models, recipe, kernel, self.ids)
        windows = Windows(windows.ids, min(windows.scored, windows.ids.shape[1] - 1))
        assert target.taps is not None
        self.report("measure drafter", 0, 1)
        reading = ReadingHead(target.model, self.head, target.taps)
        on_cpu = self.options.provider_of(DRAFTER).name == "cpu"
        with own_attention(target.model):
            full = Divergence(target.model, windows, {})
            head = Divergence(reading, windows, {}, rounds_inputs=on_cpu)
            return choose_drafter_recipe(full, head, recipe, kernel, self.head.ids)

    def _divergence(self, name: str) -> Divergence:
        if name in self._divergences:
            return self._divergences[name]
        model = self.checkpoints[name].model
        moments = self.moments(name)
        on_cpu = self.options.provider_of(name).name == "cpu"
        windows = self.windows  # they have a stage of their own
        self.report(f"measure {name} in floats", 0, 1)
        with own_attention(model):
            divergence = Divergence(model, windows, moments, rounds_inputs=on_cpu)
        self.report(f"measure {name} in floats", 1, 1)
        self._divergences[name] = divergence
        return divergence


class ReadingHead(nn.Module):
    """The target and its head as one model, with the head's quantized matrices only."""

    def __init__(self, target: Any, head: DraftModule, taps: Taps) -> None:
        super().__init__()
        self._others = target, head, taps  # a tuple, which is no module
        self.stack = head.stack
        if not taps.layers:
            self.fc = head.fc
        lends = target.get_output_embeddings()
        self.lm_head = None if head.lm_head is lends else head.lm_head

    def get_output_embeddings(self) -> Any:
        return self._others[1].lm_head

    def forward(self, ids: Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        """Return logits [b, n, vocabulary] of the last n < m tokens of `ids` [b, m]."""
        target, head, taps = self._others
        with taps.watching(target) as features:
            target(input_ids=ids, use_cache=use_cache, logits_to_keep=1)
        positions = torch.arange(ids.shape[1] - 1)[None]
        hidden, _ = head(ids[:, 1:], features[0][:, :-1], positions)
        return SimpleNamespace(logits=head.lm_head(hidden[:, -logits_to_keep:]))
