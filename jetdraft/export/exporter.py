"""Exports checkpoints to a bundle."""

import contextlib
import importlib.metadata
import logging
import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetdraft import bundle as bundles
from jetdraft.bundle import CONTRIB, DRAFTER, TARGET, Bundle, Vision
from jetdraft.checkpoints.attention import relative_bias_module
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import checkpoint_folder
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_reader import check_head, has_own_head
from jetdraft.checkpoints.model_reader import check_exportable, expert_columns
from jetdraft.checkpoints.streams import PromptSettings
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError, printable
from jetdraft.export import checks, draft_vocab, seams
from jetdraft.export.attentions import measure_scales
from jetdraft.export.draft_acceptance import with_acceptance
from jetdraft.export.draft_vocab import CutHead
from jetdraft.export.drafters import head_taps, load_draft_head, write_head_graphs
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.graphs import Job, Progress, write_graphs, write_vision
from jetdraft.export.measures import Measures
from jetdraft.export.source_step import source_sizes
from jetdraft.export.step import Sizes, buffer_sizes
from jetdraft.manifest import GraphEntry, writing
from jetdraft.ort import silenced
from jetdraft.quant.blocks import Floats
from jetdraft.quant.choice import Limit
from jetdraft.quant.stored import GridStack
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import KERNELS

__all__ = ["ExportOptions", "Limit", "export"]
NO_HEAD = "none"  # The name of a head that leaves the target's own out.


@silenced(logging.WARNING)
def export(
    target: str,
    output: str | Path,
    drafter: str | None = None,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    head: str | None = None,
) -> Bundle:
    """Export a target and perhaps a drafter or head to `output`; see `jetdraft.export`.

    An MTP module of the target is the default head, unless `head` is `NO_HEAD`.
    """
    options = options or ExportOptions()
    report = progress or (lambda stage, done, total: None)
    is_own = drafter is None and head is None and has_own_head(target)
    head = target if is_own else None if head == NO_HEAD else head
    checks.check_drafter(options, drafter, head)
    sources = {TARGET: target} | ({} if drafter is None else {DRAFTER: drafter})
    files = None if head is None or is_own else HeadFiles.read(head)
    if files is not None:
        check_head(files, target)
    models = _load_checkpoints(sources, options, report)
    checks.check_embedding(models[TARGET], drafter, head)
    options = seams.settle_source(models[TARGET], options)
    reader = None if files is None else load_draft_head(files, models[TARGET], options)
    if is_own:
        reader = _load_own_head(target, models[TARGET], options)
        head = None if reader is None else target
        checks.check_drafter(options, drafter, head)
    checks.check_draft_vocabulary(options, models, reader)
    if reader is not None:
        models[TARGET] = replace(models[TARGET], taps=head_taps(reader))
    contracts = _check_and_contract(models, options)
    for line in models[TARGET].passed_over:
        warnings.warn(f"passed over: {line}", stacklevel=3)
    learning = reader if reader is not None and reader.reads.learns else None
    measures = Measures(models, contracts, options, report, learning)
    cut = _cut_drafter(measures, reader)
    options = measures.settle_recipes()
    with writing(output) as folder:
        names = measures.checkpoints
        jobs = {n: _make_job_and_entry(folder, n, measures, cut) for n in names}
        graphs = {n: write_graphs(job, entry) for n, (job, entry) in jobs.items()}
        if head is not None and reader is not None:
            graphs[DRAFTER] = write_head_graphs(
                jobs[TARGET][0], graphs[TARGET], head, reader, measures.overlaps
            )
        vision = None
        if contracts[TARGET].picture_size:
            vision = write_vision(jobs[TARGET][0], contracts[TARGET])
        bundle = _make_bundle(folder, graphs, models[TARGET], options, vision)
        _write_texts(folder, models[TARGET])
        bundle.save()
        on_cpu = all(options.provider_of(name).name == "cpu" for name in graphs)
        if DRAFTER in graphs and on_cpu and not options.fast:
            report("measure acceptance", 0, 1)
            with_acceptance(bundle, measures.prompts).save_manifest()
            report("measure acceptance", 1, 1)
    return Bundle.open(output)


def _load_own_head(
    source: str, target: Checkpoint, options: ExportOptions
) -> DraftModule | None:
    folder = checkpoint_folder(source)
    if target.streams is not None or not has_own_head(folder):
        return None
    try:
        files = replace(HeadFiles.read(str(folder)), source=source)
        return load_draft_head(files, target, options)
    except CheckpointError as error:
        warnings.warn(f"passed over: {error}", stacklevel=4)
        return None


def _make_bundle(
    folder: Path,
    graphs: dict[str, GraphEntry],
    target: Checkpoint,
    options: ExportOptions,
    vision: Vision | None,
) -> Bundle:
    tools = ("jetdraft", "torch", "transformers", "optimum", "onnx", "onnxruntime")
    versions = {}
    for tool in tools:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[tool] = importlib.metadata.version(tool)
    copied = "eos_token_ids generation passed_over special_tokens speech embedding"
    return Bundle(
        path=folder,
        graphs=graphs,
        provider=options.provider,
        flavour=options.effective_flavour,
        drafter_provider=options.drafter_provider,
        start_token_ids=target.start_token_ids,
        adapters=dict.fromkeys(options.adapter_folders, ()),
        tools=versions,
        vision=vision,
        **{name: getattr(target, name) for name in copied.split()},
    )


def _cut_drafter(measures: Measures, reader: DraftModule | None) -> CutHead | None:
    """Set `measures.ids`, and cut the head or drafter to them; return the drafter."""
    options, checkpoints = measures.options, measures.checkpoints
    drafter = checkpoints.get(DRAFTER)
    if drafter is not None and drafter.draft_ids is not None:
        measures.ids = drafter.draft_ids
    elif options.draft_vocab is not None:
        measures.ids = measures.draft_vocabulary(options.draft_vocab)
    else:
        return None
    dtype = getattr(torch, DTYPES[options.dtype_of(DRAFTER)])
    if reader is not None:
        draft_vocab.cut_head(reader, measures.ids, dtype)
    if drafter is None:
        return None
    cut = CutHead.of(drafter, measures.ids, dtype)
    measures.checkpoints = {**checkpoints, DRAFTER: cut.checkpoint}
    return cut


def _load_checkpoints(
    sources: Mapping[str, str], options: ExportOptions, report: Progress
) -> dict[str, Checkpoint]:
    for name, source in sources.items():
        report("load" if os.path.exists(source) else "ask the hub", 0, 1)
        check_exportable(source)
        checks.check_experts(name, *expert_columns(source), options)
    draft_vocab.check_tokenizers(sources)
    checkpoints: dict[str, Checkpoint] = {}
    for number, (name, source) in enumerate(sources.items()):
        report("load", number, len(sources))
        dtype = getattr(torch, DTYPES[options.dtype_of(name)])
        keeps_grids = options.kernel_of(name) == KERNELS[0]
        checkpoint = Checkpoint.load(source, dtype, keeps_grids)
        if name == DRAFTER:
            draft_vocab.check_tokens(checkpoints[TARGET], checkpoint)
            checkpoint = checkpoint.fit_to_target(checkpoints[TARGET].vocab_size)
        checkpoints[name] = checkpoint
    report("load", len(sources), len(sources))
    if checkpoints[TARGET].tokenizer is None:
        warnings.warn(
            f"{sources[TARGET]} has no tokenizer, so the bundle takes and gives token "
            "ids only; put its tokenizer.json into the folder for texts",
            stacklevel=2,
        )
    return checkpoints


def _check_and_contract(
    checkpoints: Mapping[str, Checkpoint], options: ExportOptions
) -> dict[str, StepContract]:
    for name, checkpoint in checkpoints.items():
        for rule in checks.RULES:
            rule(name, checkpoint, options)
    named = checkpoints.items()
    contracts = {n: _make_contract(n, checkpoint, options) for n, checkpoint in named}
    for name, checkpoint in checkpoints.items():
        checks.check_buffers(name, contracts[name], checkpoint, options)
        reads = checkpoint.reads_source
        check = seams.check_source_seams if reads else seams.check_seams
        check(checkpoint.model, contracts[name])
        seams.warn_of_length(checkpoint.model, contracts[name].capacity)
    if DRAFTER in checkpoints:
        bundles.check_pair(contracts[TARGET], contracts[DRAFTER])
    return contracts


def _make_contract(
    name: str, checkpoint: Checkpoint, options: ExportOptions
) -> StepContract:
    model, probes = checkpoint.model, checkpoint.streams
    reads_source = checkpoint.reads_source
    sizes = Sizes(seams.source_kv_shapes(model)) if reads_source else None
    sizes = sizes or buffer_sizes(model)
    if name != TARGET or probes is not None:
        sizes = sizes._replace(experts=0)
    is_drafter = name == DRAFTER
    own_ids = checkpoint.draft_ids if is_drafter else None
    drafted = (options.draft_vocab or 0) if own_ids is None else len(own_ids)
    fields: dict[str, Any] = {"max_width": options.max_width}
    size, turns, whole = checkpoint.picture_sizes
    # `make_tree_graph` refuses streams of targets that read pictures whole.
    if name == TARGET and size and not (probes and whole):
        fields |= {"max_width": max(whole, options.max_width), "turn_size": turns}
        fields |= {"picture_size": size, "whole_pictures": whole > 0}
    if probes is not None:
        fields["streams"] = probes.gamma
    if isinstance(probes, PromptSettings):
        fields |= {"members": probes.members, "prefix": probes.prefix}
    if reads_source:
        bins, slots = source_sizes(model)
        fields |= {"source_slots": slots or options.capacity, "source_bins": bins}
        fields["relative_positions"] = relative_bias_module(model) is not None
    return StepContract(
        vocab_size=checkpoint.vocab_size,
        capacity=options.capacity,
        dtype=DTYPES[options.dtype_of(name)],
        **sizes._asdict(),
        hidden_size=is_drafter * model.get_output_embeddings().weight.shape[1],
        feature_size=checkpoint.taps.size if checkpoint.taps else 0,
        draft_vocab=drafted if is_drafter or probes is not None else 0,
        **fields,
    )


def _make_job_and_entry(
    folder: Path, name: str, measures: Measures, cut: CutHead | None
) -> tuple[Job, GraphEntry]:
    """Make a model's job and manifest entry, before `write_graphs` adds its probes."""
    checkpoint, options = measures.checkpoints[name], measures.options
    contract, recipe = measures.contracts[name], options.recipe_of(name)
    checks.check_raised(recipe, contract, checkpoint)
    packed, kl = checkpoint.packed, measures.kl.get(name)
    ids = measures.ids if contract.draft_vocab else None
    entry = GraphEntry(
        file=f"{name}.onnx",
        contract=contract,
        quantization=recipe.to_json()
        | _describe_packed(checkpoint)
        | ({"kl": kl} if kl is not None else {})
        | (measures.overlaps if name == DRAFTER else {}),
        source=printable(checkpoint.source, 1000),
        parameters=checkpoint.parameters,
        vocabulary_file=draft_vocab.write_vocabulary(folder, ids),
    )
    quantization = Quantization(
        recipe,
        checkpoint.lm_head_name,
        options.effective_flavour != CONTRIB,
        measures.moments(name),
        packed.blocks if packed else {},
        rounded=measures.rounded.pop(name, {}),
    )
    if ids is not None and name == TARGET:
        quantization = draft_vocab.with_probe_head(quantization, ids)
    elif ids is not None and cut is not None:
        quantization = cut.quantization(quantization)
    scales: list[Floats] = []
    if recipe.kv_bits:
        windows = measures.windows
        scales = measure_scales(checkpoint.model, contract, windows, recipe.kv_bits)
    return Job(
        folder=folder,
        name=name,
        checkpoint=checkpoint,
        options=options,
        quantization=quantization,
        names=checkpoint.weight_names(),
        report=measures.report,
        scales=scales,
        ids=ids,
    ), entry


def _describe_packed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Count a quantized checkpoint's matrices by form, for the entry; else {}."""
    packed = checkpoint.packed
    if packed is None:
        return {}
    names, layers = checkpoint.weight_names(), checkpoint.model.modules()
    matrices = {names[id(m.weight)] for m in layers if isinstance(m, torch.nn.Linear)}
    matrices |= {n for n, kept in packed.blocks.items() if isinstance(kept, GridStack)}
    kept = Counter(packed.forms[name] for name in packed.blocks if name in matrices)
    others = len(matrices - packed.blocks.keys())
    return {"packed": packed.method, "kept": dict(kept), "others": others}


_SIMILARITY_SIZE = 64
_SEED = 20_11_21


def _write_texts(folder: Path, target: Checkpoint) -> None:
    """Write tokenizer, template and int8 [vocab, 64], random projections of tokens."""
    names = bundles.TOKENIZER, bundles.CHAT_TEMPLATE
    texts = target.tokenizer, target.chat_template
    for name, text in zip(names, texts, strict=True):
        if isinstance(text, str):
            (folder / name).write_text(text, encoding="utf-8")
    table = target.model.get_input_embeddings().weight.detach()
    random = torch.Generator().manual_seed(_SEED)
    projection = torch.randn(table.shape[1], _SIMILARITY_SIZE, generator=random)
    parts, mean = table.split(1 << 14), table.mean(0, dtype=torch.float32)
    small = torch.cat([(part.float() - mean) @ projection for part in parts])
    small = torch.nn.functional.normalize(small)
    np.save(folder / bundles.SIMILARITY, (small * 127).round().to(torch.int8).numpy())
