from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import jetdraft
from jetdraft.bundle import check_pair
from jetdraft.errors import OptionError, PairError, UnsupportedModelError
from jetdraft.methods.glide.task import GlideTask
from tests.tiny import HYBRIDS, refused, save_checkpoint
from tests.train.attached.conftest import in_torch, sized
from tests.train.periodic import QUICK, made

METHOD, LAYERS = "glide", 2


@pytest.mark.parametrize("sliced", [True, False])
def test_the_graph_is_the_module(target, head, tmp_path, sliced, monkeypatch):
    if not sliced:  # as on a GPU, where a slice would ask the host for its size
        monkeypatch.setattr("jetdraft.export.drafters.slice_target_buffers", Mock())
    bundle = sized(target, tmp_path / "b", head=head)
    whole, module = in_torch(target, head)
    tokens = np.random.default_rng(6).integers(1, 288, 12).tolist()
    ids, committed = torch.tensor(tokens)[None], 7
    with torch.no_grad():
        last = whole(ids, use_cache=True).past_key_values.layers[-1]
        bias = torch.where(torch.arange(12) >= committed, -1e4, 0.0)[None, None, None]
        rows = torch.arange(12)[None]
        hidden = module(ids, rows, last.keys, last.values, bias, DynamicCache())
        logits = module.lm_head(hidden)[0].numpy()
    with jetdraft.load(bundle.path, threads=1) as model:
        parts = model.parts
        assert parts.drafter.target_cache is parts.target.cache
        parts.target.run(tokens)  # all rows are in the buffers, but not all count
        parts.target.cache.advance(committed)
        held = [buffer.numpy().copy() for buffer in parts.target.cache.buffers.values()]
        parts.drafter.run(tokens[:8], last_only=True)
        parts.drafter.cache.advance(8)
        answer = parts.drafter.run(tokens[8:])
        np.testing.assert_allclose(answer.logits, logits[8:], atol=2e-4)
        for one, buffer in zip(held, parts.target.cache.buffers.values(), strict=True):
            assert np.array_equal(one, buffer.numpy())
        parts.target.cache.rewind(committed - 3)
        assert np.abs(parts.drafter.run(tokens[8:]).logits - logits[8:]).max() > 0.01


def test_a_hybrid_lends_its_last_keys_or_is_refused_in_a_line(text, tmp_path):
    """LFM2 ends with a convolution; Qwen3.5 rotates a quarter of its keys."""
    for name in ("lfm2", "qwen3_5"):
        save_checkpoint(tmp_path / name, HYBRIDS[name]())
    files = tmp_path / "out", [text], None, QUICK
    assert made(GlideTask, str(tmp_path / "lfm2"), *files).run()["losses"]
    with pytest.raises(UnsupportedModelError, match="rotates 4 of 16 numbers"):
        made(GlideTask, str(tmp_path / "qwen3_5"), tmp_path / "no", *files[1:])


def test_without_its_output_the_cross_attention_does_nothing(target, head):
    _, module = in_torch(target, head)
    module.cross["o_proj"].weight.zero_()
    ids, rows = torch.arange(1, 7)[None], torch.arange(6)[None]
    bias = torch.zeros(1, 1, 1, 6)
    one, other = (
        module(ids, rows, *(torch.randn(2, 1, 2, 6, 16)), bias) for _ in range(2)
    )
    torch.testing.assert_close(one, other)


def test_a_pair_whose_buffers_do_not_fit_is_refused(bundle):
    own, drafter = bundle.target.contract, bundle.drafter.contract
    assert drafter.reads == ((1, 2, 16),)
    for wrong in (
        replace(own, kv_shapes=own.kv_shapes[:1]),
        replace(own, kv_shapes=((2, 16), (1, 16))),
        replace(own, kv_bits=8),
    ):
        with pytest.raises(PairError, match=r"reads 2 heads of 16 floats .* layer 1"):
            check_pair(wrong, drafter)


def test_integer_buffers_are_refused_before_anything_is_written(target, head, tmp_path):
    said = "reads the target's buffers in floats"
    refused(OptionError, said, target, "int4-rtn-kv8", head=head)


def test_it_does_not_learn_from_use(bundle, tmp_path):
    with pytest.raises(OptionError, match="learns from use"):
        jetdraft.load(bundle.path, learn=tmp_path / "use")
