from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft import Bundle, Drafting, OptionError, UnsupportedModelError
from jetdraft.methods import registered
from jetdraft.methods.kangaroo.task import KangarooSettings, KangarooTask
from jetdraft.methods.select import method as select_method
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.halves import Halves
from jetdraft.train.task import TrainingOptions
from tests import same_text
from tests.programs import assert_refused
from tests.programs import jetdraft as cli
from tests.tiny import exported, llama_config, refused, save_checkpoint
from tests.train.attached.conftest import LONG, in_torch, int4
from tests.train.periodic import PERIOD, made

LAYERS = 4


@pytest.fixture(scope="module")
def head(target, tmp_path_factory) -> Path:
    folder, text = tmp_path_factory.mktemp("adapter"), Path(target).parent / "text.txt"
    options = TrainingOptions(60, 2, 48, learning_rate=1e-2, validate_every=60)
    settings = KangarooSettings(exit_layer=1)
    made(KangarooTask, target, folder / "head", [text], settings, options).run()
    return folder / "head"


@pytest.fixture(scope="module")
def bundle(target, head, tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    return int4(target, folder, head=head, fast=False, select_kv=16)


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(PERIOD, method="none", **LONG).token_ids


def test_the_export_measures_its_acceptance(bundle):
    assert len(bundle.drafter.quantization["acceptance"]["by_position"]) == 4


def leading_of(model):
    leading = model.planner.target_for(Drafting("kangaroo"))
    follower = model.parts.draft_cache
    follower.forget()
    leading.cache.rewind(0)
    return leading, follower


def rows_of(buffers, length):
    return [np.array(buffer.numpy()[:, :, :length]) for buffer in buffers.values()]


def read(leading, follower, tokens):
    for place, token in enumerate(tokens):
        answer = leading.run([token], width=leading.widths[0])
        leading.cache.advance(1)
        follower.observe(place, [token], answer.features.copy())
    return int(answer.candidates[0, 0])


@pytest.mark.parametrize("accepted", range(5))
def test_all_caches_hold_what_a_fresh_prefill_holds(model, plain, accepted):
    model.forget()
    leading, follower = leading_of(model)
    prompt = model.parts.text.encode(PERIOD)
    read(leading, follower, prompt)
    text = plain
    root, right = text[0], text[1 : 1 + accepted]
    wrong = [(token + 1) % 288 or 1 for token in text[1 + accepted : 5]]
    draft = [root, *right, *wrong]
    assert follower.follow([*prompt, root]) is not None
    for token in draft[1:-1]:
        assert follower.step(token) is not None
    assert leading.ahead == draft[:-1]
    whole_passes = leading.whole.passes
    rows, answer = leading.verify(Rows.chain(draft), width=leading.widths[-1])
    assert leading.whole.passes == whole_passes
    path = rows.walk(answer.candidates[:, 0].tolist())
    assert len(path) == 1 + accepted
    assert leading.commit(path, ends_at_gap=True) == len(path)
    assert leading.ahead == []
    sequence, first = [*prompt, *draft[: 1 + accepted]], len(prompt)
    follower.observe(first, sequence[first:], answer.features[path])
    assert follower.follow([*sequence, text[1 + accepted]]) is not None
    fed = len(follower.tokens)
    assert fed == leading.cache.length + 1 == len(sequence) + 1
    own = rows_of(leading.cache.buffers, len(sequence))
    adapter = rows_of(model.parts.drafter.cache.buffers, fed)
    leading.cache.rewind(0)
    follower.forget()
    read(leading, follower, sequence)
    assert all(map(np.array_equal, own, rows_of(leading.cache.buffers, len(sequence))))
    follower.follow([*sequence, text[1 + accepted]])
    fresh = rows_of(model.parts.drafter.cache.buffers, fed)
    for one, other in zip(adapter, fresh, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_halves_leave_the_cores_to_each_other(model):
    """Threads that spin after a pass made the other half twice as slow."""
    sessions = model.parts.leading.halves._sessions
    for session in (sessions.lower, sessions.upper):
        options = session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def written(model, confidence, **options):
    options |= {"method": "kangaroo", "drafting": {"confidence": confidence}}
    return model.generate(PERIOD, **options, **LONG).stats


def test_each_row_runs_through_the_lower_half_once(model, plain, monkeypatch):
    ran, original = [], Halves.run_lower

    def run_lower(halves, rows, *rest):
        ran.append(len(rows.tokens))
        return original(halves, rows, *rest)

    monkeypatch.setattr(Halves, "run_lower", run_lower)
    whole_passes = model.parts.target.passes
    model.forget()
    stats = written(model, 0.0, num_draft_tokens=3)
    assert set(ran) == {1}
    # The root and each drafted token; a round without a draft runs the whole target.
    rounds = stats.target_passes
    prefills = model.parts.target.passes - whole_passes
    assert stats.drafted_tokens + rounds - prefills <= len(ran)
    assert len(ran) <= stats.drafted_tokens + rounds


def test_an_exact_generation_after_a_lossy_one_reads_all_rows(model):
    prompt = (model.parts.text.encode(PERIOD) * 8)[:48]
    how = {"token_ids": prompt, "max_new_tokens": 4}
    kept = []
    lossy = {"method": "none", "exact": False, "drafting": {"select_kv": True}}
    for is_first in (True, False):
        if not is_first:
            model.generate(**how, **lossy)
        model.forget()
        model.generate(**how, method="kangaroo", num_draft_tokens=3)
        kept.append(rows_of(model.parts.target.cache.buffers, 40))
    assert len(prompt) == 48
    assert all(map(np.array_equal, *kept))


def test_the_confidence_ends_a_draft(model):
    def drafted(confidence):
        way = {"num_draft_tokens": 4, "temperature": 1.0, "seed": 2}
        stats = written(model, confidence, **way)
        return stats.drafted_tokens / stats.target_passes

    assert drafted(1.0) <= 1.0
    assert drafted(1.0) < drafted(0.6) < drafted(0.0)


def test_the_adapter_in_the_graph_is_the_module(target, head, tmp_path):
    bundle = exported(target, tmp_path / "b", head=head, draft_vocab=40)
    whole, module = in_torch(target, head)
    assert module.exit_layer == 1
    halves = bundle.target.halves
    assert (halves.layers, halves.hidden_size, halves.scores) == (3, 64, False)
    tokens = np.random.default_rng(6).integers(1, 288, 12)
    ids, kept = torch.tensor(tokens)[None], bundle.draft_vocabulary()
    with torch.no_grad():
        states = whole(ids, output_hidden_states=True).hidden_states[1]
        hidden = module(states, torch.arange(12)[None])
        logits = module.lm_head(hidden)[0, :, kept].numpy()
    with jetdraft.load(bundle.path, threads=1) as model:
        features = model.parts.target.run(tokens.tolist()).features.copy()
        np.testing.assert_allclose(features, states[0], atol=1e-4)
        graph = model.parts.drafter
        for rows in (slice(0, 8), slice(8, 12)):
            answer = graph.run(tokens[rows].tolist(), features=features[rows])
            best = np.sort(logits[rows])[:, ::-1]
            np.testing.assert_allclose(answer.candidate_logits, best, atol=2e-4)
            first = kept[logits[rows].argmax(-1)]
            assert np.array_equal(answer.candidates[:, 0], first)
            graph.cache.advance(8)


def test_halves_over_integer_buffers_write_the_text_of_plain_decoding(
    target, head, tmp_path
):
    bundle = int4(target, tmp_path / "b", recipe="int8-kv8", head=head)
    assert bundle.target.split_contract.lower.kv_bits == 8
    drafts = [{"method": "kangaroo", "num_draft_tokens": 3}]
    with jetdraft.load(bundle.path, threads=1) as model:
        [found] = same_text(model, drafts, [{}], prompt=PERIOD, **LONG)
    assert found.stats.accepted_tokens > 10


def test_halves_of_sliding_windows_are_refused(head, tmp_path):
    from transformers import MistralConfig

    sizes = llama_config(num_hidden_layers=4).to_dict()
    known = MistralConfig().to_dict().keys() - {"model_type", "architectures"}
    fields = {name: value for name, value in sizes.items() if name in known}
    config = MistralConfig(**{**fields, "sliding_window": 8})
    source = save_checkpoint(tmp_path / "windows", config)
    refused(UnsupportedModelError, "attends in sliding windows", source, head=head)


def test_other_providers_are_refused_before_anything_is_written(target, head, tmp_path):
    said = "run on the CPU, not on cuda"
    refused(OptionError, said, target, "int4", head=head, provider="cuda")


def test_another_draft_in_the_same_buffers_is_refused(bundle, model):
    line = ["generate", bundle.path, "-p", "def", "--method"]
    selected = "--no-exact", "--drafting", "select-kv=true"
    assert_refused(cli(*line, "kangaroo", *selected), "kangaroo verifies with its own")
    assert_refused(
        cli(*line, "kangaroo,select"), "select drafts in the buffers", "kangaroo keeps"
    )
    method = replace(select_method.METHOD, name="fake", in_auto=lambda options: True)
    with registered(method):
        proposers = model.planner.proposer_set(Drafting("auto")).proposers
        assert model.planner.proposer_set(Drafting("fake,lookup")).proposers
    names = [proposer.traits.name for proposer in proposers]
    assert "kangaroo" in names
    assert select_method.NAME not in names
