"""Attacks on jetdraft with drawn cases; scripts/fuzz runs them for long."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.subject import Subject

SUBJECTS = {
    "same-text": "tests.fuzz.same_text:SameText",
    "hybrids": "tests.fuzz.same_text:Hybrids",
    "mixtures": "tests.fuzz.same_text:Mixtures",
    "families": "tests.fuzz.same_text:Families",
    "bundles": "tests.fuzz.bundles:Bundles",
    "operators": "tests.fuzz.operators:Operators",
    "server": "tests.fuzz.serving:Serving",
    "faults": "tests.fuzz.faults:Faults",
    "soak": "tests.fuzz.soak:Soak",
}
"""Where the subjects are, by their names."""


def subject_named(name: str) -> "type[Subject]":
    """A subject; what only others need is not imported, since a soak weighs it."""
    module, _, kind = SUBJECTS[name].partition(":")
    subject: type[Subject] = getattr(import_module(module), kind)
    return subject
