"""What a generation gives: pieces as it goes, and the result of all of them."""

# Annotations stay types here: of a subclass in another file, pdoc cannot read texts.
from dataclasses import dataclass, field
from typing import Self

from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.sampling.chooser import Logprob
from jetdraft.runtime.text.tools import ToolCall


@dataclass(frozen=True)
class Piece:
    """What one round added; `text` may be empty while a character is incomplete.

    The first `from_draft` of the `token_ids` had been drafted. `logprobs` has an entry
    for each token if asked for. `texts` has the text that each token completed, also
    what may become a stop string. In a chat `thought` is what the model thinks, which
    is not in `text`.
    """

    text: str
    token_ids: list[int]
    from_draft: int
    logprobs: list[Logprob] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thought: str = ""


@dataclass(frozen=True)
class Result:
    """An ended generation; `token_ids` has the new tokens, end-of-text included.

    `from_draft` says of each token whether it had been drafted. `finish_reason` is
    "stop" (end of text or a stop string), "length", "cancelled", "deadline" or
    "interrupted". If a stop string ended the text, the last token completed it. `calls`
    are the calls in the text, where `Model.chat` had tools. `texts` has the text that
    each token completed, the stop string too. In a chat `thought` is what the model
    thought before, which is not in `text`.

        model.generate("def fib(n):").text
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    stats: Stats
    from_draft: list[bool]
    logprobs: list[Logprob] | None = None
    calls: list[ToolCall] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thought: str = ""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, pieces: list[Piece], stats: Stats, with_logprobs: bool) -> Self:
        """Join pieces; `logprobs` is None unless `with_logprobs`."""
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=[token for piece in pieces for token in piece.token_ids],
            prompt_tokens=stats.prompt_tokens,
            finish_reason=stats.finish_reason,
            stats=stats,
            from_draft=[
                place < piece.from_draft
                for piece in pieces
                for place in range(len(piece.token_ids))
            ],
            logprobs=logprobs if with_logprobs else None,
            texts=[text for piece in pieces for text in piece.texts],
            thought="".join(piece.thought for piece in pieces),
        )
