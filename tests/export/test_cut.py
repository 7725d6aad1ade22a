"""A graph can be cut without streams: its halves do what the whole graph does."""

import numpy as np
import onnxruntime
import pytest

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import check_tensors
from jetdraft.export import graphs
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.graphs import Job
from jetdraft.export.step import Step
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes.session import open_session
from tests.tiny import llama_config, save_checkpoint

ROWS, CURSOR = 5, 3
TOKENS = np.random.default_rng(2).integers(1, 288, (1, ROWS))
ANCESTORS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
"""Per row of a branching draft, the rows that it sees."""


def cut_below_two(job: Job, contract: StepContract) -> Step:
    return Step(job.checkpoint.model, contract, cut=2)


def cut_bundle(folder, flavour) -> Bundle:
    options = ExportOptions(Recipe("none"), capacity=16, max_width=8, flavour=flavour)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_make_plain_step", cut_below_two)
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
    """A branching draft after a few committed rows."""
    random = np.random.default_rng(3)
    mask = np.zeros((1 + contract.draft_slots, ROWS), np.uint8)
    mask[1 : 1 + ROWS] = 1
    for row, seen in enumerate(ANCESTORS):
        mask[[1 + slot for slot in seen], row] = 0
    depths = [len(seen) - 1 for seen in ANCESTORS]
    values = {
        "input_ids": TOKENS,
        "position_ids": CURSOR + np.array([depths]),
        "cursor": np.array([CURSOR], np.int32),
        "total_length": np.array([contract.slots], np.int32),
        "answer_rows": np.arange(ROWS),
        "draft_mask": mask,
        "draft_start": np.array([CURSOR], np.int32),
    }
    for spec in contract.buffers("past"):
        values[spec.name] = random.normal(size=spec.shape).astype(np.float32)
        values[spec.name][:, :, CURSOR:] = 0
    return values


def test_the_entry_says_where_it_is_cut(bundle):
    halves = bundle.target.halves
    assert (halves.layers, halves.hidden_size, halves.scores) == (2, 64, False)
    assert bundle.target.streams is None
    contract = bundle.target.split_contract
    assert [len(c.kv_shapes) for c in (contract.lower, contract.upper)] == [1, 2]


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
    expected = run(
        whole, entry.tree_contract.inputs, entry.tree_contract.outputs, given
    )
    below = run(lower, contract.lower_inputs, contract.lower_outputs, given)
    shifted = {
        f"past_{kind}.{layer}": given[f"past_{kind}.{layer + 1}"]
        for kind in ("key", "value")
        for layer in range(2)
    }
    inputs = {**given, **shifted, "hidden": below["hidden"]}
    above = run(upper, contract.upper_inputs, contract.upper.outputs, inputs)
    np.testing.assert_allclose(above["logits"], expected["logits"], atol=1e-4)
    assert np.ptp(expected["logits"]) > 1, "too flat to prove anything"
    for name, values in (
        ("present_key.0", below["present_key.0"]),
        ("present_value.2", above["present_value.1"]),
    ):
        used = slice(0, CURSOR + ROWS)
        np.testing.assert_allclose(
            values[:, :, used], expected[name][:, :, used], atol=1e-5
        )


def test_the_chain_graph_keeps_nothing_of_the_cut(bundle):
    chain = session(bundle, bundle.target.file)
    contract = bundle.target.contract
    check_tensors(contract.inputs, chain.get_inputs(), "the chain's inputs")
    check_tensors(contract.outputs, chain.get_outputs(), "the chain's outputs")
