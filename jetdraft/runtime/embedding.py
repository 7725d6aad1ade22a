"""Embeddings of texts: the states of a target, pooled, text after text."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jetdraft.bundle import MEAN
from jetdraft.contracts.tensors import Float32s, Float64s, Int64s
from jetdraft.errors import OptionError
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.stream import Stream
from jetdraft.runtime.text.stops import STOP, StopWatcher


def embedding_prompt(parts: LoadedBundle, name: str | None) -> str:
    """Return what stands before a text by the prompt's name; raises `OptionError`."""
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
    """Embeds texts in turn; an iterator with a piece for each, up to `max_seconds`."""

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
