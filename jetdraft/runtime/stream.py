"""A generation under way, as an iterator of pieces, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from jetdraft.runtime.generation import Generation
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.text.stops import CANCELLED


class Stream:
    """A generation under way: an iterator of `Piece`, with `stats` that fill up.

    It continues the token ids `prompt`. Any thread may `cancel` it. The model is
    free again when the stream ends: to leave a loop early, keep no reference to it, use
    `with` or call `close`.

        stream = model.stream("def fib(n):")
        text = "".join(piece.text for piece in stream)
        stream.result().finish_reason
    """

    # The generation does not refer to its stream, so Python frees an abandoned stream.
    # The stream has its iterator only, so a stream that ended keeps no buffers.
    def __init__(self, generation: Generation) -> None:
        self.stats: Stats = generation.stats
        self.prompt = generation.prompt
        self._watcher = generation.watcher
        self._past_pieces = generation.pieces
        self._with_logprobs = generation.options.logprobs is not None
        self._pieces = generation.run()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End at the next round, with finish reason "cancelled"."""
        self._watcher.cancelled.set()

    def close(self, reason: str = CANCELLED) -> None:
        """End now, with this finish reason; the model is free again."""
        if not self.stats.finish_reason:
            self._watcher.end(reason)
            self._pieces.close()
            self.stats.finish_reason = self._watcher.reason  # even if nothing ran

    def result(self) -> Result:
        """Run the generation to its end; returns all pieces, joined to a result."""
        for _ in self._pieces:
            pass
        return Result.of(self._past_pieces, self.stats, self._with_logprobs)


T = TypeVar("T")


class AsyncStream:
    """An asynchronous iterator of `Piece`, and a context manager that ends it.

    Rounds run in a thread, so the event loop stays free. If a task is cancelled while
    it waits, the model is free at the end of the round.

    async with model.astream("def fib(n):") as stream:
        async for piece in stream:
            print(piece.text, end="")
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pieces = iter(stream)
        self._thread = ThreadPoolExecutor(1, "jetdraft")
        self._has_ended = False

    @property
    def stats(self) -> Stats:
        """The stats of the generation, updated after each round."""
        return self._stream.stats

    def cancel(self) -> None:
        """End at the next round, with finish reason "cancelled"."""
        self._stream.cancel()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        if self._has_ended:
            raise StopAsyncIteration
        piece = await self._run_in_thread(lambda: next(self._pieces, None))
        if piece is None:
            await self.aclose()
            raise StopAsyncIteration
        return piece

    async def result(self) -> Result:
        """Run the generation to its end; returns all pieces, joined to a result."""
        if self._has_ended:
            return self._stream.result()  # nothing is left to run
        result = await self._run_in_thread(self._stream.result)
        await self.aclose()
        return result

    async def aclose(self) -> None:
        """End the generation; the model is free again when this returns."""
        self._stream.cancel()
        if not self._has_ended:
            await asyncio.shield(self._submit(self._stream.close))
            self._has_ended = True
            self._thread.shutdown(wait=False)

    def __del__(self) -> None:
        # The stream cannot be read any more, so free the model when its round ends.
        self._stream.cancel()
        if not self._has_ended:
            with suppress(RuntimeError):  # an interpreter that ends starts no thread
                self._thread.submit(self._stream.close)
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._submit(work)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)
