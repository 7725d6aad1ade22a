"""The contract of a step graph and of its halves; docs/architecture.md has tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from typing import Annotated

from jetdraft.contracts.tensors import (
    ALL,
    ANSWERS,
    CANDIDATES,
    FRAMES_PER_SLOT,
    MIN_SELECTED,
    PREFIX,
    PROBES,
    ROWS,
    SEEN,
    SLOTS,
    TensorSpec,
)
from jetdraft.errors import ContractError
from jetdraft.parsing import MAX_SIZE, Count, Size, in_range, one_of


class Reading(IntEnum):
    """Which committed rows a pass reads; keys of `TURNED` rows get new positions."""

    ALL = 0
    SELECTED = 1
    TURNED = 2


@dataclass(frozen=True)
class Selection:
    """Which committed rows a selecting pass reads (TokenSelect, 2411.02886).

    Each KV head reads `rows` rows: the `first`, the most `recent`, and between them the
    `voted`, which its query heads choose. A layer has `query_heads` query heads.
    """

    rows: Annotated[int, in_range(MIN_SELECTED, MAX_SIZE)]
    query_heads: Size

    @property
    def first(self) -> int:
        """How many rows from the start of the buffer are read."""
        return self.rows // 16

    @property
    def recent(self) -> int:
        """How many rows just before the rows of the pass are read."""
        return self.rows // 4

    @property
    def voted(self) -> int:
        """How many of the rows between the first and the recent a vote selects."""
        return self.rows - self.first - self.recent


# The number of committed rows in the target's buffers.
TARGET_LENGTH = TensorSpec("target_length", "int32", (1,))
SELECTING = TensorSpec("selecting", "int32", (1,))  # The rows to read: a `Reading`.
# The number of slots that a source fills; the others are hidden.
SOURCE_LENGTH = TensorSpec("source_length", "int32", (1,))
SOURCE = "source"  # The name of the dynamic axis of a source's tokens.

# How many kept rows of the last pass are committed; how many of this are no padding.
STATE_ROWS = TensorSpec("state_rows", "int64", (2,))
# The inputs with the row and the stream of each probe, and with the prefix rows.
_PROBE_INPUTS = [TensorSpec(f"probe_{n}", "int64", (PROBES,)) for n in ("rows", "ids")]
PICTURES = "pictures"  # The input with the rows of pictures.
PICTURE_ROWS = TensorSpec("picture_rows", "int64", (SEEN,))
TURNS = ("cosines", "sines")  # The inputs with the rotation of each slot.
PREFIX_ROWS = TensorSpec("prefix_rows", "int64", (PREFIX,))


@dataclass(frozen=True)
class StepContract:
    """The sizes that fix every shape of a step graph.

    `kv_shapes` holds (kv_heads, head_dim) per layer; the KV buffers have `capacity` and
    `spare_slots` slots, which no pass reads, of "float32", "float16", or int8 with
    `kv_bits` 8. A drafter, or a target's probes, may choose among the ids below
    `vocab_size`, or among `draft_vocab` of them; 0 means all.

    A `tree` graph verifies branching drafts too. A row can carry `streams` probes; each
    takes `members` slots, and all see a `prefix` of slots. `hidden_size`,
    `feature_size`, `feature_input` and `carried_size` are the widths of the optional
    `hidden`, `features` (an output or an input) and `carried`.

    `guesses` is the number of tokens that a head guesses at once. `reads` has (layer,
    kv_heads, head_dim) of each buffer of the target that the graph reads, and `recent`
    is the number of tokens before a row's that it reads. `ahead` is k for a head that
    answers in row t for token t + k + 1, and reads the features of the last k rows.

    A source has at most `source_slots` tokens, or, with `source_bins`, a log-mel
    spectrum of that many bins. With `relative_positions` attention adds a bias by the
    distance between rows. Contradictory sizes raise `ContractError`.

    A layer with a recurrent state has `states`, which a pass changes in place: a
    convolution its last rows (k - 1, channels), linear attention matrices (heads, key,
    value). A pass of at most `WIDEST` rows leaves these as they were, keeps its rows
    behind them or in a tensor (WIDEST, numbers); the next pass takes up those that were
    committed. A wider pass is committed whole. A row chooses `experts` of all layers.
    Instead of an embedding it may read one of `capacity` rows of `picture_size`, whose
    numbers beyond an embedding's are added to the states after the first layers. With a
    `turn_size` its keys are rotated by `TURNS`, two numbers of a slot for each pair.
    With `whole_pictures` a pass reads a picture alone, and its `PICTURE_ROWS`, which
    are all or none, see each other.

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
    states: tuple[tuple[Size, ...], ...] = ()
    experts: Count = 0
    picture_size: Count = 0
    whole_pictures: bool = False
    turn_size: Count = 0

    def __post_init__(self) -> None:
        read, recent, carried = self.feature_input, self.recent, self.carried_size
        contradictions = {
            "features are both an input and an output": self.feature_size and read,
            "carried features need features as an input": carried and not read,
            "recent tokens need carried features": recent and not carried,
            f"rows of {self.ahead} features read {recent} recent tokens": self.ahead
            and recent != self.ahead - 1,
            "guesses need features as an input, or buffers": self.guesses
            and not (read or self.kv_shapes),
            "pictures that see each other need floats": self.whole_pictures
            and self.kv_bits,
            "a sound needs slots of a source": self.source_bins
            and not self.source_slots,
            f"{self.spare_slots} spare slots do not hold a block of {self.block}": (
                self.spare_slots < self.block
            ),
            f"a draft vocabulary of {self.draft_vocab} tokens is not a part of "
            f"{self.vocab_size}": not 0 <= self.draft_vocab <= self.vocab_size,
        }
        for fact, is_wrong in contradictions.items():
            if is_wrong:
                raise ContractError(f"graph contract: {fact}; export the bundle again")

    @property
    def stands_alone(self) -> bool:
        """Whether the drafter is a whole model, which reads nothing of the target."""
        return not (self.feature_input or self.guesses or self.reads)

    @property
    def learns(self) -> bool:
        """Whether a drafter with this graph can train in use: a model, EAGLE or MTP."""
        reads_all = self.stands_alone or bool(self.carried_size and not self.recent)
        return reads_all and not (self.source_slots or self.reads)

    @property
    def slots(self) -> int:
        """The number of rows of a KV buffer, spare slots included."""
        return self.capacity + self.spare_slots

    @property
    def block(self) -> int:
        """The number of masked tokens that a block drafter fills; 0 for others."""
        return self.guesses if self.kv_shapes else 0

    @property
    def draft_choices(self) -> int:
        """The number of tokens that a drafter's rows or the probes choose among."""
        return self.draft_vocab or self.vocab_size

    @property
    def choices(self) -> int:
        """The number of tokens that rows choose among: columns of the logits."""
        return self.vocab_size if self.streams else self.draft_choices

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("input_ids", "int64", (1, ROWS)),
            TensorSpec("position_ids", "int64", (1, ROWS)),
            TensorSpec("cursor", "int32", (1,)),
            TensorSpec("total_length", "int32", (1,)),
            TensorSpec("answer_rows", "int64", (ANSWERS,)),
            *(self.mask_inputs if self.has_mask else ()),
            *(_PROBE_INPUTS if self.streams else ()),
            *([PREFIX_ROWS] if self.streams and self.prefix else []),
            # The tokens before each row; id 0 stands before a text.
            *_optional_tensor("recent_ids", ROWS, self.recent, "int64"),
            *_optional_tensor("features", ROWS, self.feature_input * (self.ahead or 1)),
            *([TensorSpec("block", "int64", (1, self.block))] if self.block else []),
            *([TARGET_LENGTH, *self.target_kv] if self.reads else []),
            *((SOURCE_LENGTH, *self.cross_inputs) if self.source_slots else ()),
            *([SELECTING] if self.selection else []),
            *self.selections("past"),
            *self.picture_inputs,
            *([PICTURE_ROWS] if self.whole_pictures else []),
            *([STATE_ROWS] if self.states else []),
            *self.buffers("past"),
            *self.state_tensors("past"),
        )

    @property
    def picture_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs with the rows of pictures, and with the rotation of each slot."""
        rows, turns = (self.capacity, self.picture_size), (self.slots, self.turn_size)
        named = [(PICTURES, rows), *((name, turns) for name in TURNS)]
        return tuple(TensorSpec(n, self.dtype, shape) for n, shape in named if shape[1])

    @property
    def target_kv(self) -> tuple[TensorSpec, ...]:
        """The inputs with the buffers of the target that the graph reads."""
        shapes = {layer: (1, heads, SLOTS, size) for layer, heads, size in self.reads}
        return _keys_and_values("target", self.dtype, shapes)

    @property
    def cross_inputs(self) -> tuple[TensorSpec, ...]:
        """The encoder's outputs: keys and values of a source, padded with zeros."""
        if not self.source_slots:
            return ()
        return _keys_and_values("cross", self.dtype, self._shapes(self.source_slots))

    @property
    def encoder_input(self) -> TensorSpec:
        """The encoder's input: token ids, or a sound that fills all slots."""
        if self.source_bins:
            shape = 1, self.source_bins, self.frames
            return TensorSpec("input_features", "float32", shape)
        return TensorSpec("input_ids", "int64", (1, SOURCE))

    @property
    def frames(self) -> int:
        """The number of frames in the spectrum of a sound."""
        return FRAMES_PER_SLOT * self.source_slots

    @property
    def has_mask(self) -> bool:
        return self.tree or self.streams > 0

    @property
    def has_bias(self) -> bool:
        """Whether the graph's attention adds a bias over all slots to its scores."""
        return self.has_mask or self.block > 0 or self.relative_positions

    @property
    def draft_slots(self) -> int:
        """The most KV slots that a draft takes, with its probes and their prefix."""
        behind = self.prefix + self.max_width * self.streams * self.members
        return min(self.max_width + (behind if self.streams else 0), self.slots)

    @property
    def mask_inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs: 1 in line i hides slot `draft_start` + i - 1; line 0 all before."""
        rows = ALL if self.streams else ROWS
        mask = TensorSpec("draft_mask", "uint8", (1 + self.draft_slots, rows))
        return mask, TensorSpec("draft_start", "int32", (1,))

    @property
    def answers(self) -> tuple[TensorSpec, ...]:
        """The outputs that are neither selections nor KV buffers, in graph order."""
        return (
            *_answer_tensors("", self.guesses or ANSWERS, self.choices),
            *_optional_tensor("hidden", ANSWERS, self.hidden_size),
            *_optional_tensor("features", ROWS, self.feature_size),
            *_optional_tensor("carried", ROWS, self.carried_size),
            *_optional_tensor("experts", ROWS, self.experts, "int64"),
            *(
                _answer_tensors("probe_", PROBES, self.draft_choices)
                if self.streams
                else ()
            ),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        tensors = self.selections, self.buffers, self.state_tensors
        return (*self.answers, *(spec for own in tensors for spec in own("present")))

    def state_tensors(self, side: str) -> tuple[TensorSpec, ...]:
        """The tensors `{side}_state.{i}`, in the order of the layers."""
        shapes = ((f"{side}_state.{i}", (1, *s)) for i, s in enumerate(self.states))
        return tuple(TensorSpec(name, "float32", shape) for name, shape in shapes)

    def selections(self, side: str) -> tuple[TensorSpec, ...]:
        """The tensors `{side}_rows.{i}`, `{side}_query.{i}`; () without a selection."""
        if self.selection is None:
            return ()
        voted, queries = self.selection.voted, self.selection.query_heads
        specs: list[TensorSpec] = []
        for layer, (heads, size) in enumerate(self.kv_shapes):
            query = 1, heads, queries // heads, size
            specs.append(TensorSpec(f"{side}_rows.{layer}", "int64", (1, heads, voted)))
            specs.append(TensorSpec(f"{side}_query.{layer}", "float32", query))
        return tuple(specs)

    def buffers(self, side: str) -> tuple[TensorSpec, ...]:
        """The KV buffers `{side}_key.{i}` and `{side}_value.{i}` of all layers i."""
        dtype = {0: self.dtype, 8: "int8"}[self.kv_bits]
        return _keys_and_values(side, dtype, self._shapes(self.slots))

    def _shapes(self, slots: int) -> dict[int, tuple[int, ...]]:
        """Map each layer to the shape [1, kv_heads, slots, head_dim] of its buffers."""
        shapes = enumerate(self.kv_shapes)
        return {layer: (1, heads, slots, size) for layer, (heads, size) in shapes}


def _answer_tensors(
    prefix: str, axis: int | str, choices: int
) -> tuple[TensorSpec, ...]:
    """Return the four outputs for the rows of `axis`; names begin with `prefix`."""
    k = min(CANDIDATES, choices)
    return (
        TensorSpec(f"{prefix}candidates", "int64", (1, axis, k)),
        TensorSpec(f"{prefix}candidate_logits", "float32", (1, axis, k)),
        TensorSpec(f"{prefix}logsumexp", "float32", (1, axis)),
        TensorSpec(f"{prefix}logits", "float32", (1, axis, choices)),
    )


def _keys_and_values(
    side: str, dtype: str, shapes: Mapping[int, tuple[int | str, ...]]
) -> tuple[TensorSpec, ...]:
    pairs = product(shapes.items(), ("key", "value"))
    named = ((f"{side}_{kind}.{layer}", shape) for (layer, shape), kind in pairs)
    return tuple(TensorSpec(name, dtype, shape) for name, shape in named)


def _optional_tensor(
    name: str, axis: str, size: int, dtype: str = "float32"
) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name, dtype, (1, axis, size)),) if size else ()


EARLY_EXIT = ("streams.narrow.weight", "streams.widen.weight")
# The input with the parent of each row, for an early exit; the root has itself.
PARENTS = TensorSpec("parents", "int64", (ROWS,))
# The output of an early exit: the log probability of each row's token.
SCORES = TensorSpec("scores", "float32", (1, ROWS))


@dataclass(frozen=True)
class SplitContract:
    """The contracts of the two halves of a graph; both number layers from 0."""

    whole: StepContract
    hidden_size: int
    lower: StepContract
    upper: StepContract
    scores: bool = False

    @classmethod
    def of(
        cls, whole: StepContract, layers: int, hidden_size: int, scores: bool = False
    ) -> "SplitContract":
        """Split a contract below its top `layers`; raises `ContractError`."""
        below = len(whole.kv_shapes) - layers
        if layers < 1 or below < 1:
            fact = f"graph contract: {len(whole.kv_shapes)} layers cannot be cut below "
            fact += f"the top {layers}; export the bundle again"
            raise ContractError(fact)
        shapes = whole.kv_shapes[:below], whole.kv_shapes[below:]
        both = (replace(whole, kv_shapes=s, feature_size=0, experts=0) for s in shapes)
        lower, upper = both
        return cls(whole, hidden_size, lower, replace(upper, picture_size=0), scores)

    @property
    def hidden(self) -> TensorSpec:
        """The hidden states that the lower half outputs and the upper half reads."""
        return TensorSpec("hidden", self.whole.dtype, (1, ROWS, self.hidden_size))

    @property
    def lower_inputs(self) -> tuple[TensorSpec, ...]:
        rows_only = replace(self.lower, streams=0)
        mask = rows_only.mask_inputs if self.whole.has_mask else ()
        parents = [PARENTS] if self.scores else []
        others = *parents, *self.lower.picture_inputs, *self.lower.buffers("past")
        return (*self.whole.inputs[:4], *mask, *others)

    @property
    def lower_outputs(self) -> tuple[TensorSpec, ...]:
        scores = [SCORES] if self.scores else []
        return (self.hidden, *scores, *self.lower.buffers("present"))

    @property
    def upper_inputs(self) -> tuple[TensorSpec, ...]:
        return (self.hidden, *self.upper.inputs[1:])
