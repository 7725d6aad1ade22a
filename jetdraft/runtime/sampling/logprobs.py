"""The probability that the model itself gives to a chosen token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
        # A kernel may sum the graph's own logsumexp in another order in another row.
        whole = answer.logits[row]
        peak = whole.max()
        total = float(peak + np.log(np.exp(whole - peak).sum(dtype=np.float64)))
        best = answer.candidates[row, :top].tolist()
        values = (float(whole[id]) - total for id in best)
        logprob = float(whole[token]) - total
        return cls(token, logprob, tuple(zip(best, values, strict=True)))
