"""Drafting by the target itself changes no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streamed import LOSSLESS, StreamSettings
from jetdraft.errors import BundleError, OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.probes import Probes, Probing
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.measured.curve import Curve
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.train.stream_attention import IMPLEMENTATION
from tests.tiny import llama_config, save_checkpoint, save_streams

TREE = {"tree": "k-ary", "branching": [2, 2, 2]}
# One layer with streams above two without: halves of different sizes.
SETTINGS = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
PROMPT = np.random.default_rng(8).integers(0, 288, 20).tolist()
WAYS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.95},
]


def streams_checkpoint(folder, seed=0):
    save_checkpoint(folder, llama_config())
    return save_streams(folder, replace(SETTINGS, mode=LOSSLESS), seed)


IN_ONE_SIZE = pytest.mark.parametrize("model", [32], indirect=True)
"""For what does not depend on the kernels of a block size."""


@pytest.fixture(scope="module", params=[32, 128])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    options = ExportOptions(Recipe("int4", request.param), capacity=256, max_width=64)
    export(str(streams_checkpoint(folder / "c")), folder / "bundle", options=options)
    return jetdraft.load(folder / "bundle", threads=1)


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    """Floats, and other streams of the same base."""
    folder = tmp_path_factory.mktemp("float")
    options = ExportOptions(Recipe("none"), capacity=256, max_width=64)
    source = streams_checkpoint(folder / "c", seed=5)
    export(str(source), folder / "bundle", options=options)
    return jetdraft.load(folder / "bundle", threads=1)


@pytest.fixture(scope="module")
def plain_text(model):
    """The ids that plain decoding writes in a way, decoded once per way."""
    texts = {}

    def of(way):
        if str(way) not in texts:
            texts[str(way)] = text(model, "none", **way).token_ids
        return texts[str(way)]

    return of


def halves_of(model, threshold, exact=True):
    settings = {"prune_threshold": threshold}
    return model.planner.target(Drafting("stream", exact=exact, settings=settings))


def text(model, method, **options):
    return model.generate(
        token_ids=PROMPT, method=method, ignore_eos=True, max_new_tokens=200, **options
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, None])
def test_the_text_is_that_of_plain_decoding(model, plain_text, way, length):
    drafted = text(model, "stream", num_draft_tokens=length, **way)
    assert drafted.token_ids == plain_text(way)
    if length is not None:
        assert drafted.stats.drafted_tokens > 100


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("tree", ["best", "heap", "comb", "rerank"])
def test_trees_of_streams_write_the_same_text(model, plain_text, way, tree):
    drafted = text(model, "stream", drafting={"tree": tree}, **way)
    assert drafted.token_ids == plain_text(way)


def test_a_cartesian_tree(model, plain_text):
    """k = 2 per stream: 2 + 4 + 8 rows."""
    drafted = text(model, "stream", drafting=TREE)
    assert drafted.token_ids == plain_text({})
    assert set(drafted.stats.rounds_by_choice) >= {"stream:14"}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("exact", [True, False])
@IN_ONE_SIZE
def test_the_controller_branches_where_rows_are_free(model, monkeypatch, way, exact):
    """Streams of which the controller thinks better than they deserve."""
    curve = Curve(dict.fromkeys(range(1, 17), 1.0), drafts={"stream": 0.0})
    monkeypatch.setattr(curve, "learn", lambda round_: None)
    monkeypatch.setattr(model.parts, "_curve", curve)
    known = Acceptance()
    known.places.successes, known.places.trials = [500.0] * 4, [1000.0] * 4
    monkeypatch.setattr(known, "observe", lambda round_: None)
    monkeypatch.setattr(model.planner, "acceptance", {"stream": known})
    drafted = text(model, "stream", exact=exact, **way)
    deepest = SETTINGS.gamma
    lengths = [int(c.partition(":")[2] or 0) for c in drafted.stats.rounds_by_choice]
    assert max(lengths) > deepest
    if exact:
        assert drafted.token_ids == text(model, "none", **way).token_ids


def test_a_chain_can_be_asked_for(model, monkeypatch):
    curve = model.parts.curve
    monkeypatch.setattr(curve, "passes", dict.fromkeys(range(1, 17), 1.0))
    monkeypatch.setattr(curve, "learn", lambda round_: None)
    stats = text(model, "stream", drafting={"tree": "chain"}).stats
    assert set(stats.rounds_by_choice) <= {"none", "stream:1", "stream:2", "stream:3"}


def test_auto_has_streams_too(model, plain_text):
    assert model.methods == ("none", "lookup", "stream", "trigram")
    for way in WAYS:
        assert text(model, "auto", **way).token_ids == plain_text(way)


@IN_ONE_SIZE
def test_the_base_without_streams_writes_the_same(model, tmp_path):
    """Lossless: with respect to the untouched model."""
    size = model.bundle.target.quantization["block_size"]
    options = ExportOptions(Recipe("int4", size), capacity=256, max_width=64)
    base = save_checkpoint(tmp_path / "base", llama_config())
    export(str(base), tmp_path / "bundle", options=options)
    other = jetdraft.load(tmp_path / "bundle", threads=1)
    for way in WAYS:
        plain = text(other, "none", **way).token_ids
        assert text(model, "stream", **way).token_ids == plain


def test_the_first_pass_carries_streams_on_the_last_prompt_row_alone(model):
    graph, seen = model.parts.target, []
    run = graph.run

    def spy(tokens, **options):
        answer = run(tokens, **options)
        seen.append((len(tokens), sorted(answer.probes)))
        return answer

    graph.run = spy
    model.forget()
    try:
        text(model, "stream", num_draft_tokens=3)
    finally:
        del graph.run
    prompt = [rows for rows, carriers in seen if not carriers][:2]
    assert sum(prompt) == 19, "read in passes as wide as those of decoding"
    assert seen[2] == (1, [0])
    assert all(carriers == list(range(rows)) for rows, carriers in seen[2:-3])


def test_the_end_of_the_buffer_has_no_room_for_streams(model):
    full = model.generate(
        token_ids=PROMPT, method="none", ignore_eos=True, max_new_tokens=10_000
    )
    drafted = model.generate(
        token_ids=PROMPT, method="stream", ignore_eos=True, max_new_tokens=10_000,
        num_draft_tokens=3,
    )  # fmt: skip
    assert drafted.token_ids == full.token_ids
    assert len(full.token_ids) == 256 - len(PROMPT)


def test_another_task_can_be_swapped_in(model, float_model):
    """An npz of the same base changes what is drafted, never the text."""
    other = float_model.bundle.path / "streams.npz"
    swapped = jetdraft.load(model.bundle.path, threads=1, streams=other)
    own, others = (text(m, "stream", num_draft_tokens=3) for m in (model, swapped))
    assert own.token_ids == others.token_ids
    drafts = []
    for each in (model, swapped):
        each.parts.target.cache.rewind(0)
        answer = each.parts.target.run(PROMPT, probing=Probing(3))
        drafts.append(answer.probes[19].logits.copy())
    assert np.abs(drafts[0] - drafts[1]).max() > 0.01


def test_probes_do_not_change_a_bit_of_the_rows(model):
    """What an exact generation rests on, at every exact width."""
    graph = model.parts.target
    for width in [w for w in model.parts.widths.exact if w <= 8]:
        graph.cache.rewind(0)
        graph.run(PROMPT[:10])
        graph.cache.advance(10)
        alone = graph.run(PROMPT[:width]).logits.copy()
        for last_only in (False, True):
            for streams in (1, 2, 3):
                probing = Probing(streams, last_only)
                beside = graph.run(PROMPT[:width], probing=probing)
                assert sorted(beside.probes) == probing.of(width).carriers
                assert np.array_equal(beside.logits, alone)


def test_streams_of_another_base_are_refused(model, tmp_path):
    file = tmp_path / "streams.npz"
    np.savez(file, base=np.array("another"))
    with pytest.raises(BundleError, match="another base"):
        jetdraft.load(model.bundle.path, streams=file)
    np.savez(file, base=np.array(model.bundle.target.streams["base"]))
    with pytest.raises(BundleError, match="has another shape or type"):
        jetdraft.load(model.bundle.path, streams=file)
    file.write_bytes(b"")
    with pytest.raises(BundleError, match="cannot read streams"):
        jetdraft.load(model.bundle.path, streams=file)
    file.write_bytes(b"nothing")
    with pytest.raises(BundleError, match="cannot read streams"):
        jetdraft.load(model.bundle.path, streams=file)
    with pytest.raises(BundleError, match="cannot read streams"):
        jetdraft.load(model.bundle.path, streams=tmp_path / "missing.npz")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e38])
def test_streams_that_would_change_the_text_are_refused(float_model, tmp_path, value):
    """Rows of the text multiply them by zero, which does not make them zero."""
    folder, file = float_model.bundle.path, tmp_path / "streams.npz"
    with np.load(folder / "streams.npz") as stored:
        arrays = dict(stored)
    name = next(name for name in arrays if "q_proj.lora_A" in name)
    arrays[name] = np.full_like(arrays[name], value)
    np.savez(file, **arrays)
    with pytest.raises(BundleError, match="has numbers beyond 10000, or that are none"):
        jetdraft.load(folder, threads=1, streams=file)


def test_what_probes_see():
    """Two carriers with two streams each, after a row with two children."""
    probes = Probes((2, 0, 2))
    assert (probes.total, probes.rows, probes.ids) == (4, [0, 0, 2, 2], [0, 1, 0, 1])
    seen = probes.seen([[], [0], [0]])
    assert seen == [[0], [0, 3], [0, 2], [0, 2, 5]]


def test_who_carries_streams():
    assert Probing(2).of(3) == Probes((2, 2, 2))
    assert Probing(2, last_only=True).of(3) == Probes((0, 0, 2))
    assert Probing().of(3).total == 0


# --- pruning --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
def test_pruning_changes_no_text(model, plain_text, way, tree):
    drafting = {"prune_threshold": 0.3, **tree}
    pruned = text(model, "stream", drafting=drafting, **way)
    assert pruned.token_ids == plain_text(way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("threshold", [0.0, 0.01, 2.0, "auto"])
@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@IN_ONE_SIZE
def test_no_threshold_changes_a_text(model, plain_text, way, threshold, tree):
    drafting = {"prune_threshold": threshold, **tree}
    pruned = text(model, "stream", drafting=drafting, **way)
    assert pruned.token_ids == plain_text(way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@IN_ONE_SIZE
def test_a_threshold_of_zero_prunes_nothing(model, way):
    whole = text(model, "stream", drafting=TREE, **way).stats
    pruning = {"prune_threshold": 0.0, **TREE}
    halves = text(model, "stream", drafting=pruning, **way).stats
    assert halves.target_passes == whole.target_passes
    assert halves.accepted_counts == whole.accepted_counts


def test_a_threshold_above_one_is_plain_decoding(model):
    drafting = {"prune_threshold": 2.0, **TREE}
    stats = text(model, "stream", drafting=drafting).stats
    assert stats.accepted_tokens == 0
    assert stats.target_passes == 200


def test_scores_are_those_of_the_early_exit(float_model, tmp_path):
    """The log probability of each row's token after its parent."""
    folder = Path(float_model.bundle.target.source)
    streamed = Checkpoint.load(str(folder), torch.float32).with_streams(1.0)
    streamed.model.set_attn_implementation(IMPLEMENTATION)
    halves = halves_of(float_model, 0.0)
    rows = Rows([9, 8, 7, 6, 5], [-1, 0, 0, 2, 3])
    halves.cache.rewind(0)
    halves.run(PROMPT)
    halves.cache.advance(len(PROMPT))
    scores = halves._run_lower(rows, 5).arrays["scores"][0]
    for row in range(1, 5):
        path = [rows.tokens[i] for i in rows.ancestors[row]]
        ids = torch.tensor([[*PROMPT, *path]])
        at = torch.arange(ids.shape[1])
        with torch.no_grad():
            _, early, _ = streamed(
                ids, at[None], at[:0], at[:0], at, early=at, use_cache=False
            )
        expected = early[0, -1].log_softmax(-1)[rows.tokens[row]]
        assert scores[row] == pytest.approx(float(expected), abs=1e-4)


def test_a_row_goes_with_all_below_it(model):
    halves = halves_of(model, 0.5)
    rows = Rows([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3])
    scores = np.log([1.0, 0.4, 0.9, 0.6, 0.5])
    assert halves._keep(rows, scores, 0.5) == [0, 3, 4]


def test_a_constraint_is_kept(model):
    regex = "(one|two) [a-z]{3,20}!"
    how = {"token_ids": PROMPT, "regex": regex, "temperature": 0.7, "seed": 0}
    plain = model.generate(method="none", **how)
    assert plain.finish_reason == "stop"
    best = {"drafting": {"tree": "best"}, "num_draft_tokens": 4}
    for more in ({"num_draft_tokens": 2}, {}, best):
        found = model.generate(method="stream", **more, **how)
        assert found.token_ids == plain.token_ids, more


def test_without_lower_layers_there_is_nothing_to_exit_from(tmp_path):
    folder = save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=1))
    save_streams(folder, SETTINGS)
    options = ExportOptions(Recipe("none"), capacity=128, max_width=32)
    export(str(folder), tmp_path / "bundle", options=options)
    model = jetdraft.load(tmp_path / "bundle", threads=1)
    how = {"token_ids": PROMPT, "max_new_tokens": 40}
    plain = model.generate(method="none", **how)
    assert model.generate(method="stream", **how).token_ids == plain.token_ids
    with pytest.raises(OptionError, match="all of its layers have streams") as refusal:
        model.generate(method="stream", drafting={"prune_threshold": 0.1}, **how)
    assert refusal.value.field == "drafting"


def test_where_probes_change_bits_an_exact_generation_has_none(model, monkeypatch):
    widths = replace(model.parts.widths, probes_agree=False)
    monkeypatch.setattr(model.parts.survey, "_widths", widths)
    with pytest.raises(OptionError, match="add --no-exact") as refusal:
        text(model, "stream")
    assert refusal.value.field == "method"
    assert text(model, "stream", exact=False).token_ids
    stats = text(model, "auto").stats
    assert not any("stream" in choice for choice in stats.rounds_by_choice)


@pytest.mark.parametrize("exact", [True, False])
def test_both_halves_hold_what_a_fresh_prefill_holds(float_model, exact):
    """A path has one map into the lower buffers and another into the upper ones."""
    halves = halves_of(float_model, 0.0, exact)
    rows = Rows([9, 8, 7, 6, 5], [-1, 0, 0, 2, 3])
    halves.cache.rewind(0)
    halves.run(PROMPT)
    halves.cache.advance(len(PROMPT))
    halves._keep = lambda rows, scores, least: [0, 2, 3, 4]  # row 1 is pruned
    try:
        kept, _ = halves.verify(rows, 5 if not exact else 6)
    finally:
        del halves._keep
    assert kept.tokens == [9, 7, 6, 5]
    committed = halves.commit([0, 1, 2], exact)
    assert committed == (1 if exact else 3)
    length = len(PROMPT) + committed
    buffers = [
        buffer
        for cache in (halves.cache.lower, halves.cache.upper)
        for buffer in cache.buffers.values()
    ]
    found = [buffer.numpy()[:, :, :length].copy() for buffer in buffers]
    halves.cache.rewind(0)
    halves.run([*PROMPT, 9, 7, 6][:length])
    for one, buffer in zip(found, buffers, strict=True):
        np.testing.assert_allclose(one, buffer.numpy()[:, :, :length], atol=1e-4)


LOSSLESS_VERIFIER = {
    "verifier": "recursive",
    "tree": "k-ary",
    "branching": [2],
    "siblings": "with-replacement",
}


@pytest.mark.parametrize(
    ("threshold", "others", "words"),
    [
        (-0.1, {}, "out of range"),
        (1.5, {}, "out of range"),
        ("x", {}, "out of range"),
        ([0.1], {}, "give a number or a text"),
        (0.1, LOSSLESS_VERIFIER, "not exact for a draft that was pruned"),
    ],
)
def test_bad_thresholds(model, threshold, others, words):
    drafting = {"prune_threshold": threshold, **others}
    with pytest.raises(OptionError, match=words) as refusal:
        model.generate(
            token_ids=PROMPT, method="stream", drafting=drafting, exact=not others
        )
    assert refusal.value.field == "drafting"


def test_other_methods_do_not_prune(model):
    drafting = {"prune_threshold": 0.1}
    with pytest.raises(OptionError, match="unknown drafting option") as refusal:
        model.generate(token_ids=PROMPT, method="lookup", drafting=drafting)
    assert refusal.value.field == "drafting"
    with pytest.raises(OptionError, match="needs one method; give --method stream"):
        model.generate(token_ids=PROMPT, method="auto", drafting=drafting)


def test_a_list_of_methods_is_a_text(model):
    with pytest.raises(OptionError, match="is not a text") as refusal:
        model.generate(token_ids=PROMPT, method=["stream"])
    assert refusal.value.field == "method"
