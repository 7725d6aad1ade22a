"""A generation under way, as an iterator of pieces."""

from __future__ import annotations

from jetdraft.runtime.generation import Generation
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.text.stops import CANCELLED


class Stream:
    """A generation under way: an iterator of `Piece`, with `stats` that fill up.

    Any thread may `cancel` it. The model is free again when the stream ends. If you
    leave a loop over a stream early, keep no reference to it, use `with` or call
    `close`.

        stream = model.stream("def fib(n):")
        text = "".join(piece.text for piece in stream)
        stream.result().finish_reason
    """

    # The generation holds no reference to its stream. So Python frees an abandoned
    # stream, and closes the generation's iterator with it. The stream holds the
    # generation by its iterator only, so a stream that ended keeps no buffers.
    def __init__(self, generation: Generation) -> None:
        self.stats: Stats = generation.stats
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
        """Run the generation to its end, and give all of its text."""
        for _ in self._pieces:
            pass
        return Result.of(self._past_pieces, self.stats, self._with_logprobs)
