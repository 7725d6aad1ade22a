"""Lets a model write the text on which its recipes are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import OptionError
from jetdraft.quant.calibration import Windows, own_attention
from jetdraft.runtime.text.template import ChatTemplate, user

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
"""Asked of every model; a model without a chat template continues them."""

NEW_TOKENS = 24
"""Tokens of each reply: few, since a large checkpoint takes seconds for each."""

TEMPERATURE = 0.8


def own_text(
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Windows:
    """What the model replies to `QUESTIONS`, sampled with a fixed seed.

    `progress(done, total)` is called after each token of all replies.

        own_text(checkpoint).ids    # int64 [12, tokens]
    """
    prompts = own_prompts(checkpoint)
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with own_attention(checkpoint.model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        ids = _replies(checkpoint.model, ids, mask, progress)
    # The model's answer to token i is row i, so the last token is not compared.
    return Windows(ids[:, longest - shortest : -1], scored=NEW_TOKENS)


def own_prompts(checkpoint: Checkpoint) -> list[list[int]]:
    """The questions as tokens; the numbers of tokens where there is no tokenizer."""
    if checkpoint.tokenizer is None:
        return [[row % checkpoint.vocab_size] for row in range(len(QUESTIONS))]
    encoder = Tokenizer.from_str(checkpoint.tokenizer)
    texts = _chats(checkpoint)
    special = texts is None  # a template names them itself
    prompts = [
        encoder.encode(t, add_special_tokens=special) for t in texts or QUESTIONS
    ]
    return [prompt.ids or [0] for prompt in prompts]


def _chats(checkpoint: Checkpoint) -> list[str] | None:
    """The questions in the chat template; None where it takes no lone message."""
    if checkpoint.chat_template is None:
        return None
    try:
        template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
        return [template.render([user(question)]) for question in QUESTIONS]
    except OptionError:
        return None


def _replies(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    progress: Callable[[int, int], None],
) -> torch.Tensor:
    """Extend all rows by sampled tokens; end-of-text does not end a row."""
    past, rows = None, ids
    for done in range(1, NEW_TOKENS + 1):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -rows.shape[1] :]
        output = model(
            input_ids=rows,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        logits = output.logits[:, -1].float() / TEMPERATURE
        rows = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat([ids, rows], 1)
        mask = torch.cat([mask, torch.ones_like(rows)], 1)
        progress(done, NEW_TOKENS)
    return ids
