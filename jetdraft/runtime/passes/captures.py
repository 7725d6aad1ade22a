"""The table of captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Hashable

from jetdraft.ort import ort

EAGER = "-1"
"""onnxruntime's id of a run that neither captures nor replays."""

_OPTION = "gpu_graph_id"


class Captures:
    """One id for each size of pass, since onnxruntime replays whatever it is told to.

    A replay reads no shape and no host value: what differs in either needs another key.
    The first run of a key is eager, so that kernels choose and allocate outside of a
    capture; the second captures, which runs the pass three times over (harmless, as the
    rows are written to the same slots), and all later ones replay.

        captures = Captures()
        captures.run_options((width, length))
    """

    def __init__(self) -> None:
        self.ids: dict[Hashable, int] = {}
        self._warm: set[Hashable] = set()
        self._options: dict[str, ort.RunOptions] = {}

    def run_options(self, key: Hashable | None) -> ort.RunOptions:
        """How to run a pass of that key; None is always eager."""
        if key is None:
            return self._of(EAGER)
        if key not in self._warm:
            self._warm.add(key)
            return self._of(EAGER)
        number = self.ids.setdefault(key, len(self.ids) + 1)
        return self._of(str(number))

    def _of(self, number: str) -> ort.RunOptions:
        if number not in self._options:
            options = ort.RunOptions()
            options.add_run_config_entry(_OPTION, number)
            self._options[number] = options
        return self._options[number]
