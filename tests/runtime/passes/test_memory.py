"""A model with a store: what it was asked before makes it faster, never different."""

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import OptionError, StoreError
from jetdraft.runtime.history.store import Entry

PROMPT = np.random.default_rng(3).integers(0, 288, 24).tolist()
WAYS = [{}, {"temperature": 0.9, "seed": 2}]


@pytest.fixture
def remembering(bundle, tmp_path):
    return jetdraft.load(bundle, threads=1, store=tmp_path / "store.sqlite")


def text(model, prompt=PROMPT, **options):
    return model.generate(
        token_ids=prompt, max_new_tokens=60, ignore_eos=True, **options
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_second_time_takes_few_passes(remembering, model, way):
    plain = text(model, method="none", **way)
    assert text(remembering, method="recall", **way).token_ids == plain.token_ids
    again = text(remembering, method="recall", num_draft_tokens=15, **way)
    assert again.token_ids == plain.token_ids
    assert again.stats.tokens_per_pass == pytest.approx(15.0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", ["recall", "lookup", "recall,lookup", "auto"])
def test_a_poisoned_entry_changes_no_text(remembering, model, method, way):
    vector = remembering.parts.similarity.vector(PROMPT)
    wrong = np.random.default_rng(4).integers(0, 288, 80).tolist()
    remembering.parts.store.add(Entry(PROMPT, wrong, vector))
    plain = text(model, method="none", **way)
    poisoned = text(remembering, method=method, **way)
    assert poisoned.token_ids == plain.token_ids
    if method == "recall":
        assert poisoned.stats.drafted_tokens > poisoned.stats.accepted_tokens


def test_what_is_said_is_kept_for_the_next_process(bundle, remembering):
    first = text(remembering)
    again = jetdraft.load(bundle, threads=1, store=remembering.parts.store.file)
    [entry] = again.parts.store.entries
    assert (entry.prompt, entry.response) == (PROMPT, first.token_ids)
    stats = text(again, method="lookup", num_draft_tokens=8).stats
    assert stats.tokens_per_pass > 4


def test_an_unfinished_text_is_not_kept(remembering):
    stream = remembering.stream(token_ids=PROMPT)
    next(iter(stream))
    stream.close()
    assert remembering.parts.store.entries == []


def test_without_a_store_nothing_is_recalled(model):
    assert "recall" not in model.methods
    for method in ("recall", "draft,recall"):
        with pytest.raises(OptionError, match="--store") as refusal:
            text(model, method=method)
        assert refusal.value.field == "method"


def test_a_store_of_another_tokenizer(bundle, remembering, monkeypatch):
    monkeypatch.setattr(jetdraft.Bundle, "tokenizer_sha256", "another")
    with pytest.raises(StoreError, match="another tokenizer"):
        jetdraft.load(bundle, threads=1, store=remembering.parts.store.file)


@pytest.mark.parametrize("method", ["lookup", "cascade", "auto", "draft,lookup"])
def test_a_user_without_a_store(model, method):
    with pytest.raises(OptionError, match="user 'ann' needs a store") as refusal:
        text(model, method=method, drafting={"user": "ann"})
    assert refusal.value.field == "drafting"


@pytest.mark.parametrize("method", ["recall", "lookup", "auto"])
def test_what_a_user_asked_is_drafted_for_that_user_only(remembering, method):
    """As a service with one model and several users would have it."""
    store, ann = remembering.parts.store, {"drafting": {"user": "ann"}}
    first = text(remembering, method=method, **ann)
    assert store.entries == store.of("bob").entries == []
    [entry] = store.of("ann").entries
    assert (entry.prompt, entry.response) == (PROMPT, first.token_ids)
    if method != "auto":
        again = text(remembering, method=method, num_draft_tokens=8, **ann)
        assert again.stats.tokens_per_pass > 4
        bob = {"drafting": {"user": "bob"}}
        other = text(remembering, method=method, num_draft_tokens=8, **bob)
        assert other.stats.tokens_per_pass < 2
        assert again.token_ids == other.token_ids == first.token_ids
