"""The distance of a quantized model from its unquantized model, over a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jetdraft.runtime.passes.graph import Graph

Floats = npt.NDArray[np.float64]


@dataclass
class Quality:
    """Sums over tokens: the KL divergence from p to q, and the loss of q, in nats.

    p is the unquantized model, q the quantized model.

        quality = Quality()
        quality.add(p_logits, q_logits, next_ids)
        quality.top1_agreement
    """

    kls: list[Floats] = field(default_factory=list)
    agreed: int = 0
    loss: float = 0.0
    counted: int = 0

    def add(
        self, p: npt.NDArray[np.float32], q: npt.NDArray[np.float32], ids: Sequence[int]
    ) -> None:
        """Count logits [n, vocab] of both models over the same rows.

        `ids` are the tokens after the rows; the last row may have no next token.
        """
        p_log, q_log = _log_softmax(p), _log_softmax(q)
        self.kls.append((np.exp(p_log) * (p_log - q_log)).sum(-1))
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.loss -= float(q_log[np.arange(len(ids)), ids].sum())
        self.counted += len(ids)

    @property
    def kl_mean(self) -> float:
        """The mean KL over all rows, in nats."""
        return float(np.concatenate(self.kls).mean())

    @property
    def kl_p99(self) -> float:
        """The KL that only one row in a hundred exceeds, in nats."""
        return float(np.quantile(np.concatenate(self.kls), 0.99))

    @property
    def top1_agreement(self) -> float:
        """The share of rows with the same best token."""
        return self.agreed / sum(map(len, self.kls))

    @property
    def perplexity(self) -> float:
        """The perplexity of the text to the quantized model."""
        return float(np.exp(self.loss / max(self.counted, 1)))


def _log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logs: Floats = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return logs


def compare(p: Graph, q: Graph, windows: Sequence[Sequence[int]]) -> Quality:
    """Run two step graphs over the same windows of token ids, row by row.

    compare(full.target, quantized.target, [[5, 8, 9, 2]]).kl_mean
    """
    quality = Quality()
    widest = min(p.contract.max_width, q.contract.max_width)
    for window in windows:
        p.cache.rewind(0)
        q.cache.rewind(0)
        for start in range(0, len(window), widest):
            rows = list(window[start : start + widest])
            quality.add(
                p.run(rows).logits,
                q.run(rows).logits,
                window[start + 1 : start + 1 + len(rows)],
            )
            p.cache.advance(len(rows))
            q.cache.advance(len(rows))
    p.cache.rewind(0)
    q.cache.rewind(0)
    return quality
