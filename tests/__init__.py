"""What any module of tests may use."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jetdraft.manifest import MANIFEST, SEAL, seal_hash

LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
WAYS: tuple[dict[str, Any], ...] = {}, {"temperature": 0.9, "seed": 4}
"""Greedy and sampled."""


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` where each row of the table is an argument."""
    return pytest.mark.parametrize(names, rows, **options)


async def tick(seconds: float, seen: list[int]) -> None:
    """Append to `seen` after each wait of `seconds`: late where the loop is busy."""
    while True:
        await asyncio.sleep(seconds)
        seen.append(len(seen))


def same_text(
    model: Any,
    drafts: Iterable[Any],
    ways: Iterable[Mapping[str, Any]] = WAYS,
    **how: Any,
) -> list[Any]:
    """Assert that all drafts (a method, or options) write the text of plain decoding.

    In each of the `ways` to sample; gives the results. `LONG` is the default of `how`.
    """
    results = []
    for way in ways:
        options = {**LONG, **how, **way}
        plain = model.generate(method="none", **options)
        for draft in drafts:
            own = {"method": draft} if isinstance(draft, str) else draft
            drafted = model.generate(**{**options, **own})
            for name in ("token_ids", "text", "logprobs"):
                assert getattr(drafted, name) == getattr(plain, name), (way, draft)
            results.append(drafted)
    return results


def filled(graph: Any, tokens: Any, **how: Any) -> Any:
    """The graph after a pass over these tokens, whose rows are all that it keeps."""
    graph.cache.rewind(0)
    graph.run(tokens, **how)
    graph.cache.advance(len(tokens))
    return graph


def edit_json(file: Path, **changes: Any) -> None:
    """Change fields of a file; those that are `...` are left out."""
    fields = {**json.loads(file.read_text()), **changes}
    kept = {name: value for name, value in fields.items() if value is not ...}
    file.write_text(json.dumps(kept))


def read_manifest(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / MANIFEST).read_text())


def write_manifest(bundle: Path, manifest: dict[str, Any]) -> None:
    sealed = {**manifest, SEAL: seal_hash(manifest)}
    (bundle / MANIFEST).write_text(json.dumps(sealed, indent=2))


def edit_manifest(bundle: Path, **changes: object) -> None:
    edit_json(bundle / MANIFEST, **changes)
    write_manifest(bundle, read_manifest(bundle))
