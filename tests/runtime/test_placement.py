"""What runs on a GPU, run here: the same code, with another provider behind it.

The memory is staged as if it were a device's, graphs are "captured" under ids that the
CPU provider does not look at, and chains and trees have sessions of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft.devices import providers
from jetdraft.devices.providers import PROVIDERS, Presence, Provider
from jetdraft.errors import MethodError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.quant.recipe import Recipe
from jetdraft.runtime import opening
from jetdraft.runtime.calibration import measure
from jetdraft.runtime.captures import Captures
from jetdraft.runtime.options import Options
from jetdraft.runtime.session import open_session
from jetdraft.runtime.tensor import Memory
from jetdraft.runtime.weights import shared_weights

PROMPT = np.random.default_rng(3).integers(0, 288, 30).tolist()
CPU = PROVIDERS["cpu"].full
WAYS = [
    {"method": "none"},
    {"method": "lookup"},
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "draft", "tree": "best", "num_draft_tokens": 6},
    {"method": "auto"},
    {"method": "draft", "temperature": 0.9, "seed": 3},
    {"method": "draft", "exact": False, "tree": "best", "num_draft_tokens": 6},
]


@pytest.fixture(scope="module", params=["cuda", "tensorrt"])
def bundle(pair, tmp_path_factory, request):
    """A bundle for a GPU, whose drafter stays on the CPU."""
    output = tmp_path_factory.mktemp("placed") / request.param
    options = ExportOptions(
        Recipe("int8", 32),
        provider=request.param,
        drafter_provider="cpu",
        capacity=320,
        max_width=64,
    )
    return export(str(pair.target), output, str(pair.drafter), options)


@pytest.fixture
def pretended(bundle, monkeypatch):
    """The CPU provider in the place of the bundle's."""
    name = bundle.provider
    real = PROVIDERS[name]
    fake = Provider(name, CPU, "cpu", real.flavour, real.dtype)
    monkeypatch.setitem(PROVIDERS, name, fake)
    runs = Presence(name, compiled=True, runs=True)
    monkeypatch.setattr(providers, "presence", lambda name: runs)
    monkeypatch.setattr(opening, "WIDTHS", (4, 8))
    return jetdraft.load(bundle.path, threads=1)


def text(model, **way):
    given = {"max_new_tokens": 60, "ignore_eos": True, **way}
    return model.generate(token_ids=PROMPT, **given).token_ids


def test_a_bundle_for_a_gpu_is_fp16(bundle):
    assert bundle.target.contract.dtype == "float16"
    assert bundle.drafter.contract.dtype == "float32"
    assert bundle.drafter_provider == "cpu"
    assert (
        bundle.flavour == {"cuda": "contrib", "tensorrt": "standard"}[bundle.provider]
    )


def test_the_text_is_that_of_the_cpu(bundle, pretended):
    plain = jetdraft.load(bundle.path, provider="cpu", threads=1)
    assert pretended.placement == f"{bundle.provider}+cpu"
    for way in WAYS:
        settings = {k: v for k, v in way.items() if k in ("temperature", "seed")}
        expected = text(plain, method="none", **settings)
        assert text(pretended, **way) == expected, way


def test_only_candidates_come_to_the_host(pretended):
    graph = pretended.target
    assert graph.memory == Memory("cpu", copies=True)
    graph.cache.rewind(0)
    answer = graph.run(PROMPT[:8])
    source = answer._source
    assert source.stale
    seen = np.take_along_axis(answer.logits, answer.candidates, 1)
    assert not source.stale
    assert np.array_equal(seen, answer.candidate_logits)
    before = answer.logits.copy()
    graph.run(PROMPT[8:16])
    assert source.stale
    assert not np.array_equal(answer.logits, before)


def test_pruning_is_refused(bundle, pretended):
    with pytest.raises(MethodError, match="not on "):
        pretended.target_for(Options(method="stream", prune_threshold=0.1))


def test_passes_are_captured_by_size_and_length(bundle, pretended):
    if bundle.provider != "cuda":
        assert pretended.target.captures is None
        return
    captures = pretended.target.captures
    text(pretended, method="none")
    captures.ids.clear()
    text(pretended, method="none", max_new_tokens=250)
    [(_, length)] = captures.ids
    assert length == 320, "an exact generation knows one length"
    text(pretended, method="none", exact=False, max_new_tokens=250)
    assert {length for _, length in captures.ids} == {256, 320}


def test_each_engine_has_a_width(bundle, pretended):
    engines = pretended.target.engines
    if bundle.provider == "cuda":
        assert engines.width(3, room=100) == 3
        assert engines.chain.session is not engines.any.session
        return
    assert [engines.width(rows, room=100) for rows in (1, 4, 5, 9)] == [4, 4, 8, 9]
    assert engines.width(5, room=7) == 5, "near the end the wide ones do not fit"
    assert engines.of(8, branching=True) is engines.fixed[8]
    assert engines.of(9, branching=True) is engines.any


def test_a_new_size_runs_eagerly_first():
    captures = Captures()

    def number(key):
        return captures.run_options(key).get_run_config_entry("gpu_graph_id")

    assert [number(key) for key in ("a", "b", "a", "b", "a", None)] == [
        *("-1", "-1", "1", "2", "1", "-1")
    ]


def test_trees_that_round_otherwise_are_not_exact(bundle, pretended):
    assert pretended.planner.calibration.trees_agree
    if bundle.provider != "cuda":
        return
    graph, other = pretended.target, jetdraft.load(bundle.path, "cpu", 1).target
    file = bundle.path / bundle.target.tree_file
    own = shared_weights(file, "cpu")
    arrays = {name: value.numpy() for name, value in own.items()}
    scales = next(name for name, w in arrays.items() if w.dtype == np.float16)
    swapped = open_session(file, "cpu", weights={scales: 2 * arrays[scales]})
    graph.engines.any = replace(graph.engines.any, session=swapped)
    graph._bindings.clear()
    assert not measure(graph, None).trees_agree
    assert measure(other, None).trees_agree
    known = pretended.planner.calibration
    pretended.planner.calibration = replace(known, trees_agree=False)
    tree = {"method": "draft", "tree": "best"}
    with pytest.raises(MethodError, match="passes that branch"):
        text(pretended, **tree)
    assert text(pretended, exact=False, **tree)
    drafted = pretended.generate(token_ids=PROMPT, method="auto", max_new_tokens=40)
    assert drafted.token_ids == text(pretended, method="none", max_new_tokens=40)
