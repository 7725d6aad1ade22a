"""One generation at a time uses the buffers of a model."""

from __future__ import annotations

import gc
from threading import Thread

import numpy as np
import pytest

from jetdraft.bench.tuning import tune
from jetdraft.errors import JetdraftError
from jetdraft.methods import Method, Proposer, Traits, registered

IDS = np.random.default_rng(12).integers(0, 288, 20).tolist()
HOW = {"token_ids": IDS, "max_new_tokens": 30, "ignore_eos": True, "method": "none"}


@pytest.fixture
def going(model):
    """A generation that has given its first piece."""
    stream = model.stream(**HOW)
    next(stream)
    yield stream
    stream.close()
    model.parts.claim.check_free()


def test_a_second_generation_is_refused_and_the_first_goes_on(model, going):
    with pytest.raises(JetdraftError, match="already generating"):
        model.generate(**HOW)
    other = model.stream(**HOW)  # only its rounds need the buffers
    with pytest.raises(JetdraftError, match="already generating"):
        next(other)
    found = going.result().token_ids
    assert found == model.generate(**HOW).token_ids
    assert len(found) == 30


@pytest.mark.parametrize(
    "use",
    [
        lambda model, file: tune(model),
        lambda model, file: model.measure_again(),
        lambda model, file: model.load_prefix(file),
        lambda model, file: model.save_prefix(file, IDS),
        lambda model, file: model.close(),
    ],
    ids=["tune", "measure", "load", "save", "close"],
)
def test_nobody_else_uses_the_buffers_meanwhile(model, going, tmp_path, use):
    with pytest.raises(JetdraftError, match="already generating"):
        use(model, tmp_path / "prefix.npz")
    assert len(going.result().token_ids) == 30


def test_another_thread_is_refused_too(model, going):
    refusals = []

    def run():
        try:
            model.generate(**HOW)
        except JetdraftError as error:
            refusals.append(str(error))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert len(refusals) == 1
    assert "already generating" in refusals[0]


def test_a_closed_stream_frees_the_model(model, going):
    going.close()
    model.parts.claim.check_free()
    assert going.result().finish_reason == "cancelled"
    assert len(model.generate(**HOW).token_ids) == 30


def test_an_abandoned_stream_frees_the_model(model):
    stream = model.stream(**HOW)
    next(stream)
    del stream
    gc.collect()
    model.parts.claim.check_free()


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
    with registered(method), pytest.raises(RuntimeError, match="a bug in another"):
        model.generate(**how)
    model.parts.claim.check_free()
    assert len(model.generate(**HOW).token_ids) == 30


def test_twins_do_not_wait_for_each_other(model, going):
    with model.twin() as twin:
        expected = twin.generate(**HOW).token_ids
    assert going.result().token_ids == expected


def test_a_twin_measures_only_while_the_first_model_is_free(model, going):
    """They share what was measured, in the buffers of the first model."""
    with model.twin() as twin, pytest.raises(JetdraftError, match="already generating"):
        twin.measure_again()
