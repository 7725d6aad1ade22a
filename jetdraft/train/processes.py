"""The processes that train together, as accelerate or torchrun has started them."""

from __future__ import annotations

import os

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from jetdraft.errors import OptionError


def this_process() -> PartialState:
    """This process's `process_index` of `num_processes`, and its `device`.

    Raises `OptionError` for processes that were started together and do not know of
    each other: each would learn everything, and write into the same folder.

        this_process().num_processes
    """
    # Without its argument, accelerate lets each process on a CPU be alone.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        raise OptionError(
            f"{started} processes were started, and each would train alone; on CPUs, "
            "set ACCELERATE_USE_CPU=true in the environment"
        )
    return state
