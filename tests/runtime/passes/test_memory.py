"""A model with a store: what it was asked before makes it faster, never different."""

from __future__ import annotations

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
    vector = remembering.similarity.vector(PROMPT)
    wrong = np.random.default_rng(4).integers(0, 288, 80).tolist()
    remembering.store.add(Entry(PROMPT, wrong, vector))
    plain = text(model, method="none", **way)
    poisoned = text(remembering, method=method, **way)
    assert poisoned.token_ids == plain.token_ids
    if method == "recall":
        assert poisoned.stats.drafted_tokens > poisoned.stats.accepted_tokens


def test_what_is_said_is_kept_for_the_next_process(bundle, remembering):
    first = text(remembering)
    again = jetdraft.load(bundle, threads=1, store=remembering.store.file)
    [entry] = again.store.entries
    assert (entry.prompt, entry.response) == (PROMPT, first.token_ids)
    stats = text(again, method="lookup", num_draft_tokens=8).stats
    assert stats.tokens_per_pass > 4


def test_an_unfinished_text_is_not_kept(remembering):
    stream = remembering.stream(token_ids=PROMPT)
    next(iter(stream))
    stream._pieces.close()
    assert remembering.store.entries == []


def test_without_a_store_nothing_is_recalled(model):
    assert "recall" not in model.methods
    with pytest.raises(OptionError, match="--store"):
        text(model, method="recall")
    with pytest.raises(OptionError, match="--store"):
        text(model, method="draft,recall")


def test_a_store_of_another_tokenizer(bundle, remembering, monkeypatch):
    monkeypatch.setattr(jetdraft.Bundle, "tokenizer_sha256", "another")
    with pytest.raises(StoreError, match="another tokenizer"):
        jetdraft.load(bundle, threads=1, store=remembering.store.file)


def test_a_user_without_a_store(bundle):
    with pytest.raises(OptionError, match="needs a store"):
        jetdraft.load(bundle, threads=1, user="ann")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_several_methods_take_turns(model, way):
    plain = text(model, method="none", **way)
    assert text(model, method="draft,lookup", **way).token_ids == plain.token_ids


@pytest.mark.parametrize("method", ["none,draft", "auto,lookup"])
def test_lists_name_proposers_only(model, method):
    with pytest.raises(OptionError, match="proposers only"):
        text(model, method=method)


def test_an_unknown_name_in_a_list(model):
    with pytest.raises(OptionError, match="'guess'"):
        text(model, method="draft,guess")
