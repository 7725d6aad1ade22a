import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

import jetdraft
from jetdraft import errors
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.attention import set_attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, JetdraftError, UnsupportedModelError
from jetdraft.methods.block.module import embedding_sha256
from jetdraft.methods.block.task import SourceBlockTask, SourceLesson
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.train.blocks import Blocks
from tests import edit_json, edit_manifest, filled, same_text
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import write
from tests.export.conftest import check_blocks, check_logits
from tests.sources import CONFIGS, SOURCE, START, save, save_drafter
from tests.tiny import (
    VOCAB_SIZE,
    exported,
    exported_model,
    llama_config,
    refused,
    save_checkpoint,
)
from tests.whispers import save as save_whisper

DRAFTED = "t5"
"""The family whose bundle has a drafter; an export takes seven seconds."""
SLOTS = 5
TOKENS = np.random.default_rng(1).integers(4, VOCAB_SIZE, 20).tolist()
DAMAGED = {
    "layers": ({"num_hidden_layers": 3}, "has 3 layers, but the target's decoder 2"),
    "weights": ({"target_words": "others"}, "was trained for other weights"),
    "block": ({"block_size": 65}, "fills 65 tokens, and jetdraft at most 64"),
    "none": ({"block_size": 0}, "has block_size=0; it needs a whole number"),
    "key": ({"heads": 3}, "has heads=3, which jetdraft does not know"),
    "deeper": ({"num_hidden_layers": 2}, "lacks weight 'model.decoder.block.1"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        target = save(folder / "target", CONFIGS[name])
        drafter = save_drafter(folder / "drafter", target, SLOTS)
        model = exported_model(target, folder / "bundle", head=drafter)
        return str(target), drafter, model

    return make


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, pairs, tmp_path_factory):
    """A family, a bundle, and the target; `DRAFTED` has itself as the drafter."""
    checkpoint, _, model = pairs(request.param)
    if request.param == DRAFTED:
        folder = tmp_path_factory.mktemp("itself") / "bundle"
        model = exported_model(checkpoint, folder, drafter=checkpoint)
    own = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    return request.param, model, own


def own_logits(own, text, ids):
    with torch.no_grad():
        out = own(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([ids]))
    return out.logits[0].numpy()


def test_logits_are_those_of_transformers(family):
    _, model, own = family
    target = model.parts.target
    ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, 20).tolist()
    for source in (SOURCE, SOURCE[:3], list(range(4, 64))):
        target.source.encode(source)
        check_logits(target, ids, own_logits(own, source, ids))
    model.forget()


def test_logits_of_a_tree_are_those_of_its_branches(family):
    _, model, own = family
    target, before = model.parts.target, [7, 8, 9]
    target.source.encode(SOURCE)
    filled(target, before)
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
    greedy = {"max_new_tokens": 24, "do_sample": False, "num_beams": 1}
    wanted = own.generate(torch.tensor([SOURCE]), **greedy)[0].tolist()
    assert wanted[0] == START[name]
    assert result.token_ids == wanted[1 : 1 + len(result.token_ids)]
    assert result.prompt_tokens == len(SOURCE)


def test_every_method_gives_the_text_of_plain_decoding(family):
    """T5's drafter has the row "block" of tests/runtime/test_conformance.py."""
    name, model, _ = family
    own, steps = ("draft", {}) if name == DRAFTED else ("block", {"steps": 2})
    assert {"draft", "block", "diffusion", "dflash"} & {*model.methods} == {own}
    drafts = [*model.methods[1:], "auto", f"{own},lookup"]
    for length in (1, 3):
        of_length = {"num_draft_tokens": length}
        drafts += [{"method": method, **of_length} for method in model.methods[1:]]
    drafts.append({"method": own, "drafting": {"tree": "best"}})
    drafts.append({"method": own, "num_draft_tokens": 4, "drafting": steps})
    for source in (SOURCE, SOURCE[::-1]):
        found = same_text(model, drafts, token_ids=source, max_new_tokens=50)
        assert found[-1].stats.drafted_tokens > 20


@pytest.mark.parametrize("family", [DRAFTED], indirect=True)
def test_a_drafter_that_is_the_target_is_always_right(family):
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


@pytest.fixture(scope="module")
def quantized(pair, tmp_path_factory):
    target, drafter = pair
    recipes = {"recipe": "int8", "drafter_recipe": "int8"}
    folder = tmp_path_factory.mktemp("quantized")
    return exported(target, folder / "bundle", head=drafter, **recipes)


def test_quantized_text_is_the_same_with_every_method(quantized):
    encoder = quantized.files["target-encoder.onnx.data"]["bytes"]
    # Two layers of matrices of a byte a weight, and scales: four of attention, three of
    # the MLP, two for the cross attention's rows. The tied embedding is quantized too.
    assert encoder < 1.5 * (2 * ((4 + 2) * 64 * 64 + 3 * 64 * 96) + 64 * VOCAB_SIZE)
    with jetdraft.load(quantized.path, threads=1) as model:
        assert "block" in model.methods
        methods = model.methods[1:]
        same_text(model, methods, prompt=" the self the self", max_new_tokens=24)


def test_bad_sources_and_pairs_are_refused(family, tmp_path):
    name, model, _ = family
    with pytest.raises(JetdraftError, match="the prompt has 65 tokens"):
        model.generate(token_ids=[5] * 65)
    with pytest.raises(JetdraftError, match="the prompt is empty"):
        model.generate(token_ids=[])
    with pytest.raises(JetdraftError, match="no prefix can be kept"):
        model.save_prefix(tmp_path / "prefix.npz", SOURCE)
    copy = shutil.copytree(model.bundle.path, tmp_path / "copy")
    edit_manifest(copy, start_token_ids=[])
    with pytest.raises(errors.BundleError, match="begins with tokens"):
        Bundle.open(copy)
    if name == "t5":
        return
    refused(JetdraftError, "has 64 positions", model.bundle.target.source, capacity=128)


def test_a_recipe_of_a_text_and_a_checkpoint_without_a_start_are_refused(tmp_path):
    folder = save(tmp_path / "t5", CONFIGS["t5"], tokenizer=False)
    refused(JetdraftError, "reads no text", folder, "int4-gptq")
    for file in ("config.json", "generation_config.json"):
        edit_json(folder / file, decoder_start_token_id=...)
    refused(CheckpointError, "with which token its text begins", folder)


@pytest.fixture(scope="module", params=CONFIGS)
def made(request, pairs):
    return request.param, *pairs(request.param)


def graph_of(model, source=SOURCE):
    graph = model.parts.drafter
    graph.source.encode(source)
    graph.cache.rewind(0)
    return graph


def in_training(target, drafter, count, known):
    checkpoint, task = Checkpoint.load(target, torch.float32), SourceBlockTask()
    module = task.pupil(load_head(drafter, checkpoint, torch.float32)).drafter
    ids = torch.tensor([[*TOKENS[:count], *known, *[0] * (SLOTS - len(known))]])
    source = torch.tensor([[*SOURCE, 7, 7]])
    filled = torch.tensor([[True] * len(SOURCE) + [False] * 2])
    lesson = SourceLesson(ids, ids, [], ids, ids, ids > 0, source, filled)
    anchors, real = torch.tensor([[count - 1]]), torch.ones(1, 1, dtype=torch.bool)
    blocks = Blocks(anchors, torch.tensor([[len(known)]]), real)
    slots = torch.arange(SLOTS)[None, None]
    is_given = slots < len(known)
    with torch.no_grad():
        lesson = task.encode(module, lesson)
        logits = task.logits(module, lesson, blocks, is_given, slots >= 0)
    return logits.numpy()


def test_the_graph_does_what_a_training_does(made):
    _, target, drafter, model = made
    graph, compared = graph_of(model), 0
    for start, end in ((0, 1), (1, 6), (6, 7), (7, 12)):
        for known in ((), (7, 3)):
            answer = graph.run(TOKENS[start:end], last_only=True, block=known)
            wanted = in_training(target, drafter, end, known)
            assert answer.candidates.shape[0] == SLOTS
            np.testing.assert_allclose(answer.logits, wanted, atol=1e-3, rtol=1e-3)
            assert np.ptp(wanted) > 1, "too flat to prove anything"
            compared += 1
        graph.cache.advance(end - start)
    assert compared == 8
    model.forget()


def test_the_graph_does_what_transformers_does_with_a_mask(made):
    """Not for T5, whose own bias calls all rows behind a row equally far."""
    name, target, drafter, model = made
    if name == "t5":
        pytest.skip("its bias is compared with the bias of a training")
    checkpoint = Checkpoint.load(target, torch.float32)
    own = load_head(drafter, checkpoint, torch.float32).model
    set_attention(own, "eager")
    count, known = 7, TOKENS[7:12]
    seen = torch.ones(count + SLOTS, count + SLOTS).tril().bool()
    seen[count:] = True
    with torch.no_grad():
        wanted = own(
            input_ids=torch.tensor([SOURCE]),
            decoder_input_ids=torch.tensor([TOKENS[: count + SLOTS]]),
            decoder_attention_mask=(~seen)[None, None].float() * -1e9,
            use_cache=False,
        ).logits[0, count:]
    answer = graph_of(model).run(TOKENS[:count], last_only=True, block=known)
    np.testing.assert_allclose(answer.logits, wanted.numpy(), atol=1e-4, rtol=1e-4)
    model.forget()


def test_blocks(made):
    """They stay outside of the context, and are about the source."""
    *_, model = made
    graph = graph_of(model)

    def run(start, end, block=()):
        return graph.run(TOKENS[start:end], last_only=True, block=block)

    check_blocks(graph, run)
    assert graph.contract.slots == graph.contract.capacity + 2 * SLOTS
    one, other = (
        graph_of(model, source).run(TOKENS[:4], True).logits[0].copy()
        for source in (SOURCE, SOURCE[::-1])
    )
    assert np.abs(one - other).max() > 1e-3
    model.forget()


def test_greedy_verification_with_one_best_token_is_plain_decoding(made):
    *_, model = made
    how = {"token_ids": SOURCE, "method": "block", "num_draft_tokens": SLOTS}
    how |= {"max_new_tokens": 40, "ignore_eos": True, "exact": False}

    def figures(**drafting):
        result = model.generate(**how, drafting={"confidence": 0.0, **drafting})
        assert result.stats.lossy == ("verifier tolerant" if drafting else "")
        return result.token_ids, result.stats.accepted_tokens

    # Of the same widths: others may round another token.
    walk = figures()
    for top, tolerance in ((1, 100.0), (64, 0.0)):
        assert figures(verifier="tolerant", top=top, tolerance=tolerance) == walk
    wide = figures(verifier="tolerant", top=64, tolerance=1000.0)
    if len(set(walk[0])) > 3:  # a text of one token stays as it is
        assert wide[0] != walk[0]
        assert wide[1] > walk[1]
    drafting = {"verifier": "tolerant", "top": 1}
    with pytest.raises(errors.OptionError, match=r"neither the text .* add --no-exact"):
        model.generate(token_ids=SOURCE, method="block", drafting=drafting)


def test_what_the_bundle_says(made):
    name, _, _, model = made
    entry = model.bundle.drafter
    contract = entry.contract
    assert contract.block == SLOTS
    assert contract.kv_shapes == ((4, 16),)
    assert contract.source_slots == model.bundle.target.contract.source_slots == 64
    assert contract.relative_positions == (name == "t5")
    assert entry.encoder_file == "drafter-encoder.onnx"
    assert entry.tree_file is None
    assert not contract.learns


def test_the_embedding_is_stored_once(quantized):
    for file, owner in (
        ("drafter.onnx", "target.onnx.data"),
        ("drafter-encoder.onnx", "target-encoder.onnx.data"),
    ):
        model = onnx.load(quantized.path / file, load_external_data=False)
        shared = [
            tuple(tensor.dims)
            for tensor in model.graph.initializer
            if any(entry.value == owner for entry in tensor.external_data)
        ]
        assert any(dims[0] == VOCAB_SIZE for dims in shared), (file, shared)


@pytest.fixture(scope="module")
def pair(pairs):
    return pairs("t5")[:2]


def test_pairs_that_do_not_fit_are_refused(pair, tmp_path):
    target, drafter = pair
    bart = save(tmp_path / "bart", CONFIGS["bart"])
    refused(CheckpointError, "is not for a bart", bart, head=drafter)
    llama = save_checkpoint(tmp_path / "llama", llama_config())
    alone = "is a decoder alone, and a drafter of kind block"
    refused(UnsupportedModelError, alone, llama, head=drafter)
    whisper = save_whisper(tmp_path / "whisper")
    refused(UnsupportedModelError, "hears, and a drafter", whisper, head=drafter)
    dflash = write(tmp_path / "dflash", *layouts.dflash())
    other = "is an encoder-decoder, and a head for it is a drafter of"
    refused(UnsupportedModelError, other, target, head=dflash)
    said, cut = "leave --draft-vocab out", {"draft_vocab": 50}
    refused(errors.OptionError, said, target, head=drafter, **cut)


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_drafter_is_refused(pair, tmp_path, case):
    target, drafter = pair
    changes, message = DAMAGED[case]
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    edit_json(folder / "config.json", **changes)
    refused(CheckpointError, message, target, head=folder)


def test_a_drafter_knows_its_target_by_the_words(pair, tmp_path):
    target, drafter = pair
    other = shutil.copytree(target, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["shared.weight"] = tensors["shared.weight"].flip(0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = "was trained for other weights; give the drafter that was trained for"
    refused(CheckpointError, said, other, head=drafter)
    hashes = {
        embedding_sha256(Checkpoint.load(target, dtype))
        for dtype in (torch.float32, torch.float16)
    }
    fields = json.loads(Path(drafter, "config.json").read_text())
    assert hashes == {fields["target_words"]}


def test_a_drafter_knows_its_target_in_another_padding(pair, tmp_path):
    target, drafter = pair
    wide = shutil.copytree(target, tmp_path / "wide")
    model = AutoModelForSeq2SeqLM.from_pretrained(wide)
    model.resize_token_embeddings(VOCAB_SIZE + 32, mean_resizing=False)
    model.save_pretrained(wide)
    checkpoint = Checkpoint.load(str(wide), torch.float32)
    load_head(str(drafter), checkpoint, torch.float32)


def test_a_tensor_of_another_size_is_refused(pair, tmp_path):
    target, drafter = pair
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    tensors = load_file(folder / "model.safetensors")
    tensors["masks"] = torch.zeros(SLOTS, 32)
    save_file(tensors, folder / "model.safetensors")
    message = r"masks of .* is \[5, 32\], but its config and the target need \[5, 64\]"
    refused(CheckpointError, message, target, head=folder)
