"""Traced graphs that are kept, so that one trace serves several exports.

A trace takes most of the time of an export, and does not depend on the recipe:
`jetdraft recipes` exports a target once for each.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir

MOST = 4
"""How many graphs are kept; they are without weights, and small."""


class KeptTraces:
    """The last graphs by their fingerprints, each as the bytes of an ONNX file.

    model = KeptTraces().get_or_make(fingerprint(step), lambda: traced(step))
    """

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def get_or_make(
        self, key: str | None, make: Callable[[], onnx_ir.Model]
    ) -> onnx_ir.Model:
        """The graph with that key; it is made if there is none, or no key."""
        if key is None:
            return make()
        file = self.read(key)
        if file is None:
            file = onnx_ir.to_proto(make()).SerializeToString()
            self.write(key, file)
        model: onnx_ir.Model = onnx_ir.from_proto(onnx.ModelProto.FromString(file))
        return model

    def read(self, key: str) -> bytes | None:
        """The file with that key, if it is kept."""
        return self._files.get(key)

    def write(self, key: str, file: bytes) -> None:
        """Keep a file; the oldest goes."""
        while len(self._files) >= MOST:
            del self._files[next(iter(self._files))]
        self._files[key] = file
