"""A request for embeddings, checked before it waits for a model."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from jetdraft.runtime.embedding import Embedder, Embeddings, normalized
from jetdraft.runtime.model import Model
from jetdraft.runtime.text.stops import DEADLINE
from jetdraft.server import RequestError

MAX_INPUTS = 2048  # The most texts of a request, as with OpenAI.
FIELDS = ("model", "input", "encoding_format", "dimensions", "user", "prompt_name")


@dataclass(frozen=True)
class EmbeddingRequest:
    """A request for the embeddings of texts, which may be token ids.

    An embedding is cut to `dimensions` numbers, and has the length 1 again. `as_bytes`
    asks for base64 of little-endian float32.
    """

    texts: list[str | list[int]]
    prompt_name: str | None
    as_bytes: bool
    dimensions: int | None
    options: dict[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any], max_seconds: float) -> Self:
        """Check the body of a request; raises `RequestError`."""
        form, size = body.get("encoding_format", "float"), body.get("dimensions")
        texts, name = _as_texts(body.get("input")), body.get("prompt_name")
        unknown = next((field for field in body if field not in FIELDS), None)
        for is_wrong, fact, field in (
            (unknown is not None, f"unknown field {unknown!r}; leave it out", None),
            (form not in ("float", "base64"), f"encoding_format {form!r} is unknown; "
             "choose float or base64", "encoding_format"),
            (type(size or 1) is not int or (size or 0) < 0, f"dimensions {size!r} is "
             "not a number from 1 on", "dimensions"),
            (not isinstance(name, str | None), f"prompt_name {name!r} is not a text",
             "prompt_name"),
            (not texts, f"give a text, a list of 1 to {MAX_INPUTS} texts, or token ids",
             "input"),
        ):  # fmt: skip
            if is_wrong:
                raise RequestError(fact, field)
        return cls(texts, name, form == "base64", size, {"max_seconds": max_seconds})

    @property
    def count(self) -> int:
        """How many results `streams` gives."""
        return 1

    @property
    def max_seconds(self) -> float:
        """The most seconds that the embeddings may take."""
        return float(self.options["max_seconds"])

    def streams(self, model: Model) -> Iterator[Embedder]:
        """Start to embed; iterating over it yields a piece for each text."""
        embedder = model.embedder(self.texts, self.prompt_name, self.max_seconds)
        width = model.parts.target.contract.feature_size
        if self.dimensions is not None and not 1 <= self.dimensions <= width:
            raise RequestError(
                f"the model's embeddings have {width} dimensions; ask for 1 to {width}",
                "dimensions",
            )
        yield embedder

    def answer(self, result: Embeddings, model: str) -> dict[str, Any]:
        """Return OpenAI's list of embeddings; raises `RequestError` if it was cut."""
        if result.finish_reason == DEADLINE:
            raise RequestError(
                f"the texts took more than {self.max_seconds:g} s; send fewer", "input"
            )
        vectors = normalized(result.vectors[:, : self.dimensions]).astype("<f4")
        entries = [
            {
                "object": "embedding",
                "index": place,
                "embedding": base64.b64encode(vector.tobytes()).decode()
                if self.as_bytes
                else vector.tolist(),
            }
            for place, vector in enumerate(vectors)
        ]
        count = result.prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": entries, "model": model, "usage": usage}


def _as_texts(given: Any) -> list[str | list[int]]:
    """Return the texts, or lists of ids, of an input; [] for something else."""

    def is_text(value: object) -> bool:
        is_list = isinstance(value, list)
        return isinstance(value, str) or (
            is_list and all(type(id) is int for id in value)  # type: ignore[attr-defined]
        )

    texts = [given] if given and is_text(given) else given
    if not isinstance(texts, list) or len(texts) > MAX_INPUTS:
        return []
    return texts if all(map(is_text, texts)) else []
