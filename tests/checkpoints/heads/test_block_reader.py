"""Published DFlash heads and diffusion drafters load, and compute what they should."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from jetdraft.checkpoints.heads.blocks import masked
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts, reference
from tests.checkpoints.heads.conftest import ROWS
from tests.checkpoints.heads.layouts import BLOCK, MASK, VD, write
from tests.tiny import VOCAB_SIZE

CLOSE = {"rtol": 0, "atol": 2e-5}
ANCHOR = 9
UNKNOWN = VOCAB_SIZE


def matrices(target):
    model = target.model
    return (
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
    )


def filled(drafter, taps, known=(), mask=None, shift=0):
    """The logits [slots, n] of a block behind rows of the target's states."""
    masks = [UNKNOWN] * (BLOCK - 1 - len(known))
    block = torch.tensor([[ANCHOR, *known, *masks]])
    positions = torch.arange(ROWS + BLOCK)[None]
    positions[:, ROWS:] += shift
    with torch.no_grad():
        context = drafter.fuse([tap[None] for tap in taps])
        states = drafter(context, block, positions, masked(mask))
        return drafter.lm_head(drafter.guessed(states))[0]


DFLASH = {
    "authors": (layouts.dflash, {}, {}),
    "ids beside, another prefix": (
        layouts.dflash,
        {"nested": False, "prefix": "model."},
        {},
    ),
    "one layer": (layouts.dflash, {"layers": 1}, {}),
    "speculators": (layouts.speculators_dflash, {}, {"theta": 5000.0}),
    "speculators, all tokens": (
        layouts.speculators_dflash,
        {"cut": False},
        {"theta": 5000.0},
    ),
}


@pytest.mark.parametrize("known", [(), (4, 8)], ids=["masks", "known"])
@pytest.mark.parametrize("case", DFLASH)
def test_dflash(target, states, tmp_path, case, known):
    """Ids of outputs and ids of inputs name the same states of the target."""
    make, shape, numerics = DFLASH[case]
    torch.manual_seed(3)
    config, tensors = make(**shape)
    drafter = load_head(write(tmp_path, config, tensors), target, torch.float32)
    assert drafter.config.taps == (2, 3, 5)
    assert drafter.config.slots == BLOCK - 1
    taps = [states.streams[tap] for tap in (2, 3, 5)]
    embedding, lm_head = matrices(target)
    weights = {n.removeprefix("model."): t for n, t in tensors.items()}
    tokens = [ANCHOR, *known, *[MASK] * (BLOCK - 1 - len(known))]
    context = reference.dflash_context(weights, taps)
    wanted = reference.dflash(weights, context, embedding[tokens], **numerics)
    wanted = F.linear(wanted[1:], weights.get("lm_head.weight", lm_head))
    torch.testing.assert_close(filled(drafter, taps, known), wanted, **CLOSE)
    if "d2t" in weights:
        ids = torch.arange(VD) + weights["d2t"]
        assert torch.equal(drafter.ids, ids)
    else:
        assert drafter.ids is None


def causal(states, drafter, target):
    mask = torch.ones(BLOCK, ROWS + BLOCK, dtype=torch.bool).tril(ROWS)
    return filled(drafter, [states.streams[tap] for tap in (2, 3, 5)], mask=mask)


def taps_off_by_one(states, drafter, target):
    return filled(drafter, [states.streams[tap] for tap in (1, 2, 4)])


def taps_reversed(states, drafter, target):
    return filled(drafter, [states.streams[tap] for tap in (5, 3, 2)])


def block_moved(states, drafter, target):
    return filled(drafter, [states.streams[tap] for tap in (2, 3, 5)], shift=1)


def context_not_normed(states, drafter, target):
    drafter.hidden_norm = torch.nn.Identity()
    return filled(drafter, [states.streams[tap] for tap in (2, 3, 5)])


def rope_of_the_target(states, drafter, target):
    drafter.stack.rotary = target.model.model.rotary_emb
    return filled(drafter, [states.streams[tap] for tap in (2, 3, 5)])


def another_mask_token(states, drafter, target):
    object.__setattr__(drafter.config, "mask_token", 3)
    return filled(drafter, [states.streams[tap] for tap in (2, 3, 5)])


MUTATIONS = [
    causal,
    taps_off_by_one,
    taps_reversed,
    block_moved,
    context_not_normed,
    rope_of_the_target,
    another_mask_token,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_mutation_changes_a_block(target, states, tmp_path, mutation):
    """Mistakes that no equality of texts can see."""
    torch.manual_seed(3)
    drafter = load_head(write(tmp_path, *layouts.dflash()), target, torch.float32)
    right = filled(drafter, [states.streams[tap] for tap in (2, 3, 5)])
    assert (mutation(states, drafter, target) - right).abs().max() > 1e-2


@pytest.mark.parametrize("known", [(), (4, 8)], ids=["masks", "known"])
def test_diffusion(target, tmp_path, known):
    """Its context is text, whose rows see only the rows before them."""
    torch.manual_seed(4)
    config, tensors = layouts.diffusion()
    drafter = load_head(write(tmp_path, config, tensors), target, torch.float32)
    tokens = torch.arange(5, 5 + ROWS)
    unknown = BLOCK - len(known)
    block = torch.tensor([*known, *[UNKNOWN] * unknown])
    mask = torch.ones(ROWS + BLOCK, ROWS + BLOCK, dtype=torch.bool).tril()
    mask[ROWS:] = True
    with torch.no_grad():
        positions = torch.arange(ROWS + BLOCK)[None]
        states = drafter(tokens[None], block[None], positions, masked(mask))
        logits = drafter.lm_head(drafter.guessed(states))[0]
    wanted = reference.diffusion(tensors, tokens, [*known, *[None] * unknown])
    wanted = F.linear(wanted, tensors["embed_tokens.weight"])
    torch.testing.assert_close(logits, wanted, **CLOSE)
    assert drafter.lm_head.weight is drafter.embed_tokens.weight


def other(make=layouts.dflash, changes=None, drop=(), replace=None, **shape):
    config, tensors = make(**shape)
    tensors = {n: t for n, t in tensors.items() if n not in drop}
    return config | (changes or {}), tensors | (replace or {})


WRONG = {
    "unknown key": (other(is_causal=False), "is_causal=False"),
    "scaled embedding": (other(input_embedding_scale=8.0), "input_embedding_scale=8.0"),
    "sliding window": (
        other(changes={"layer_types": ["sliding_attention", "full_attention"]}),
        "layer_types",
    ),
    "unknown in dflash_config": (
        other(changes={"dflash_config": {"mask_token_id": 3, "shift": 1}}),
        "dflash_config of .*'shift': 1.* knows mask_token_id and target_layer_ids",
    ),
    "DSpark": (
        other(layouts.speculators_dflash, sample_from_anchor=True),
        "sample_from_anchor=True",
    ),
    "Domino": (
        other(layouts.speculators_dflash, projector_type="domino"),
        "projector_type='domino'",
    ),
    "a Markov head": (
        other(replace={"markov_head.markov_w1.weight": torch.zeros(4, 4)}),
        "unknown weight 'markov_head.markov_w1.weight'",
    ),
    "another target": (other(num_target_layers=36), "target of 36 layers, .* has 7"),
    "taps beyond": (other(outputs=(1, 2, 7)), r"reads the target at \[1, 2, 7\]"),
    "taps that are no list": (
        other(layouts.speculators_dflash, aux_hidden_state_layer_ids=None),
        "reads the target at None",
    ),
    "fc of another width": (
        other(replace={"fc.weight": torch.zeros(64, 128)}),
        "fc of .* reads 128 numbers, .* have 192",
    ),
    "no fc": (other(drop=["fc.weight"]), "has no fc.weight"),
    "no mask": (
        other(changes={"dflash_config": {"target_layer_ids": [1, 2, 4]}}),
        "mask_token_id=None, .* embeds the tokens 0 to 287",
    ),
    "mask beyond the embedding": (
        other(
            changes={
                "dflash_config": {"mask_token_id": 288, "target_layer_ids": [1, 2, 4]}
            }
        ),
        "mask_token_id=288",
    ),
    "no block": (other(changes={"block_size": 1}), "block_size=1; .* 2 to 64"),
    "a block that is no number": (other(changes={"block_size": "6"}), "block_size='6'"),
    "vocabulary": (other(changes={"vocab_size": 9999}), "vocabulary of 9999 tokens"),
    "hidden size": (other(changes={"hidden_size": 96}), "states of 96 numbers"),
    "missing norm": (other(drop=["hidden_norm.weight"]), "lacks weight 'hidden_norm"),
    "diffusion, unknown key": (
        other(layouts.diffusion, changes={"noise": "uniform"}),
        "noise='uniform'",
    ),
    "diffusion, vocabulary": (
        other(layouts.diffusion, changes={"vocab_size": 9999}),
        "vocabulary of 9999 tokens",
    ),
    "diffusion without a mask": (
        other(layouts.diffusion, drop=["mask"]),
        "lacks weight 'mask'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(target, tmp_path, case):
    """One clear line each."""
    (config, tensors), message = WRONG[case]
    with pytest.raises(CheckpointError) as caught:
        load_head(write(tmp_path, config, tensors), target, torch.float32)
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value))
