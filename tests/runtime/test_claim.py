"""One generation at a time uses the buffers of a model."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.errors import JetdraftError, OptionError
from jetdraft.methods import Method, Proposer, Traits, registered
from jetdraft.runtime.claim import Idle

IDS = np.random.default_rng(12).integers(0, 288, 20).tolist()
HOW = {"token_ids": IDS, "max_new_tokens": 30, "ignore_eos": True, "method": "none"}


@pytest.fixture
def going(model):
    """A generation that has given its first piece."""
    stream = model.stream(**HOW)
    next(stream)
    yield stream
    stream.close()
    with model.parts.claim.held():
        pass


def test_a_second_generation_is_refused_and_the_first_goes_on(model, going):
    with pytest.raises(JetdraftError, match="already generating"):
        model.generate(**HOW)
    other = model.stream(**HOW)  # only its rounds need the buffers
    with pytest.raises(JetdraftError, match="already generating"):
        next(other)
    found = going.result().token_ids
    assert found == model.generate(**HOW).token_ids
    assert len(found) == 30


USES = {
    "tune": lambda model, file: tune(model),
    "measure": lambda model, file: model.measure_again(),
    "load": lambda model, file: model.load_prefix(file),
    "save": lambda model, file: model.save_prefix(file, IDS),
    "close": lambda model, file: model.close(),
}
"""What needs the buffers beside a generation."""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nobody_else_uses_the_buffers_meanwhile(model, going, tmp_path, use):
    with pytest.raises(JetdraftError, match="already generating"):
        use(model, tmp_path / "prefix.npz")
    assert len(going.result().token_ids) == 30
    assert model.generate(**HOW).token_ids, "a refusal to close leaves it open"


def refusal_in_a_thread(model):
    """Why another thread cannot generate; None if it can."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(model.generate, **HOW).exception()


def test_another_thread_is_refused_too(model, going):
    assert "already generating" in str(refusal_in_a_thread(model))
    assert len(going.result().token_ids) == 30


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_generation_begins_while_the_buffers_are_used(
    own, tmp_path, monkeypatch, use
):
    """Not even between the look whether they are free and their use."""
    model, file = jetdraft.load(own, threads=1), tmp_path / "prefix.npz"
    model.save_prefix(file, IDS)
    paused, user, refusals = Idle.paused, get_ident(), []

    @contextmanager
    def interrupted(idle, **how):
        if get_ident() == user:
            refusals.append(refusal_in_a_thread(model))
        with paused(idle, **how):
            yield

    monkeypatch.setattr(Idle, "paused", interrupted)
    use(model, file)
    monkeypatch.undo()
    assert refusals
    assert all("already generating" in str(refusal) for refusal in refusals)
    model.close()


def test_cancelling_ends_whoever_holds_the_buffers(model, going):
    model.cancel()
    result = going.result()
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) < 30
    model.cancel()  # nobody to cancel
    assert model.generate(**HOW).finish_reason == "length"


class Failing(Proposer):
    """A method from outside that goes wrong."""

    traits = Traits("failing", max_draft_tokens=4)

    def propose(self, context, budget, parents=None):
        raise RuntimeError("a bug in another package")


def test_a_generation_that_fails_frees_the_model(model):
    method = Method("failing", "a bug", lambda parts, options: Failing())
    how = {**HOW, "method": "failing", "num_draft_tokens": 2}
    problem = r"method 'failing' failed \(a bug in another package\); leave it out"
    with registered(method), pytest.raises(OptionError, match=problem):
        model.generate(**how)
    with model.parts.claim.held():
        pass
    assert len(model.generate(**HOW).token_ids) == 30


def test_twins_do_not_wait_for_each_other(model, going):
    with model.twin() as twin:
        expected = twin.generate(**HOW).token_ids
    assert going.result().token_ids == expected


def test_a_twin_measures_only_while_the_first_model_is_free(model, going):
    """They share what was measured, in the buffers of the first model."""
    with model.twin() as twin, pytest.raises(JetdraftError, match="already generating"):
        twin.measure_again()
