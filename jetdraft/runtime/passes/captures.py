"""Numbers the CUDA graphs that onnxruntime captures and replays."""

from __future__ import annotations

from collections.abc import Hashable

from jetdraft.ort import ort

EAGER = "-1"
"""onnxruntime's id of a run that neither captures nor replays."""

_OPTION = "gpu_graph_id"


class Captures:
    """One graph id per key, since onnxruntime replays whatever id it gets.

    A replay reads no shape and no value on the host: passes that differ in these need
    different keys. The first run of a key is eager, so that kernels are chosen and
    memory is allocated outside of a capture. The second run captures, and runs the pass
    three times, which is harmless: the rows go to the same slots. Later runs replay.

        captures = Captures()
        captures.run_options((width, length))
    """

    def __init__(self) -> None:
        self.ids: dict[Hashable, int] = {}
        self._warm: set[Hashable] = set()
        self._options: dict[str, ort.RunOptions] = {}

    def run_options(self, key: Hashable | None) -> ort.RunOptions:
        """The options to run a pass of that key with; None is always eager."""
        if key is None:
            return self._options_of(EAGER)
        if key not in self._warm:
            self._warm.add(key)
            return self._options_of(EAGER)
        graph_id = self.ids.setdefault(key, len(self.ids) + 1)
        return self._options_of(str(graph_id))

    def _options_of(self, graph_id: str) -> ort.RunOptions:
        if graph_id not in self._options:
            options = ort.RunOptions()
            options.add_run_config_entry(_OPTION, graph_id)
            self._options[graph_id] = options
        return self._options[graph_id]
