"""Mistakes that no equality of texts can see change what the head says.

Each test reads a head wrongly in one way, and must then differ from the reference that
`test_head_reader` compares it with.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jetdraft.checkpoints.heads.head_reader import load_head
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import TAPS, write
from tests.checkpoints.heads.test_head_reader import drafted


def load(target, folder, make=layouts.speculators, **shape):
    torch.manual_seed(8)
    return load_head(write(folder, *make(**shape)), target, torch.float32)


def taps_of(states, taps=TAPS):
    return [states.streams[tap] for tap in taps]


def with_flags(head, **flags):
    """The same weights, read with other flags."""
    head.config = replace(head.config, **flags)
    for name, value in flags.items():
        if hasattr(head.stack.layers[0], name):
            setattr(head.stack.layers[0], name, value)
    return head


def taps_off_by_one(head, states, target):
    return drafted(head, states, taps_of(states, [tap + 1 for tap in TAPS]))


def taps_reversed(head, states, target):
    return drafted(head, states, taps_of(states, TAPS[::-1]))


def residual_flag_flipped(head, states, target):
    flipped = not head.config.norm_before_residual
    head = with_flags(head, norm_before_residual=flipped)
    return drafted(head, states, taps_of(states))


def recycled_state_not_normed(head, states, target):
    flipped = not head.config.carries_normed
    head = with_flags(head, carries_normed=flipped)
    return drafted(head, states, taps_of(states))


def concatenation_reversed(head, states, target):
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.stack.layers[0].self_attn, name).weight
        weight.data = weight.data.roll(layouts.H, dims=1)
    return drafted(head, states, taps_of(states))


def rope_of_the_target(head, states, target):
    head.stack.rotary = target.model.model.rotary_emb
    return drafted(head, states, taps_of(states))


def features_shifted(head, states, target):
    return drafted(head, states, [tap.roll(1, 0) for tap in taps_of(states)])


MUTATIONS = [
    taps_off_by_one,
    taps_reversed,
    residual_flag_flipped,
    recycled_state_not_normed,
    concatenation_reversed,
    rope_of_the_target,
    features_shifted,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("output", [False, True], ids=["plain", "3.1"])
def test_a_mutation_changes_eagle3(target, states, tmp_path, mutation, output):
    """Each changes logits by far more than the comparison's tolerance."""
    shape = {"norm_output": output, "fc_norm": output}
    head = load(target, tmp_path, **shape)
    right = drafted(head, states, taps_of(states))
    wrong = mutation(head, states, target)
    assert (wrong - right).abs().max() > 1e-2


def test_a_state_before_the_final_norm_changes_eagle1(target, states, tmp_path):
    """EAGLE-1 reads what the LM head reads."""
    head = load(target, tmp_path, layouts.eagle1)
    right = drafted(head, states, [states.final])
    wrong = drafted(head, states, [states.streams[-1]])
    assert (wrong - right).abs().max() > 1e-2


def test_ids_are_offsets(target, tmp_path):
    """A map read as ids would name other tokens."""
    torch.manual_seed(8)
    config, tensors = layouts.speculators()
    head = load_head(write(tmp_path, config, tensors), target, torch.float32)
    marked = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(head.ids, marked)
    assert not torch.equal(head.ids, tensors["d2t"])
