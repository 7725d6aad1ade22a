"""Block drafters of encoder-decoders in a bundle: what a block sees, and the text."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

import jetdraft
from jetdraft.checkpoints.attention import set_attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, OptionError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.block.module import embedding_sha256
from jetdraft.methods.block.task import SourceBlockTask, SourceLesson
from jetdraft.recipe import Recipe
from jetdraft.train.blocks import Blocks
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import write
from tests.exports import exported
from tests.sources import CONFIGS, SOURCE, save, save_drafter
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint
from tests.whispers import save as save_whisper

SLOTS = 5
TOKENS = np.random.default_rng(1).integers(4, VOCAB_SIZE, 20).tolist()


@pytest.fixture(scope="module", params=CONFIGS)
def made(request, tmp_path_factory):
    """The name of a family, a target, its drafter, and a model of both."""
    folder = tmp_path_factory.mktemp(request.param)
    target = save(folder / "target", CONFIGS[request.param])
    drafter = save_drafter(folder / "drafter", target, SLOTS)
    exported(target, folder / "bundle", head=drafter)
    model = jetdraft.load(folder / "bundle", threads=1)
    return request.param, str(target), drafter, model


def graph_of(model, source=SOURCE):
    graph = model.parts.drafter
    graph.source.encode(source)
    graph.cache.rewind(0)
    return graph


def in_training(target, drafter, count, known):
    """The logits of the block behind `count` rows, as a training computes them."""
    checkpoint = Checkpoint.load(target, torch.float32)
    task = SourceBlockTask()
    module = task.pupil(load_head(drafter, checkpoint, torch.float32)).drafter
    ids = torch.tensor([[*TOKENS[:count], *known, *[0] * (SLOTS - len(known))]])
    # Padding must not be seen.
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


def test_rows_of_a_block_are_no_context(made):
    """After a block the same text gives the same bits, as if it had not been."""
    *_, model = made
    graph = graph_of(model)
    graph.run(TOKENS[:4], last_only=True)
    graph.cache.advance(4)
    first = graph.run(TOKENS[4:6], last_only=True).logits.copy()
    graph.run(TOKENS[4:6], last_only=True, block=(1, 2, 3, 4))
    assert np.array_equal(graph.run(TOKENS[4:6], last_only=True).logits, first)
    model.forget()


def test_the_source_and_both_ends_of_a_block_count(made):
    *_, model = made
    unknown = [VOCAB_SIZE] * (SLOTS - 1)
    first, other = (
        graph_of(model).run(TOKENS[:4], True, block=[*unknown, token]).logits[0].copy()
        for token in (4, 9)
    )
    assert np.abs(first - other).max() > 1e-3
    about = graph_of(model, SOURCE[::-1]).run(TOKENS[:4], True, block=[*unknown, 4])
    assert np.abs(first - about.logits[0]).max() > 1e-3
    model.forget()


def test_a_block_takes_the_spare_slots(made):
    """Behind the last row, and behind the last position of a table."""
    *_, model = made
    graph = graph_of(model)
    assert graph.contract.slots == graph.contract.capacity + 2 * SLOTS
    for _ in range(4):
        answer = graph.run([5] * 16, last_only=True)
        graph.cache.advance(16)
        assert np.isfinite(answer.logits).all()
    assert graph.cache.room == 0
    model.forget()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
def test_its_drafts_change_no_text(made, options):
    *_, model = made
    assert "block" in model.methods
    assert not {"draft", "diffusion", "dflash"} & set(model.methods)
    how = {**options, "max_new_tokens": 50, "ignore_eos": True}
    for source in (SOURCE, SOURCE[::-1]):
        plain = model.generate(token_ids=source, method="none", **how)
        for drafting in (
            {"num_draft_tokens": 5, "drafting": {"confidence": 0.0}},
            {"num_draft_tokens": 4, "drafting": {"confidence": 0.0, "steps": 2}},
            {"drafting": {"tree": "best"}},
            {},
        ):
            drafted = model.generate(
                token_ids=source, method="block", **how, **drafting
            )
            assert drafted.token_ids == plain.token_ids, drafting
            if drafting:
                assert drafted.stats.drafted_tokens > 20
        for method in ("block,lookup", "auto"):
            drafted = model.generate(token_ids=source, method=method, **how)
            assert drafted.token_ids == plain.token_ids, method


def test_greedy_verification_with_one_best_token_is_plain_decoding(made):
    """More tokens within a larger tolerance change the text."""
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
    with pytest.raises(OptionError, match=r"neither the text .* add --no-exact"):
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


def test_the_embedding_is_stored_once(tmp_path):
    target = save(tmp_path / "target", CONFIGS["t5"])
    drafter = save_drafter(tmp_path / "drafter", target, SLOTS)
    recipes = {"recipe": "int8", "drafter_recipe": "int8"}
    bundle = exported(target, tmp_path / "bundle", head=drafter, **recipes)
    for file, owner in (
        ("drafter.onnx", "target.onnx.data"),
        ("drafter-encoder.onnx", "target-encoder.onnx.data"),
    ):
        model = onnx.load(bundle.path / file, load_external_data=False)
        shared = [
            tuple(tensor.dims)
            for tensor in model.graph.initializer
            if any(entry.value == owner for entry in tensor.external_data)
        ]
        assert any(dims[0] == VOCAB_SIZE for dims in shared), (file, shared)
    with jetdraft.load(bundle.path, threads=1) as model:
        texts = [
            model.generate(
                token_ids=SOURCE, method=method, max_new_tokens=30, ignore_eos=True
            ).token_ids
            for method in ("none", "block")
        ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save(folder / "t5", CONFIGS["t5"])
    return str(target), save_drafter(folder / "drafter", target, SLOTS)


def refused(target, head, error, message, output):
    with pytest.raises(error, match=message) as caught:
        exported(target, output, head=head)
    assert "\n" not in str(caught.value)
    assert not output.exists()


def test_pairs_that_do_not_fit_are_refused(pair, tmp_path):
    target, drafter = pair
    output = tmp_path / "out"
    bart = save(tmp_path / "bart", CONFIGS["bart"])
    refused(bart, drafter, CheckpointError, "is not for a bart", output)
    llama = save_checkpoint(tmp_path / "llama", llama_config())
    alone = "is a decoder alone, and a drafter of kind block"
    refused(llama, drafter, UnsupportedModelError, alone, output)
    whisper = save_whisper(tmp_path / "whisper")
    refused(whisper, drafter, UnsupportedModelError, "hears, and a drafter", output)
    dflash = write(tmp_path / "dflash", *layouts.dflash())
    other = "is an encoder-decoder, and a head for it is a drafter of"
    refused(target, dflash, UnsupportedModelError, other, output)
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16, draft_vocab=50)
    with pytest.raises(OptionError, match="leave --draft-vocab out"):
        export(target, output, options=options, head=drafter)


DAMAGED = {
    "layers": ({"num_hidden_layers": 3}, "has 3 layers, but the target's decoder 2"),
    "weights": ({"target_words": "others"}, "was trained for other weights"),
    "block": ({"block_size": 65}, "fills 65 tokens, and jetdraft at most 64"),
    "none": ({"block_size": 0}, "has block_size=0; it needs a whole number"),
    "key": ({"heads": 3}, "has heads=3, which jetdraft does not know"),
    "deeper": ({"num_hidden_layers": 2}, "lacks weight 'model.decoder.block.1"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_drafter_is_refused(pair, tmp_path, case):
    target, drafter = pair
    changes, message = DAMAGED[case]
    folder = shutil.copytree(drafter, tmp_path / "drafter")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    refused(target, folder, CheckpointError, message, tmp_path / "out")


def test_a_drafter_knows_its_target_by_the_words(pair, tmp_path):
    """In each type that the target is loaded in."""
    target, drafter = pair
    other = shutil.copytree(target, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["shared.weight"] = tensors["shared.weight"].flip(0)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = "was trained for other weights; give the drafter that was trained for"
    refused(other, drafter, CheckpointError, said, tmp_path / "out")
    hashes = {
        embedding_sha256(Checkpoint.load(target, dtype))
        for dtype in (torch.float32, torch.float16)
    }
    fields = json.loads((drafter / "config.json").read_text())
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
    refused(target, folder, CheckpointError, message, tmp_path / "out")
