"""Encoder-decoders: the graphs' logits are transformers', and every method writes
the text of plain decoding."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.errors import BundleError, CheckpointError, JetdraftError
from jetdraft.runtime.planning.drafting import Drafting
from tests import manifests
from tests.exports import exported
from tests.sources import CONFIGS, SOURCE, START, save
from tests.tiny import VOCAB_SIZE

DRAFTED = "t5"
"""The family whose bundle has a drafter; an export takes seven seconds."""


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    """A checkpoint of a family, and its bundle; `DRAFTED` has itself as the drafter."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = save(folder / "checkpoint", CONFIGS[request.param])
    drafter = checkpoint if request.param == DRAFTED else None
    bundle = exported(checkpoint, folder / "bundle", drafter=drafter)
    model = jetdraft.load(bundle.path, threads=1)
    own = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    return request.param, model, own


def own_logits(own, source, ids):
    with torch.no_grad():
        output = own(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])
        )
    return output.logits[0].numpy()


def test_logits_are_those_of_transformers(family):
    _, model, own = family
    target = model.parts.target
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, 20).tolist()
    for source in (SOURCE, SOURCE[:3], list(range(4, 64))):
        target.source.encode(source)
        target.cache.rewind(0)
        wanted = own_logits(own, source, ids)
        for start, end in ((0, 9), (9, 10), (10, 20)):
            found = target.run(ids[start:end]).logits
            np.testing.assert_allclose(found, wanted[start:end], atol=1e-4, rtol=1e-4)
            target.cache.advance(end - start)
    model.forget()


def test_logits_of_a_tree_are_those_of_its_branches(family):
    _, model, own = family
    target, before = model.parts.target, [7, 8, 9]
    target.source.encode(SOURCE)
    target.cache.rewind(0)
    target.run(before)
    target.cache.advance(len(before))
    # Rows 1 and 2 follow row 0, row 3 follows row 2.
    tokens, depths, ancestors = [20, 30, 40, 50], [0, 1, 1, 2], [[], [0], [0], [0, 2]]
    found = target.run_branches(tokens, depths, ancestors).logits
    for row, path in enumerate(ancestors):
        ids = [*before, *(tokens[place] for place in path), tokens[row]]
        wanted = own_logits(own, SOURCE, ids)[-1]
        np.testing.assert_allclose(found[row], wanted, atol=1e-4, rtol=1e-4)
    model.forget()


def test_greedy_text_is_that_of_transformers(family):
    name, model, own = family
    result = model.generate(token_ids=SOURCE, method="none", max_new_tokens=24)
    wanted = own.generate(
        torch.tensor([SOURCE]), max_new_tokens=24, do_sample=False, num_beams=1
    )[0].tolist()
    assert wanted[0] == START[name]
    assert result.token_ids == wanted[1 : 1 + len(result.token_ids)]
    assert result.prompt_tokens == len(SOURCE)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
def test_every_method_gives_the_text_of_plain_decoding(family, options):
    name, model, _ = family
    assert ("draft" in model.methods) == (name == DRAFTED)
    options = {**options, "max_new_tokens": 40, "ignore_eos": True}
    for source in (SOURCE, SOURCE[::-1]):
        plain = model.generate(token_ids=source, method="none", **options)
        for method in (*model.methods[1:], "auto"):
            for length in (1, 3, None) if method != "auto" else (None,):
                result = model.generate(
                    token_ids=source, method=method, num_draft_tokens=length, **options
                )
                assert result.token_ids == plain.token_ids, (method, length)
    if name == DRAFTED:
        way = {"method": "draft", "drafting": {"tree": "best"}}
        tree = model.generate(token_ids=SOURCE[::-1], **way, **options)
        assert tree.token_ids == plain.token_ids


@pytest.mark.parametrize("family", [DRAFTED], indirect=True)
def test_a_drafter_that_is_the_target_is_always_right(family):
    """A drafter that reads another source, or none, is not."""
    _, model, _ = family
    how = {"max_new_tokens": 24, "num_draft_tokens": 3, "ignore_eos": True}
    for source in (SOURCE, SOURCE[::-1], SOURCE):
        stats = model.generate(token_ids=source, method="draft", **how).stats
        assert stats.accepted_by_position == [1.0, 1.0, 1.0]


def test_lookup_drafts_from_the_source(family):
    _, model, _ = family
    lookup = model.planner.proposer_set(Drafting("lookup")).proposers[0]
    model.parts.encode_source([40, 41, 42, 43, 44])
    lookup.begin([3], None)
    assert lookup.propose([3, 40, 41, 42], 2).tokens == [42, 43, 44]


def test_a_source_is_encoded_once_and_never_mixed_up(family):
    _, model, _ = family
    options = {"method": "none", "max_new_tokens": 12, "ignore_eos": True}
    first = model.generate(token_ids=SOURCE, **options).token_ids
    other = model.generate(token_ids=SOURCE[:4], **options).token_ids
    source = model.parts.target.source
    assert source.tokens == SOURCE[:4]
    before = source.seconds
    assert model.generate(token_ids=SOURCE[:4], **options).token_ids == other
    assert source.seconds == before
    assert model.generate(token_ids=SOURCE, **options).token_ids == first
    assert model.twin().generate(token_ids=SOURCE[:4], **options).token_ids == other
    assert model.generate(token_ids=SOURCE, **options).token_ids == first


def test_quantized_text_is_the_same_with_every_method(tmp_path):
    checkpoint = save(tmp_path / "checkpoint", CONFIGS["t5"])
    bundle = exported(checkpoint, tmp_path / "bundle", "int8")
    encoder = bundle.files["target-encoder.onnx.data"]["bytes"]
    # Two layers of matrices of a byte a weight, and scales: four of attention, three of
    # the MLP, two for the cross attention's rows. The tied embedding is quantized too.
    weights = 2 * ((4 + 2) * 64 * 64 + 3 * 64 * 96) + 64 * VOCAB_SIZE
    assert encoder < 1.5 * weights
    with jetdraft.load(tmp_path / "bundle", threads=1) as model:
        texts = [
            model.generate(
                " the self the self", method=method, max_new_tokens=24, ignore_eos=True
            ).token_ids
            for method in model.methods
        ]
    assert all(text == texts[0] for text in texts)


def test_bad_sources_and_pairs_are_refused(family, tmp_path):
    name, model, _ = family
    with pytest.raises(JetdraftError, match="the prompt has 65 tokens"):
        model.generate(token_ids=[5] * 65)
    with pytest.raises(JetdraftError, match="the prompt is empty"):
        model.generate(token_ids=[])
    with pytest.raises(JetdraftError, match="no prefix can be kept"):
        model.save_prefix(tmp_path / "prefix.npz", SOURCE)
    copy = shutil.copytree(model.bundle.path, tmp_path / "copy")
    manifest = manifests.read(copy)
    manifest["start_token_ids"] = []
    manifests.write(copy, manifest)
    with pytest.raises(BundleError, match="begins with tokens"):
        Bundle.open(copy)
    if name == "t5":
        return
    with pytest.raises(JetdraftError, match="has 64 positions"):
        exported(model.bundle.target.source, tmp_path / "out", capacity=128)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_a_start_is_refused(tmp_path):
    folder = save(tmp_path / "t5", CONFIGS["t5"], tokenizer=False)
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((folder / file).read_text())
        fields.pop("decoder_start_token_id", None)
        (folder / file).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="with which token its text begins"):
        exported(folder, tmp_path / "out")


def test_recipes_that_read_a_text_are_refused(tmp_path):
    folder = save(tmp_path / "t5", CONFIGS["t5"], tokenizer=False)
    with pytest.raises(JetdraftError, match="reads no text"):
        exported(folder, tmp_path / "out", "int4-gptq")
