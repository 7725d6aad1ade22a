"""How the threads of a session wait."""

from __future__ import annotations

from jetdraft.ort import ort


def leaves_cores(options: ort.SessionOptions) -> bool:
    """Whether threads stop spinning when a pass ends."""
    return options.get_session_config_entry("session.force_spinning_stop") == "1"
