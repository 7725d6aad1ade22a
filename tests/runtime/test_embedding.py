import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import get_ident

import numpy as np
import pytest

import jetdraft
from jetdraft.bench.tuning import tune
from jetdraft.errors import JetdraftError, OptionError
from jetdraft.methods import Method, Proposer, Traits, registered
from jetdraft.runtime.claim import Idle
from tests import tick
from tests.programs import ended

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
OPTIONS = {"token_ids": IDS, "max_new_tokens": 80, "ignore_eos": True}
OPTIONS |= {"temperature": 0.9, "seed": 3}
OTHER_IDS = np.random.default_rng(12).integers(0, 288, 20).tolist()
HOW = {"token_ids": OTHER_IDS, "max_new_tokens": 30, "ignore_eos": True}
HOW |= {"method": "none"}
USES = {
    "tune": lambda model, file: tune(model),
    "measure": lambda model, file: model.measure_again(),
    "load": lambda model, file: model.load_prefix(file),
    "save": lambda model, file: model.save_prefix(file, OTHER_IDS),
    "close": lambda model, file: model.close(),
}
"""What needs the buffers beside a generation."""


def test_a_model_is_closed_with_its_context(bundle):
    with jetdraft.load(bundle, threads=1) as model:
        text = model.generate(**OPTIONS).text
    assert text
    model.close()  # like a file
    for use in (lambda: model.generate("a"), lambda: model.methods):
        with pytest.raises(JetdraftError, match="closed"):
            use()


def test_a_model_has_a_method_of_its_own(bundle):
    model = jetdraft.load(bundle, threads=1, method="lookup")
    assert model.generate(**OPTIONS).stats.method == "lookup"
    assert model.generate(**OPTIONS, method="none").stats.method == "none"
    with pytest.raises(OptionError, match="no method 'stream'"):
        jetdraft.load(bundle, threads=1, method="stream")


def test_the_result_says_what_was_drafted(model):
    result = model.generate(**OPTIONS, method="draft", num_draft_tokens=3)
    assert len(result.from_draft) == len(result.token_ids)
    assert 0 < sum(result.from_draft) < len(result.token_ids)
    assert not any(model.generate(**OPTIONS, method="none").from_draft)


@pytest.mark.parametrize("method", ["none", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_log_probabilities_are_those_of_all_logits(model, method, temperature):
    options = {**OPTIONS, "temperature": temperature, "method": method}
    assert model.generate(**options).logprobs is None
    assert not any(each.top for each in model.generate(**options, logprobs=0).logprobs)
    result = model.generate(**options, logprobs=5)
    assert [each.token for each in result.logprobs] == result.token_ids
    model.parts.target.cache.rewind(0)
    whole = [*IDS, *result.token_ids]
    logits = model.parts.target.run(whole[:60]).logits.astype(np.float64)
    logits = logits - logits.max(1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for place in range(len(IDS) - 1, 59):
        found = result.logprobs[place + 1 - len(IDS)]
        assert found.logprob == pytest.approx(logs[place, found.token], abs=1e-3)
        best = sorted(logs[place], reverse=True)[:5]
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-3)
        for token, value in found.top:
            assert value == pytest.approx(logs[place, token], abs=1e-3)


def test_an_error_on_the_way_out_is_not_hidden(bundle):
    def fail_in(context):
        with context as opened:
            with opened.take() if context is pool else nullcontext(opened) as other:
                kept = other.stream(**OPTIONS)
                next(kept)
            raise ZeroDivisionError

    pool = jetdraft.Pool(bundle, 1, threads=1)
    for context in (jetdraft.load(bundle, threads=1), pool):
        with pytest.raises(ZeroDivisionError):
            fail_in(context)


def test_an_asynchronous_stream_is_the_same(model):
    expected = model.generate(**OPTIONS)

    async def main():
        async with model.astream(**OPTIONS) as stream:
            pieces = [piece async for piece in stream]
            result = await stream.result()
            return pieces, await asyncio.sleep(0, stream.stats), result

    pieces, stats, result = asyncio.run(main())
    assert result.token_ids == expected.token_ids
    assert [t for piece in pieces for t in piece.token_ids] == expected.token_ids
    assert "".join(piece.text for piece in pieces) == expected.text
    assert stats.finish_reason == "length"


def test_the_loop_is_free_beside_a_stream(model):
    async def main():
        beside = asyncio.create_task(tick(0.0, seen := []))
        result = await model.astream(**OPTIONS).result()
        beside.cancel()
        assert len(seen) > 10
        return result

    assert len(asyncio.run(main()).token_ids) == 80


def test_a_cancelled_task_frees_the_model(model):
    async def main():
        async def read():
            async with model.astream(**OPTIONS) as stream:
                async for _ in stream:
                    await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        early = model.astream(**OPTIONS)
        async for _ in early:
            break
        await early.aclose()
        assert [piece async for piece in early] == []
        return await model.astream(**OPTIONS).result()

    assert len(asyncio.run(main()).token_ids) == 80


class Executor:
    def __init__(self, *arguments):
        executor = ThreadPoolExecutor(*arguments)
        self.submit, self.shutdown = executor.submit, executor.shutdown


@pytest.mark.parametrize("ended", [True, False], ids=["to the end", "left"])
def test_asyncio_needs_no_private_name_of_the_library(model, monkeypatch, ended):
    monkeypatch.setattr("jetdraft.runtime.stream.ThreadPoolExecutor", Executor)

    async def main():
        texts = model.astream(**OPTIONS)
        pieces = [await anext(texts)]
        if not ended:
            await texts.aclose()
        pieces += [piece async for piece in texts]
        result = await texts.result()
        assert [id for piece in pieces for id in piece.token_ids] == result.token_ids
        return result.finish_reason

    assert asyncio.run(main()) == ("length" if ended else "cancelled")


def test_a_stream_that_lives_as_long_as_the_program_ends_in_silence(bundle):
    code = (
        "import asyncio, sys, jetdraft\n"
        "async def main():\n"
        "    return [model.astream('a'), await anext(texts)]\n"
        "model = jetdraft.load(sys.argv[1], threads=1)\n"
        "texts = model.astream('a', max_new_tokens=200, ignore_eos=True)\n"
        "kept = asyncio.run(main())\n"
    )
    done = ended(sys.executable, "-c", code, bundle)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stream_that_is_dropped_frees_the_model_soon(model):
    async def main():
        async for _ in model.astream(**OPTIONS):
            break

    asyncio.run(main())
    for _ in range(200):
        try:
            with model.parts.claim.held():
                return
        except JetdraftError:
            time.sleep(0.01)
    raise AssertionError("it stayed busy")


def test_a_pool_answers_several_at_once(bundle):
    with jetdraft.Pool(bundle, size=3, threads=1) as pool:
        sessions = {
            id(model.parts.target.sessions.any.session) for model in pool.models
        }
        assert len(sessions) == 1, "weights are there once"
        expected = {
            seed: pool.models[0].generate(**{**OPTIONS, "seed": seed}).token_ids
            for seed in range(6)
        }

        def answer(seed):
            with pool.take() as model:
                return model.generate(**{**OPTIONS, "seed": seed}).token_ids

        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(answer, range(6)))
        assert found == [expected[seed] for seed in range(6)]
        assert len(set(map(tuple, found))) == 6


def test_a_pool_that_is_busy_says_so(bundle):
    with (
        jetdraft.Pool(bundle, size=1, threads=1) as pool,
        pool.take(),
        pytest.raises(JetdraftError, match="all 1 models"),
        pool.take(0.01),
    ):
        pass
    for wrong in (0, True, "2"):
        with pytest.raises(OptionError, match="give 1 or more"):
            jetdraft.Pool(bundle, size=wrong)


@pytest.fixture
def going(model):
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


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_nobody_else_uses_the_buffers_meanwhile(model, going, tmp_path, use):
    with pytest.raises(JetdraftError, match="already generating"):
        use(model, tmp_path / "prefix.npz")
    assert len(going.result().token_ids) == 30
    assert model.generate(**HOW).token_ids, "a refusal to close leaves it open"


def refusal_in_a_thread(model):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(model.generate, **HOW).exception()


def test_another_thread_is_refused_too(model, going):
    assert "already generating" in str(refusal_in_a_thread(model))
    assert len(going.result().token_ids) == 30


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_text_begins_while_the_buffers_are_used(own, tmp_path, monkeypatch, use):
    model, file = jetdraft.load(own, threads=1), tmp_path / "prefix.npz"
    model.save_prefix(file, OTHER_IDS)
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


def test_twins_wait_for_each_other_to_measure_only(model, going):
    """They share what was measured, in the buffers of the first model."""
    with model.twin() as twin:
        with pytest.raises(JetdraftError, match="already generating"):
            twin.measure_again()
        expected = twin.generate(**HOW).token_ids
    assert going.result().token_ids == expected
