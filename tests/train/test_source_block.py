import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, T5Config

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import DataError, OptionError, UnsupportedModelError
from jetdraft.methods.block import task as module
from jetdraft.methods.block.module import SourceDrafter, source_config, spread_layers
from jetdraft.methods.block.task import SourceBatch, SourceBlockTask, make_source_lesson
from jetdraft.methods.dflash.task import DFlashTask
from jetdraft.methods.diffusion.task import DiffusionTask
from jetdraft.methods.draft.task import ModelTask
from jetdraft.methods.eagle.task import EagleTask
from jetdraft.train.attention import Masked, Masks
from jetdraft.train.blocks import Blocks
from jetdraft.train.data import IGNORED, Example, collate
from jetdraft.train.task import TrainingOptions
from tests import same_text
from tests.sources import CONFIGS, T5, save, save_drafter
from tests.tiny import WORDS, exported, llama_config, save_checkpoint
from tests.train.periodic import descend, made
from tests.whispers import save as save_whisper

SLOTS = 5
QUICK = TrainingOptions(steps=4, batch_size=4, sequence_length=64, validate_every=2)
LONGER = replace(
    QUICK, steps=500, learning_rate=3e-3, validate_every=500, validation_share=0.2
)
SETTINGS = module.SourceBlockSettings(layers=1, block_rows=SLOTS, anchors=8)
SOURCES = [f" {word} {other}" for word in WORDS[:4] for other in WORDS[4:6]]
LINES = {
    source: " " + " ".join(random.Random(source).choices(WORDS, k=14))
    for source in SOURCES
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    data = folder / "pairs.jsonl"
    pairs = [{"prompt": s, "completion": line} for s, line in LINES.items()]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in 3 * pairs))
    base = save(folder / "base", CONFIGS["t5"])
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    words = Tokenizer.from_file(str(base / "tokenizer.json"))
    rows = []
    for source, line in LINES.items():
        prompt = words.encode(source).ids
        ids = [*prompt, *words.encode(line).ids, 0]
        rows.append(Example.completed(ids, len(prompt)))
    batch = SourceBatch.of(collate(rows), (3,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        logits = model(
            input_ids=batch.source,
            attention_mask=batch.filled.long(),
            decoder_input_ids=batch.ids,
        ).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        descend(optimizer, loss)
    assert loss < 0.05
    target = folder / "target"
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((base / name).read_text())
    return folder, str(target), data


def prepare(world, output, options=QUICK, data=None, **changes):
    settings, data = replace(SETTINGS, **changes), [data or world[2]]
    return made(SourceBlockTask, world[1], output, data, settings, options)


@pytest.fixture(scope="module")
def trained(world):
    folder, seen = world[0] / "drafter", []
    run = prepare(world, folder, LONGER, glancing=0.0)
    figures = run.run(seen.append)
    return run, seen[0].validation, figures, str(folder)


def drafted(bundle, mix_up=False, **how):
    tokens = passes = 0
    with jetdraft.load(bundle, threads=1) as model:
        if mix_up:
            other = model.prompt(SOURCES[0]).tolist()
            source = model.parts.drafter.source
            source.encode(other)
            source.encode = lambda material: False
        draft = {"method": "block", "num_draft_tokens": SLOTS}
        draft["drafting"] = {"confidence": 0.0}
        for source in SOURCES[1:]:
            more = {"prompt": source, "max_new_tokens": 24, "ignore_eos": False}
            [result] = same_text(model, [draft], [how], **more)
            tokens += len(result.token_ids)
            passes += result.stats.target_passes
    return tokens / passes


def test_a_trained_drafter_is_right_more_often(world, trained, tmp_path):
    _, before, figures, folder = trained
    assert len(figures["acceptance"]) == SLOTS
    assert figures["tokens_per_pass"] > 3 > 2 > before["tokens_per_pass"]
    wrong = save_drafter(tmp_path / "untrained", world[1], SLOTS)
    bundle = exported(world[1], tmp_path / "right", head=folder).path
    other = exported(world[1], tmp_path / "wrong", head=wrong).path
    right = drafted(bundle)
    assert right > 2.5 > 1.6 > drafted(other)
    assert drafted(bundle, temperature=0.7, seed=3) > 2
    assert drafted(bundle, mix_up=True) < 0.85 * right


def test_the_folder_reads_back_as_it_was(world, trained):
    run, _, _, folder = trained
    checkpoint = Checkpoint.load(world[1], torch.float32)
    drafter = load_head(folder, checkpoint, torch.float32)
    assert drafter.config == run.task.config
    named = dict(drafter.named_parameters())
    for key, weight in run.weights.items():
        torch.testing.assert_close(named[key], weight.detach())
    shared = {id(weight) for weight in checkpoint.model.parameters()}
    assert {key for key in named if id(named[key]) in shared} == {"model.shared.weight"}
    fields = json.loads((Path(folder) / "config.json").read_text())
    assert (fields["block_size"], fields["target_type"]) == (SLOTS, "t5")
    tensors = load_file(folder + "/model.safetensors")
    assert tensors.keys() == run.weights.keys()
    assert not any("shared" in key or "lm_head" in key for key in tensors)


def test_it_begins_as_the_target(world, tmp_path):
    run = prepare(world, tmp_path / "out", layers=2)
    theirs = run.target.model.state_dict()
    for name, weight in run.weights.items():
        if name != "masks":
            torch.testing.assert_close(weight, theirs[name.removeprefix("model.")])
    words, masks = theirs["shared.weight"], run.weights["masks"].detach()
    assert masks.shape == (SLOTS, 64)
    assert float(masks.std()) == pytest.approx(float(words.std()), rel=0.2)


def test_its_layers_are_spread_over_those_of_the_target(tmp_path):
    assert spread_layers(1, 8) == [0]
    assert spread_layers(2, 8) == [0, 7]
    assert spread_layers(3, 8) == [0, 4, 7]
    assert spread_layers(4, 4) == [0, 1, 2, 3]
    deep = T5Config(**{**T5, "num_decoder_layers": 4})
    checkpoint = Checkpoint.load(str(save(tmp_path / "deep", deep)), torch.float32)
    drafter = SourceDrafter(source_config(checkpoint, 2, 3), checkpoint.model)
    theirs = checkpoint.model.decoder.block
    for mine, other in zip(drafter.get_decoder().block, theirs[::3], strict=True):
        for name, weight in other.named_parameters():
            assert torch.equal(dict(mine.named_parameters())[name], weight)
    numbers = [layer.layer[0].SelfAttention.layer_idx for layer in theirs]
    assert numbers == [0, 1, 2, 3], "the target keeps its own"
    mine = drafter.get_decoder().block
    mine = [layer.layer[1].EncDecAttention.layer_idx for layer in mine]
    assert mine == [0, 1]


def test_a_share_of_the_wrong_guesses_is_told(world, tmp_path):
    """Half of them in training, and nothing in a validation."""
    run = prepare(world, tmp_path / "out", known_share=0.0)
    batch = SourceBatch.of(run.corpus.batch(0, 4), run.target.start_token_ids)
    task, drafter = run.task, run.module.drafter
    lesson = task.encode(drafter, make_source_lesson(run.target.model, batch, 0.0))
    blocks = task.blocks(run, batch, learns=True)
    places = blocks.anchors[..., None] + 1 + torch.arange(SLOTS)
    whole = (places < batch.ids.shape[1]) & blocks.is_real[..., None]
    places = places.clamp(max=batch.ids.shape[1] - 1)
    labels = batch.labels.gather(1, places.flatten(1)).view(places.shape)
    is_open = whole & (labels != IGNORED)

    def shown_of(share, learns=True):
        own = replace(lesson, glancing=share)
        return task.shown(drafter, own, blocks, is_open, learns)

    shown = {share: shown_of(share) for share in (0.0, 0.5, 1.0)}
    assert not any((one & ~is_open).any() for one in shown.values())
    wrong = shown[1.0].sum(-1)
    assert not shown[0.0].any()
    assert (shown[1.0] | ~shown[0.5]).all()
    assert torch.equal(shown[0.5].sum(-1), (wrong * 0.5).round().long())
    assert wrong.sum() > wrong.numel()
    assert not shown_of(1.0, learns=False).any()


def test_blocks_begin_at_the_start_of_a_text():
    rows = [Example.completed([5, 6, 7, 8, 9], 2), Example.completed([5, 6], 1)]
    batch = SourceBatch.of(collate(rows), (3, 4))
    assert batch.source.tolist() == [[5, 6], [5, 0]]
    assert batch.filled.tolist() == [[True, True], [True, False]]
    assert batch.ids.tolist() == [[3, 4, 7, 8, 9], [3, 4, 6, 0, 0]]
    no = IGNORED
    assert batch.labels.tolist() == [[no, no, 7, 8, 9], [no, no, 6, no, no]]
    spread = Blocks.spread(batch, 3, first=0)
    assert spread.anchors.tolist() == [[1, 2, 3], [1, 0, 0]]
    assert spread.is_real.tolist() == [[True] * 3, [True, False, False]]


def test_prompts_alone_are_completed_by_the_target(world, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": s}) + "\n" for s in SOURCES))
    run = prepare(world, tmp_path / "out", data=data)
    words = Tokenizer.from_str(run.target.tokenizer)
    texts = [*run.corpus.training, *run.corpus.validation]
    known = {(*words.encode(s).ids, *words.encode(t).ids, 0) for s, t in LINES.items()}
    # Sampled, so that some may have left their lines.
    assert sum(tuple(text.ids) in known for text in texts) >= len(SOURCES) // 2


def test_texts_without_a_source_are_refused(world, tmp_path):
    data = tmp_path / "text.txt"
    data.write_text(LINES[SOURCES[0]] * 40)
    with pytest.raises(DataError, match="the data has texts without one"):
        prepare(world, tmp_path / "out", data=data)
    assert not (tmp_path / "out").exists()


def test_sequences_longer_than_a_table_of_positions_are_refused(world, tmp_path):
    bart = save(tmp_path / "bart", CONFIGS["bart"])
    options = replace(QUICK, sequence_length=65)
    with pytest.raises(OptionError, match="more than the target's 64 positions"):
        prepare((None, str(bart), world[2]), tmp_path / "out", options)
    prepare((None, str(bart), world[2]), tmp_path / "out", QUICK)


def test_targets_of_other_kinds_are_refused(world, tmp_path):
    llama = str(save_checkpoint(tmp_path / "llama", llama_config()))
    whisper = str(save_whisper(tmp_path / "whisper"))
    for target, fact in ((llama, "is a decoder alone"), (whisper, "hears")):
        with pytest.raises(UnsupportedModelError, match=fact):
            prepare((None, target, world[2]), tmp_path / "out")
    for task in (EagleTask, ModelTask, DFlashTask, DiffusionTask):
        with pytest.raises(UnsupportedModelError, match=r"an encoder-.* train block"):
            made(task, world[1], tmp_path / "out", [world[2]])
    assert not (tmp_path / "out").exists()


def test_two_models_in_one_process_keep_their_masks_apart(world):
    texts = torch.tensor([[5, 6, 7, 8]])
    models = [AutoModelForSeq2SeqLM.from_pretrained(world[1]) for _ in range(2)]
    masked = [Masked(model) for model in models]
    seen = Masks(torch.zeros(1, 1, 1, 4))
    half = Masks(torch.tensor([[[[0.0, 0.0, -1e4, -1e4]]]]))

    def states(number):
        with torch.no_grad():
            return models[number].get_encoder()(texts).last_hidden_state

    with masked[0].adding(seen):
        alone = states(0)
        with masked[1].adding(half):
            torch.testing.assert_close(states(0), alone)
            assert (states(1) - alone).abs().max() > 1e-3
