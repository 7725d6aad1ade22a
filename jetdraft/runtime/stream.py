"""A generation under way, as an iterator of pieces, for threads and for asyncio.

Texts that are embedded come as such an iterator too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from jetdraft.bundle import MEAN
from jetdraft.contracts.tensors import Float32s, Float64s, Int64s
from jetdraft.errors import OptionError
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.text.stops import CANCELLED, STOP, StopWatcher


class Stream(Iterator[Piece], AbstractContextManager["Stream"]):
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
        self.prompt, self._watcher = generation.prompt, generation.watcher
        self._past_pieces = generation.pieces
        self._with_logprobs = generation.options.logprobs is not None
        self._pieces = generation.run()

    def __next__(self) -> Piece:
        return next(self._pieces)

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


class AsyncStream(AsyncIterator[Piece], AbstractAsyncContextManager["AsyncStream"]):
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


def embedding_prompt(parts: LoadedBundle, name: str | None) -> str:
    """Return what stands before a text by the prompt's name, None for the default.

    Raises `OptionError` for an unknown name, and for a model that embeds nothing.
    """
    embedding = parts.bundle.embedding
    if embedding is None:
        fact = "the bundle's model writes texts and embeds none; export a checkpoint "
        fact += "with the files of sentence-transformers, such as Qwen3-Embedding"
        raise OptionError(fact, "input")
    name = embedding.default_prompt if name is None else name
    if name is not None and name not in embedding.prompts:
        known = ", ".join(embedding.prompts) or "none"
        fact = f"the model has no prompt {name!r}; its prompts are: {known}"
        raise OptionError(fact, "prompt_name")
    return "" if name is None else embedding.prompts[name]


@dataclass(frozen=True)
class Embeddings(Result):
    """The embeddings of texts: `vectors` float32 [texts, width], each of length 1."""

    vectors: Float32s = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class Embedder(Stream):
    """Embeds texts one after another; an iterator with a piece without text for each.

    The texts run through the same buffers, so that an embedding does not depend on the
    texts beside it. It ends after `max_seconds`.
    """

    def __init__(
        self,
        parts: LoadedBundle,
        texts: Sequence[Int64s],
        max_seconds: float | None = None,
    ) -> None:
        self.stats = Stats("none", exact=True, prompt_tokens=sum(map(len, texts)))
        self._watcher = StopWatcher(parts.text.stream([]), (), (), max_seconds)
        self._parts, self._texts = parts, texts
        self._vectors: list[Float64s] = []
        self._pieces = self._run()

    def result(self) -> Embeddings:
        """Embed all texts; returns their embeddings, fewer if it was cut."""
        for _ in self._pieces:
            pass
        width = self._parts.target.contract.feature_size
        vectors = normalized(np.array(self._vectors).reshape(-1, width))
        return replace(Embeddings.of([], self.stats, False), vectors=vectors)

    def _run(self) -> Generator[Piece, None, None]:
        with self._parts.claim.held_by(self._watcher):
            for ids in self._texts:
                total = self._pool(ids)
                if self._watcher.must_end():
                    break
                self._vectors.append(total)
                yield Piece("", [], 0)
        self._watcher.end(STOP)
        self.stats.finish_reason = self._watcher.reason

    def _pool(self, ids: Int64s) -> Float64s:
        """Run a text in passes; return the sum, or the last, of its states [width]."""
        graph, total = self._parts.target, np.zeros(1)
        is_mean = self._parts.bundle.embedding.pooling == MEAN  # type: ignore[union-attr]
        graph.cache.rewind(0)
        for start in range(0, len(ids), graph.contract.max_width):
            part = ids[start : start + graph.contract.max_width].tolist()
            states = graph.run(part, silent=True).features
            assert states is not None
            graph.cache.advance(len(part))
            rows = states[: len(part)].astype(np.float64)
            total = total + rows.sum(0) if is_mean else rows[-1]
            if self._watcher.must_end():
                break
        return total


def normalized(vectors: Float32s | Float64s) -> Float32s:
    """Return vectors [n, width] with the length 1 each, as float32."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-30), np.float32)
