"""A generation under way, what each of its rounds adds, and what it was in the end."""

from __future__ import annotations

import time
from collections.abc import Generator as Running
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.generator import Generator
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.proposers.constrained import constrained
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.sampling.logprobs import Logprob
from jetdraft.runtime.sampling.penalties import PenaltyProcessor
from jetdraft.runtime.sampling.processor import LogitsProcessor
from jetdraft.runtime.text.stops import CANCELLED, StopWatcher

if TYPE_CHECKING:
    from jetdraft.runtime.model import Model


@dataclass(frozen=True)
class Piece:
    """What one round added: `text` may be empty while a character is incomplete.

    The first `from_draft` of `token_ids` had been drafted. `logprobs` has one for each
    token where they were asked for.
    """

    text: str
    token_ids: list[int]
    from_draft: int
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """A generation that has ended; `token_ids` are the new ones, end-of-text included.

    `from_draft` says of each token whether it had been drafted. `finish_reason` is
    "stop" (end of text or a stop string), "length", "cancelled" or "deadline". Where a
    stop string ended the text, the last token is the one that completed it.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    stats: Stats
    from_draft: list[bool]
    logprobs: list[Logprob] | None = None


class Stream:
    """A generation under way: an iterator of `Piece`, with `stats` that fill up.

    Any thread may `cancel` it. Leaving a loop over it ends it, if nobody else has it;
    who keeps it uses `with`, or `close`.

    stream = model.stream("def fib(n):")
    text = "".join(piece.text for piece in stream)
    stream.result().finish_reason
    """

    def __init__(self, model: Model, prompt: Int64s, options: Options) -> None:
        self._generation = _Generation(model, prompt, options)
        self._pieces = self._generation.run()

    @property
    def stats(self) -> Stats:
        """Of the generation, filled as it goes."""
        return self._generation.stats

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End it at the next round, with finish reason "cancelled"."""
        self._generation.ending.cancelled.set()

    def close(self) -> None:
        """End it now; the model is free again."""
        self._pieces.close()

    def result(self) -> Result:
        """Run to the end, and what came out in all."""
        for _ in self._pieces:
            pass
        return self._generation.result()


class _Generation:
    """What a stream runs. Nothing here knows the stream, so that goes when left."""

    def __init__(self, model: Model, prompt: Int64s, options: Options) -> None:
        planner = model.planner
        self.stats = Stats(
            method=options.method,
            exact=options.exact,
            prompt_tokens=len(prompt),
            plain_ms=planner.costs.pass_ms(min(planner.widths(options))),
        )
        _check_model(options, model)
        self._model, self._prompt, self._options = model, prompt.tolist(), options
        self._proposers = planner.choose(options)
        self._processors: list[LogitsProcessor] = []
        if options.shaping.changes:
            self._processors.append(PenaltyProcessor(options.shaping, self._prompt))
        if options.constraint is not None:
            matcher = model.vocabulary.matcher(options.constraint, len(prompt))
            self._processors.append(matcher)
            if options.verifier == "walk":
                self._proposers = constrained(self._proposers, matcher)
        self._controller = planner.controller(options, self._proposers)
        self.ending = StopWatcher(
            model.text.stream(self._prompt),
            () if options.ignore_eos else model.bundle.eos_token_ids,
            options.stops,
            options.max_seconds,
        )
        self._seen: list[Piece] = []

    def result(self) -> Result:
        """What came out until now."""
        pieces = self._seen
        return Result(
            text="".join(piece.text for piece in pieces),
            token_ids=[token for piece in pieces for token in piece.token_ids],
            prompt_tokens=self.stats.prompt_tokens,
            finish_reason=self.stats.finish_reason,
            stats=self.stats,
            from_draft=[
                place < piece.from_draft
                for piece in pieces
                for place in range(len(piece.token_ids))
            ],
            logprobs=(
                None
                if self._options.logprobs is None
                else [each for piece in pieces for each in piece.logprobs]
            ),
        )

    def run(self) -> Running[Piece, None, None]:
        """Piece by piece, alone on the model."""
        model = self._model
        with model.claimed(self.ending):
            try:
                for piece in self._rounds(model):
                    self._seen.append(piece)
                    paused = time.perf_counter()
                    yield piece
                    self.stats.waited_seconds += time.perf_counter() - paused
            except GeneratorExit:
                self.stats.finish_reason = self.ending.reason or CANCELLED
                raise
            said = [token for piece in self._seen for token in piece.token_ids]
            model.remember(self._prompt, said)

    def _rounds(self, model: Model) -> Iterator[Piece]:
        options, ending = self._options, self.ending
        target = model.target_for(options)
        if options.verifier != "walk" and model.follower is not None:
            model.follower.forget()  # its probabilities have a say, to the last bit
        generator = Generator(
            target,
            model.planner.widths(options),
            list(self._proposers.values()),
            options.drafting.checker,
            options.exact,
            options.logprobs,
            model.prefix_of(target),
            model.planner.prefills,
        )
        for commit in generator.run(
            self._prompt,
            Chooser(options.sampling, self._processors),
            self._controller,
            options.max_new_tokens,
            ending,
            self.stats,
        ):
            yield Piece(
                ending.take(), commit.token_ids, commit.accepted, commit.logprobs
            )
        if rest := ending.rest():
            yield Piece(rest, [], 0)
        self.stats.finish_reason = ending.reason or "length"


def _check_model(options: Options, model: Model) -> None:
    """Refuse what this model's vocabulary or tokenizer does not allow."""
    vocabulary = model.bundle.target.contract.vocab_size
    wrong = [t for t in options.shaping.logit_bias if not 0 <= t < vocabulary]
    if wrong:
        raise OptionError(
            f"logit bias of token {wrong[0]}, which is outside the vocabulary; ids are "
            f"0 to {vocabulary - 1}"
        )
    if options.stops and not model.text.readable:
        raise OptionError("the bundle has no tokenizer, so no stop string can be found")
