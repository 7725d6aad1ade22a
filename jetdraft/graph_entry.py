"""A graph of a bundle, as the manifest describes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from jetdraft.contracts.selection import Selection
from jetdraft.contracts.split_contract import SplitContract
from jetdraft.contracts.step_contract import StepContract
from jetdraft.recipe import Recipe
from jetdraft.untrusted.record import Count, Rule, Size, in_range

FileName = Annotated[
    str, Rule("a plain file name", lambda n: n == Path(n).name and n.isprintable())
]
Share = Annotated[float, in_range(0.0, 1.0)]


class AcceptanceRecord(TypedDict):
    """How often a target accepted a drafter's tokens, by their position in a draft.

    Each of `prompts`, token ids, was followed by `new_tokens` tokens of greedy text.
    """

    by_position: tuple[Share, ...]
    prompts: tuple[tuple[Count, ...], ...]
    new_tokens: Size


class Quantization(TypedDict, total=False):
    """What the manifest says of a graph's weights: a recipe and what became of it.

    `overlap` is the share of a drafter's tokens that its target accepts, as the export
    estimated it on its text, and `full_overlap` that of the drafter in floats.
    """

    scheme: str
    block_size: Count
    algorithm: str
    head: str | None
    kv: str | None
    raised: tuple[Count, ...]
    packed: str
    kept: dict[str, Count]
    others: Count
    kl: float
    overlap: Share
    full_overlap: Share
    acceptance: AcceptanceRecord


class _ProbeRecord(TypedDict):
    """What the manifest says of all probes."""

    gamma: Size
    mode: str
    base: str


class StreamRecord(_ProbeRecord, total=False):
    """What the manifest says of a target's streams or prompt tokens."""

    layers: Size
    lora_rank: Size
    prune_rank: Size
    positions: str
    members: Size
    prefix: Count
    ranks: tuple[tuple[Share, ...], ...]


@dataclass(frozen=True)
class Halves:
    """The graphs of a model that is cut below its top `layers`.

    `hidden_size` is the width of the states between the halves; with `scores` the lower
    half has an early exit. The graph `exit` leaves the upper layers out, for heads that
    were trained for weights with the hash `base`; both are empty without that graph.
    """

    lower: FileName
    upper: FileName
    lower_compaction: FileName
    upper_compaction: FileName
    layers: Size
    hidden_size: Size
    scores: bool
    exit: FileName | None = None
    base: str = ""

    @property
    def files(self) -> list[str]:
        """All graph files."""
        compactions = [self.lower_compaction, self.upper_compaction]
        exits = [] if self.exit is None else [self.exit]
        return [self.lower, self.upper, *compactions, *exits]


@dataclass(frozen=True)
class GraphEntry:
    """One model: its step graph, contract, quantization and source.

    `tree_file` and `compaction_file` are its graphs for branching drafts, None if its
    attention does not allow branching. `streams` are the settings of its streams,
    `halves` its graphs below and above a cut. `vocabulary_file` is the draft vocabulary
    of a head, see `Bundle.draft_vocabulary`, and `encoder_file` the encoder's graph of
    a decoder that reads a source. `select_file` is a graph that can also read the rows
    of a `selection` only.
    """

    file: FileName
    contract: StepContract
    quantization: Annotated[dict[str, Any], Quantization]
    source: str
    parameters: Annotated[int, Rule("0 or more", lambda count: count >= 0)]
    tree_file: FileName | None = None
    compaction_file: FileName | None = None
    streams: Annotated[dict[str, Any], StreamRecord] | None = None
    halves: Halves | None = None
    encoder_file: FileName | None = None
    vocabulary_file: FileName | None = None
    select_file: FileName | None = None
    selection: Selection | None = None

    def check(self) -> None:
        """Raise `BundleError` or `ValueError` if the fields contradict each other."""
        Recipe.from_json(self.quantization)
        if self.halves is not None:
            self.split_contract  # noqa: B018  # raises if malformed
        if bool(self.contract.draft_vocab) != (self.vocabulary_file is not None):
            raise ValueError("a draft vocabulary and its file come together")
        if bool(self.contract.source_slots) != (self.encoder_file is not None):
            raise ValueError("a decoder that reads a source comes with an encoder")
        if (self.selection is None) != (self.select_file is None):
            raise ValueError("a selection of rows and its graph come together")

    @property
    def files(self) -> list[str]:
        """All its files but the weights."""
        names = (
            self.file,
            self.tree_file,
            self.compaction_file,
            self.vocabulary_file,
            self.encoder_file,
            self.select_file,
            *(self.halves.files if self.halves else ()),
        )
        return [name for name in names if name is not None]

    @property
    def split_contract(self) -> SplitContract:
        """The contract of the halves; the entry must have halves."""
        assert self.halves is not None
        return SplitContract.of(
            self.tree_contract,
            self.halves.layers,
            self.halves.hidden_size,
            self.halves.scores,
        )

    @property
    def tree_contract(self) -> StepContract:
        """The contract of `tree_file`."""
        return replace(self.contract, tree=True)

    @property
    def widest_contract(self) -> StepContract:
        """The contract of `widest_file`."""
        branching = self.contract.tree or self.tree_file is not None
        return replace(self.contract, tree=branching, selection=self.selection)

    @property
    def widest_file(self) -> str:
        """The graph that can do most: select rows, or branch, or run chains only."""
        return self.select_file or self.tree_file or self.file

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `read_record` reads."""
        halves = asdict(self.halves) if self.halves else None
        selection = asdict(self.selection) if self.selection else None
        return {
            **self.__dict__,
            "contract": self.contract.to_json(),
            "halves": halves,
            "selection": selection,
        }
