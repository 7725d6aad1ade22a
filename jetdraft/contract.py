"""The graph contract: what a step graph takes and gives, declared once.

The exporter names its inputs and outputs after these declarations and the runtime
checks a session against them at load. A *step graph* runs `n` rows over a fixed KV
buffer of `capacity` rows:

| input | type, shape |
| --- | --- |
| `input_ids`, `position_ids` | int64 [1, n] |
| `cursor` | int32 [1], committed rows in the buffer |
| `total_length` | int32 [1], cursor + n; the capacity in a tree graph |
| `answer_rows` | int64 [m], the rows to answer for: all, or the last in a prefill |
| `attention_bias` | dtype [1, 1, n + r, capacity], 0 or `HIDDEN`; trees or streams |
| `probe_rows`, `probe_ids` | int64 [r], the row and the stream of each probe |
| `past_key.{i}`, `past_value.{i}` | dtype [1, kv_heads, capacity, head_dim] |

| output | type, shape |
| --- | --- |
| `candidates`, `candidate_logits` | int64, float32 [1, m, K], best first |
| `logsumexp` | float32 [1, m] |
| `logits` | float32 [1, m, vocab] |
| `probe_candidates`, ..., `probe_logits` | the same four for the r probes |
| `present_key.{i}`, `present_value.{i}` | the same buffers, updated in place |

Probes only exist in graphs that draft as they verify: rows that propose and are never
committed. Their keys and values land past the rows of the pass.

Such a graph also comes in two halves, see `SplitContract`, between which a host may
drop rows that an early exit thinks little of.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from jetdraft.errors import ContractError

CANDIDATES = 64
"""K: how many candidates per row a graph returns, unless the vocabulary is smaller."""

WIDEST = 16
"""Rows of the widest pass that a controller plans."""

HIDDEN = -1e4
"""Added to the score of a slot that a row may not see; fits float16."""

ROWS, ANSWERS, PROBES, ALL = "n", "m", "r", "n+r"
"""The names of the dynamic axes: the rows of a pass, those it answers for, its probes,
and rows and probes together."""


EARLY_EXIT = ("streams.narrow.weight", "streams.widen.weight")
"""The weights of the pruning adapter, which only the lower half of a graph has."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: name, numpy dtype name, shape with named dynamic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sized(
        self, rows: int = 0, answers: int = 0, probes: int = 0
    ) -> tuple[int, ...]:
        """The shape in a pass of `rows` rows and `probes` probes.

        `answers` of the rows are answered for.
        """
        sizes = {ROWS: rows, ANSWERS: answers, PROBES: probes, ALL: rows + probes}
        return tuple(
            sizes[axis] if isinstance(axis, str) else axis for axis in self.shape
        )


@dataclass(frozen=True)
class StepContract:
    """The sizes that fix every shape of a step graph.

    `kv_shapes` holds (kv_heads, head_dim) per layer and `dtype` is the one of the KV
    buffers, "float32" or "float16". A `tree` graph verifies branching drafts too, and
    one with `streams` drafts that many tokens after each row that carries them. One
    with a `hidden_size` gives the hidden states under its head as well. With `kv_bits`
    8 the buffers hold int8, with 0 they hold `dtype`.

        contract = StepContract(
            vocab_size=4096, capacity=2048, max_width=256, dtype="float32",
            kv_shapes=((2, 64),) * 7,
        )
        [spec.name for spec in contract.inputs]
    """

    vocab_size: int
    capacity: int
    max_width: int
    dtype: str
    kv_shapes: tuple[tuple[int, int], ...]
    tree: bool = False
    streams: int = 0
    hidden_size: int = 0
    kv_bits: int = 0

    @property
    def candidates(self) -> int:
        """Candidates per row."""
        return min(CANDIDATES, self.vocab_size)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in graph order."""
        return (
            TensorSpec("input_ids", "int64", (1, ROWS)),
            TensorSpec("position_ids", "int64", (1, ROWS)),
            TensorSpec("cursor", "int32", (1,)),
            TensorSpec("total_length", "int32", (1,)),
            TensorSpec("answer_rows", "int64", (ANSWERS,)),
            *([self.bias] if self.biased else []),
            *(self.probes if self.streams else []),
            *self.buffers("past"),
        )

    @property
    def biased(self) -> bool:
        """Whether a pass says which slots its rows may see."""
        return self.tree or self.streams > 0

    @property
    def bias(self) -> TensorSpec:
        """Which slots each row, and then each probe, may see."""
        rows = ALL if self.streams else ROWS
        return TensorSpec("attention_bias", self.dtype, (1, 1, rows, self.capacity))

    @property
    def probes(self) -> tuple[TensorSpec, ...]:
        """The inputs that say which row carries which stream."""
        return (
            TensorSpec("probe_rows", "int64", (PROBES,)),
            TensorSpec("probe_ids", "int64", (PROBES,)),
        )

    @property
    def answers(self) -> tuple[TensorSpec, ...]:
        """The outputs that are not KV buffers, in graph order."""
        size = self.hidden_size
        hidden = [TensorSpec("hidden", "float32", (1, ANSWERS, size))] if size else []
        probes = self._answers("probe_", PROBES) if self.streams else ()
        return (*self._answers("", ANSWERS), *hidden, *probes)

    def _answers(self, prefix: str, axis: str) -> tuple[TensorSpec, ...]:
        k = self.candidates
        return (
            TensorSpec(f"{prefix}candidates", "int64", (1, axis, k)),
            TensorSpec(f"{prefix}candidate_logits", "float32", (1, axis, k)),
            TensorSpec(f"{prefix}logsumexp", "float32", (1, axis)),
            TensorSpec(f"{prefix}logits", "float32", (1, axis, self.vocab_size)),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs, in graph order."""
        return (*self.answers, *self.buffers("present"))

    def buffers(self, side: str) -> tuple[TensorSpec, ...]:
        """The KV buffers named `{side}_key.{i}` and `{side}_value.{i}`."""
        dtype = {0: self.dtype, 8: "int8"}[self.kv_bits]
        return tuple(
            TensorSpec(
                f"{side}_{kind}.{layer}",
                dtype,
                (1, heads, self.capacity, head_dim),
            )
            for layer, (heads, head_dim) in enumerate(self.kv_shapes)
            for kind in ("key", "value")
        )

    def split(self, layers: int, hidden_size: int) -> SplitContract:
        """The contract of the halves below and from the top `layers` on."""
        below = len(self.kv_shapes) - layers
        return SplitContract(
            whole=self,
            hidden_size=hidden_size,
            lower=replace(self, kv_shapes=self.kv_shapes[:below]),
            upper=replace(self, kv_shapes=self.kv_shapes[below:]),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StepContract:
        """Read `to_json`'s object; raise `ContractError` if it is not one."""
        try:
            shapes = tuple((int(h), int(d)) for h, d in fields["kv_shapes"])
            sizes = {
                name: int(fields[name])
                for name in ("vocab_size", "capacity", "max_width", "streams")
            }
            # Bundles of the first version 0.1 have neither.
            sizes["hidden_size"] = int(fields.get("hidden_size", 0))
            sizes["kv_bits"] = {0: 0, 8: 8}[int(fields.get("kv_bits", 0))]
            flags = {"tree": bool(fields["tree"]), "kv_shapes": shapes}
            return cls(**{**fields, **sizes, **flags})
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(
                f"the graph contract in bundle.json is malformed ({error}); "
                "export the bundle again"
            ) from error


@dataclass(frozen=True)
class SplitContract:
    """Two graphs that together are one with streams.

    The lower one runs the rows of a draft and says how likely an early exit thinks each
    is after its parent (`scores`, log probabilities); the upper one takes the hidden
    states of those that are kept. `lower` and `upper` have the shapes of their buffers,
    which are numbered from 0 in both.

        halves = contract.split(layers=2, hidden_size=384)
    """

    whole: StepContract
    hidden_size: int
    lower: StepContract
    upper: StepContract

    @property
    def hidden(self) -> TensorSpec:
        """The hidden states between the halves."""
        return TensorSpec("hidden", self.whole.dtype, (1, ROWS, self.hidden_size))

    @property
    def lower_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the lower half, in graph order."""
        bias = TensorSpec(
            "attention_bias", self.whole.dtype, (1, 1, ROWS, self.whole.capacity)
        )
        return (
            *self.whole.inputs[:4],
            bias,
            TensorSpec("parents", "int64", (ROWS,)),
            *self.lower.buffers("past"),
        )

    @property
    def lower_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the lower half, in graph order."""
        scores = TensorSpec("scores", "float32", (1, ROWS))
        return (self.hidden, scores, *self.lower.buffers("present"))

    @property
    def upper_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the upper half, in graph order."""
        return (self.hidden, *self.upper.inputs[1:])

    @property
    def upper_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the upper half, in graph order."""
        return self.upper.outputs


_ONNX_TYPES = {
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
}


def check_tensors(declared: tuple[TensorSpec, ...], found: list[Any], of: str) -> None:
    """Compare a session's inputs or outputs with their declaration.

    `found` are onnxruntime `NodeArg`s, `of` names the graph and side in the message.
    Raises `ContractError` on the first difference.
    """
    actual = {arg.name: (arg.type, tuple(arg.shape)) for arg in found}
    for spec in declared:
        if spec.name not in actual:
            raise ContractError(f"{of} lack {spec.name!r}; export the bundle again")
        dtype, shape = actual.pop(spec.name)
        if dtype != _ONNX_TYPES[spec.dtype] or not _fits(spec.shape, shape):
            raise ContractError(
                f"{of}: {spec.name!r} is {dtype} {list(shape)}, declared "
                f"{spec.dtype} {list(spec.shape)}; export the bundle again"
            )
    if actual:
        raise ContractError(
            f"{of} have undeclared {sorted(actual)}; export the bundle again"
        )


def _fits(declared: tuple[int | str, ...], found: tuple[Any, ...]) -> bool:
    """A named axis fits any symbolic axis; a number fits only itself."""
    return len(declared) == len(found) and all(
        not isinstance(there, int) if isinstance(here, str) else here == there
        for here, there in zip(declared, found, strict=True)
    )
