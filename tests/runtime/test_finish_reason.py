"""Every way in which a generation ends, its name, and that the model is free then."""

import asyncio
import gc
import threading

import numpy as np
import pytest

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
OPTIONS = {"token_ids": IDS, "max_new_tokens": 40, "ignore_eos": True}
METHODS = [{"method": "none"}, {"method": "draft", "num_draft_tokens": 3}]


@pytest.fixture(params=METHODS, ids=lambda way: way["method"])
def options(request):
    return {**OPTIONS, **request.param}


@pytest.fixture(autouse=True)
def _free(model):
    """However a generation ends, another one can begin."""
    yield
    with model.parts.claim.held():
        pass
    assert model.generate(token_ids=IDS, max_new_tokens=1).finish_reason


def check(result, reason, whole):
    """An ended text is the beginning of the whole text, and says why it ended."""
    assert result.finish_reason == result.stats.finish_reason == reason
    assert result.stats.to_json()["finish_reason"] == reason
    assert result.token_ids == whole[: len(result.token_ids)]
    assert result.stats.new_tokens == len(result.token_ids)


@pytest.fixture(scope="module")
def whole(model):
    return model.generate(**OPTIONS, method="none").token_ids


def test_length(model, options, whole):
    result = model.generate(**options)
    check(result, "length", whole)
    assert len(result.token_ids) == 40
    assert result.prompt_tokens == len(IDS)
    assert result.stats.time_to_first_token > 0


def test_stop_by_a_text(model, options, whole):
    text = model.generate(**options).text
    result = model.generate(**options, stop=text[5:8])
    check(result, "stop", whole)
    assert result.text == text[: text.index(text[5:8])]


def test_stop_by_an_end_of_text(model, options, whole):
    [eos] = model.bundle.eos_token_ids
    result = model.generate(**{**options, "ignore_eos": False}, logit_bias={eos: 100.0})
    check(result, "stop", [eos])
    assert result.token_ids == [eos]


@pytest.mark.parametrize("pieces", [0, 1])
def test_cancelled_by_cancel(model, options, whole, pieces):
    stream = model.stream(**options)
    for _ in range(pieces):
        next(stream)
    stream.cancel()
    stream.cancel()  # once more changes nothing
    for _ in range(2):
        check(stream.result(), "cancelled", whole)
        assert bool(stream.result().token_ids) == bool(pieces)
        assert len(stream.result().token_ids) < 40


def test_cancelled_by_the_model_from_another_thread(model, options, whole):
    stream = model.stream(**options)
    next(stream)
    thread = threading.Thread(target=model.cancel)
    thread.start()
    thread.join()
    check(stream.result(), "cancelled", whole)
    assert 0 < len(stream.result().token_ids) < 40
    model.cancel()  # nothing to cancel, nothing happens


@pytest.mark.parametrize("pieces", [0, 1])
def test_cancelled_by_leaving_its_context(model, options, whole, pieces):
    with model.stream(**options) as stream:
        tokens = [t for _ in range(pieces) for t in next(stream).token_ids]
    stream.close()
    check(stream.result(), "cancelled", whole)
    assert stream.result().token_ids == tokens
    assert list(stream) == []


def test_cancelled_by_leaving_a_loop(model, options):
    stream = model.stream(**options)
    stats = stream.stats
    for _ in stream:
        break
    assert stats.finish_reason == ""
    del stream
    gc.collect()
    assert stats.finish_reason == "cancelled"


@pytest.mark.parametrize("end", ["cancel", "aclose"])
def test_cancelled_in_a_loop_of_asyncio(model, options, whole, end):
    async def main():
        stream = model.astream(**options)
        async for _ in stream:
            break
        if end == "cancel":
            stream.cancel()
        else:
            await stream.aclose()
        return await stream.result()

    result = asyncio.run(main())
    check(result, "cancelled", whole)
    assert 0 < len(result.token_ids) < 40


def test_a_text_that_came_to_its_end_is_not_cancelled(model, options, whole):
    with model.stream(**options) as stream:
        stream.result()
        stream.cancel()
    stream.close()
    check(stream.result(), "length", whole)


def test_deadline(model, options, whole, monkeypatch):
    """The clock jumps past the limit after the first pieces."""
    stream = model.stream(**options, max_seconds=1000.0)
    next(stream)
    monkeypatch.setattr(stream._watcher, "_deadline", 0.0)
    result = stream.result()
    check(result, "deadline", whole)
    assert 0 < len(result.token_ids) < 40


def test_deadline_before_the_first_token(model, options):
    result = model.generate(**options, max_seconds=1e-9)
    assert (result.token_ids, result.finish_reason) == ([], "deadline")
    assert result.stats.time_to_first_token == 0


def test_interrupted_inside_a_pass(model, options, whole, monkeypatch):
    """Ctrl-C comes as an exception, wherever the program is."""
    target, passes = model.parts.target, []
    run = target.run

    def interrupted(*arguments, **more):
        passes.append(arguments)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return run(*arguments, **more)

    monkeypatch.setattr(target, "run", interrupted)
    stream, tokens = model.stream(**options), []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(token for piece in stream for token in piece.token_ids)
    result = stream.result()
    check(result, "interrupted", whole)
    assert result.token_ids == tokens
    assert tokens
    monkeypatch.undo()
    # What the interrupted pass wrote into the buffers is not taken for a prefix.
    assert model.generate(**options).token_ids == whole


def test_an_interruption_of_a_whole_call_goes_on_to_the_caller(model, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.parts.target, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**OPTIONS)
    monkeypatch.undo()
