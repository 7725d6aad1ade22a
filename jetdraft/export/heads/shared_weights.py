"""Lets one graph read the weights that it has in common with another from one file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx

_PAGE, _LARGE = 4096, 1 << 16
"""A large tensor begins at a page of its file, so that it can be mapped alone."""


def share_weights(file: Path, other: Path) -> None:
    """Read the tensors of the graph `file` that `other` has too from the latter's file.

    Both graphs keep their large tensors in files of their own beside them, and tensors
    with equal bytes are one. The weights of `file` become smaller.

        share_weights(folder / "drafter.onnx", folder / "target.onnx")
    """
    model = onnx.load(file, load_external_data=False)
    theirs = {
        _digest(other.parent, tensor): tensor
        for tensor in _external(onnx.load(other, load_external_data=False))
    }
    tensors = _external(model)
    if not tensors:
        return
    weights = file.parent / _place(tensors[0])["location"]
    kept = weights.with_suffix(".kept")
    with kept.open("wb") as written:
        for tensor in tensors:
            twin = theirs.get(_digest(file.parent, tensor))
            if twin is not None:
                _set_place(tensor, _place(twin))
                continue
            place = _place(tensor)
            step = _PAGE if int(place["length"]) >= _LARGE else 64
            written.write(bytes(-written.tell() % step))
            moved = {**place, "offset": str(written.tell())}
            written.write(_bytes(file.parent, place))
            _set_place(tensor, moved)
    kept.replace(weights)
    onnx.save(model, file)


def _external(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """The tensors that lie in another file."""
    return [t for t in model.graph.initializer if t.external_data]


def _place(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _set_place(tensor: onnx.TensorProto, place: dict[str, str]) -> None:
    del tensor.external_data[:]
    for key in ("location", "offset", "length"):
        tensor.external_data.add(key=key, value=place[key])


def _digest(folder: Path, tensor: onnx.TensorProto) -> tuple[object, ...]:
    """What is equal for tensors that can be one."""
    digest = hashlib.sha256(_bytes(folder, _place(tensor)))
    return tensor.data_type, tuple(tensor.dims), digest.digest()


def _bytes(folder: Path, place: dict[str, str]) -> bytes:
    """The bytes of a tensor."""
    with (folder / place["location"]).open("rb") as weights:
        weights.seek(int(place["offset"]))
        return weights.read(int(place["length"]))
