"""The bundle: one folder that holds everything a runtime needs, checked on opening.

bundle.json       the manifest, with a sha256 per file
target.onnx       step graph of the target, weights in target.onnx.data
target-tree.onnx  step graph for branching drafts, with the same weights file
target-compaction.onnx   moves an accepted branch together in the KV buffers
target-lower.onnx, target-upper.onnx, ...   the target in two halves
drafter.onnx, drafter-tree.onnx, ...   the same graphs of a drafter
target-encoder.onnx, ...   the encoder of a target that reads a source
drafter-vocabulary.npy   the draft vocabulary of a head: its token ids
target-adapter-NAME.onnx   the target with LoRA, which target.onnx.data has too
target-vision.onnx   the encoder of a target that reads pictures
streams.npz       the weights of the streams, for a target with streams
similarity.npy    small embeddings of the target: they find similar requests
tokenizer.json, chat_template.jinja   if the checkpoint has them
"""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import BundleError, OptionError, PairError, as_error
from jetdraft.files import read_array, read_arrays
from jetdraft.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    SEAL,
    VERSION,
    FileName,
    GraphEntry,
    Share,
    check_files,
    read_manifest,
    seal_hash,
    sha256_of,
)
from jetdraft.parsing import Count, Rule, Size, in_range, one_of, read_fields

# Graphs with onnxruntime's operators, with ai.onnx only, and without TensorScatter.
CONTRIB, STANDARD, SCATTERED = FLAVOURS = "contrib", "standard", "standard-scatternd"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
STREAMS = "streams.npz"
SIMILARITY = "similarity.npy"
# The largest absolute weight of streams. Products of larger numbers may overflow, and
# NaN would change the text even where it is multiplied by zero.
MAX_WEIGHT = 1e4
SAMPLE_RATE = 16_000  # Samples per second of the sound that a speech model reads.
HOP, WINDOW = 160, 400  # Samples from one frame to the next, and in a frame.
TARGET = "target"
DRAFTER = "drafter"

Provider = Annotated[
    str, Rule("a provider's name", lambda n: bool(re.fullmatch("[a-z0-9-]{1,32}", n)))
]


def is_token_name(name: str) -> bool:
    """Whether `name` is a special token's name in templates, such as bos_token."""
    return bool(re.fullmatch("[a-z_]{1,32}_token", name))


def is_adapter_name(name: str) -> bool:
    """Whether `name` can name an adapter, and a part of a file's name."""
    return bool(re.fullmatch(r"[\w-][\w.-]{0,63}", name, re.ASCII))


def adapter_file(name: str) -> str:
    """The file of the target's widest graph with the adapter `name`."""
    return f"{TARGET}-adapter-{name}.onnx"


class Defaults(TypedDict, total=False):
    """The options of a generation for which a checkpoint may have defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    stop: list[str]


class FileRecord(TypedDict):
    """A file in the manifest: its size in bytes and its sha256 in hex digits."""

    bytes: Annotated[int, Rule("0 or more", lambda size: size >= 0)]
    sha256: str


@dataclass(frozen=True)
class Speech:
    """Token ids of Whisper (2212.04356, section 2.3), from its generation_config.json.

    `languages` maps codes such as "en" to ids, and `tasks` "transcribe" and
    "translate"; both are empty for a model of one language. A text without timestamps
    begins with `no_timestamps`; the ids after it are timestamps. Tokens in `suppressed`
    are never written, tokens in `suppressed_first` not as the first token, and the
    first timestamp has at most the number `latest_first`; 0 for any.
    """

    no_timestamps: Count
    languages: dict[str, Count]
    tasks: dict[str, Count]
    suppressed: tuple[Count, ...]
    suppressed_first: tuple[Count, ...]
    latest_first: Count

    @property
    def no_speech(self) -> int:
        """The id whose probability says that nobody speaks; it is never generated."""
        return self.no_timestamps - 1

    @property
    def first_timestamp(self) -> int:
        """The id of the timestamp 0.00; each next id is 0.02 seconds later."""
        return self.no_timestamps + 1

    def fits(self, vocab_size: int) -> bool:
        """Whether all ids are below `vocab_size`, and languages come with tasks."""
        named = {*self.languages.values(), *self.tasks.values()}
        ids = {self.no_timestamps, *named, *self.suppressed, *self.suppressed_first}
        return max(ids) < vocab_size and bool(self.languages) == bool(self.tasks)

    def prompt(
        self, start: tuple[int, ...], language: str, task: str, timestamps: bool
    ) -> list[int]:
        """Return the first tokens of a text: `start`, language, task, timestamps."""
        named = [self.languages[language], self.tasks[task]] if self.languages else []
        return [*start, *named, *([] if timestamps else [self.no_timestamps])]


MEAN, LAST = "mean", "last"  # Values of `Embedding.pooling`.


@dataclass(frozen=True)
class Embedding:
    """How states become the embedding of a text, from files of sentence-transformers.

    `pooling` takes the mean of the states of all tokens, or the state of the last.
    `prompts` are texts, by name, that stand before a text; `default_prompt` is the name
    of the prompt where none is asked for.
    """

    pooling: Annotated[str, one_of(MEAN, LAST)]
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


# Values of `Vision.tiling`, and keys of `Vision.text`.
SPLIT, GRID, WHOLE = TILINGS = ("split", "grid", "whole")
MAX_PIXELS = 1 << 26  # Of a picture, and of all pictures of a prompt.
MAX_TILES, MAX_SIDE = 64, 4096  # Tiles in a grid; pixels of an edge.
TEXTS = ("place", "begin", "tile", "break", "line", "grid", "whole", "end")


@dataclass(frozen=True)
class Vision:
    """How a model reads pictures, from its config and its image processor's.

    The graph in `file` makes `rows` rows of a square, float32 [1, 3, `side`, `side`]
    with this `mean` and `std`; their ids begin at `first_row`. By `tiling` a picture is
    split after its longer edge is resized to `edge`, or fills the best grid of `tiles`
    (from, to) if it has at least `large` pixels, or is resized to one square; `filter`
    is Pillow's. A tile of a grid has `span` x `span` squares.

    With `patch` the picture keeps its ratio: of `least` to `most` pixels, or an edge of
    at most `edge`. Its squares, a row each, hold patches of `patch` pixels; `window` is
    the edge of windows, in rows.

    A prompt has `text["place"]`, or else `token`, for each picture, which becomes:
    "begin", "tile" before each tile, "break" between lines of squares, "line" after
    each row of tiles, "grid" after all, "whole" before the whole picture, and "end".
    Pairs of a head turn with `frequencies`, by the `axes` of a row: its place in the
    text, its line and column.
    """

    file: FileName
    token: str
    first_row: Count
    rows: Size
    side: Size
    tiling: Annotated[str, one_of(*TILINGS)]
    edge: Count
    least: Size
    most: Size
    filter: Annotated[str, one_of("bilinear", "bicubic", "lanczos")]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    text: dict[str, str]
    patch: Count = 0
    span: Size = 1
    tiles: tuple[Size, Size] = (1, 1)
    large: Count = 0
    window: Count = 0
    frequencies: tuple[float, ...] = ()
    axes: tuple[Annotated[int, in_range(0, 2)], ...] = ()

    @property
    def place(self) -> str:
        """The text of a whole picture in a prompt."""
        return self.text["place"] or self.token

    def check(self, contract: StepContract) -> None:
        """Raise `ValueError` for fields that contradict each other or `contract`."""
        turns, (fewest, most) = contract.turn_size, self.tiles
        squares = self.most // self.side**2 if self.patch else 1
        one_block = self.tiling == WHOLE and not (self.edge or self.text.get("break"))
        one_block &= self.rows * squares <= contract.max_width
        facts = {
            "texts of a picture are missing": self.text.keys() == {*TEXTS},
            "rows of pictures have ids of words": self.first_row >= contract.vocab_size,
            "a deviation is 0": all(self.std),
            "there are more rows than slots": self.rows <= contract.capacity,
            "the bounds of a picture": self.least <= self.most <= MAX_PIXELS,
            "the bounds of a grid": fewest <= most <= MAX_TILES,
            "a tile is too large": self.side * self.span <= MAX_SIDE,
            "turns do not fit": len(self.frequencies) == len(self.axes) == turns,
            "only squares have places": not self.axes
            or (bool(self.patch) and self.tiling == WHOLE and self.rows == 1),
            "a picture has no square": bool(squares or self.edge),
            "pictures cannot be read whole": not contract.whole_pictures
            or (one_block and bool(self.text.get("end"))),
            "patches do not fill squares": not self.patch
            or self.side % self.patch == 0,
            "no longer edge": int(self.tiling == SPLIT) <= self.edge <= MAX_SIDE,
        }
        for fact, holds in facts.items():
            if not holds:
                raise ValueError(f"pictures: {fact}")


# The order of its fields is their order in the manifest.
@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An opened bundle: its `path` and its manifest.

    `files` maps each file name to its bytes and sha256, and `tools` maps the exporting
    tools to their versions. `drafter_provider` is None if the drafter runs on the
    target's provider. `generation` has the checkpoint's defaults by option.
    `passed_over` has a line for each field of the checkpoint that is ignored but would
    change the text. `special_tokens` are the tokenizer's, by their names in the chat
    template. `start_token_ids` begin the text of an encoder-decoder, and are empty for
    a decoder alone. `speech` is None for a model of text, `embedding` for a model that
    writes, and `vision` for a model without eyes. `adapters` change the target at run
    time; by name, they have the acceptance of drafts by position, which is empty if it
    was not measured.

        Bundle.open("bundle").generation  # {"temperature": 0.6, "top_p": 0.95}
    """

    path: Path
    graphs: dict[str, GraphEntry]
    eos_token_ids: tuple[Count, ...]
    provider: Provider
    flavour: Annotated[str, one_of(*FLAVOURS)] = CONTRIB
    drafter_provider: Provider | None = None
    generation: Defaults = field(default_factory=Defaults)
    passed_over: tuple[str, ...] = ()
    special_tokens: dict[Annotated[str, Rule("a token's name", is_token_name)], str] = (
        field(default_factory=dict)
    )
    start_token_ids: tuple[Count, ...] = ()
    speech: Speech | None = None
    embedding: Embedding | None = None
    adapters: dict[
        Annotated[str, Rule("an adapter's name", is_adapter_name)], tuple[Share, ...]
    ] = field(default_factory=dict)
    vision: Vision | None = None
    tools: dict[str, str]
    files: dict[FileName, FileRecord] = field(default_factory=dict)

    @property
    def target(self) -> GraphEntry:
        """The target's graph."""
        return self.graphs[TARGET]

    def adapted(self, adapter: str | None) -> GraphEntry:
        """The target's graph with an adapter; raises `OptionError` without it."""
        if adapter is None:
            return self.target
        if adapter not in [*self.adapters]:
            known = ", ".join(self.adapters) or "none; export with --adapter"
            fact = f"the bundle has no adapter {adapter!r}; it has: {known}"
            raise OptionError(fact, "adapter")
        file, tree = adapter_file(adapter), self.target.tree_file
        return replace(self.target, file=file, tree_file=tree and file)

    @property
    def drafter(self) -> GraphEntry | None:
        """The drafter's graph; None without a drafter."""
        return self.graphs.get(DRAFTER)

    @property
    def tokenizer(self) -> Path | None:
        """The path of the tokenizer; None if the checkpoint had no tokenizer."""
        return self.path / TOKENIZER if TOKENIZER in self.files else None

    @property
    def chat_template(self) -> Path | None:
        """The path of the chat template; None if the checkpoint had none."""
        return self.path / CHAT_TEMPLATE if CHAT_TEMPLATE in self.files else None

    @property
    def similarity(self) -> Path | None:
        """The path of the small embeddings that find similar requests, or None."""
        return self.path / SIMILARITY if SIMILARITY in self.files else None

    @property
    def tokenizer_sha256(self) -> str:
        """The tokenizer's hash; without one, a text with the vocabulary's size."""
        if self.tokenizer is None:
            return f"{self.target.contract.vocab_size} ids"
        return str(self.files[TOKENIZER]["sha256"])

    @property
    def sha256(self) -> str:
        """The manifest's hash, in hex digits; it covers the hashes of all files."""
        return seal_hash(self.to_json())

    @classmethod
    def open(cls, path: str | Path, again: bool = False) -> "Bundle":
        """Read and check a bundle; raises `BundleError` or `PairError`.

        Unchanged files are hashed `again` only on request.
        """
        if not isinstance(path, (str, Path)):
            raise BundleError(f"a bundle is a folder, not {path!r}; give its path")
        folder = Path(path)
        bundle = cls._parse(folder, read_manifest(folder))
        check_files(folder, bundle.files, again)
        for name, entry in bundle.graphs.items():
            bundle.draft_vocabulary(name)
            if name != TARGET:
                check_pair(bundle.target.contract, entry.contract, name)
        return bundle

    def draft_vocabulary(self, name: str = DRAFTER) -> npt.NDArray[np.int64] | None:
        """Ids of the draft vocabulary, int64 [n], None for all; `BundleError`."""
        entry = self.graphs[name]
        if entry.vocabulary_file is None:
            return None
        file, contract = self.path / entry.vocabulary_file, entry.contract
        refusal = BundleError(
            f"{file} does not hold {contract.draft_vocab} different token ids below "
            f"{contract.vocab_size} as int64; export the bundle again"
        )
        ids = read_array(file, refusal)
        if ids.dtype != np.int64 or ids.shape != (contract.draft_vocab,):
            raise refusal
        in_range = ids.min() >= 0 and ids.max() < contract.vocab_size
        if len(set(ids.tolist())) < len(ids) or not in_range:
            raise refusal
        return ids

    @classmethod
    def _parse(cls, folder: Path, manifest: dict[str, Any]) -> "Bundle":
        """Convert a manifest to a bundle; raises `BundleError` for malformed fields."""
        fields = {n: v for n, v in manifest.items() if n not in (VERSION, SEAL)}
        fact = f"{folder / MANIFEST} is malformed"
        with as_error(BundleError, ValueError, fact, "export the bundle again"):
            bundle = cls(path=folder, **read_fields(cls, fields, without="path"))
            for entry in bundle.graphs.values():
                entry.check()
            bundle._check_fields()
        return bundle

    def _check_fields(self) -> None:
        """Raise `ValueError` for fields that contradict each other."""
        listed = {file for entry in self.graphs.values() for file in entry.files}
        listed |= {*map(adapter_file, self.adapters)}
        if TARGET not in self.graphs or not listed <= set(self.files):
            raise ValueError("a graph or its file is not listed")
        if self.target.contract.reads:
            raise ValueError("the target reads the buffers of a target")
        ids, contract = self.start_token_ids, self.target.contract
        if bool(ids) != bool(contract.source_slots) or any(
            id >= contract.vocab_size for id in ids
        ):
            raise ValueError("a text after a source begins with tokens")
        hears, speech = bool(contract.source_bins), self.speech
        if hears != bool(speech) or (speech and not speech.fits(contract.vocab_size)):
            raise ValueError("a model that hears has tokens of speech")
        if self.embedding and not contract.feature_size:
            raise ValueError("a model that embeds gives its states")
        if bool(self.vision) != bool(contract.picture_size):
            raise ValueError("a model that sees has an encoder of pictures")
        if self.vision is not None:
            if self.vision.file not in self.files:
                raise ValueError("the encoder of pictures is not listed")
            self.vision.check(contract)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's fields, with their hash in the field `SEAL`."""
        fields = {VERSION: SCHEMA_VERSION, **asdict(self)}
        del fields["path"]
        return {**fields, SEAL: seal_hash(fields)}

    def save(self) -> None:
        """Hash all files in `path` into `files`, and write the manifest there."""
        for file in sorted(self.path.iterdir()):
            size = file.stat().st_size
            self.files[file.name] = {"bytes": size, "sha256": sha256_of(file)}
        self.save_manifest()

    def save_manifest(self) -> None:
        """Write the manifest; `files` must have the hashes already."""
        text = json.dumps(self.to_json(), indent=2) + "\n"
        (self.path / MANIFEST).write_text(text, encoding="utf-8")


def check_pair(
    target: StepContract, drafter: StepContract, name: str = DRAFTER
) -> None:
    """Raise `PairError` unless the graph `name` can draft for the target."""
    if target.vocab_size < drafter.vocab_size:
        fact = f"the {name} chooses among {drafter.vocab_size} tokens, the target has "
        fact += f"{target.vocab_size}; export both together"
        raise PairError(fact)
    if target.capacity != drafter.capacity:
        fact = f"the {name}'s capacity is {drafter.capacity}, the target's "
        fact += f"{target.capacity}; export both together"
        raise PairError(fact)
    if target.source_slots != drafter.source_slots and not drafter.feature_input:
        fact = f"the {name} reads sources of {drafter.source_slots} tokens, the target "
        fact += f"sources of {target.source_slots}; give a drafter of the same kind"
        raise PairError(fact)
    if target.source_bins != drafter.source_bins and not drafter.feature_input:
        fact = f"the {name} hears {drafter.source_bins} mel bins, the target "
        fact += f"{target.source_bins}; give a drafter of the same kind"
        raise PairError(fact)
    if drafter.feature_input not in (0, target.feature_size):
        fact = f"the {name} reads features of width {drafter.feature_input}, the "
        fact += f"target gives width {target.feature_size}; export both together"
        raise PairError(fact)
    for layer, *shape in drafter.reads:
        if target.kv_bits or target.kv_shapes[layer : layer + 1] != (tuple(shape),):
            fact = f"the {name} reads {shape[0]} heads of {shape[1]} floats of the "
            fact += f"target's layer {layer}, which the target does not keep"
            raise PairError(f"{fact}; export both together")


def read_streams(file: Path, bundle: Bundle) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of a `streams.npz`; raises `BundleError` unless they fit."""
    advice = "give a streams.npz that jetdraft export wrote"
    weights, own_weights = (
        read_arrays(path, BundleError(f"cannot read streams from {path}; {advice}"))
        for path in (file, bundle.path / STREAMS)
    )
    base = str(weights.pop("base", ""))
    streams = bundle.target.streams
    if streams is None or base != streams["base"]:
        raise BundleError(
            f"the streams in {file} were trained for another base, in another mode or "
            "exported at another adapter scale; give a file for this bundle's base"
        )
    own_weights.pop("base", None)
    for name in sorted(own_weights.keys() | weights.keys()):
        old, new = (
            (arrays[name].shape, arrays[name].dtype) if name in arrays else None
            for arrays in (own_weights, weights)
        )
        if old != new:
            fact = f"{name} in {file} has another shape or type than in the bundle"
            raise BundleError(f"{fact}; train with the same gamma, layers and ranks")
        if not np.abs(weights[name]).max(initial=0) <= MAX_WEIGHT:  # refuses NaN too
            fact = f"{name} in {file} has numbers beyond {MAX_WEIGHT:g}, or NaN"
            raise BundleError(f"{fact}; train the streams again")
    return weights
