"""Embeddings and LM heads with other rows than the target's: what counts are tokens."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import jetdraft
from jetdraft.errors import PairError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests import sources
from tests.exports import exported
from tests.ggufs import write_gguf
from tests.tiny import VOCAB_SIZE, WORDS, llama_config, save_checkpoint, save_tokenizer

MAX_VOCAB_SIZE = VOCAB_SIZE + 64
PAIRS = [(320, 288), (320, 320), (320, 352), (288, 352), (320, 280)]
"""Rows of the target and of the drafter; the tokenizer has 288 tokens."""

PROMPT = [5, 9, 200, 31, 64, 77]
UNUSED = 5
"""The type of a GGUF file's tokens without a meaning."""

WAYS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Makes one model with that many rows: cut, or with random rows behind them."""
    folder = tmp_path_factory.mktemp("padded")
    config = llama_config(
        tie_word_embeddings=False, vocab_size=MAX_VOCAB_SIZE, num_hidden_layers=1
    )
    whole = save_checkpoint(folder / "whole", config)

    def make(rows, tied=False):
        copy = shutil.copytree(whole, folder / f"{rows}-{tied}", dirs_exist_ok=True)
        fields = json.loads((copy / "config.json").read_text())
        fields |= {"vocab_size": rows, "tie_word_embeddings": tied}
        (copy / "config.json").write_text(json.dumps(fields))
        weights = load_file(whole / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:rows].clone()
        if tied:
            del weights["lm_head.weight"]
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    return make


@pytest.fixture(scope="module")
def opened(padded, tmp_path_factory):
    """Opens the bundle of a target and a drafter with that many rows, once."""
    models = {}

    def make(rows, drafter_rows):
        if (rows, drafter_rows) not in models:
            target, drafter = padded(rows), padded(drafter_rows)
            output = tmp_path_factory.mktemp("pair") / "bundle"
            exported(target, output, drafter=drafter)
            models[rows, drafter_rows] = jetdraft.load(output, threads=1)
        return models[rows, drafter_rows]

    yield make
    for model in models.values():
        model.close()


def drafts_as_plain(model, prompt, count=24, **way):
    """Stats of a drafted text, which must be the plain text to the last bit."""
    way |= {"max_new_tokens": 40, "ignore_eos": True, "logprobs": 5}
    plain = model.generate(token_ids=prompt, method="none", **way)
    drafted = model.generate(
        token_ids=prompt, method="draft", num_draft_tokens=count, **way
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    return plain, drafted.stats


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_padding_drafts_the_plain_text(opened, pair, count, way):
    plain, stats = drafts_as_plain(opened(*pair), PROMPT, count, **way)
    assert len(set(plain.token_ids)) > 4, "too dull to prove anything"
    if pair[1] >= pair[0]:  # then the drafter is the target
        assert stats.tokens_per_pass > 1 + 0.8 * count


@pytest.mark.parametrize("pair", PAIRS)
def test_no_token_beyond_the_smaller_is_ever_proposed(opened, pair):
    """What it says of the others is what the target says, whose weights it has."""
    target, drafter = opened(*pair).parts.target, opened(*pair).parts.drafter
    target.cache.rewind(0)
    drafter.cache.rewind(0)
    wanted = target.run(PROMPT).logits[:, : min(pair)].copy()
    answer = drafter.run(PROMPT)
    np.testing.assert_allclose(answer.logits, wanted, rtol=0, atol=1e-4)
    assert answer.candidates.max() < min(pair)
    best = wanted.max(axis=-1)
    np.testing.assert_allclose(answer.candidate_logits[:, 0], best, rtol=0, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", [(320, 288), (320, 280)])
def test_tokens_that_the_drafter_lacks_are_read(opened, pair, way):
    model, last = opened(*pair), pair[0] - 1
    for prompt in ([last], [5, last, 7], [5, 9, pair[1], last]):
        drafts_as_plain(model, prompt, 4, **way)
    liked = {last: 60.0} if way["temperature"] else {last: 9.0}
    plain, _ = drafts_as_plain(model, PROMPT, 4, logit_bias=liked, **way)
    assert last in plain.token_ids


@pytest.mark.parametrize(
    "way",
    [*({"drafting": {"tree": tree}} for tree in ("best", "heap")),
     {"method": "cascade"}, {"method": "auto"}],
)  # fmt: skip
def test_trees_and_other_methods_too(opened, way):
    how = {"token_ids": [5, 319, 9] * 5, "max_new_tokens": 30, "ignore_eos": True}
    how |= {"temperature": 0.9, "seed": 2}
    model = opened(320, 288)
    plain = model.generate(method="none", **how)
    drafted = model.generate(**{"method": "draft", **how, **way})
    assert drafted.token_ids == plain.token_ids
    assert "method" in way or drafted.stats.drafted_tokens > 20


@pytest.mark.parametrize("pair", [(320, 288), (288, 320)])
def test_quantized_and_cut_drafters(padded, tmp_path, pair):
    drafter, recipes = padded(pair[1], tied=True), {"drafter_recipe": "int8"}
    options = {**recipes, "draft_vocab": min(pair) - 1}
    bundle = exported(
        padded(pair[0]), tmp_path / "bundle", "int8", drafter=drafter, **options
    )
    assert bundle.draft_vocabulary().max() < min(pair)
    assert bundle.drafter.contract.vocab_size == min(pair)
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts_as_plain(model, [5, pair[0] - 1, 9], 4, temperature=0.0)


@pytest.mark.parametrize("rows", [288, 352])
def test_the_recipe_of_a_padded_drafter_is_measured(padded, tmp_path, rows):
    options = ExportOptions(Recipe("int8", 32), capacity=64, max_width=16)
    bundle = export(str(padded(320)), tmp_path / "b", str(padded(rows)), options)
    assert bundle.drafter.quantization["full_overlap"] > 0.5
    assert len(bundle.drafter.quantization["acceptance"]["by_position"]) == 4


@pytest.mark.parametrize(("rows", "of_file"), [(320, 288), (288, 320)])
def test_a_gguf_drafter(padded, tmp_path, rows, of_file):
    def pad(writer):
        fields = writer.kv_data[0]
        spare = range(VOCAB_SIZE, of_file)
        fields["tokenizer.ggml.tokens"].value += [f"[PAD{i}]" for i in spare]
        fields["tokenizer.ggml.token_type"].value += [UNUSED for _ in spare]

    config = llama_config(vocab_size=of_file, num_hidden_layers=1)
    file = write_gguf(tmp_path / "drafter.gguf", config, change=pad).path
    bundle = exported(padded(rows), tmp_path / "bundle", drafter=file)
    assert bundle.drafter.contract.vocab_size == 288
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts_as_plain(model, [5, rows - 1, 9], 4, temperature=0.9, seed=3)


@pytest.mark.parametrize(("family", "pair"), [("t5", (320, 288)), ("bart", (288, 320))])
def test_encoder_decoders(tmp_path, family, pair):
    folders = []
    for name, rows in zip(("target", "drafter"), pair, strict=True):
        layers = ("num_layers", "num_decoder_layers", "encoder_layers")
        small = dict.fromkeys((*layers, "decoder_layers"), 1) | {"vocab_size": rows}
        sizes = sources.T5 if family == "t5" else sources.BART
        own = {name: small.get(name, size) for name, size in sizes.items()}
        config = type(sources.CONFIGS[family])(**own)
        folders.append(sources.save(tmp_path / name, config))
    bundle = exported(folders[0], tmp_path / "bundle", drafter=folders[1])
    with jetdraft.load(bundle.path, threads=1) as model:
        source = [*sources.SOURCE, pair[0] - 1]
        for way in WAYS:
            _, stats = drafts_as_plain(model, source, 4, **way)
            assert stats.drafted_tokens


def test_tokenizers_may_differ_in_what_only_one_has(padded, tmp_path):
    """Merges decide nothing: only the target's tokenizer reads texts."""
    drafter = shutil.copytree(padded(288), tmp_path / "drafter")
    file = drafter / "tokenizer.json"
    made = Tokenizer.from_file(str(file))
    made.add_special_tokens(["<tool>"])
    fields = json.loads(made.to_str())
    fields["normalizer"] = {"type": "NFC"}
    fields["model"]["merges"].reverse()
    file.write_text(json.dumps(fields))
    exported(padded(320), tmp_path / "bundle", drafter=drafter)
    save_tokenizer(drafter, WORDS[::-1])
    with pytest.raises(PairError, match=r"token \d+ is '.*', not '.*'; choose"):
        exported(padded(320), tmp_path / "other", drafter=drafter)
