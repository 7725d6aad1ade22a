"""A target by hand, with a head or with a drafter that fills a block."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from jetdraft.bundle import (
    CHAT_TEMPLATE,
    DRAFTER,
    SIMILARITY,
    TARGET,
    TOKENIZER,
    Bundle,
)
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import CANDIDATES, TensorSpec
from jetdraft.export.derived import make_compaction_graph
from jetdraft.manifest import GraphEntry
from jetdraft.testing import toy_bundle

# Numbers of a feature, and of a row in a buffer.
WIDTH, SIZE = 6, 16
# A head carries what it read, (token, position, ...), plus STEP and its token.
STEP = 10_000.0
"""More than any feature of the target."""

VOCABULARY, CAPACITY = 384, 192
# Tokens whose id is a multiple of it are outside of the draft vocabulary.
LEFT_OUT = 5
COMMON = {"vocab_size": VOCABULARY, "capacity": CAPACITY, "max_width": 32}
COMMON |= {"dtype": "float32", "kv_shapes": ((1, SIZE),)}
TARGET_CONTRACT = StepContract(**COMMON, feature_size=WIDTH)
IDS = np.array([i for i in range(VOCABULARY) if i % LEFT_OUT])
HEAD_CONTRACT = StepContract(
    **COMMON, feature_input=WIDTH, carried_size=WIDTH, draft_vocab=len(IDS)
)
_RANDOM = np.random.default_rng(3)
# The target's logits after each (token + 7 position) mod `VOCABULARY`.
LOGITS = _RANDOM.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * 2
# What the head takes them for: another row for three of ten.
GUESSES = LOGITS.copy()
_WRONG = _RANDOM.permutation(VOCABULARY)[: VOCABULARY * 3 // 10]
GUESSES[_WRONG] = LOGITS[np.roll(_WRONG, 1)]
# What a head takes them for that has learned nothing.
NOISE = _RANDOM.normal(size=LOGITS.shape).astype(np.float32) * 2

# Tokens of a block.
BLOCK = 5
# Contracts of drafters that fill a block, by their method.
METHODS = {
    "dflash": StepContract(
        **COMMON,
        feature_input=WIDTH,
        draft_vocab=len(IDS),
        guesses=BLOCK,
        spare_slots=2 * (BLOCK + 1),
    ),
    "diffusion": StepContract(**COMMON, guesses=BLOCK, spare_slots=2 * BLOCK),
}


def toy_eagle(folder: Path, guesses: np.ndarray = GUESSES) -> Path:
    return write_toy(folder, HEAD_CONTRACT, guesses)


def toy_block(folder: Path, method: str, guesses: np.ndarray = GUESSES) -> Path:
    return write_toy(folder, METHODS[method], guesses)


def write_toy(folder: Path, drafter: StepContract, guesses: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    toy = toy_bundle()
    for name in (TOKENIZER, CHAT_TEMPLATE, SIMILARITY):
        shutil.copy(toy / name, folder / name)
    ends = Bundle.open(toy).eos_token_ids
    graphs = {
        TARGET: _entry(folder, TARGET, TARGET_CONTRACT, LOGITS),
        DRAFTER: _entry(folder, DRAFTER, drafter, guesses),
    }
    Bundle(
        path=folder, graphs=graphs, eos_token_ids=ends, provider="cpu", tools={}
    ).save()
    return folder


def _entry(
    folder: Path, name: str, contract: StepContract, logits: np.ndarray
) -> GraphEntry:
    files = [f"{name}.onnx", f"{name}-tree.onnx", f"{name}-compaction.onnx"]
    trees = (False,) if contract.block else (False, True)
    for file, tree in zip(files, trees, strict=False):
        write_graph(folder / file, replace(contract, tree=tree), logits)
    if contract.block:
        files = [files[0], None, None]
    else:
        ir.save(make_compaction_graph(contract), folder / files[2])
    facts = contract, {"scheme": "none"}, name, 1000
    own = {}
    if contract.draft_vocab:
        own["vocabulary_file"] = f"{name}-vocabulary.npy"
        np.save(folder / own["vocabulary_file"], IDS)
    return GraphEntry(files[0], *facts, *files[1:], **own)


def write_graph(file: Path, contract: StepContract, logits: np.ndarray) -> None:
    onnx.save(_model(contract, logits), file)


def features_of(tokens: list[int], start: int = 0) -> np.ndarray:
    rows = [
        [token, position, 1, token % 7, position % 5, token * position % 97]
        for position, token in enumerate(tokens, start)
    ]
    return np.array(rows, np.float32)


class _Nodes:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def make(self, kind: str, *inputs: object, to: str = "", **attributes) -> str:
        """A node; numbers and arrays among its inputs become constants."""
        names = [
            value if isinstance(value, str) else self._constant(np.asarray(value))
            for value in inputs
        ]
        name = to or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, names, [name], **attributes))
        return name

    def cast(self, value: str, kind: int) -> str:
        name = f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node("Cast", [value], [name], to=kind))
        return name

    def _constant(self, array: np.ndarray) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = array
        return name


def _model(contract: StepContract, logits: np.ndarray) -> onnx.ModelProto:
    nodes = _Nodes()
    is_head = bool(contract.feature_input)
    # The row of a head is for the token after its position.
    position = nodes.make("Add", "position_ids", [1 if is_head else 0])
    is_cut = bool(contract.draft_vocab)
    table = nodes.make("Identity", logits[:, IDS] if is_cut else logits)
    if contract.block:
        ids = IDS if is_cut else np.arange(VOCABULARY)
        answered = _block(nodes, contract.block, position, table, ids)
    else:
        rows = _rows(nodes, position, "input_ids", table)
        answered = nodes.make("Gather", rows, "answer_rows", axis=1, to="logits")
    places = "places" if is_cut else "candidates"
    outputs = ["candidate_logits", places]
    nodes.nodes.append(helper.make_node("TopK", [answered, "k"], outputs))
    nodes.constants["k"] = np.array([min(CANDIDATES, contract.choices)])
    if is_cut:
        nodes.make("Gather", IDS, places, to="candidates")
    nodes.make("ReduceLogSumExp", answered, [-1], keepdims=0, to="logsumexp")
    _features(nodes, is_head, contract.slots)
    graph = helper.make_graph(
        nodes.nodes,
        "toy",
        [_value(spec) for spec in contract.inputs],
        [_value(spec) for spec in contract.outputs],
        [
            onnx.numpy_helper.from_array(array, name)
            for name, array in nodes.constants.items()
        ],
    )
    opset = helper.make_opsetid("", 18)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def _rows(nodes: _Nodes, position: str, token: str, table: str) -> str:
    place = nodes.make("Add", nodes.make("Mul", position, [7]), token)
    place = nodes.make("Mod", place, [VOCABULARY])
    return nodes.make("Gather", table, place, axis=0)


def _block(nodes: _Nodes, size: int, position: str, table: str, ids: np.ndarray) -> str:
    """The logits of a block: after a token that is not known, after its best guess."""
    last = nodes.make("Gather", position, [-1], axis=1)
    before = nodes.make("Gather", "input_ids", [-1], axis=1)
    rows = []
    for place in range(size):
        row = _rows(nodes, nodes.make("Add", last, [place]), before, table)
        rows.append(row)
        best = nodes.make("Gather", ids, nodes.make("ArgMax", row, axis=2, keepdims=0))
        given = nodes.make("Gather", "block", [place], axis=1)
        known = nodes.make("Less", given, [VOCABULARY])
        before = nodes.make("Where", known, given, best)
    return nodes.make("Concat", *rows, axis=1, to="logits")


def _features(nodes: _Nodes, is_head: bool, slots: int) -> None:
    """Give features, or read features and carry others; keep the rows."""
    token, position = (_column(nodes, ids) for ids in ("input_ids", "position_ids"))
    if is_head:
        features = "features"
        first = np.array([1, 0, 0, 0, 0, 0], np.float32)
        added = nodes.make("Add", nodes.make("Mul", token, first), np.float32(STEP))
        nodes.make("Add", features, added, to="carried")
    else:
        one = nodes.make("Add", nodes.make("Mul", token, np.float32(0)), np.float32(1))
        product = nodes.make("Mul", token, position)
        rests = [
            nodes.make("Mod", value, np.float32(number), fmod=1)
            for value, number in ((token, 7), (position, 5), (product, 97))
        ]
        columns = [token, position, one, *rests]
        features = nodes.make("Concat", *columns, axis=2, to="features")
    row = nodes.make("Concat", token, features, axis=2)
    pads = np.array([0, 0, 0, 0, 0, SIZE - 1 - WIDTH])
    rows = nodes.make("Unsqueeze", nodes.make("Pad", row, pads), [1])
    place = nodes.make("Sub", np.arange(slots), nodes.cast("cursor", TensorProto.INT64))
    count = nodes.make("Shape", "input_ids", start=1, end=2)
    inside = nodes.make(
        "And",
        nodes.make("GreaterOrEqual", place, [0]),
        nodes.make("Less", place, count),
    )
    last = nodes.make("Sub", count, [1])
    near = nodes.make("Min", nodes.make("Max", place, [0]), last)
    spread = nodes.make("Gather", rows, near, axis=2)
    mask = nodes.make("Reshape", inside, [1, 1, -1, 1])
    for kind in ("key", "value"):
        nodes.make("Where", mask, spread, f"past_{kind}.0", to=f"present_{kind}.0")


def _column(nodes: _Nodes, ids: str) -> str:
    return nodes.cast(nodes.make("Unsqueeze", ids, [2]), TensorProto.FLOAT)


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = {"float32": "FLOAT"}.get(spec.dtype, spec.dtype.upper())
    return helper.make_tensor_value_info(
        spec.name, getattr(TensorProto, kind), spec.shape
    )


# Constants of a tree graph: the numbers of its slots, and a draft's slots.
SLOTS, LAST = "draft_mask.slots", "draft_mask.last"


def resized(bundle: Path, output: Path, capacity: int, max_width: int) -> Path:
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("profiles"))
    (output / "bundle.json").unlink()
    opened, graphs = Bundle.open(bundle), {}
    for name, entry in opened.graphs.items():
        contract = replace(entry.contract, capacity=capacity, max_width=max_width)
        for file in (entry.file, entry.tree_file, entry.compaction_file):
            if file is not None:
                _resize(output / file, entry.contract, contract)
        graphs[name] = replace(entry, contract=contract)
    replace(opened, path=output, graphs=graphs, files={}).save()
    return output


def respelled(bundle: Path, output: Path, tokenizer: Tokenizer) -> Path:
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("profiles"))
    (output / "bundle.json").unlink()
    tokenizer.save(str(output / "tokenizer.json"))
    replace(Bundle.open(bundle), path=output, special_tokens={}, files={}).save()
    return output


def streamed_bundle(folder: Path) -> Path:
    from jetdraft.checkpoints.streams import StreamSettings
    from tests.tiny import exported, llama_config, save_checkpoint, save_probes

    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    save_checkpoint(checkpoint, llama_config(num_hidden_layers=2))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_probes(checkpoint, settings, seed=0)
    exported(checkpoint, folder, capacity=160)
    return folder


def _resize(file: Path, old: StepContract, new: StepContract) -> None:
    graph = onnx.load(file, load_external_data=False)
    sizes = {old.slots: new.slots, 1 + old.draft_slots: 1 + new.draft_slots}
    body = graph.graph
    for value in (*body.input, *body.output, *body.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_value in sizes:
                axis.dim_value = sizes[axis.dim_value]
    for constant in body.initializer:
        if constant.name in (SLOTS, LAST):
            before = numpy_helper.to_array(constant)
            after = [new.draft_slots]
            if constant.name == SLOTS:
                after = before.ravel()[: new.slots]
            array = np.array(after, before.dtype)
            constant.CopyFrom(numpy_helper.from_array(array, constant.name))
    onnx.save(graph, file)
