"""The probability that the model itself gives to a chosen token."""

from __future__ import annotations

from dataclasses import dataclass, field

from jetdraft.runtime.passes.answer import Answer


@dataclass(frozen=True)
class Logprob:
    """The natural logarithm of a token's probability.

    It is the model's own, before temperature, filters, biases and penalties. `top` has
    the (id, logprob) pairs of the best tokens, best first. `names` has the bytes that
    each of these tokens stands for at its place in the text, None for a hidden token.
    A token may be a part of a character; the bytes of all tokens together are the text.

        entry = Logprob.of(answer, row=0, token=42, top=5)
        entry.logprob, entry.names[42]
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    names: dict[int, bytes | None] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Answer, row: int, token: int, top: int) -> Logprob:
        """The logprob of the token chosen after a row, and of the `top` best tokens.

        `top` is at most the number of the answer's candidates.
        """
        total = float(answer.logsumexp[row])
        ids = answer.candidates[row].tolist()
        values = answer.candidate_logits[row].tolist()
        if token in ids:
            logit = values[ids.index(token)]
        else:
            logit = float(answer.logits[row, token])
        best = zip(ids[:top], values[:top], strict=True)
        return cls(token, logit - total, tuple((i, value - total) for i, value in best))
