from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from tests.checkpoints.heads import layouts
from tests.tiny import exported

LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
sized = partial(exported, capacity=256, max_width=32)
int4 = partial(sized, recipe="int4")
"""Export a target and one of the drafters, with sizes for which it is traced once."""


def random_head(folder: Path, method: str, **changes: Any) -> Path:
    torch.manual_seed(3)
    return Path(layouts.write(folder, *layouts.one_layer(method, **changes)))


def in_torch(target: str, drafter: Path) -> tuple[Any, Any]:
    """The modules of a target and of its drafter."""
    checkpoint = Checkpoint.load(target, torch.float32)
    checkpoint.model.set_attn_implementation("sdpa")
    return checkpoint.model, load_head(str(drafter), checkpoint, torch.float32)


def followed(follower, text, states, rows):
    """The answer to a text after some of its rows, before which it saw nothing."""
    follower.forget()
    follower.begin(text)
    follower.observe(0, text[:rows], states[:rows])
    answer = follower.follow(text[: rows + 1])
    assert answer is not None
    return answer


@contextmanager
def in_floats(
    target: str, drafter: Path, folder: Path, text: list[int]
) -> Iterator[tuple[jetdraft.Model, Any, Tensor]]:
    bundle = sized(target, folder / "bundle", head=drafter, draft_vocab=40)
    model, module = in_torch(target, drafter)
    with torch.no_grad():
        decoder = model.get_decoder()
        features = decoder(torch.tensor([text])).last_hidden_state
    with jetdraft.load(bundle.path, threads=1) as model:
        yield model, module, features


def check_drafts(follower, text, states, rows, wanted, most=None) -> None:
    """After each number of `rows` of the target a draft of `text` has these logits."""
    for first, seen in pairwise((0, *rows)):
        follower.observe(first, text[first:seen], states[first:seen])
        logits = [follower.follow(text[: seen + 1]).candidate_logits[-1].copy()]
        for token in text[seen + 1 :][:most]:
            logits.append(follower.step(token).candidate_logits[-1].copy())
        with torch.no_grad():
            np.testing.assert_allclose(logits, wanted(seen)[: len(logits)], atol=2e-4)


@pytest.fixture(scope="module")
def head(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "head"
    return random_head(folder, request.module.METHOD)


@pytest.fixture(scope="module")
def bundle(target, head, tmp_path_factory) -> Bundle:
    return int4(target, tmp_path_factory.mktemp("bundles") / "bundle", head=head)


@pytest.fixture(scope="module")
def model(bundle):
    with jetdraft.load(bundle.path, threads=1) as model:
        yield model
