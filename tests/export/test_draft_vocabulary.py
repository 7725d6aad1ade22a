import json
import re
import shutil
from collections import Counter
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import jetdraft
from jetdraft import Bundle, OptionError, PairError, recipe, testing
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.devices.providers import PROVIDERS
from jetdraft.export.draft_acceptance import with_acceptance
from jetdraft.export.draft_vocab import frequent_tokens
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.measures import sample_text
from jetdraft.quant.divergence import Windows, own_attention
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import ONE_THREAD
from tests import (
    WAYS,
    edit_json,
    read_manifest,
    same_text,
    sources,
    tiny,
    write_manifest,
)
from tests.checkpoints.heads.layouts import LAYERS, eagle1, eagle3, write
from tests.ggufs import write_gguf
from tests.programs import jetdraft as command
from tests.programs import succeed

COUNT = 120
TEXT = "the self import range in print def return for " * 30 + "0123456789abcdefgh" * 9
PROMPT = " the self"
MAX_VOCAB_SIZE = tiny.VOCAB_SIZE + 64
PAIRS = [(320, 288), (320, 320), (320, 352), (288, 352), (320, 280)]
"""Rows of the target and of the drafter; the tokenizer has 288 tokens."""
IDS = [5, 9, 200, 31, 64, 77]
UNUSED = 5
"""The type of a GGUF file's tokens without a meaning."""
TREES = [{"method": "draft", "drafting": {"tree": tree}} for tree in ("best", "heap")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="module")
def cut(pair, text, tmp_path_factory):
    options = {"draft_vocab": COUNT, "calibration": text, "fast": False}
    options |= {"drafter_recipe": "int8", "capacity": 256, "max_width": 64}
    folder = tmp_path_factory.mktemp("cut") / "bundle"
    return tiny.exported(pair.target, folder, "int8", drafter=pair.drafter, **options)


@pytest.fixture(scope="module")
def cut_model(cut):
    with jetdraft.load(cut.path, threads=1) as model:
        yield model


def shapes(bundle, file):
    model = onnx.load(bundle.path / file, load_external_data=False)
    return {t.name: tuple(t.dims) for t in model.graph.initializer}


def test_its_tokens_are_the_most_frequent_of_the_text(cut, pair):
    ids = cut.draft_vocabulary()
    assert cut.drafter.contract.draft_vocab == len(ids) == COUNT
    assert (np.diff(ids) > 0).all()
    tokenizer = Tokenizer.from_file(str(pair.target / "tokenizer.json"))
    counts = Counter(tokenizer.encode(TEXT, add_special_tokens=False).ids)
    assert 20 < len(counts) < COUNT, "too easy, or some are left out"
    assert set(counts) <= set(ids)


def test_few_tokens_are_the_most_frequent_and_equal_ones_the_most_probable(pair):
    target = Checkpoint.load(str(pair.target), torch.float32)
    windows = Windows(torch.tensor([[7, 9, 9, 200, 200, 200, 9, 7]]))
    assert frequent_tokens(target.model, windows, 2).tolist() == [9, 200]
    assert frequent_tokens(target.model, windows, 3).tolist() == [7, 9, 200]
    with torch.no_grad(), own_attention(target.model):
        logits = target.model(windows.ids).logits[0]
    expected = logits.softmax(-1).sum(0)
    expected[[7, 9, 200]] = 0
    more = frequent_tokens(target.model, windows, 5).tolist()
    assert set(more) == {7, 9, 200, *expected.topk(2).indices.tolist()}


def test_what_the_target_writes_ranks_all_tokens(pair):
    target = Checkpoint.load(str(pair.target), torch.float32)
    ids = frequent_tokens(target.model, sample_text(target), tiny.VOCAB_SIZE)
    assert ids.tolist() == list(range(tiny.VOCAB_SIZE))


def test_the_head_has_fewer_rows_and_the_embedding_stays_quantized(cut):
    sizes = shapes(cut, cut.drafter.file)
    heads = {n: s for n, s in sizes.items() if s[:1] == (COUNT,) and "int8" in n}
    assert len(heads) == 1
    tables = {
        n: s for n, s in sizes.items() if s[:1] == (tiny.VOCAB_SIZE,) and len(s) > 1
    }
    assert tables
    assert all("int8" in name for name in tables)


def test_its_logits_are_those_of_the_whole_head(cut, pair):
    tokens = [5, 80, 33, 260, 12]
    ours = Opener(cut, PROVIDERS["cpu"], ONE_THREAD).graph(cut.drafter).run(tokens)
    model = Checkpoint.load(str(pair.drafter), torch.float32).model
    with torch.no_grad(), own_attention(model):
        rows = model(torch.tensor([tokens])).logits[0].numpy()
    ids = cut.draft_vocabulary()
    assert set(ours.candidates.ravel().tolist()) <= set(ids.tolist())
    near = {"atol": 0.03 * np.ptp(rows)}  # for integers of 8 bits
    wanted = np.take_along_axis(rows, ours.candidates, 1)
    np.testing.assert_allclose(ours.candidate_logits, wanted, **near)
    np.testing.assert_allclose(ours.candidate_logits[:, 0], rows[:, ids].max(1), **near)
    sums = np.log(np.exp(rows[:, ids]).sum(1))
    np.testing.assert_allclose(ours.logsumexp, sums, **near)


def test_no_text_changes(cut_model):
    drafts = [{"method": m, "num_draft_tokens": 3} for m in ("draft", "cascade")]
    own = set(cut_model.bundle.draft_vocabulary().tolist())
    how = {"prompt": PROMPT, "max_new_tokens": 60}
    for drafted in same_text(cut_model, [*drafts, *TREES], **how):
        assert set(drafted.token_ids) - own
        assert drafted.stats.drafted_tokens > 20


def test_a_verifier_that_reads_q_keeps_the_distribution(cut_model):
    rejection = {"verifier": "recursive", "siblings": "with-replacement"}
    rejection |= {"tree": "k-ary", "branching": (3,)}
    # The tree needs room for its rows.
    how = {"max_new_tokens": 5, "temperature": 1.0, "ignore_eos": True, "exact": False}
    ids, draws, accepted = set(cut_model.bundle.draft_vocabulary().tolist()), 400, 0
    counts = Counter(), Counter()
    drafted = {"method": "draft", "drafting": rejection}
    for turn, way in enumerate(({"method": "none"}, drafted)):
        for seed in range(draws):
            own = {"seed": turn * draws + seed, **way}
            result = cut_model.generate(PROMPT, **how, **own)
            token = result.token_ids[1]
            counts[turn][token in ids, token // 72] += 1
            accepted += result.stats.accepted_tokens
    assert accepted > 50, "too few to prove anything"
    groups = counts[0] | counts[1]
    assert {True, False} == {drafted for drafted, _ in groups}
    square = sum(
        (counts[0][g] - counts[1][g]) ** 2 / (counts[0][g] + counts[1][g])
        for g in groups
    )
    # Five standard deviations above the mean.
    assert square < len(groups) + 5 * (2 * len(groups)) ** 0.5


def target(folder, layers):
    config = tiny.llama_config(num_hidden_layers=layers)
    return str(tiny.save_checkpoint(folder / "target", config))


def test_a_head_without_a_map_is_cut(tmp_path):
    checkpoint = target(tmp_path, 1)
    torch.manual_seed(3)
    head = write(tmp_path / "head", *eagle1(fc_bias=False, embedding=False))
    own, sizes = recipe.Recipe.parse("int4-head8", 32), {"draft_vocab": COUNT}
    sizes |= {"capacity": 64, "max_width": 16}
    options = ExportOptions(own, kernel="onnxruntime", **sizes)
    bundle = export(checkpoint, tmp_path / "bundle", options=options, head=head)
    assert len(bundle.draft_vocabulary()) == COUNT
    sizes = shapes(bundle, bundle.drafter.file)
    assert any(size[:1] == (COUNT,) and len(size) == 3 for size in sizes.values())
    chosen = bundle.drafter.quantization
    assert chosen["full_overlap"] > 0.1
    if chosen["scheme"] == "int4":
        assert chosen["full_overlap"] - chosen["overlap"] < 0.01
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts = [{"method": "eagle", "num_draft_tokens": 3}]
        for drafted in same_text(model, drafts, prompt=PROMPT, max_new_tokens=30):
            assert drafted.stats.drafted_tokens > 20


@pytest.mark.parametrize("count", [0, -1, tiny.VOCAB_SIZE, 10**9])
def test_a_count_that_is_no_part_is_refused(pair, tmp_path, count):
    result = command(
        *("export", pair.target, "--drafter", pair.drafter, "--quantize=int8"),
        *("--draft-vocab", count, "-o", tmp_path / "bundle"),
    )
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert re.match(f"error: (a draft vocabulary of|draft vocab) {count} ", error)
    assert not (tmp_path / "bundle").exists()


def test_a_draft_vocabulary_without_a_drafter_is_refused(pair, tmp_path):
    said = r"a drafter or streams \(jetdraft train stream\); give --drafter"
    tiny.refused(OptionError, said, pair.target, draft_vocab=9)


def test_a_trained_map_rules(tmp_path):
    head = write(tmp_path / "head", *eagle3())
    said, source = "trained with its own draft vocabulary", target(tmp_path, LAYERS)
    tiny.refused(OptionError, said, source, head=head, draft_vocab=50)


def acceptance(bundle):
    return bundle.drafter.quantization["acceptance"]


def test_an_export_stores_the_acceptance_and_check_finds_it_again(cut):
    shares = acceptance(cut)["by_position"]
    assert len(shares) == 4
    assert all(one >= other for one, other in pairwise(shares))
    result = succeed("check", cut.path, "--threads", "1")
    shown = " ".join(f"{share:.2f}" for share in shares)
    assert f"acceptance by position {shown}, at export {shown}" in result.stdout
    assert "warning: the target accepts" not in result.stderr


def test_no_file_is_hashed_again_to_store_it(tmp_path, monkeypatch):
    """The files of a large pair take seconds to hash."""
    bundle = Bundle.open(testing.toy_bundle(tmp_path / "toy"))
    hashed = Mock(side_effect=AssertionError("a file was hashed again"))
    with monkeypatch.context() as patched:
        patched.setattr("jetdraft.bundle.sha256_of", hashed)
        patched.setattr("jetdraft.manifest.sha256_of", hashed)
        with_acceptance(bundle, [[5, 8, 9, 40, 41]]).save_manifest()
    assert len(acceptance(Bundle.open(bundle.path))["by_position"]) == 4


def test_check_warns_where_the_acceptance_fell(cut, tmp_path):
    copy = tmp_path / "bundle"
    shutil.copytree(cut.path, copy)
    manifest = read_manifest(copy)
    record = manifest["graphs"]["drafter"]["quantization"]["acceptance"]
    record["by_position"] = [min(1.0, x + 0.3) for x in record["by_position"]]
    write_manifest(copy, manifest)
    result = succeed("check", copy, "--threads", "1")
    assert "warning: the target accepts fewer drafted tokens" in result.stderr


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("padded")
    config = tiny.llama_config(
        tie_word_embeddings=False, vocab_size=MAX_VOCAB_SIZE, num_hidden_layers=1
    )
    whole = tiny.save_checkpoint(folder / "whole", config)

    def make(rows, tied=False):
        copy = shutil.copytree(whole, folder / f"{rows}-{tied}", dirs_exist_ok=True)
        file = copy / "config.json"
        edit_json(file, vocab_size=rows, tie_word_embeddings=tied)
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
    models = {}

    def make(rows, drafter_rows):
        if (rows, drafter_rows) not in models:
            target, drafter = padded(rows), padded(drafter_rows)
            output = tmp_path_factory.mktemp("pair") / "bundle"
            made = tiny.exported_model(target, output, drafter=drafter)
            models[rows, drafter_rows] = made
        return models[rows, drafter_rows]

    yield make
    for model in models.values():
        model.close()


def drafts_as_plain(model, ids, counts=(4,), ways=WAYS, **how):
    drafts = [{"method": "draft", "num_draft_tokens": count} for count in counts]
    return same_text(model, drafts, ways, token_ids=ids, logprobs=5, **how)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_padding_drafts_the_plain_text(opened, pair):
    counts = 1, 4, 7
    drafted = drafts_as_plain(opened(*pair), IDS, counts)
    for count, found in zip(counts * len(WAYS), drafted, strict=True):
        assert len(set(found.token_ids)) > 4, "too dull to prove anything"
        if pair[1] >= pair[0]:  # then the drafter is the target
            assert found.stats.tokens_per_pass > 1 + 0.8 * count


@pytest.mark.parametrize("pair", PAIRS)
def test_no_token_beyond_the_smaller_is_ever_proposed(opened, pair):
    """What it says of the others is what the target says, whose weights it has."""
    target, drafter = opened(*pair).parts.target, opened(*pair).parts.drafter
    target.cache.rewind(0)
    drafter.cache.rewind(0)
    wanted = target.run(IDS).logits[:, : min(pair)].copy()
    answer = drafter.run(IDS)
    np.testing.assert_allclose(answer.logits, wanted, rtol=0, atol=1e-4)
    assert answer.candidates.max() < min(pair)
    best = wanted.max(axis=-1)
    np.testing.assert_allclose(answer.candidate_logits[:, 0], best, rtol=0, atol=1e-4)


@pytest.mark.parametrize("pair", [(320, 288), (320, 280)])
def test_tokens_that_the_drafter_lacks_are_read(opened, pair):
    model, last = opened(*pair), pair[0] - 1
    for prompt in ([last], [5, last, 7], [5, 9, pair[1], last]):
        drafts_as_plain(model, prompt)
    for way, bias in zip(WAYS, (9.0, 60.0), strict=True):
        [found] = drafts_as_plain(model, IDS, ways=[way], logit_bias={last: bias})
        assert last in found.token_ids


def test_trees_and_other_methods_too(opened):
    prompt, drafts = [5, 319, 9] * 5, [*TREES, "cascade", "auto"]
    way = {"temperature": 0.9, "seed": 2, "max_new_tokens": 30}
    drafted = same_text(opened(320, 288), drafts, [way], token_ids=prompt)
    assert all(found.stats.drafted_tokens > 20 for found in drafted[: len(TREES)])


@pytest.mark.parametrize("pair", [(320, 288), (288, 320)])
def test_quantized_and_cut_drafters(padded, tmp_path, pair):
    drafter, recipes = padded(pair[1], tied=True), {"drafter_recipe": "int8"}
    options = {**recipes, "draft_vocab": min(pair) - 1}
    bundle = tiny.exported(
        padded(pair[0]), tmp_path / "bundle", "int8", drafter=drafter, **options
    )
    assert bundle.draft_vocabulary().max() < min(pair)
    assert bundle.drafter.contract.vocab_size == min(pair)
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts_as_plain(model, [5, pair[0] - 1, 9], ways=WAYS[:1])


@pytest.mark.parametrize("rows", [288, 352])
def test_the_recipe_of_a_padded_drafter_is_measured(padded, tmp_path, rows):
    options = ExportOptions(recipe.Recipe("int8", 32), capacity=64, max_width=16)
    bundle = export(str(padded(320)), tmp_path / "b", str(padded(rows)), options)
    assert bundle.drafter.quantization["full_overlap"] > 0.5
    assert len(bundle.drafter.quantization["acceptance"]["by_position"]) == 4


@pytest.mark.parametrize(("rows", "of_file"), [(320, 288), (288, 320)])
def test_a_gguf_drafter(padded, tmp_path, rows, of_file):
    def pad(writer):
        fields, spare = writer.kv_data[0], range(tiny.VOCAB_SIZE, of_file)
        fields["tokenizer.ggml.tokens"].value += [f"[PAD{i}]" for i in spare]
        fields["tokenizer.ggml.token_type"].value += [UNUSED for _ in spare]

    config = tiny.llama_config(vocab_size=of_file, num_hidden_layers=1)
    file = write_gguf(tmp_path / "drafter.gguf", config, change=pad).path
    with tiny.exported_model(padded(rows), tmp_path / "b", drafter=file) as model:
        assert model.bundle.drafter.contract.vocab_size == 288
        drafts_as_plain(model, [5, rows - 1, 9], ways=WAYS[1:])


@pytest.mark.parametrize(("family", "pair"), [("t5", (320, 288)), ("bart", (288, 320))])
def test_encoder_decoders(tmp_path, family, pair):
    kind, sizes = type(sources.CONFIGS[family]), getattr(sources, family.upper())
    small = {n: 1 if n.endswith("layers") else size for n, size in sizes.items()}
    target, drafter = (
        sources.save(tmp_path / str(rows), kind(**small | {"vocab_size": rows}))
        for rows in pair
    )
    with tiny.exported_model(target, tmp_path / "bundle", drafter=drafter) as model:
        drafted = drafts_as_plain(model, [*sources.SOURCE, pair[0] - 1])
    assert all(found.stats.drafted_tokens for found in drafted)


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
    tiny.exported(padded(320), tmp_path / "bundle", drafter=drafter)
    tiny.save_tokenizer(drafter, tiny.WORDS[::-1])
    said = r"token \d+ is '.*', not '.*'; choose"
    tiny.refused(PairError, said, padded(320), drafter=drafter)
