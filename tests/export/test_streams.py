from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import GraniteConfig

import jetdraft
from jetdraft import Bundle, CheckpointError, OptionError, UnsupportedModelError
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import LOSSLESS, SHARED, Streams, StreamSettings
from jetdraft.contracts.tensors import check_tensors
from jetdraft.export import graphs
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.graphs import Job
from jetdraft.export.step import Step
from jetdraft.manifest import GraphEntry
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.rows import Probing
from jetdraft.runtime.passes.session import open_session
from jetdraft.train.attention import IMPLEMENTATION
from tests import cases
from tests.tiny import (
    exported,
    exported_model,
    llama_config,
    refused,
    save_checkpoint,
    save_probes,
)

SETTINGS = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
COUNT = 16
TOKENS = np.random.default_rng(4).integers(0, 288, COUNT).tolist()
# Its LoRA is in all layers, also in the layer below the streams.
CONFIG = llama_config(num_hidden_layers=2)
SHARING = replace(SETTINGS, mode=SHARED)
ROWS, CURSOR = 5, 3
CUT_TOKENS = np.random.default_rng(2).integers(1, 288, (1, ROWS))
ANCESTORS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
"""Per row of a branching draft, the rows that it sees."""


@pytest.fixture(scope="module", params=[SETTINGS, SHARING], ids=[LOSSLESS, SHARED])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams") / "checkpoint"
    save_checkpoint(folder, CONFIG)
    return save_probes(folder, request.param)


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    return exported_model(checkpoint, tmp_path_factory.mktemp("bundles") / "streams")


def whole_sequence(checkpoint, change=lambda streams: None):
    """Main [T, vocab] and stream [T, gamma, vocab] logits of the training layout."""
    loaded = Checkpoint.load(str(checkpoint), torch.float32)
    streamed = loaded.add_probes(1.0)
    loaded.model.set_attn_implementation(IMPLEMENTATION)
    change(streamed.streams)
    ids, rows, gamma = torch.tensor([TOKENS]), len(TOKENS), SETTINGS.gamma
    at = torch.arange(rows)
    with torch.no_grad():
        carried = at.repeat_interleave(gamma), torch.arange(gamma).repeat(rows), at
        logits, _, _ = streamed(ids, at[None], *carried, use_cache=False)
    found = logits[0].numpy()
    return found[:rows], found[rows:].reshape(rows, gamma, -1)


def passes(model, parts, probing):
    graph = model.parts.target
    graph.cache.rewind(0)
    start, main, streams = 0, [], {}
    for rows in parts:
        answer = graph.run(TOKENS[start : start + rows], probing=probing)
        graph.cache.advance(rows)
        main.append(answer.logits.copy())
        for row, found in answer.probes.items():
            streams[start + row] = found.logits.copy()
        start += rows
    return np.concatenate(main), streams


@pytest.mark.parametrize("parts", [[15, 1], [4, 1, 2, 6, 3], [1] * COUNT])
def test_rows_of_passes_are_those_of_training(checkpoint, model, parts):
    """The best export test: committed prefixes match, so the logits must."""
    expected_main, expected = whole_sequence(checkpoint)
    main, streams = passes(model, parts, Probing(SETTINGS.gamma))
    np.testing.assert_allclose(main, expected_main, atol=1e-4)
    assert sorted(streams) == list(range(COUNT))
    for row, found in streams.items():
        np.testing.assert_allclose(found, expected[row], atol=1e-4)


def test_a_pass_that_would_fill_the_buffers_carries_no_streams(checkpoint, model):
    """Attention would count the places of its streams: 16 rows with 3 streams each."""
    main, streams = passes(model, [COUNT], Probing(SETTINGS.gamma))
    assert not streams
    np.testing.assert_allclose(main, whole_sequence(checkpoint)[0], atol=1e-4)


@cases("probing", Probing(1), Probing(2), Probing(3, last_only=True))
def test_fewer_streams_say_what_all_of_them_say(model, probing):
    _, every = passes(model, [4, 6], Probing(3))
    _, some = passes(model, [4, 6], probing)
    assert sorted(some) == ([3, 9] if probing.last_only else [*range(10)])
    for row, found in some.items():
        np.testing.assert_allclose(found, every[row][: probing.streams], atol=1e-5)


def test_a_draft_vocabulary_needs_the_lm_heads_own_logits(tmp_path):
    scaled = {**CONFIG.to_dict(), "model_type": "granite", "logits_scaling": 8.0}
    save_checkpoint(tmp_path / "c", GraniteConfig.from_dict(scaled))
    save_probes(tmp_path / "c", SETTINGS)
    said = "changes its logits after the LM head"
    refused(UnsupportedModelError, said, tmp_path / "c", draft_vocab=70)


def test_a_stream_sees_the_streams_below_it_only(checkpoint):
    main, before = whole_sequence(checkpoint)

    def change(streams: Streams) -> None:
        streams.embeddings.data[1] += 1

    changed_main, after = whole_sequence(checkpoint, change)
    np.testing.assert_array_equal(changed_main, main)
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    assert np.abs(after[:, 1] - before[:, 1]).max() > 0.01
    assert np.abs(after[:, 2] - before[:, 2]).max() > 0.001


def test_streams_leave_nothing_in_the_cache(model):
    graph = model.parts.target
    passes(model, [12, 4], Probing(3))
    buffers = graph.cache.buffers.values()
    found = [buffer.numpy()[:, :, :16].copy() for buffer in buffers]
    passes(model, [16], Probing())
    for one, buffer in zip(found, buffers, strict=True):
        np.testing.assert_allclose(one, buffer.numpy()[:, :, :16], atol=1e-5)


def test_rows_of_a_tree_carry_streams_too(checkpoint, model):
    graph = model.parts.target
    passes(model, [10], Probing())
    # Row 2 is a wrong sibling of row 1, row 3 follows row 1.
    tokens = [TOKENS[10], TOKENS[11], 7, TOKENS[12]]
    depths, ancestors = [0, 1, 1, 2], [[], [0], [0], [0, 1]]
    answer = graph.run_branches(tokens, depths, ancestors, probing=Probing(3))
    main, streams = whole_sequence(checkpoint)
    for row, place in ((0, 10), (1, 11), (3, 12)):
        np.testing.assert_allclose(answer.logits[row], main[place], atol=1e-4)
        np.testing.assert_allclose(answer.probes[row].logits, streams[place], atol=1e-4)


def test_parameters_are_those_of_the_paper():
    """Table 1 of 2402.11131: 4.096E4 and 8.19E4 for hidden sizes 2048 and 4096."""
    for hidden, expected in ((2048, 40960), (4096, 81920)):
        streams = Streams(StreamSettings(gamma=4, prune_rank=8), hidden)
        assert sum(p.numel() for p in streams.parameters()) == expected


def test_streams_of_the_shared_mode_only_are_merged(tmp_path, model, checkpoint):
    if model.bundle.target.streams["mode"] != SHARED:
        said = "needs streams of the shared mode"
        refused(OptionError, said, checkpoint, adapter_scale=0.5)
        return
    exported(save_checkpoint(tmp_path / "c", CONFIG), tmp_path / "base")
    exported(checkpoint, tmp_path / "zero", adapter_scale=0.0)
    base, scaled = (
        passes(jetdraft.load(tmp_path / name, threads=1), [COUNT], Probing())[0]
        for name in ("base", "zero")
    )
    np.testing.assert_allclose(scaled, base, atol=1e-5)
    tuned, _ = passes(model, [COUNT], Probing())
    assert np.abs(tuned - base).max() > 0.01


@cases(
    "change", {"gamma": 0}, {"gamma": 17}, {"layers": 4}, {"layers": 0}, {"mode": "x"}
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(OptionError):
        replace(SETTINGS, **change).check(3)


@cases(
    "seed, names, said",
    (9, ("streams.json", "streams.safetensors"), "other weights"),
    (0, ("streams.json",), "train the streams again"),
)
def test_damaged_and_foreign_streams_are_refused(
    tmp_path, checkpoint, seed, names, said
):
    other = save_checkpoint(tmp_path / "other", CONFIG, seed=seed)
    for name in names:
        (other / name).write_bytes((checkpoint / name).read_bytes())
    refused(CheckpointError, said, other)


def cut_below_two(job: Job, entry: GraphEntry) -> tuple[Step, GraphEntry]:
    return Step(job.checkpoint.model, entry.contract, cut=2), entry


def cut_bundle(folder, flavour) -> Bundle:
    options = ExportOptions(Recipe("none"), capacity=16, max_width=8, flavour=flavour)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_make_step", cut_below_two)
        return export(str(folder.parent / "checkpoint"), folder, options=options)


@pytest.fixture(scope="module", params=["contrib", "standard"])
def bundle(request, tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("cut")
    save_checkpoint(folder / "checkpoint", llama_config())
    return cut_bundle(folder / "bundle", request.param)


def test_every_export_writes_the_same_bytes(bundle, request):
    flavour = request.node.callspec.params["bundle"]
    again = cut_bundle(bundle.path.parent / "again", flavour)
    for file in bundle.path.glob("*.*"):
        assert file.read_bytes() == (again.path / file.name).read_bytes(), file.name


def session(bundle, file) -> onnxruntime.InferenceSession:
    return open_session(bundle.path / file, "cpu")


def run(session, inputs, outputs, feeds) -> dict[str, np.ndarray]:
    names = [spec.name for spec in outputs]
    given = {spec.name: feeds[spec.name] for spec in inputs}
    return dict(zip(names, session.run(names, given), strict=True))


def feeds(contract) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    mask = np.zeros((1 + contract.draft_slots, ROWS), np.uint8)
    mask[1 : 1 + ROWS] = 1
    for row, seen in enumerate(ANCESTORS):
        mask[[1 + slot for slot in seen], row] = 0
    depths = [len(seen) - 1 for seen in ANCESTORS]
    values = {"input_ids": CUT_TOKENS, "position_ids": CURSOR + np.array([depths])}
    values |= {"cursor": np.array([CURSOR], np.int32)}
    values |= {"total_length": np.array([contract.slots], np.int32)}
    values |= {"answer_rows": np.arange(ROWS), "draft_mask": mask}
    values |= {"draft_start": np.array([CURSOR], np.int32)}
    for spec in contract.buffers("past"):
        values[spec.name] = random.normal(size=spec.shape).astype(np.float32)
        values[spec.name][:, :, CURSOR:] = 0
    return values


def test_the_entry_says_where_it_is_cut_and_the_chain_graph_is_whole(bundle):
    halves = bundle.target.halves
    assert (halves.layers, halves.hidden_size, halves.scores) == (2, 64, False)
    assert bundle.target.streams is None
    parts = bundle.target.split_contract
    assert [len(c.kv_shapes) for c in (parts.lower, parts.upper)] == [1, 2]
    chain, contract = session(bundle, bundle.target.file), bundle.target.contract
    check_tensors(contract.inputs, chain.get_inputs(), "the chain's inputs")
    check_tensors(contract.outputs, chain.get_outputs(), "the chain's outputs")


def test_halves_do_what_the_whole_graph_does(bundle):
    entry, contract = bundle.target, bundle.target.split_contract
    whole, lower, upper = (
        session(bundle, file)
        for file in (entry.tree_file, entry.halves.lower, entry.halves.upper)
    )
    check_tensors(contract.lower_inputs, lower.get_inputs(), "lower")
    check_tensors(contract.lower_outputs, lower.get_outputs(), "lower")
    check_tensors(contract.upper_inputs, upper.get_inputs(), "upper")
    check_tensors(contract.upper.outputs, upper.get_outputs(), "upper")
    given = feeds(entry.tree_contract)
    wanted = run(whole, entry.tree_contract.inputs, entry.tree_contract.outputs, given)
    below = run(lower, contract.lower_inputs, contract.lower_outputs, given)
    shifted = {
        f"past_{kind}.{layer}": given[f"past_{kind}.{layer + 1}"]
        for kind in ("key", "value")
        for layer in range(2)
    }
    inputs = {**given, **shifted, "hidden": below["hidden"]}
    above = run(upper, contract.upper_inputs, contract.upper.outputs, inputs)
    np.testing.assert_allclose(above["logits"], wanted["logits"], atol=1e-4)
    assert np.ptp(wanted["logits"]) > 1, "too flat to prove anything"
    for name, values in (
        ("present_key.0", below["present_key.0"]),
        ("present_value.2", above["present_value.1"]),
    ):
        used = np.s_[:, :, : CURSOR + ROWS]
        np.testing.assert_allclose(values[used], wanted[name][used], atol=1e-5)
