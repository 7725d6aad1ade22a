import shutil
from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices import providers
from jetdraft.devices.providers import PROVIDERS, Presence, Provider
from jetdraft.ort import ort
from jetdraft.runtime.measured.survey import Survey
from jetdraft.runtime.passes import opener as opening
from jetdraft.runtime.passes.buffers import Cache, Memory
from jetdraft.runtime.passes.opener import shared_weights
from jetdraft.runtime.passes.session import Captures, open_session
from jetdraft.runtime.planning.drafting import Drafting
from tests.programs import refused_option
from tests.tiny import exported, llama_config, save_checkpoint, save_probes

PROMPT = np.random.default_rng(3).integers(0, 288, 30).tolist()
CPU = PROVIDERS["cpu"].full
BEST = {"tree": "best"}
WAYS = [
    {"method": "none"},
    {"method": "lookup"},
    {"method": "auto"},
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "draft", "drafting": BEST, "num_draft_tokens": 6},
    {"method": "draft", "temperature": 0.9, "seed": 3},
    {"method": "lookup", "temperature": 1.2, "seed": 5, "top_p": 0.95},
    {"method": "draft", "num_draft_tokens": 7, "max_new_tokens": 286},
    {"method": "draft", "exact": False, "drafting": BEST, "num_draft_tokens": 6},
]


@pytest.fixture(scope="module", params=["cuda", "tensorrt"])
def placed(pair, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("placed")
    config = llama_config(num_hidden_layers=1)
    target, output = save_checkpoint(folder / "target", config), folder / request.param
    providers = {"provider": request.param, "drafter_provider": "cpu"}
    sizes = {"drafter_recipe": "int8", "capacity": 320, "max_width": 64}
    return exported(target, output, "int8", pair.drafter, **providers, **sizes)


def pretend(monkeypatch, name):
    real = PROVIDERS[name]
    fake = Provider(name, CPU, "cpu", real.flavour, real.dtype)
    monkeypatch.setitem(PROVIDERS, name, fake)
    runs = Presence(name, compiled=True, runs=True)
    monkeypatch.setattr(providers, "try_provider", lambda name: runs)
    monkeypatch.setattr(opening.providers, "ENGINE_WIDTHS", (4, 8))


@pytest.fixture
def pretended(placed, monkeypatch):
    pretend(monkeypatch, placed.provider)
    return jetdraft.load(placed.path, threads=1)


def text(model, **way):
    given = {"max_new_tokens": 60, "ignore_eos": True, **way}
    return model.generate(token_ids=PROMPT, **given).token_ids


def test_a_bundle_for_a_gpu_is_fp16_and_its_drafter_goes_where_the_caller_goes(placed):
    """A bundle's choice for its drafter belongs to its choice for the target."""
    assert placed.target.contract.dtype == "float16"
    assert placed.drafter.contract.dtype == "float32"
    assert placed.drafter_provider == "cpu"
    flavours = {"cuda": "contrib", "tensorrt": "standard"}
    assert placed.flavour == flavours[placed.provider]
    model = jetdraft.load(placed.path, provider="cpu", threads=1)
    assert model.parts.profiles.machine["provider"] == "cpu"


def test_the_text_is_that_of_the_cpu(placed, pretended):
    plain = jetdraft.load(placed.path, provider="cpu", threads=1)
    assert pretended.parts.profiles.machine["provider"] == f"{placed.provider}+cpu"
    for way in WAYS:
        kept = ("temperature", "seed", "top_p", "max_new_tokens")
        settings = {key: value for key, value in way.items() if key in kept}
        assert text(pretended, **way) == text(plain, method="none", **settings), way


def test_only_candidates_come_to_the_host(pretended):
    graph = pretended.parts.target
    assert graph.memory == Memory("cpu", copies=True)
    graph.cache.rewind(0)
    answer = graph.run(PROMPT[:8])
    source = answer._fetch.__self__
    assert source.stale
    seen = np.take_along_axis(answer.logits, answer.candidates, 1)
    assert not source.stale
    assert np.array_equal(seen, answer.candidate_logits)
    before = answer.logits.copy()
    graph.run(PROMPT[8:16])
    assert source.stale
    assert not np.array_equal(answer.logits, before)


def test_pruning_is_refused(placed, pretended):
    drafting = Drafting("stream", settings={"prune_threshold": 0.1})
    with refused_option(f"not on {placed.provider}"):
        pretended.planner.target_for(drafting)


def test_passes_are_captured_by_size_and_length(placed, pretended):
    if placed.provider != "cuda":
        assert pretended.parts.target.captures is None
        return
    captures = pretended.parts.target.captures
    text(pretended, method="none")
    captures.ids.clear()
    text(pretended, method="none", max_new_tokens=250)
    [(_, length)] = captures.ids
    assert length == 320, "an exact generation knows one length"
    text(pretended, method="none", exact=False, max_new_tokens=250)
    assert {length for _, length in captures.ids} == {256, 320}


def test_each_engine_has_a_width(placed, pretended):
    engines = pretended.parts.target.sessions
    if placed.provider == "cuda":
        assert engines.width(3, room=100) == 3
        assert engines.chain.session is not engines.any.session
        return
    assert [engines.width(rows, room=100) for rows in (1, 4, 5, 9)] == [4, 4, 8, 9]
    widths = set(pretended.parts.curve.passes)
    assert widths == {4, 8, *range(9, 17)}, "others would be filled up to these"
    assert engines.of(8, branching=True) is engines.fixed[8]
    assert engines.of(9, branching=True) is engines.any


def test_a_new_size_runs_eagerly_first():
    captures = Captures()

    def number(key):
        return captures.run_options(key).get_run_config_entry("gpu_graph_id")

    numbers = [int(number(key)) for key in ("a", "b", "a", "b", "a", None)]
    assert numbers == [-1, -1, 1, 2, 1, -1]


def test_trees_that_round_otherwise_are_not_exact(placed, pretended):
    assert pretended.parts.widths.trees_agree
    if placed.provider != "cuda":
        return
    graph = pretended.parts.target
    other = jetdraft.load(placed.path, provider="cpu", threads=1).parts.target
    file = placed.path / placed.target.tree_file
    views, _owners = shared_weights(file, "cpu")
    arrays = {name: value.numpy() for name, value in views.items()}
    scales = next(name for name, w in arrays.items() if w.dtype == np.float16)
    swapped = open_session(file, "cpu", weights={scales: 2 * arrays[scales]})
    graph.sessions.any = replace(graph.sessions.any, session=swapped)
    graph._bindings.clear()
    assert not Survey(graph, None).widths.trees_agree
    assert Survey(other, None).widths.trees_agree
    survey = pretended.parts.survey
    survey._widths = replace(survey.widths, trees_agree=False)
    tree = {"method": "draft", "drafting": BEST}
    with refused_option("passes that branch"):
        text(pretended, **tree)
    assert text(pretended, exact=False, **tree)
    drafted = text(pretended, method="auto", max_new_tokens=40)
    assert drafted == text(pretended, method="none", max_new_tokens=40)


def test_a_drafter_that_was_off_is_measured_when_it_is_on(placed, tmp_path):
    copy = shutil.copytree(placed.path, tmp_path / "copy")
    shutil.rmtree(copy / "profiles", ignore_errors=True)
    off = jetdraft.load(copy, provider="cpu", threads=1, drafter_provider="off")
    assert off.parts.profiles.machine["provider"] == "cpu+off"
    on = jetdraft.load(copy, provider="cpu", threads=1)
    assert text(on, method="draft")
    assert off.parts.curve.drafter == 0.0
    assert on.parts.curve.drafter > 0.0


@pytest.mark.parametrize("scheme", ["int4", "none"])
def test_streams_and_integers_of_four_bits(tmp_path, monkeypatch, scheme):
    flavour = "contrib" if scheme == "none" else "standard"
    save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=1))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_probes(tmp_path / "c", settings)
    options = {"flavour": flavour, "capacity": 192, "max_width": 64}
    exported(tmp_path / "c", tmp_path / "b", scheme, provider="cuda", **options)
    plain = jetdraft.load(tmp_path / "b", provider="cpu", threads=1)
    pretend(monkeypatch, "cuda")
    model = jetdraft.load(tmp_path / "b", threads=1)
    assert model.parts.target.memory.copies
    for way in ({}, {"temperature": 1.1, "seed": 2, "top_p": 0.9}):
        expected = text(plain, method="none", **way)
        for tree in ("chain", "best"):
            drafting = {"drafting": {"tree": tree}, "num_draft_tokens": 3}
            assert text(model, method="stream", **drafting, **way) == expected


TOKENS = np.random.default_rng(3).integers(0, 288, 64)


@pytest.fixture
def graph(model):
    model.parts.target.cache.rewind(0)
    yield model.parts.target
    model.parts.target.cache.rewind(0)


def feed(graph, tokens):
    answer = graph.run(np.asarray(tokens))
    graph.cache.advance(len(tokens))
    return answer.logits.copy()


def contents(graph, rows):
    return [b.numpy()[:, :, :rows].copy() for b in graph.cache.buffers.values()]


@pytest.mark.parametrize("wrong", [1, 2, 5, 9])
def test_buffers_after_a_rewind_equal_a_fresh_prefill(graph, wrong):
    feed(graph, TOKENS[:20])
    feed(graph, (TOKENS[20 : 20 + wrong] + 1) % 288)
    graph.cache.rewind(20)
    feed(graph, TOKENS[20:30])
    rewound = contents(graph, 30)
    graph.cache.rewind(0)
    feed(graph, TOKENS[:20])
    feed(graph, TOKENS[20:30])
    for before, after in zip(rewound, contents(graph, 30), strict=True):
        assert np.array_equal(before, after)


def test_a_pass_writes_its_rows_and_no_others(graph):
    feed(graph, TOKENS[:10])
    before = contents(graph, graph.cache.capacity)
    graph.run(TOKENS[50:53])  # tokens that no test fed at this place
    for old, new in zip(before, contents(graph, graph.cache.capacity), strict=True):
        assert np.flatnonzero((old != new).any(axis=(0, 1, 3))).tolist() == [10, 11, 12]


def test_a_pass_past_the_buffer_is_refused(graph):
    graph.cache.advance(graph.cache.capacity - 2)
    with pytest.raises(ValueError, match="does not fit"):
        graph.run(TOKENS[:3])


def test_candidates_are_the_best_logits(graph):
    answer = graph.run(TOKENS[:6])
    order = np.argsort(-answer.logits, axis=1, kind="stable")[:, :64]
    best = np.take_along_axis(answer.logits, order, 1)
    assert np.array_equal(answer.candidate_logits, best)
    chosen = np.take_along_axis(answer.logits, answer.candidates, 1)
    assert np.array_equal(answer.candidate_logits, chosen)
    expected = np.log(np.exp(answer.logits.astype(np.float64)).sum(1))
    assert np.allclose(answer.logsumexp, expected, atol=1e-5)


def test_each_width_is_bound_once(graph):
    graph.run(TOKENS[:3])
    bound = dict(graph._bindings)
    graph.run(TOKENS[3:6])
    assert graph._bindings == bound


def test_widths_share_the_memory_of_logits(graph):
    narrow, wide = (graph.run(TOKENS[:rows]) for rows in (2, 9))
    assert np.shares_memory(narrow.logits, wide.logits)
    assert not np.shares_memory(narrow.candidates, wide.candidates)


def test_answering_for_the_last_row_only(graph):
    whole = graph.run(TOKENS[:9])
    expected = whole.logits[-1].copy()
    last = graph.run(TOKENS[:9], last_only=True)
    assert last.logits.shape == (1, 288)
    assert np.allclose(last.logits[0], expected, atol=0.05)
    assert last.candidates[0, 0] == whole.candidates[-1, 0]


def test_present_and_past_are_one_buffer(graph):
    buffer = next(iter(graph.cache.buffers.values()))
    assert isinstance(buffer, ort.OrtValue)
    before = buffer.numpy()[0, :, :4].copy()
    graph.run(TOKENS[40:44])
    assert not np.array_equal(before, buffer.numpy()[0, :, :4])


CONTRACT = StepContract(
    vocab_size=8, capacity=10, max_width=4, dtype="float32", kv_shapes=((2, 4),)
)


def test_cursor_moves_and_buffers_stay():
    cache = Cache(CONTRACT)
    pointers = [buffer.data_ptr() for buffer in cache.buffers.values()]
    cache.advance(7)
    cache.rewind(3)
    assert (cache.length, cache.room) == (3, 7)
    assert [buffer.data_ptr() for buffer in cache.buffers.values()] == pointers


@pytest.mark.parametrize("length", [-1, 5, 11])
def test_a_cursor_stays_between_the_first_row_and_the_last(length):
    cache = Cache(CONTRACT)
    if length != 5:
        with pytest.raises(ValueError, match="cannot commit"):
            cache.advance(length)
    cache.advance(4)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind(length)
