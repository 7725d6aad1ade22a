"""The graph contract: the inputs and outputs of a step graph, declared once.

The exporter names inputs and outputs after these declarations and the runtime checks
each session against them at load. A *step graph* runs `n` rows over a fixed KV buffer
of `capacity` rows:

| input | type, shape |
| --- | --- |
| `input_ids`, `position_ids` | int64 [1, n] |
| `cursor` | int32 [1], committed rows in the buffer |
| `total_length` | int32 [1], cursor + n; the capacity in a tree graph |
| `answer_rows` | int64 [m], the rows to answer for: all, or the last in a prefill |
| `draft_mask` | uint8 [s, n + b], 1 where a slot is hidden; trees or streams |
| `draft_start` | int32 [1], the slot of the draft's first row; trees or streams |
| `probe_rows`, `probe_ids` | int64 [r], the row and the stream of each probe |
| `prefix_rows` | int64 [p], the rows of a learned prefix that probes see: all or none |
| `recent_ids` | int64 [1, n, q], the q tokens before each row's, the oldest first |
| `features` | float32 [1, n, w], one per row or k of them, in the graph of a head |
| `target_length` | int32 [1], committed rows in the target's buffers |
| `target_key.{i}`, `target_value.{i}` | the target's buffers of layer i, only read |
| `block` | int64 [1, g], tokens behind the rows; `vocab_size` for an unknown one |
| `source_length` | int32 [1], slots of the source, in the decoder of an encoder |
| `cross_key.{i}`, `cross_value.{i}` | dtype [1, kv_heads, source_slots, head_dim] |
| `selecting` | int32 [1], 1 in a pass that reads selected rows only, else 0 |
| `past_rows.{i}` | int64 [1, kv_heads, voted], rows of the buffers that were selected |
| `past_query.{i}` | float32 [1, kv_heads, groups, head_dim], what selected them |
| `past_key.{i}`, `past_value.{i}` | dtype [1, kv_heads, capacity, head_dim] |

| output | type, shape |
| --- | --- |
| `candidates`, `candidate_logits` | int64, float32 [1, m, K], best first |
| `logsumexp` | float32 [1, m] |
| `logits` | float32 [1, m, vocab], or [1, m, draft_vocab] |
| `hidden` | float32 [1, m, h], the state that enters the LM head |
| `features` | float32 [1, n, w], one per row, for a head to read |
| `carried` | float32 [1, n, c], a head's own features, for its next draft step |
| `probe_candidates`, ..., `probe_logits` | the same four for the r probes |
| `present_rows.{i}`, `present_query.{i}` | the selection after the pass, in place |
| `present_key.{i}`, `present_value.{i}` | the same buffers, updated in place |

A draft takes slots from `draft_start` on, and line 1 + j of the mask is for its slot j.
Line 0 is for the slots before the draft, which all rows see. The graph widens the mask
to a bias of all slots, so that little crosses to a device.

Probes are rows that propose and are never committed; only graphs that draft as they
verify have probes. Their keys and values land past the rows of the pass, in b slots:
first those of a learned prefix, which probes alone see, then `members` slots for each
probe. The members of a probe start from different embeddings, and its logits are the
mean of theirs.

A *head graph* reads the `features` of another graph. It may choose among a part of the
vocabulary only, its *draft vocabulary*. Then its `input_ids` and `candidates` are still
the target's token ids, but `logits` has a column for each token of that part only.
A head that `guesses` several tokens at once answers for the last of `answer_rows` only:
its answers are for the tokens after that row, so their axis m has a fixed size.

A graph with buffers that guesses fills a *block*: its answers are for the tokens of the
input `block`, which follow the last row's token. The rows of the block see each other
and all rows before; their keys and values land past the rows of the pass, in slots that
the next pass overwrites.

The decoder of an *encoder-decoder* reads a source: its encoder's graph, see
`SourceContract`, writes the cross buffers once, and the decoder only reads them.

A pass that is *selecting* attends to a part of the committed rows, see `Selection`.

A graph can also be cut into two halves, see `SplitContract`, so that the host can drop
rows between them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from jetdraft.errors import ContractError
from jetdraft.untrusted.record import MOST_SIZE, Count, Size, in_range, one_of

CANDIDATES = 64
"""K: how many candidates a graph returns for a row, or the whole vocabulary."""

WIDEST = 16
"""Rows of the widest pass that a controller plans."""

CAPACITY, MAX_WIDTH = 2048, 128
"""Defaults of an export: rows of the KV buffers, and rows of the widest pass."""

MIN_SELECTED = 16
"""The least rows that a selecting pass reads."""

HIDDEN = -1e4
"""Added to the score of a slot that a row may not see; fits float16."""

SOURCE = "source"
"""The name of the axis of a source's tokens."""

FRAMES_PER_SLOT = 2
"""Frames of a spectrum that Whisper's encoder makes one slot of."""

ROWS, ANSWERS, PROBES, PREFIX, ALL = "n", "m", "r", "p", "n+b"
"""The names of the dynamic axes: the rows of a pass, the rows it answers for, its
probes, the rows of their prefix, and the slots of all these together."""

SLOTS = "s"
"""The name of the axis of slots in buffers of another graph, which may have more."""

EARLY_EXIT = ("streams.narrow.weight", "streams.widen.weight")
"""The weights of the pruning adapter, which only the lower half of a graph has."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: name, numpy dtype name, shape with named dynamic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def sized(
        self,
        rows: int = 0,
        answers: int = 0,
        probes: int = 0,
        members: int = 1,
        prefix: int = 0,
    ) -> tuple[int, ...]:
        """The shape in a pass of `rows` rows and `probes` probes.

        `answers` of the rows are answered for. `members` and `prefix` are those of the
        contract.
        """
        prefix = prefix if probes else 0
        sizes = {
            ROWS: rows,
            ANSWERS: answers,
            PROBES: probes,
            PREFIX: prefix,
            ALL: rows + prefix + probes * members,
            SLOTS: rows + 1,  # of buffers that are lent, to trace with
        }
        return tuple(
            sizes[axis] if isinstance(axis, str) else axis for axis in self.shape
        )


PARENTS = TensorSpec("parents", "int64", (ROWS,))
"""The parents of a draft's rows, for an early exit; the root is its own parent."""

TARGET_LENGTH = TensorSpec("target_length", "int32", (1,))
"""The committed rows in the target's buffers."""

SCORES = TensorSpec("scores", "float32", (1, ROWS))
"""What an early exit gives: the log probability of each row's token."""


SELECTING = TensorSpec("selecting", "int32", (1,))
"""1 if the pass reads selected rows only, else 0."""

SOURCE_LENGTH = TensorSpec("source_length", "int32", (1,))
"""The slots that a source fills; the others are hidden."""


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


@dataclass(frozen=True)
class StepContract:
    """The sizes that fix every shape of a step graph.

    `kv_shapes` holds (kv_heads, head_dim) per layer; `dtype`, "float32" or "float16",
    is the type of the KV buffers. A `tree` graph verifies branching drafts too. A row
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
            *([TARGET_LENGTH, *self.lent] if self.reads else []),
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
    def lent(self) -> tuple[TensorSpec, ...]:
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

    def split(
        self, layers: int, hidden_size: int, scores: bool = False
    ) -> SplitContract:
        """The contract of two halves; the upper half has the top `layers`.

        `hidden_size` is the width of the states between them, which take the place of
        features; with `scores` the lower half has an early exit. Raises
        `ContractError` if a half would have no layer.
        """
        below = len(self.kv_shapes) - layers
        if layers < 1 or below < 1:
            raise ContractError(
                f"graph contract: {len(self.kv_shapes)} layers cannot be cut below the "
                f"top {layers}; export the bundle again"
            )
        return SplitContract(
            whole=self,
            hidden_size=hidden_size,
            lower=replace(self, kv_shapes=self.kv_shapes[:below], feature_size=0),
            upper=replace(self, kv_shapes=self.kv_shapes[below:], feature_size=0),
            scores=scores,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `read_record` reads."""
        return asdict(self)


def _optional(name: str, axis: str, size: int) -> tuple[TensorSpec, ...]:
    """A float tensor with a vector for each row of `axis`; no tensor if `size` is 0."""
    return (TensorSpec(name, "float32", (1, axis, size)),) if size else ()


@dataclass(frozen=True)
class SplitContract:
    """Two graphs that together do what a whole graph does.

    The lower half runs the rows of a draft and gives the hidden states that enter the
    upper half. With `scores` it has an early exit, which also gives the log probability
    of each row's token after its parent. The upper half takes the hidden states of the
    rows that the host keeps. An exit graph can take its place, see `exit_inputs`.
    `lower` and `upper` are the contracts of the two halves' KV buffers; in both, layers
    are numbered from 0.

        halves = contract.split(layers=2, hidden_size=384)
    """

    whole: StepContract
    hidden_size: int
    lower: StepContract
    upper: StepContract
    scores: bool = False

    @property
    def hidden(self) -> TensorSpec:
        """The hidden states between the halves."""
        return TensorSpec("hidden", self.whole.dtype, (1, ROWS, self.hidden_size))

    @property
    def lower_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the lower half, in graph order."""
        rows_only = replace(self.lower, streams=0)
        return (
            *self.whole.inputs[:4],
            *(rows_only.mask if self.whole.masked else ()),
            *([PARENTS] if self.scores else []),
            *self.lower.buffers("past"),
        )

    @property
    def lower_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the lower half, in graph order."""
        scores = [SCORES] if self.scores else []
        return (self.hidden, *scores, *self.lower.buffers("present"))

    @property
    def upper_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the upper half, in graph order."""
        return (self.hidden, *self.upper.inputs[1:])

    @property
    def upper_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the upper half, in graph order."""
        return self.upper.outputs

    @property
    def exit_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the graph that leaves the upper layers out, in graph order.

        It has the outputs of the upper half. `hidden` becomes the keys and values of
        the layers left out, and the LM head reads `exit_hidden`.
        """
        exit_hidden = replace(self.hidden, name="exit_hidden")
        buffers = self.upper.buffers("past")
        return (self.hidden, *self.whole.inputs[1:5], exit_hidden, *buffers)


@dataclass(frozen=True)
class SourceContract:
    """The graph of an encoder, for the decoder with the contract `step`.

    It takes a source, `input_ids` int64 [1, source], and gives the cross buffers of all
    layers, with zeros behind the source. An encoder that hears takes `input_features`
    float32 [1, bins, frames], a sound that fills all slots.

        SourceContract(contract).outputs
    """

    step: StepContract

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in graph order."""
        if self.step.source_bins:
            shape = 1, self.step.source_bins, self.frames
            return (TensorSpec("input_features", "float32", shape),)
        return (TensorSpec("input_ids", "int64", (1, SOURCE)),)

    @property
    def frames(self) -> int:
        """The frames of the spectrum of a sound."""
        return FRAMES_PER_SLOT * self.step.source_slots

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs, in graph order."""
        return self.step.cross


_ONNX_TYPES = {
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
}


def check_tensors(declared: tuple[TensorSpec, ...], actual: list[Any], of: str) -> None:
    """Compare a session's inputs or outputs with their declaration.

    `actual` are onnxruntime `NodeArg`s; `of` names the graph and the side in messages.
    Raises `ContractError` on the first difference.
    """
    unchecked = {arg.name: (arg.type, tuple(arg.shape)) for arg in actual}
    for spec in declared:
        if spec.name not in unchecked:
            raise ContractError(f"{of} lack {spec.name!r}; export the bundle again")
        dtype, shape = unchecked.pop(spec.name)
        if dtype != _ONNX_TYPES[spec.dtype] or not _fits(spec.shape, shape):
            raise ContractError(
                f"{of}: {spec.name!r} is {dtype} {list(shape)}, declared "
                f"{spec.dtype} {list(spec.shape)}; export the bundle again"
            )
    if unchecked:
        raise ContractError(
            f"{of} have undeclared {sorted(unchecked)}; export the bundle again"
        )


def _fits(declared: tuple[int | str, ...], actual: tuple[Any, ...]) -> bool:
    """Whether a shape is as declared: a named axis fits any symbolic axis."""
    return len(declared) == len(actual) and all(
        not isinstance(size, int) if isinstance(axis, str) else axis == size
        for axis, size in zip(declared, actual, strict=True)
    )
