"""The contract of a step graph; docs/architecture.md has its tables in full."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Annotated, Any

from jetdraft.contracts.constants import CANDIDATES, MIN_SELECTED
from jetdraft.contracts.tensors import (
    ALL,
    ANSWERS,
    PREFIX,
    PROBES,
    ROWS,
    SLOTS,
    TensorSpec,
)
from jetdraft.errors import ContractError
from jetdraft.parsing import MOST_SIZE, Count, Size, in_range, one_of


class Reading(IntEnum):
    """Which committed rows a pass reads, and whether the keys of selected rows turn.

    `TURNED` is for texts beyond the trained length: the keys turn to adjoining
    positions there. A draft must guess what a pass over `ALL` rows says, so the keys of
    `SELECTED` rows stay as they are.
    """

    ALL = 0
    SELECTED = 1
    TURNED = 2


@dataclass(frozen=True)
class Selection:
    """Which committed rows a selecting pass reads (TokenSelect, 2411.02886).

    In each layer and for each KV head it reads `rows` rows: the `first` of the buffer,
    the most `recent`, and between them those that the KV head's query heads voted for.
    A layer has `query_heads` in all.

        Selection(rows=1024, query_heads=14).voted    # 704
    """

    rows: Annotated[int, in_range(MIN_SELECTED, MOST_SIZE)]
    query_heads: Size

    @property
    def first(self) -> int:
        """The first rows of a text, which take much of the attention."""
        return self.rows // 16

    @property
    def recent(self) -> int:
        """The rows just before those of the pass."""
        return self.rows // 4

    @property
    def voted(self) -> int:
        """The rows that a vote selects."""
        return self.rows - self.first - self.recent


TARGET_LENGTH = TensorSpec("target_length", "int32", (1,))
"""The committed rows in the target's buffers."""

SELECTING = TensorSpec("selecting", "int32", (1,))
"""Which rows the pass reads, a `Reading`."""

SOURCE_LENGTH = TensorSpec("source_length", "int32", (1,))
"""The slots that a source fills; the others are hidden."""


@dataclass(frozen=True)
class StepContract:
    """The sizes that fix every shape of a step graph.

    `kv_shapes` holds (kv_heads, head_dim) per layer; `dtype`, "float32" or "float16",
    is the type of the KV buffers. A drafter reads all ids of its target, and may choose
    among fewer, its `vocab_size`. A `tree` graph verifies branching drafts too. A row
    can carry `streams` probes, which draft as many tokens; each takes `members` slots,
    and all of them see a `prefix` of that many slots. With `kv_bits` 8 the buffers hold
    int8, with 0 they hold `dtype`.

    The other sizes are widths of optional tensors, 0 where a graph does not have them:
    `hidden_size` of the output `hidden`, `feature_size` of the output `features`,
    `feature_input` of the input `features`, and `carried_size` of `carried`. A
    `draft_vocab` of 0 means the whole vocabulary. `guesses` is the number of tokens
    that a head guesses at once, 0 for other graphs. `reads` has (layer, kv_heads,
    head_dim) of each layer of the target whose buffers the graph reads, and `recent` is
    the number of tokens before a row's that it reads. `ahead` is k for a head that
    answers in row t for token t + k + 1, and reads the features of the last k rows in
    each; 0 for other graphs. Raises `ContractError` for sizes that contradict each
    other.

    A decoder of an encoder reads a source of at most `source_slots` tokens, or, with
    `source_bins`, a sound as its log-mel spectrum of that many bins. With
    `relative_positions` its attention has a bias of its own, by the distance of rows.

    With a `selection` a pass may read selected rows only.

    The buffers have `spare_slots` more slots than the capacity. A pass near the end may
    fill them, and no pass reads them.

        contract = StepContract(
            vocab_size=4096, capacity=2048, max_width=128, dtype="float32",
            kv_shapes=((2, 64),) * 7,
        )
        [spec.name for spec in contract.inputs]
    """

    vocab_size: Size
    capacity: Size
    max_width: Size
    dtype: Annotated[str, one_of("float32", "float16")]
    kv_shapes: tuple[tuple[Size, Size], ...]
    tree: bool = False
    streams: Annotated[int, in_range(0, 1024)] = 0
    hidden_size: Count = 0
    kv_bits: Annotated[int, one_of(0, 8)] = 0
    feature_size: Count = 0
    feature_input: Count = 0
    carried_size: Count = 0
    draft_vocab: Count = 0
    guesses: Annotated[int, in_range(0, 1024)] = 0
    spare_slots: Count = 0
    members: Annotated[int, in_range(1, 64)] = 1
    prefix: Annotated[int, in_range(0, 1024)] = 0
    reads: tuple[tuple[Count, Size, Size], ...] = ()
    recent: Annotated[int, in_range(0, 64)] = 0
    ahead: Annotated[int, in_range(0, 64)] = 0
    source_slots: Count = 0
    source_bins: Count = 0
    relative_positions: bool = False
    selection: Selection | None = None

    def __post_init__(self) -> None:
        for is_wrong, fact in (
            (
                self.feature_size and self.feature_input,
                "features are both an input and an output",
            ),
            (
                self.carried_size and not self.feature_input,
                "carried features need features as an input",
            ),
            (
                self.recent and not self.carried_size,
                "recent tokens need carried features",
            ),
            (
                self.ahead and self.recent != self.ahead - 1,
                f"rows of {self.ahead} features read {self.recent} recent tokens",
            ),
            (
                self.guesses and not (self.feature_input or self.kv_shapes),
                "guesses need features as an input, or buffers",
            ),
            (
                self.source_bins and not self.source_slots,
                "a sound needs slots of a source",
            ),
            (
                self.block and self.spare_slots < self.block,
                f"{self.spare_slots} spare slots do not hold a block of {self.block}",
            ),
            (
                not 0 <= self.draft_vocab <= self.vocab_size,
                f"a draft vocabulary of {self.draft_vocab} tokens is not a part of "
                f"{self.vocab_size}",
            ),
        ):
            if is_wrong:
                raise ContractError(f"graph contract: {fact}; export the bundle again")

    @property
    def stands_alone(self) -> bool:
        """Whether a drafter with this graph is a model of its own, which reads text."""
        return not (self.feature_input or self.guesses or self.reads)

    @property
    def learns(self) -> bool:
        """Whether use can train a drafter with this graph: a model, EAGLE or MTP."""
        reads_all = self.stands_alone or bool(self.carried_size and not self.recent)
        return reads_all and not self.source_slots

    @property
    def slots(self) -> int:
        """The rows of a KV buffer."""
        return self.capacity + self.spare_slots

    @property
    def block(self) -> int:
        """The tokens of the block that the graph fills; 0 for other graphs."""
        return self.guesses if self.kv_shapes else 0

    @property
    def choices(self) -> int:
        """Columns of the logits: the tokens that the graph chooses among."""
        return self.draft_vocab or self.vocab_size

    @property
    def candidates(self) -> int:
        """The number of candidates for each row."""
        return min(CANDIDATES, self.choices)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in graph order."""
        return (
            TensorSpec("input_ids", "int64", (1, ROWS)),
            TensorSpec("position_ids", "int64", (1, ROWS)),
            TensorSpec("cursor", "int32", (1,)),
            TensorSpec("total_length", "int32", (1,)),
            TensorSpec("answer_rows", "int64", (ANSWERS,)),
            *(self.mask if self.masked else ()),
            *(self.probes if self.streams else []),
            *([self.recent_ids] if self.recent else []),
            *_optional("features", ROWS, self.feature_input * (self.ahead or 1)),
            *([TensorSpec("block", "int64", (1, self.block))] if self.block else []),
            *([TARGET_LENGTH, *self.target_kv] if self.reads else []),
            *((SOURCE_LENGTH, *self.cross) if self.source_slots else ()),
            *([SELECTING] if self.selection else []),
            *self.selected("past"),
            *self.buffers("past"),
        )

    @property
    def recent_ids(self) -> TensorSpec:
        """The input of the tokens before each row's; token 0 stands before a text."""
        return TensorSpec("recent_ids", "int64", (1, ROWS, self.recent))

    @property
    def target_kv(self) -> tuple[TensorSpec, ...]:
        """The buffers of the target that the graph reads."""
        return tuple(
            TensorSpec(
                f"target_{kind}.{layer}", self.dtype, (1, heads, SLOTS, head_dim)
            )
            for layer, heads, head_dim in self.reads
            for kind in ("key", "value")
        )

    @property
    def cross(self) -> tuple[TensorSpec, ...]:
        """The keys and values of the source, which only the encoder's graph writes."""
        return tuple(
            TensorSpec(
                f"cross_{kind}.{layer}",
                self.dtype,
                (1, heads, self.source_slots, head_dim),
            )
            for layer, (heads, head_dim) in enumerate(self.kv_shapes)
            for kind in ("key", "value")
            if self.source_slots
        )

    @property
    def masked(self) -> bool:
        """Whether the graph has a `draft_mask`."""
        return self.tree or self.streams > 0

    @property
    def biased(self) -> bool:
        """Whether its attention has a bias of all slots."""
        return self.masked or self.block > 0 or self.relative_positions

    @property
    def draft_slots(self) -> int:
        """The most slots that a draft takes with its probes."""
        behind = self.prefix + self.max_width * self.streams * self.members
        return min(self.max_width + (behind if self.streams else 0), self.slots)

    def behind(self, probes: int) -> int:
        """The slots that probes and their prefix take behind the rows of a pass."""
        return self.prefix + probes * self.members if probes else 0

    @property
    def mask(self) -> tuple[TensorSpec, ...]:
        """The inputs that hide a draft's slots from its rows and probes."""
        rows = ALL if self.streams else ROWS
        return (
            TensorSpec("draft_mask", "uint8", (1 + self.draft_slots, rows)),
            TensorSpec("draft_start", "int32", (1,)),
        )

    @property
    def probes(self) -> tuple[TensorSpec, ...]:
        """The inputs that give each probe its row and its stream, and the prefix."""
        return (
            TensorSpec("probe_rows", "int64", (PROBES,)),
            TensorSpec("probe_ids", "int64", (PROBES,)),
            *([TensorSpec("prefix_rows", "int64", (PREFIX,))] if self.prefix else []),
        )

    @property
    def answers(self) -> tuple[TensorSpec, ...]:
        """The outputs that are not KV buffers, in graph order."""
        return (
            *self._answers("", self.guesses or ANSWERS),
            *_optional("hidden", ANSWERS, self.hidden_size),
            *_optional("features", ROWS, self.feature_size),
            *_optional("carried", ROWS, self.carried_size),
            *(self._answers("probe_", PROBES) if self.streams else ()),
        )

    def _answers(self, prefix: str, axis: int | str) -> tuple[TensorSpec, ...]:
        k = self.candidates
        return (
            TensorSpec(f"{prefix}candidates", "int64", (1, axis, k)),
            TensorSpec(f"{prefix}candidate_logits", "float32", (1, axis, k)),
            TensorSpec(f"{prefix}logsumexp", "float32", (1, axis)),
            TensorSpec(f"{prefix}logits", "float32", (1, axis, self.choices)),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs, in graph order."""
        return (*self.answers, *self.selected("present"), *self.buffers("present"))

    def selected(self, side: str) -> tuple[TensorSpec, ...]:
        """The selections `{side}_rows.{i}` and `{side}_query.{i}`, if there are any."""
        if self.selection is None:
            return ()
        voted, queries = self.selection.voted, self.selection.query_heads
        return tuple(
            spec
            for layer, (heads, size) in enumerate(self.kv_shapes)
            for spec in (
                TensorSpec(f"{side}_rows.{layer}", "int64", (1, heads, voted)),
                TensorSpec(
                    f"{side}_query.{layer}",
                    "float32",
                    (1, heads, queries // heads, size),
                ),
            )
        )

    def buffers(self, side: str) -> tuple[TensorSpec, ...]:
        """The KV buffers named `{side}_key.{i}` and `{side}_value.{i}`."""
        dtype = {0: self.dtype, 8: "int8"}[self.kv_bits]
        return tuple(
            TensorSpec(
                f"{side}_{kind}.{layer}", dtype, (1, heads, self.slots, head_dim)
            )
            for layer, (heads, head_dim) in enumerate(self.kv_shapes)
            for kind in ("key", "value")
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `read_record` reads."""
        return asdict(self)


def _optional(name: str, axis: str, size: int) -> tuple[TensorSpec, ...]:
    """A float tensor with a vector for each row of `axis`; no tensor if `size` is 0."""
    return (TensorSpec(name, "float32", (1, axis, size)),) if size else ()
