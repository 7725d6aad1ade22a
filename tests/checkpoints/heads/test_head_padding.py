"""Heads whose embeddings and LM heads have other rows than their target's."""

import re

import pytest
import torch

import jetdraft
from jetdraft.checkpoints.heads.head_reader import load_head
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import write
from tests.exports import exported
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

TABLE = re.compile(r"(embed_tokens|lm_head|hydra_lm_head\.\d|\d\.1)\.weight|t2d")


def repadded(config, tensors, rows):
    layer = "transformer_layer_config"
    if layer in config:
        config = config | {layer: config[layer] | {"vocab_size": rows}}
    elif "vocab_size" in config:  # Medusa's and Hydra's have none
        config = config | {"vocab_size": rows}
    own = {}
    for name, tensor in tensors.items():
        if TABLE.fullmatch(name) and len(tensor) == VOCAB_SIZE:
            spare = torch.zeros(64, *tensor.shape[1:]).to(tensor.dtype)
            spare = spare if name == "t2d" else torch.randn(spare.shape)
            own[name] = torch.cat([tensor, spare])[:rows].clone()
        else:
            own[name] = tensor
    return config, own


def whole_head(**changes):
    config, tensors = layouts.eagle3(**changes)
    config.pop("draft_vocab_size")
    kept = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    return config, kept | {"lm_head.weight": layouts.rand(VOCAB_SIZE, layouts.H)}


NAMES = ("eagle1", "eagle3", "speculators", "medusa", "hydra", "dflash", "diffusion")
LAYOUTS = {
    **{name: getattr(layouts, name) for name in NAMES},
    **{"eagle3, whole LM head": whole_head},
    **{"dflash, mapped": layouts.speculators_dflash},
}


def made(layout, rows):
    torch.manual_seed(3)
    config, tensors = LAYOUTS[layout]()
    if "d2t" in tensors:  # to tokens that all of them have
        tensors |= layouts.map_of(torch.arange(layouts.VD) * 2)
    return repadded(config, tensors, rows)


def lm_heads(head):
    modules = head.lm_heads if hasattr(head, "lm_heads") else [head.lm_head]
    ids = range(VOCAB_SIZE) if head.ids is None else head.ids.tolist()
    for module in modules:
        assert len(module.weight) == len(ids)
        yield dict(zip(ids, module.weight, strict=True))


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE + 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_another_padding_says_the_same(target, tmp_path, layout, rows):
    """It drafts no token that it or the target lacks, and reads all of the target's."""
    heads = [
        load_head(write(tmp_path / str(n), *made(layout, n)), target, torch.float32)
        for n in (VOCAB_SIZE, rows)
    ]
    known = min(rows, VOCAB_SIZE)
    for one, other in zip(*map(lm_heads, heads), strict=True):
        lends = layout in ("eagle1", "dflash")  # the target's own LM head
        wanted = set(one) if lends else {i for i in one if i < known}
        assert wanted == set(other)
        assert all(torch.equal(one[i], other[i]) for i in wanted)
    if hasattr(heads[0], "embed_tokens"):
        one, other = (head.embed_tokens.weight for head in heads)
        assert one.shape == other.shape
        assert torch.equal(one[:known], other[:known])


def test_a_map_to_tokens_that_the_target_lacks_loses_them(target, tmp_path):
    config, tensors = repadded(*layouts.eagle3(), VOCAB_SIZE + 32)
    ids = torch.arange(layouts.VD) + torch.arange(layouts.VD) * 2 + 20
    tensors |= layouts.map_of(ids, VOCAB_SIZE + 32)
    head = load_head(write(tmp_path / "head", config, tensors), target, torch.float32)
    known = ids < VOCAB_SIZE
    assert 0 < known.sum() < layouts.VD
    assert torch.equal(head.ids, ids[known])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"][known])


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE, VOCAB_SIZE + 32])
def test_the_targets_own_matrices_are_not_kept_twice(target, tmp_path, rows):
    """Publishers copy the target's embedding into the head, with their padding."""
    config, tensors = layouts.eagle1()
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach()
    tensors["lm_head.weight"] = target.model.get_output_embeddings().weight.detach()
    source = write(tmp_path / "head", *repadded(config, tensors, rows))
    head = load_head(source, target, torch.float32)
    assert head.embed_tokens is target.model.get_input_embeddings()
    assert head.lm_head is target.model.get_output_embeddings()
    assert head.ids is None


def test_its_drafts_change_no_text(tmp_path):
    """Its part of the vocabulary is one like any other, whoever reads it."""
    config = llama_config(num_hidden_layers=1, tie_word_embeddings=False)
    checkpoint = save_checkpoint(tmp_path / "target", config)
    rows, method = VOCAB_SIZE - 8, "medusa"
    head = write(tmp_path / "head", *made(method, rows))
    bundle = exported(checkpoint, tmp_path / "bundle", head=head)
    ids = bundle.draft_vocabulary()
    assert ids is not None
    assert ids.max() < rows
    with jetdraft.load(bundle.path, threads=1) as model:
        for way in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4}):
            how = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 3, **way}
            prompt = [5, VOCAB_SIZE - 1, 9, 40]
            plain = model.generate(token_ids=prompt, method="none", **how)
            drafted = model.generate(
                token_ids=prompt, method=method, num_draft_tokens=3, **how
            )
            assert drafted.token_ids == plain.token_ids
            assert drafted.logprobs == plain.logprobs
            assert drafted.stats.drafted_tokens > 10
