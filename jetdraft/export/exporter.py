"""Exports checkpoints to a bundle."""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jetdraft.bundle import (
    CHAT_TEMPLATE,
    CONTRIB,
    DRAFTER,
    TARGET,
    TOKENIZER,
    Bundle,
    check_pair,
)
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.block_drafter import BlockDrafter
from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.heads.head_reader import AnyHead, check_head
from jetdraft.checkpoints.reading.model_reader import check_exportable
from jetdraft.checkpoints.silence import silenced
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import OptionError, printable
from jetdraft.export.embeddings import write_similarity
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.heads.head_export import head_of, taps_of, write_head
from jetdraft.export.job import Job, Progress
from jetdraft.export.kv import cache_scales
from jetdraft.export.measures import Measures
from jetdraft.export.pair.cut_head import CutHead, cut_head, write_vocabulary
from jetdraft.export.pair.draft_acceptance import with_acceptance
from jetdraft.export.pair.pair_tokenizers import check_tokens, compare_tokenizers
from jetdraft.export.seams import warn_of_length
from jetdraft.export.source.family import Family
from jetdraft.export.step import Step
from jetdraft.export.variants import VARIANTS
from jetdraft.manifest import GraphEntry
from jetdraft.quant.blocks import Floats
from jetdraft.quant.choice import Limit
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import Recipe
from jetdraft.staging import writing

__all__ = ["ExportOptions", "Limit", "export"]


@silenced(logging.WARNING)
def export(
    target: str,
    output: str | Path,
    drafter: str | None = None,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    head: str | None = None,
) -> Bundle:
    """Export a target, and a drafter beside it, to the bundle folder `output`.

    `target` and `drafter` are local folders, GGUF files or hub ids. A `head` in place
    of a drafter reads the target's states. Raises `CheckpointError`, `OptionError`,
    `PairError` or `OutputError` before it writes.

        export("target/", "bundle", drafter="drafter/")
    """
    options = options or ExportOptions()
    report = progress or (lambda stage, done, total: None)
    _check_drafter(options, drafter, head)
    sources = {TARGET: target} | ({} if drafter is None else {DRAFTER: drafter})
    if head is not None:
        check_head(head, target)
    checkpoints = _load(sources, options, report)
    options = Family.of(checkpoints[TARGET]).options(checkpoints[TARGET], options)
    reader = head_of(head, checkpoints[TARGET], options) if head is not None else None
    _check_draft_vocabulary(options, checkpoints, reader)
    if reader is not None:
        checkpoints[TARGET] = replace(checkpoints[TARGET], taps=taps_of(reader))
    contracts = _check(checkpoints, options)
    for line in checkpoints[TARGET].passed_over:
        warnings.warn(f"passed over: {line}", stacklevel=3)
    carrying = reader if isinstance(reader, Head) else None
    measures = Measures(checkpoints, contracts, options, report, carrying)
    cut = _cut(measures, reader)
    options = measures.settled()
    with writing(output) as folder:
        checkpoints = dict(measures.checkpoints)
        jobs = {n: _job(folder, n, checkpoints[n], measures) for n in checkpoints}
        if cut is not None:
            jobs[DRAFTER] = _cut_job(jobs[DRAFTER], cut)
        graphs = {name: _write_graphs(job) for name, job in jobs.items()}
        if head is not None and reader is not None:
            graphs[DRAFTER] = write_head(jobs[TARGET], head, reader, measures.overlaps)
        bundle = _bundle(folder, graphs, checkpoints[TARGET], options)
        _write_texts(folder, checkpoints[TARGET])
        write_similarity(folder, checkpoints[TARGET].model)
        bundle.save()
        if _can_draft_here(bundle, options):
            report("measure acceptance", 0, 1)
            with_acceptance(bundle, measures.prompts).save_manifest()
            report("measure acceptance", 1, 1)
    return Bundle.open(output)


def _check_drafter(
    options: ExportOptions, drafter: str | None, head: str | None
) -> None:
    """Raise `OptionError` for two drafters, or for options of a missing one."""
    if head is not None and drafter is not None:
        raise OptionError(
            "a bundle has one drafter; give --drafter or --head, not both"
        )
    has_drafter = drafter is not None or head is not None
    if options.drafter_provider and not has_drafter:
        raise OptionError("a drafter's provider needs a drafter; give --drafter too")
    if options.draft_vocab is not None and not has_drafter:
        raise OptionError(
            "a draft vocabulary needs a drafter; give --drafter or --head too"
        )


def _bundle(
    folder: Path,
    graphs: dict[str, GraphEntry],
    target: Checkpoint,
    options: ExportOptions,
) -> Bundle:
    """The bundle of graphs that lie in the folder."""
    return Bundle(
        path=folder,
        graphs=graphs,
        eos_token_ids=target.eos_token_ids,
        provider=options.provider,
        flavour=options.flavour_made,
        drafter_provider=options.drafter_provider,
        generation=target.generation,
        passed_over=target.passed_over,
        special_tokens=target.special_tokens,
        start_token_ids=target.start_token_ids,
        speech=target.speech,
        tools=_versions(),
    )


def _can_draft_here(bundle: Bundle, options: ExportOptions) -> bool:
    """Whether the acceptance can be measured: on the CPU, where every machine runs."""
    return (
        bundle.drafter is not None
        and not options.fast
        and all(options.provider_of(name).name == "cpu" for name in bundle.graphs)
    )


def _check_draft_vocabulary(
    options: ExportOptions,
    checkpoints: Mapping[str, Checkpoint],
    reader: AnyHead | None,
) -> None:
    """Raise `OptionError` for a draft vocabulary that is no part of the vocabulary."""
    count = options.draft_vocab
    most = min(checkpoint.vocab_size for checkpoint in checkpoints.values()) - 1
    if count is None:
        return
    if count > most:
        raise OptionError(
            f"a draft vocabulary of {count} tokens is not a part of the pair's "
            f"{most + 1}; give 1 to {most}, or leave it out"
        )
    if isinstance(reader, BlockDrafter) and reader.reads_text:
        raise OptionError(
            "diffusion drafters draft from the whole vocabulary; leave --draft-vocab "
            "out"
        )
    drafter = checkpoints.get(DRAFTER)
    for name, ids in (
        ("head", None if reader is None else reader.ids),
        (DRAFTER, None if drafter is None else drafter.draft_ids),
    ):
        if ids is not None:
            raise OptionError(
                f"the {name} was trained with its own draft vocabulary of {len(ids)} "
                "tokens, which rules; leave --draft-vocab out"
            )


def _cut(measures: Measures, reader: AnyHead | None) -> CutHead | None:
    """Cut the LM head of the drafter, if the options ask for it, or its training did.

    Gives the checkpoint that was cut; a head that reads states is cut in place.
    """
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
        cut_head(reader, measures.ids, dtype)
        return None
    cut = CutHead.of(checkpoints[DRAFTER], measures.ids, dtype)
    measures.checkpoints = {**checkpoints, DRAFTER: cut.checkpoint}
    return cut


def _cut_job(job: Job, cut: CutHead) -> Job:
    """The job of a drafter whose LM head was cut."""
    file = write_vocabulary(job.folder, cut.ids)
    return replace(
        job,
        entry=replace(job.entry, vocabulary_file=file),
        quantization=cut.quantization(job.quantization),
        step=Step(job.checkpoint.model, job.contract, ids=cut.ids),
    )


def _load(
    sources: Mapping[str, str], options: ExportOptions, report: Progress
) -> dict[str, Checkpoint]:
    """The checkpoints by their names in the bundle."""
    for source in sources.values():
        check_exportable(source)
    compare_tokenizers(sources)
    checkpoints: dict[str, Checkpoint] = {}
    for number, (name, source) in enumerate(sources.items()):
        report("load", number, len(sources))
        dtype = getattr(torch, DTYPES[options.dtype_of(name)])
        checkpoint = Checkpoint.load(source, dtype)
        if name == DRAFTER:
            check_tokens(checkpoints[TARGET], checkpoint)
            checkpoint = checkpoint.beside(checkpoints[TARGET].vocab_size)
        checkpoints[name] = checkpoint
    report("load", len(sources), len(sources))
    if checkpoints[TARGET].tokenizer is None:
        warnings.warn(
            f"{sources[TARGET]} has no tokenizer, so the bundle takes and gives token "
            "ids only; put its tokenizer.json into the folder for texts",
            stacklevel=2,
        )
    return checkpoints


def _check(
    checkpoints: Mapping[str, Checkpoint], options: ExportOptions
) -> dict[str, StepContract]:
    """Check the checkpoints, alone and as a pair; returns their graphs' contracts."""
    for name, checkpoint in checkpoints.items():
        for variant in VARIANTS:
            variant.check(name, checkpoint, options)
    contracts = {
        name: _contract(name, checkpoint, options)
        for name, checkpoint in checkpoints.items()
    }
    for name, checkpoint in checkpoints.items():
        Family.of(checkpoint).check_seams(checkpoint.model, contracts[name])
        warn_of_length(checkpoint.model, contracts[name].capacity)
    if DRAFTER in checkpoints:
        check_pair(contracts[TARGET], contracts[DRAFTER])
    return contracts


def _contract(
    name: str, checkpoint: Checkpoint, options: ExportOptions
) -> StepContract:
    head = checkpoint.model.get_output_embeddings().weight
    contract = StepContract(
        vocab_size=checkpoint.vocab_size,
        capacity=options.capacity,
        max_width=options.max_width,
        dtype=DTYPES[options.dtype_of(name)],
        kv_shapes=Family.of(checkpoint).kv_shapes(checkpoint.model),
        # A drafter's last hidden state predicts acceptance (SpecDec++).
        hidden_size=head.shape[1] if name == DRAFTER else 0,
        draft_vocab=_draft_vocab(checkpoint, options) if name == DRAFTER else 0,
        spare_slots=int(_attends_as_two(name, checkpoint, options)),
    )
    for variant in VARIANTS:
        contract = variant.declare(checkpoint, contract)
    return contract


def _draft_vocab(drafter: Checkpoint, options: ExportOptions) -> int:
    """The size of the draft vocabulary; 0 for all tokens."""
    own = drafter.draft_ids
    return (options.draft_vocab or 0) if own is None else len(own)


def _attends_as_two(name: str, checkpoint: Checkpoint, options: ExportOptions) -> bool:
    """Whether a pass of one row attends as two rows, see `attend_as_two`.

    Only a target must round alike at all widths. In half precision and on a GPU other
    kernels depend on the width too, so attention alone would change nothing.
    """
    return (
        name == TARGET
        and options.provider_of(name).name == "cpu"
        and options.flavour_made == CONTRIB
        and options.dtype_of(name) == "fp32"
        and checkpoint.streams is None
    )


def _job(folder: Path, name: str, checkpoint: Checkpoint, measures: Measures) -> Job:
    """The job of one model; measures what its recipe needs.

    This comes before the variants, which hook into the model's layers.
    """
    options, contract = measures.options, measures.contracts[name]
    recipe = options.recipe_of(name)
    _check_raised(recipe, contract)
    packed, kl = checkpoint.packed, measures.kl.get(name)
    entry = GraphEntry(
        file=f"{name}.onnx",
        contract=contract,
        quantization=recipe.to_json()
        | _kept(checkpoint)
        | ({"kl": kl} if kl is not None else {})
        | (measures.overlaps if name == DRAFTER else {}),
        source=printable(checkpoint.source, 1000),
        parameters=checkpoint.parameters,
    )
    quantization = Quantization(
        recipe,
        checkpoint.head,
        options.flavour_made != CONTRIB,
        measures.moments(name),
        packed.blocks if packed else {},
    )
    scales: list[Floats] = []
    if recipe.kv_bits:
        windows = measures.windows
        scales = cache_scales(checkpoint.model, contract, windows, recipe.kv_bits)
    return Job(
        folder=folder,
        name=name,
        checkpoint=checkpoint,
        entry=entry,
        options=options,
        report=measures.report,
        quantization=quantization,
        scales=scales,
        names=checkpoint.names(),
        step=Step(checkpoint.model, contract),
    )


def _kept(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a bundle says of a checkpoint's integers; empty for a checkpoint of floats.

    `kept` counts the matrices by their forms, `others` is the number of matrices that
    were floats, or that the graph cannot hold as they were.
    """
    packed = checkpoint.packed
    if packed is None:
        return {}
    matrices = checkpoint.matrices()
    kept = Counter(packed.forms[name] for name in packed.blocks if name in matrices)
    others = len(matrices - packed.blocks.keys())
    return {"packed": packed.method, "kept": dict(kept), "others": others}


def _write_graphs(job: Job) -> GraphEntry:
    """Write all graphs of one model."""
    for variant in VARIANTS:
        variant.write(job)
    return job.entry


def _check_raised(recipe: Recipe, contract: StepContract) -> None:
    """Refuse a recipe that raises a layer which the model does not have."""
    layers = len(contract.kv_shapes)
    if recipe.raised and recipe.raised[-1] >= layers:
        raise OptionError(
            f"{recipe.name} raises layer {recipe.raised[-1]}; the model has layers 0 "
            f"to {layers - 1}"
        )


def _write_texts(folder: Path, target: Checkpoint) -> None:
    texts = {TOKENIZER: target.tokenizer, CHAT_TEMPLATE: target.chat_template}
    for name, text in texts.items():
        if isinstance(text, str):
            (folder / name).write_text(text, encoding="utf-8")


def _versions() -> dict[str, str]:
    tools = ("jetdraft", "torch", "transformers", "optimum", "onnx", "onnxruntime")
    versions = {}
    for tool in tools:
        try:
            versions[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
