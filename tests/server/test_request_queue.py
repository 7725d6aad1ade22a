"""Turns: fair between clients, in order within one, and none lost."""

import asyncio
import threading
from functools import wraps
from types import SimpleNamespace

import pytest

from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Result
from jetdraft.server import RequestError
from jetdraft.server.request_queue import Job, RequestQueue


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def story(body):
    """A test that runs in an event loop, for half a minute at most."""

    @wraps(body)
    def test():
        run(body())

    return test


async def take(queue, client, log, name=None, hold=None):
    async with queue.acquire_model(client) as model:
        log.append(name or client)
        await (hold.wait() if hold else asyncio.sleep(0))
        return model


async def start(*coroutines):
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.create_task(coroutine))
        await asyncio.sleep(0)
    return tasks


@story
async def test_clients_take_turns():
    queue, log, hold = RequestQueue(["m"], 9, 30.0), [], asyncio.Event()
    tasks = await start(
        take(queue, "x", log, "x0", hold),
        *(take(queue, "greedy", log, f"g{i}") for i in range(4)),
        take(queue, "small", log, "s0"),
        take(queue, "other", log, "o0"),
    )
    assert queue.waiting == 6
    assert queue.generating == 1
    hold.set()
    await asyncio.gather(*tasks)
    assert log == ["x0", "g0", "s0", "o0", "g1", "g2", "g3"]
    assert (queue.waiting, queue.generating) == (0, 0)


@story
async def test_a_queue_has_an_end():
    queue, log, hold = RequestQueue(["m"], 1, 30.0), [], asyncio.Event()
    tasks = await start(take(queue, "a", log, hold=hold), take(queue, "b", log))
    with pytest.raises(RequestError, match="too many") as found:
        await take(queue, "c", log)
    assert found.value.status == 429
    hold.set()
    await asyncio.gather(*tasks)
    assert await take(queue, "c", log) == "m"


@story
async def test_whoever_fills_the_queue_makes_room():
    queue, log, hold = RequestQueue(["m"], 3, 30.0), [], asyncio.Event()
    tasks = await start(
        take(queue, "greedy", log, "g0", hold),
        *(take(queue, "greedy", log, f"g{i}") for i in range(1, 4)),
        take(queue, "small", log, "s0"),
    )
    hold.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, RequestError) for end in ends] == [0, 0, 0, 1, 0]
    assert ends[3].status == 429
    assert log == ["g0", "g1", "s0", "g2"]
    assert (queue.waiting, queue.generating) == (0, 0)


@story
async def test_waiting_has_an_end():
    queue, log, hold = RequestQueue(["m"], 9, 0.05), [], asyncio.Event()
    tasks = await start(take(queue, "a", log, hold=hold))
    with pytest.raises(RequestError, match=r"0\.05 s") as found:
        await take(queue, "b", log)
    assert found.value.status == 503
    assert queue.waiting == 0
    hold.set()
    await asyncio.gather(*tasks)
    assert await take(queue, "b", log) == "m"


@story
async def test_who_leaves_is_forgotten():
    queue, log, hold = RequestQueue(["m"], 9, 30.0), [], asyncio.Event()
    first, second, third = await start(
        take(queue, "a", log, hold=hold), take(queue, "b", log), take(queue, "b", log)
    )
    second.cancel()
    await asyncio.sleep(0)
    assert queue.waiting == 1
    hold.set()
    await asyncio.gather(first, third)
    assert log == ["a", "b"]
    assert queue.generating == 0


@story
async def test_a_model_given_to_who_just_left_goes_on():
    queue, log, hold = RequestQueue(["m"], 9, 30.0), [], asyncio.Event()
    first, second, third = await start(
        take(queue, "a", log, hold=hold), take(queue, "b", log), take(queue, "c", log)
    )
    hold.set()
    while not first.done():
        await asyncio.sleep(0)
    second.cancel()  # its turn has come, and it has not seen so yet
    await asyncio.gather(third, return_exceptions=True)
    assert log[-1] == "c"
    assert queue.generating == 0


class Windows:
    """A stream between two generations: the model has nothing to cancel."""

    max_seconds, count = 30.0, 1

    def __init__(self):
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.is_closed = False

    def streams(self, model):
        yield self

    def __iter__(self):
        self.started.set()
        assert self.cancelled.wait(20)
        return iter(())

    def cancel(self):
        self.cancelled.set()

    def close(self):
        self.is_closed = True

    def result(self):
        return Result.of([], Stats("none", True, 0), False)


def job_of(stream):
    return Job(
        RequestQueue([SimpleNamespace(cancel=lambda: None)], 1, 30.0), stream, "a"
    )


@story
async def test_a_job_cancels_its_stream_and_not_only_the_model():
    windows = Windows()
    job = job_of(windows)
    await asyncio.to_thread(windows.started.wait, 20)
    job.cancel()
    await job.results()


def test_a_loop_that_ends_leaves_no_generation_behind():
    """Else its thread holds the model, which another service takes for free."""
    windows = Windows()

    async def story():
        job_of(windows)
        await asyncio.to_thread(windows.started.wait, 20)

    run(story())
    assert windows.cancelled.is_set()
    assert windows.is_closed


def test_an_end_of_the_process_is_no_answer():
    """It ends the loop; a reader that got it would raise it inside a request."""
    read = []

    class Ending(Windows):
        def __iter__(self):
            raise SystemExit(3)

    async def story():
        job = job_of(Ending())
        try:
            await job.next()
        except BaseException as error:
            read.append(type(error))
            raise

    with pytest.raises(SystemExit):
        run(story())
    assert read == [asyncio.CancelledError]


@story
async def test_a_client_gets_the_model_that_it_had():
    queue, log = RequestQueue(["m", "n"], 9, 30.0), []
    had = [await take(queue, client, log) for client in "xyyxyxzzx"]
    assert had == ["m", "n", "n", "m", "n", "m", "n", "n", "m"]
    both = await start(*(take(queue, "z", log, hold=asyncio.Event()) for _ in "mn"))
    both[0].cancel()
    await asyncio.sleep(0)
    both[1].cancel()
    await asyncio.gather(*both, return_exceptions=True)
    assert await take(queue, "z", log) == "m", "its last model"
