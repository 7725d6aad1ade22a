"""Published DFlash heads and diffusion drafters load, and compute what they should."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from jetdraft.checkpoints.heads.blocks import masked_attention
from jetdraft.checkpoints.heads.head_reader import load_head
from tests.checkpoints.heads import layouts, reference
from tests.checkpoints.heads.conftest import ROWS
from tests.checkpoints.heads.layouts import BLOCK, MASK, VD, write
from tests.tiny import VOCAB_SIZE

CLOSE = {"rtol": 0, "atol": 2e-5}
ANCHOR = 9
UNKNOWN = VOCAB_SIZE
TAPS = (2, 3, 5)


def filled(drafter, states, known=(), taps=TAPS, mask=None, shift=0):
    """The logits [slots, n] of a block behind rows of the target's states."""
    masks = [UNKNOWN] * (BLOCK - 1 - len(known))
    block = torch.tensor([[ANCHOR, *known, *masks]])
    positions = torch.arange(ROWS + BLOCK)[None]
    positions[:, ROWS:] += shift
    with torch.no_grad():
        context = drafter.fuse([states.streams[tap][None] for tap in taps])
        rows = drafter(context, block, positions, masked_attention(mask))
        return drafter.lm_head(drafter.mask_states(rows))[0]


DFLASH = {
    "authors": (layouts.dflash, {}, {}),
    "ids beside": (layouts.dflash, {"nested": False, "prefix": "model."}, {}),
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
    assert drafter.config.taps == TAPS
    assert drafter.config.slots == BLOCK - 1
    taps = [states.streams[tap] for tap in TAPS]
    embedding = target.model.get_input_embeddings().weight.detach()
    lm_head = target.model.get_output_embeddings().weight.detach()
    weights = {n.removeprefix("model."): t for n, t in tensors.items()}
    tokens = [ANCHOR, *known, *[MASK] * (BLOCK - 1 - len(known))]
    context = reference.dflash_context(weights, taps)
    wanted = reference.dflash(weights, context, embedding[tokens], **numerics)
    wanted = F.linear(wanted[1:], weights.get("lm_head.weight", lm_head))
    torch.testing.assert_close(filled(drafter, states, known), wanted, **CLOSE)
    assert (drafter.ids is None) == ("d2t" not in weights)
    if drafter.ids is not None:
        assert torch.equal(drafter.ids, torch.arange(VD) + weights["d2t"])


CAUSAL = torch.ones(BLOCK, ROWS + BLOCK, dtype=torch.bool).tril(ROWS)
MISTAKES = {
    "a causal block": ({"mask": CAUSAL}, None),
    "taps off by one": ({"taps": (1, 2, 4)}, None),
    "taps reversed": ({"taps": (5, 3, 2)}, None),
    "a block moved": ({"shift": 1}, None),
    "a context not normed": (
        {},
        lambda head, _: setattr(head, "hidden_norm", torch.nn.Identity()),
    ),
    "rotations of the target": (
        {},
        lambda head, target: setattr(head.stack, "rotary", target.rotary_emb),
    ),
    "another mask token": (
        {},
        lambda head, _: setattr(head, "config", replace(head.config, mask_token=3)),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_a_block(target, states, tmp_path, mistake):
    """Mistakes that no equality of texts can see."""
    torch.manual_seed(3)
    drafter = load_head(write(tmp_path, *layouts.dflash()), target, torch.float32)
    right = filled(drafter, states)
    how, change = MISTAKES[mistake]
    if change is not None:
        change(drafter, target.model.model)
    assert (filled(drafter, states, **how) - right).abs().max() > 1e-2


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
        states = drafter(tokens[None], block[None], positions, masked_attention(mask))
        logits = drafter.lm_head(drafter.mask_states(states))[0]
    wanted = reference.diffusion(tensors, tokens, [*known, *[None] * unknown])
    wanted = F.linear(wanted, tensors["embed_tokens.weight"])
    torch.testing.assert_close(logits, wanted, **CLOSE)
    assert drafter.lm_head.weight is drafter.embed_tokens.weight
