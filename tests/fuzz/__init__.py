"""Attacks on jetdraft with drawn cases; scripts/fuzz runs them for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.subject import Subject


def subjects() -> dict[str, type[Subject]]:
    """All subjects by their names."""
    from tests.fuzz.bundles import Bundles
    from tests.fuzz.faults import Faults
    from tests.fuzz.same_text import SameText
    from tests.fuzz.serving import Serving
    from tests.fuzz.soak import Soak

    return {s.name: s for s in (SameText, Bundles, Serving, Faults, Soak)}
