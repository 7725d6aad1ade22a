"""The kernels of a provider, and why it has none for an operator."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jetdraft.errors import ProviderError
from tools.forecast.graph_view import Operator, Value

TABLES = ("cuda", "tensorrt", "webgpu")
"""The providers that have a table; tools/kernels.py renews them."""


class Kernel(NamedTuple):
    """Versions and types that one entry of a table covers.

    `last` is None for a kernel that only covers the versions from `first` to the next
    definition of the operator. `types` maps a type variable, the name of an input or
    the place of an input to the types that it may have.
    """

    first: int
    last: int | None
    types: Mapping[str, tuple[str, ...]]

    def covers(self, version: int) -> bool:
        """Whether onnxruntime takes it for an operator defined in that version."""
        if self.last is None:
            return version == self.first
        return self.first <= version <= self.last

    def refused(self, operator: Operator) -> list[tuple[str, str, str]]:
        """The values it does not take: what each is, its type, the types it may have.

        A value whose type is not known is refused too.
        """
        places = [
            (role, place, value)
            for role, values in (
                ("input", operator.inputs),
                ("output", operator.outputs),
            )
            for place, value in enumerate(values)
            if value.name
        ]
        return [
            (f"{role} {place}{_named(value)}", value.type, " or ".join(allowed))
            for role, place, value in places
            for variable, allowed in self.types.items()
            if _is_for(variable, role, place, value) and value.type not in allowed
        ]


def _is_for(variable: str, role: str, place: int, value: Value) -> bool:
    if variable.isdigit():
        return role == "input" and place == int(variable)
    return variable in (value.formal.type, value.formal.name)


def _named(value: Value) -> str:
    return f" ({value.formal.name})" if value.formal.name else ""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of one provider, by domain and operator.

    `source` names the package and version that the table was taken from.

        KernelTable.of("cuda").refusal(operator)
    """

    provider: str
    source: str
    kernels: Mapping[tuple[str, str], tuple[Kernel, ...]]

    @classmethod
    @functools.cache
    def of(cls, provider: str) -> KernelTable:
        """The table of "cuda", "tensorrt" or "webgpu"; raises `ProviderError`."""
        if provider not in TABLES:
            raise ProviderError(
                f"no table of kernels for {provider!r}; choose {', '.join(TABLES)}"
            )
        file = importlib.resources.files(__package__) / f"{provider}.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        kernels = {
            (domain, kind): tuple(map(_parsed, entries))
            for domain, operators in fields["kernels"].items()
            for kind, entries in operators.items()
        }
        return cls(provider, fields["source"], kernels)

    def refusal(self, operator: Operator) -> str:
        """Why there is no kernel for the operator; empty if there is one."""
        kernels = self.kernels.get((operator.domain, operator.kind), ())
        if not kernels:
            return f"{self.source} has no kernel for {operator.title}"
        fitting = [kernel for kernel in kernels if kernel.covers(operator.version)]
        if not fitting:
            versions = ", ".join(sorted({_span(k) for k in kernels}, key=_first))
            return (
                f"{self.source} has {operator.title} of the versions {versions}, not "
                f"of {operator.version}"
            )
        refusals = [kernel.refused(operator) for kernel in fitting]
        nearest = min(refusals, key=len)
        if not nearest:
            return ""
        what, type_name, _ = nearest[0]
        allowed = {a for refusal in refusals for w, _, a in refusal if w == what}
        types = sorted({name for names in allowed for name in names.split(" or ")})
        return (
            f"{what} is {type_name or 'of unknown type'}, the kernel takes "
            f"{' or '.join(types)}"
        )


def _parsed(entry: list[object]) -> Kernel:
    first, last, types = entry
    assert isinstance(first, int)
    assert isinstance(last, int | None)
    assert isinstance(types, dict)
    return Kernel(first, last, {name: tuple(t.split()) for name, t in types.items()})


def _span(kernel: Kernel) -> str:
    if kernel.last in (None, kernel.first):
        return str(kernel.first)
    return f"{kernel.first} to {kernel.last}"


def _first(span: str) -> int:
    return int(span.split(maxsplit=1)[0])
