"""The graphs of a model as written: chain, with LoRA, halves, tree, selecting."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from jetdraft.bundle import SCATTERED, STREAMS, TARGET, Vision, adapter_file
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.parameters import make_inputs_constant
from jetdraft.checkpoints.streams import StreamedModel
from jetdraft.checkpoints.vision import ATTENTION, read_vision
from jetdraft.contracts.step_contract import SCORES, StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export import derived
from jetdraft.export.adapters import Pairs, add_adapters, keep_adapter, read_adapter
from jetdraft.export.attentions import attentions, is_shared, quantize_cache, windowed
from jetdraft.export.derived import make_compaction_graph
from jetdraft.export.draft_vocab import own_names
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.fusing import fuse, fuse_products, replace_gather_nd, split_gemms
from jetdraft.export.selected_attention import add_selection
from jetdraft.export.source_step import EncoderStep, SourceStep, VisionStep
from jetdraft.export.step import CUT, ProbeStep, Step, StreamStep, write_probe_weights
from jetdraft.export.tracer import trace
from jetdraft.manifest import GraphEntry, Halves
from jetdraft.native import DOMAIN
from jetdraft.quant.blocks import Floats
from jetdraft.quant.edits import PARAMETER
from jetdraft.quant.weights import Quantization, routers
from jetdraft.recipe import KERNELS

Progress = Callable[[str, int, int], None]  # Stage, steps done, steps in all.


@dataclass(frozen=True)
class Job:
    """A model to write: `names` by ids of weights, `ids` of a draft vocabulary."""

    folder: Path
    name: str
    checkpoint: Checkpoint
    options: ExportOptions
    quantization: Quantization
    names: Mapping[int, str]
    report: Progress = lambda stage, done, total: None
    scales: list[Floats] = field(default_factory=list)
    ids: Tensor | None = None

    @property
    def own_attention(self) -> bool:
        """Whether `jetdraft.native` attends: it has no buffers of integers."""
        return self.options.kernel_of(self.name) == KERNELS[0] and not self.scales

    @property
    def adapters(self) -> dict[str, Pairs]:
        """The LoRA of the target's adapters, by their names."""
        folders = self.options.adapter_folders if self.name == TARGET else {}
        model = self.checkpoint.model
        return {name: read_adapter(f, model) for name, f in folders.items()}

    def graph_file(self, kind: str) -> Path:
        """Return the file of another graph of this model, for example "tree"."""
        return self.folder / f"{self.name}-{kind}.onnx"


def write_graphs(job: Job, entry: GraphEntry) -> GraphEntry:
    """Write all graphs of one model; return its manifest entry with their files."""
    if job.checkpoint.reads_source:
        head = job.quantization.head
        # An embedding that is tied to the LM head has the head's integers.
        own = job.quantization
        tied = replace(own, borrowed={head: head}, lender=own, head="")
        entry = write_encoder(job, entry, tied)
    step, entry = _make_step(job, entry)
    entry = write_chain(job, entry, step)
    _write_adapted(job, entry)
    entry = _write_halves(job, entry, step)
    entry = write_tree(job, entry)
    return _write_selection(job, entry)


def _make_step(job: Job, entry: GraphEntry) -> tuple[Step, GraphEntry]:
    """Make the step of a model; with probes their weights are written beside it."""
    checkpoint, contract = job.checkpoint, entry.contract
    model, taps = checkpoint.model, checkpoint.taps
    if checkpoint.streams is not None:
        probed = checkpoint.add_probes(job.options.adapter_scale)
        write_probe_weights(job.folder / STREAMS, probed, contract.dtype)
        settings = asdict(checkpoint.streams) | {"base": probed.base}
        kind: Any = StreamStep if isinstance(probed, StreamedModel) else ProbeStep
        return kind(probed, contract, job.ids), replace(entry, streams=settings)
    if checkpoint.reads_source:
        return SourceStep(model, contract), entry
    cut = 0 if taps is None else taps.cut
    above = len(contract.kv_shapes) - cut if cut else 0
    return Step(model, contract, cut=above, ids=job.ids, taps=taps), entry


def write_chain(job: Job, entry: GraphEntry, step: Step) -> GraphEntry:
    """Trace and quantize a step; write its graph and weights; return its entry."""
    stage = f"trace {job.name}"
    job.report(stage, 0, 1)
    model = trace(step, {**job.names, **own_names(step)})
    replace_gather_nd(model.graph)
    if job.quantization.standard:
        derived.standardize(model, job.options.effective_flavour == SCATTERED)
    else:
        forms = {name: kept.form for name, kept in job.quantization.packed.items()}
        chosen_by = [node.inputs[1] for node in routers(model.graph)]
        names = [v.metadata_props.get(PARAMETER, "") for v in chosen_by if v]
        forms |= dict.fromkeys(names, "floats")
        rotation_nodes = job.options.provider_of(job.name).name == "webgpu"
        fuse(model, entry.contract, forms, rotation_nodes, job.own_attention)
    if adapters := job.adapters:
        dtype = entry.contract.dtype
        add_adapters(model.graph, adapters, job.checkpoint.model, dtype)
    job.report(stage, 1, 1)
    stage = f"quantize {job.name}"
    report = partial(job.report, stage)
    with tempfile.TemporaryFile(dir=job.folder) as spill:
        job.quantization.apply(model, report, spill)
        fuse_products(model)
        if job.scales:
            bits = job.quantization.recipe.kv_bits
            contract = quantize_cache(model, entry.contract, job.scales, bits)
            entry = replace(entry, contract=contract)
        own_operators = any(node.domain == DOMAIN for node in model.graph)
        entry = replace(entry, own_operators=own_operators)
        make_inputs_constant(model, step.unquantized_weights, {})
        _save_with_weights(model, job.folder / entry.file)
    return entry


def write_encoder(job: Job, entry: GraphEntry, quantizer: Quantization) -> GraphEntry:
    """Write the encoder's graph; return the entry with its file."""
    file = job.graph_file("encoder")
    stage = f"trace {job.name}'s encoder"
    job.report(stage, 0, 1)
    # The decoder's states do not matter, so a drafter shares the trace of its target.
    contract = replace(entry.contract, hidden_size=0)
    model = trace(EncoderStep(job.checkpoint.model, contract), job.names)
    quantizer.apply(model)
    _save_with_weights(model, file)
    job.report(stage, 1, 1)
    return replace(entry, encoder_file=file.name)


def write_vision(job: Job, contract: StepContract) -> Vision:
    """Write the graph that encodes pictures, in 8 bits unless the target has floats."""
    file = job.graph_file("vision")
    stage = "trace the pictures' encoder"
    job.report(stage, 0, 1)
    source, text = job.checkpoint.source, job.checkpoint.model
    seeing, encode, vision = read_vision(source, text, file.name)
    step = VisionStep(seeing, contract, vision, encode)
    if not vision.patch:
        with torch.no_grad():
            vision = replace(vision, rows=step(*step.example_inputs())[0].shape[1])
    names = {id(weight): f"vision.{n}" for n, weight in seeing.named_parameters()}
    model = trace(step, names)
    split_gemms(model.graph)
    standard = job.quantization.standard
    if standard:
        model.graph.opset_imports.pop("com.microsoft", None)
    for node in [n for n in model.graph if standard and n.op_type == ATTENTION]:
        node.domain, node.op_type = "", "Attention"
        heads = node.attributes.pop("num_heads").as_int()
        for name in ("q_num_heads", "kv_num_heads"):
            node.attributes.add(ir.AttrInt64(name, heads))
    Quantization(job.quantization.recipe.of_encoder, standard=standard).apply(model)
    _save_with_weights(model, file)
    job.report(stage, 1, 1)
    return vision


def _save_with_weights(model: ir.Model, file: Path) -> None:
    for node in model.graph:
        node.metadata_props.clear()  # drops stack traces with this machine's paths
    ir.save(model, file, external_data=f"{file.name}.data")


def _write_adapted(job: Job, entry: GraphEntry) -> None:
    """Write the widest graph with each adapter, and the chain graph without them."""
    names, chain = [*job.adapters], job.folder / entry.file
    for name in names:
        model = ir.load(chain)
        keep_adapter(model, name)
        _become_tree(job, entry, model)
        ir.save(model, job.folder / adapter_file(name))
    if names:
        model = ir.load(chain)
        keep_adapter(model, "")
        ir.save(model, chain)


def _become_tree(job: Job, entry: GraphEntry, chain: ir.Model) -> bool:
    """Make a chain graph a tree graph, in place; False if it cannot be a tree graph."""
    if entry.contract.states or job.checkpoint.embedding:
        return False
    return derived.make_tree_graph(chain, entry.contract, job.checkpoint.source)


def _write_halves(job: Job, entry: GraphEntry, step: Step) -> GraphEntry:
    chain = job.folder / entry.file
    layers, size = len(entry.contract.kv_shapes), entry.contract.picture_size
    # The upper half runs rows of pictures for probes, without what is added to them.
    deepest = size // job.checkpoint.model.get_input_embeddings().weight.shape[1] - 1
    is_deep = isinstance(step, ProbeStep) and deepest > layers - step.cut
    if 0 < step.cut < layers and not is_deep:
        entry = replace(entry, halves=_write_split(job, entry, step))
    if step.extra_outputs:
        model = ir.load(chain)
        derived.drop_extra_values(model, step)
        ir.save(model, chain)
    return entry


def _write_split(job: Job, entry: GraphEntry, step: Step) -> Halves:
    model = ir.load(job.folder / entry.file)
    if windowed(model.graph) or any(map(is_shared, attentions(model.graph))):
        fact = f"{job.checkpoint.source} attends in sliding windows, or in layers that "
        fact += "share keys, and the halves of a target need plain attention"
        raise UnsupportedModelError(f"{fact}; choose another head")
    hidden = next(value for value in model.graph.outputs if value.name == CUT)
    assert hidden.shape is not None
    names = "lower", "upper", "lower_compaction", "upper_compaction"
    files = {name: job.graph_file(name.replace("_", "-")) for name in names}
    halves = Halves(
        **{name: file.name for name, file in files.items()},
        layers=step.cut,
        hidden_size=int(hidden.shape[2]),  # type: ignore[arg-type]  # never symbolic
        scores=SCORES.name in step.extra_outputs,
    )
    contract = replace(entry, halves=halves).split_contract
    sides = map(make_compaction_graph, (contract.lower, contract.upper))
    graphs = *derived.split_graph(model, contract), *sides
    for graph, file in zip(graphs, files.values(), strict=True):
        ir.save(graph, file)
    return halves


def write_tree(job: Job, entry: GraphEntry) -> GraphEntry:
    """Write the tree graph and its compaction, if the model can have a tree graph."""
    model = ir.load(job.folder / entry.file)
    if not _become_tree(job, entry, model):
        return entry
    tree, compaction = map(job.graph_file, ("tree", "compaction"))
    ir.save(model, tree)
    scatter_nd = job.options.provider_of(job.name).name == "webgpu"
    ir.save(make_compaction_graph(entry.contract, scatter_nd), compaction)
    return replace(entry, tree_file=tree.name, compaction_file=compaction.name)


def _write_selection(job: Job, entry: GraphEntry) -> GraphEntry:
    rows = job.options.select_kv
    if rows is None or job.name != TARGET:
        return entry
    model = ir.load(job.folder / (entry.tree_file or entry.file))
    model, selection = add_selection(model, entry.contract, job.checkpoint, rows)
    file = job.graph_file("select")
    ir.save(model, file)
    return replace(entry, select_file=file.name, selection=selection)


_PAGE, _LARGE = 4096, 1 << 16  # Large tensors begin at a page, to be mapped alone.


def share_weights(file: Path, other: Path) -> None:
    """Let the graph `file` read equal tensors from the weights file of `other`."""
    model = ir.load(file)
    theirs = {_digest(t): t for t in _stored_tensors(ir.load(other)).values()}
    tensors = _stored_tensors(model)
    if not tensors:
        return
    weights = Path(next(iter(tensors.values())).path)
    kept = weights.with_suffix(".kept")
    with kept.open("wb") as written:
        for name, tensor in tensors.items():
            twin = theirs.get(_digest(tensor))
            if twin is not None:
                place = twin.location, twin.offset, twin.length
            else:
                step = _PAGE if tensor.nbytes >= _LARGE else 64
                written.write(bytes(-written.tell() % step))
                place = tensor.location, written.tell(), tensor.length
                tensor.tofile(written)
            moved = ir.ExternalTensor(
                *place, tensor.dtype, shape=tensor.shape, name=name
            )
            model.graph.initializers[name].const_value = moved
    kept.replace(weights)
    ir.save(model, file)


def _stored_tensors(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    """The constants of a graph that are in a weights file, by their names."""
    values = ((n, v.const_value) for n, v in model.graph.initializers.items())
    return {n: value for n, value in values if isinstance(value, ir.ExternalTensor)}


def _digest(tensor: ir.ExternalTensor) -> tuple[object, ...]:
    digest = hashlib.sha256()
    # `tobytes` would keep an array of the whole tensor.
    tensor.tofile(SimpleNamespace(write=digest.update))
    return tensor.dtype, tuple(tensor.shape), digest.digest()
