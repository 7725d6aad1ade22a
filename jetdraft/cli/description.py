"""Describes a bundle in text, from its manifest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import printable
from jetdraft.manifest import GraphEntry
from jetdraft.recipe import Recipe
from jetdraft.runtime.planning.registry import methods_of
from jetdraft.runtime.speech.segments import SECONDS_PER_SLOT

MAX_LINE_CHARS = 1000
"""The most characters of a line, which may hold a long path."""


def describe(bundle: Bundle) -> str:
    """Return the graphs, shapes, quantization and bytes of a bundle, line by line."""
    return "\n".join(printable(line, MAX_LINE_CHARS) for line in _lines(bundle))


def _lines(bundle: Bundle) -> Iterator[str]:
    contract = bundle.target.contract
    ends = ", ".join(map(str, bundle.eos_token_ids)) or "none"
    yield f"bundle      {bundle.path} (sha256 {bundle.sha256[:12]})"
    yield f"methods     {', '.join(methods_of(bundle))}"
    yield f"provider    {bundle.provider}"
    if bundle.drafter_provider:
        yield f"drafter on  {bundle.drafter_provider}"
    yield f"flavour     {bundle.flavour}"
    yield f"vocabulary  {contract.vocab_size}, end of text {ends}"
    yield f"capacity    {contract.capacity} tokens, {contract.max_width} rows"
    if bundle.generation:
        options = dict[str, object](bundle.generation)
        if "logit_bias" in options:
            options["logit_bias"] = f"of {len(bundle.generation['logit_bias'])} tokens"
        yield f"defaults    {', '.join(f'{n} {value}' for n, value in options.items())}"
    for line in bundle.passed_over:
        yield f"passed over {line}"
    for name, entry in bundle.graphs.items():
        yield from _graph_lines(name, entry)
    yield ""
    yield "files"
    for name, file in bundle.files.items():
        yield f"  {name:22} {file['bytes']:>13,}  {file['sha256'][:12]}"
    versions = ", ".join(f"{tool} {version}" for tool, version in bundle.tools.items())
    yield ""
    yield f"made with {versions}"


def _graph_lines(name: str, entry: GraphEntry) -> Iterator[str]:
    contract = entry.contract
    yield ""
    yield f"{name}  {entry.file} from {entry.source}"
    if entry.tree_file is None and contract.kv_shapes and not contract.block:
        yield "  trees         none: the model attends in sliding windows"
    elif entry.tree_file is not None:
        yield f"  trees         {entry.tree_file}, weights of {entry.file}.data"
    if entry.encoder_file is not None:
        most = f"sources of up to {contract.source_slots} tokens"
        if contract.source_bins:
            seconds = contract.source_slots * SECONDS_PER_SLOT
            most = f"{contract.source_bins} mel bins, windows of {seconds:g} s"
        yield f"  encoder       {entry.encoder_file}, {most}"
    if entry.selection is not None:
        some = f"{entry.selection.rows} of {contract.capacity} KV rows in a pass"
        yield f"  select        {entry.select_file}, {some}: a drafter, or lossy"
    if entry.streams is not None:
        streams = entry.streams
        if "layers" in streams:
            layers = f"in the top {streams['layers']} layers"
            yield f"  streams       {streams['gamma']} {layers}, {streams['mode']}"
        else:
            members = f"{streams['gamma']} with {streams['members']} embeddings each"
            yield f"  {streams['mode']:13} {members}"
    yield from _head(contract)
    yield f"  parameters    {entry.parameters:,}"
    yield f"  quantization  {scheme(entry)}; floats are {contract.dtype}"
    if contract.kv_shapes:
        yield from _cache(contract)
    for side, specs in (("inputs", contract.inputs), ("outputs", contract.outputs)):
        yield f"  {side}"
        for spec in specs:
            # The buffers of layer 0 stand for the buffers of all layers.
            if spec.name.endswith(".0") or "." not in spec.name:
                axes = " x ".join(map(str, spec.shape))
                yield f"    {spec.name:22} {spec.dtype:8} {axes}"


def _head(contract: StepContract) -> Iterator[str]:
    """The lines about what a drafter's graph reads and guesses."""
    if contract.feature_input:
        ids = f"{contract.choices:,} of {contract.vocab_size:,} tokens"
        yield f"  head          features of width {contract.feature_input}, {ids}"
    if contract.recent:
        yield f"  recent        {contract.recent} tokens before each row's"
    if contract.ahead:
        yield f"  ahead         {contract.ahead} tokens in a pass over as many rows"
    for layer, *_ in contract.reads:
        yield f"  reads         the target's keys and values of layer {layer}"
    if contract.guesses:
        place = "in a block behind the last row" if contract.block else "from one row"
        yield f"  guesses       {contract.guesses} tokens {place}"


def _cache(contract: StepContract) -> Iterator[str]:
    """The lines about layers and their buffers."""
    shapes = sorted(set(contract.kv_shapes))
    heads = " or ".join(f"{heads} x {size}" for heads, size in shapes)
    yield f"  layers        {len(contract.kv_shapes)}, KV heads {heads}"
    yield f"  KV buffers    {_buffer_bytes(contract) / 1e6:.1f} MB"


def scheme(entry: GraphEntry) -> str:
    """How a graph's weights are quantized, in a few words."""
    recipe = entry.quantization
    name = Recipe.from_json(recipe).name
    if "kept" not in recipe:
        return name
    kept, others = recipe["kept"], recipe["others"]
    forms = ", ".join(f"{count} {form}" for form, count in kept.items())
    rest = "left as floats" if name.startswith("none") else f"requantized to {name}"
    return f"{sum(kept.values())} matrices kept ({forms}), {others} {rest}"


def _buffer_bytes(contract: StepContract) -> int:
    return sum(
        int(np.prod(spec.sized())) * np.dtype(spec.dtype).itemsize
        for spec in contract.buffers("past")
    )
