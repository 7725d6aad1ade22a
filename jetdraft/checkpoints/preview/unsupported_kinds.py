"""Kinds of models that no graph is written for yet, known by fields of their configs.

A new kind of graph takes its row out of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jetdraft.contracts.constants import EXPERTS
from jetdraft.errors import UnsupportedModelError, printable


@dataclass(frozen=True)
class Kind:
    """What a user calls a kind, the fields that count its parts, and its layers' types.

    A model has `least` parts or more, unless the field `unless` is false. Fields have
    the names of transformers, or those of GGUF without the family.

        Kind("has convolution layers", fields=("shortconv.l_cache",), types=("conv",))
    """

    words: str
    fields: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    least: int = 1
    unless: str = ""

    def found(self, field: Callable[[str], Any]) -> Iterator[str]:
        """The fields and types that say that a model is of this kind."""
        for name in self.fields if field(self.unless) is not False else ():
            value = field(name)
            counts = value if isinstance(value, list) else [value]
            most = max((n for n in counts if isinstance(n, int)), default=0)
            if most >= self.least:
                yield f"{name} {printable(most, 20)}"
        for name in ("layer_types", "layers_block_type", "block_types"):
            types = field(name)
            if isinstance(types, (list, tuple)):
                yield from (f"{name} {t}" for t in self.types if t in types)


KINDS = (
    Kind(
        "is a mixture of experts",
        (*EXPERTS, "expert_count"),
        ("moe",),
        least=2,
        unless="is_moe",
    ),
    Kind(
        "has recurrent layers",
        ("ssm.state_size", "wkv.head_size"),
        (
            *("linear_attention", "hybrid", "hybrid_sliding", "recurrent"),
            *("mamba", "mamba2"),
        ),
    ),
    Kind("has convolution layers", ("shortconv.l_cache",), ("conv",)),
    Kind(
        "has layers that share keys and values",
        ("num_kv_shared_layers", "attention.shared_kv_layers"),
    ),
    Kind("has latent attention (MLA)", ("kv_lora_rank", "attention.kv_lora_rank")),
)


def check_kinds(source: str, field: Callable[[str], Any]) -> None:
    """Raise `UnsupportedModelError` for a model of these kinds, by all their names.

    `field` gives the value of a config's field, None for a field that it lacks.

        check_kinds("qwen3-moe/", {"num_experts": 128}.get)
    """
    found = [(kind.words, next(kind.found(field), None)) for kind in KINDS]
    said = [f"{words} ({sign})" for words, sign in found if sign is not None]
    if said:
        raise UnsupportedModelError(
            f"{source} {' and '.join(said)}, which jetdraft does not export yet; it "
            "exports dense decoders like Llama, Qwen3 and Gemma 3, see docs/models.md"
        )
