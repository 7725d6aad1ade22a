"""jetdraft check: what a bundle holds, and whether all its methods give one text."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

import click
import numpy as np

from jetdraft.bundle import Bundle
from jetdraft.cli import flags
from jetdraft.cli.command import Command, option
from jetdraft.cli.console import ProgressBars
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices.providers import PROVIDERS
from jetdraft.errors import CheckError, OptionError, printable
from jetdraft.export.draft_acceptance import TOLERANCE, compare_acceptance, has_fallen
from jetdraft.manifest import GraphEntry
from jetdraft.runtime.measured.widths import Widths
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.registry import AUTO, NONE, methods, methods_of
from jetdraft.runtime.speech.segments import SLOT_SECONDS

MAX_LINE_CHARS = 1000  # The most characters of a line, which may hold a long path.
# The packages, by provider, in which tools/kernels.py found a kernel for float32.
LINEAR_ATTENTION = {"cuda": "onnxruntime-gpu", "webgpu": "onnxruntime-ep-webgpu"}
_SETTINGS: tuple[dict[str, float | int], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 40, "top_p": 0.95},
)
_DRAFT_LENGTHS = (1, 2, 4, None)
_TOKENS = 96


@click.command("check", cls=Command)
@flags.bundle_argument
@option(
    "measurement --run/--no-run",
    "Run the bundle; --no-run only checks its files and prints its manifest.",
    default=True,
)
@option(
    "measurement --for other",
    "Run nothing; say what this provider has for recurrent states, and refuse "
    "graphs that it cannot run.",
    type=click.Choice([name for name in PROVIDERS if name != "cpu"]),
)
@flags.runtime_options()
@flags.json_option
def command(
    bundle: Path, run: bool, other: str | None, runtime: LoadOptions, as_json: bool
) -> None:
    """Check BUNDLE's files and contracts, width classes, and every method's text."""
    checked = Bundle.open(bundle, again=True)
    if other is not None:
        _check_provider(checked, other)
        return
    if not run:
        text = json.dumps(checked.to_json(), indent=2)
        click.echo(text if as_json else describe_bundle(checked))
        return
    model = load(bundle, **runtime)
    with ProgressBars() as bars:
        bars("measure widths", 0, 1)
        model.measure_again()
        bars("measure widths", 1, 1)
    widths = model.parts.widths
    files, graphs = len(model.bundle.files), len(model.bundle.graphs)
    comparisons = []
    if not as_json:
        click.echo(f"files      {files} present, hashes right")
        click.echo(f"contract   {graphs} graphs as declared")
        for line in _width_lines(widths):
            click.echo(f"widths     {line}")
    for comparison in compare_methods(model):
        comparisons.append(comparison)
        if not as_json:
            click.echo(f"text       {_text_line(comparison)}")
    acceptance = compare_acceptance(model)
    if acceptance is not None and not as_json:
        click.echo(f"acceptance {_acceptance_line(*acceptance)}")
    if as_json:
        fields = {
            **{"files": files, "graphs": graphs, "widths": asdict(widths)},
            "texts": [asdict(comparison) for comparison in comparisons],
            "acceptance": acceptance
            and dict(zip(("exported", "measured"), acceptance, strict=True)),
        }
        click.echo(json.dumps(fields))
    if acceptance is not None and has_fallen(*acceptance):
        fact = "warning: the target accepts fewer drafted tokens than at export, by "
        fact += f"more than {TOLERANCE}: {_acceptance_line(*acceptance)}"
        fix = "export the drafter again, or choose another provider for it"
        click.echo(f"{fact}; {fix}", err=True)
    wrong = sum(one.first_difference is not None for one in comparisons)
    if wrong:
        fact = f"{wrong} methods gave another text than plain decoding"
        fix = "report this with the output of jetdraft check --no-run"
        raise CheckError(f"{fact}; {fix}")
    if not as_json:
        click.echo(f"verdict    pass: {len(comparisons)} texts as by plain decoding")


def _check_provider(bundle: Bundle, name: str) -> None:
    """Print what a provider has for states; `CheckError` for graphs it cannot run."""
    reasons = []
    for graph, entry in bundle.graphs.items():
        contract, own = entry.contract, entry.only_on_cpu(name)
        if any(len(shape) == 3 for shape in contract.states):  # matrices of heads
            package = LINEAR_ATTENTION.get(name)
            found = f"; {package} has a kernel of its own" if package else ""
            click.echo(f"{graph:10} LinearAttention: no kernel of jetdraft{found}")
        if why := PROVIDERS[name].refusal(bundle.flavour, contract.dtype, own):
            reasons.append(f"{entry.file}: {why}")
    if reasons:
        raise CheckError(f"{name} cannot run {'; '.join(reasons)}")
    click.echo(f"verdict    {name} can run all graphs, by their flavour and types")


def _width_lines(widths: Widths) -> Iterator[str]:
    """Yield a line for each class of widths, and warnings about trees and probes."""
    for group in widths.classes:
        span = f"{group[0]}" if len(group) == 1 else f"{group[0]}..{group[-1]}"
        if group != list(range(group[0], group[-1] + 1)):
            span = ", ".join(map(str, group))
        gap = max(widths.gaps[width] for width in group)
        kind = "exact"
        if group != widths.exact:
            kind = f"left out when exact: another kernel rounds, logits by {gap:.1e}"
        yield f"{span:9} {kind}"
    if not widths.trees_agree:
        fact = "passes that branch round otherwise than chains: an exact generation"
        yield f"{fact} does not branch; --no-exact does"
    if not widths.probes_agree:
        fact = "probes change the last bits of the rows beside them: an exact"
        yield f"{fact} generation has no probes; --no-exact has"
    if len(widths.exact) == 1:
        fact = "no two widths agree bit by bit: an exact generation cannot draft here"
        yield f"{fact}; --no-exact can"


def _acceptance_line(exported: list[float], measured: list[float]) -> str:
    """Return the line of acceptance rates by position in a draft, now and at export."""
    both = (measured, exported)
    now, before = (" ".join(f"{share:.2f}" for share in shares) for shares in both)
    return f"by position {now}, at export {before}"


def _text_line(comparison: "Comparison") -> str:
    """Return the line of a comparison: method, options, where its text differs."""
    name = comparison.method
    if comparison.num_draft_tokens:
        name += f" {comparison.num_draft_tokens}"
    settings = " ".join(f"{k}={v}" for k, v in comparison.settings.items()) or "greedy"
    verdict = f"same {comparison.tokens} tokens"
    if comparison.first_difference is not None:
        verdict = f"differs at token {comparison.first_difference}"
    return f"{name:37} {settings:43} {verdict}"


@dataclass(frozen=True)
class Comparison:
    """A method's text against plain decoding; `first_difference` is None if equal."""

    method: str
    num_draft_tokens: int | None
    settings: dict[str, float | int]
    tokens: int
    first_difference: int | None


def compare_methods(model: Model) -> Iterator[Comparison]:
    """Generate with every method, greedy and sampling; yield each as a `Comparison`."""
    contract = model.bundle.target.contract
    # Repetitive, so that lookup has something to find.
    words = np.random.default_rng(5).integers(0, contract.vocab_size, 12)
    prompt = np.tile(words, 3)[: max(1, contract.capacity // 4)].tolist()
    count = min(_TOKENS, contract.capacity - len(prompt))
    for settings in _SETTINGS:
        options: dict[str, Any] = {"max_new_tokens": count, "ignore_eos": True}
        options |= settings
        plain = model.generate(token_ids=prompt, method=NONE, **options).token_ids
        for name, length, keywords in _decoding_options(model):
            ids = model.generate(token_ids=prompt, **keywords, **options).token_ids
            pairs = enumerate(zip_longest(plain, ids))
            difference = next((i for i, (one, other) in pairs if one != other), None)
            yield Comparison(name, length, settings, len(plain), difference)


def _decoding_options(model: Model) -> Iterator[tuple[str, int | None, dict[str, Any]]]:
    """Yield a name, a draft length and keywords of `Model.generate` to compare."""
    for name in model.methods:
        if name == NONE or not _can_run(model, Drafting(name)):
            continue
        for length in _DRAFT_LENGTHS:
            yield name, length, {"method": name, "num_draft_tokens": length}
        for settings in methods()[name].samples:
            if _can_run(model, Drafting(name, settings=settings)):
                words = ",".join(f"{key}={value}" for key, value in settings.items())
                yield f"{name} {words}", None, {"method": name, "drafting": settings}
    yield AUTO, None, {"method": AUTO}


def _can_run(model: Model, drafting: Drafting) -> bool:
    """Whether the bundle has what `drafting` needs, and this machine keeps it exact."""
    try:
        model.planner.proposer_set(drafting)
        model.planner.target_for(drafting)
    except OptionError:
        return False
    return True


def describe_bundle(bundle: Bundle) -> str:
    """Return lines of text: the graphs, shapes, quantization and bytes of a bundle."""
    return "\n".join(printable(line, MAX_LINE_CHARS) for line in _bundle_lines(bundle))


def _bundle_lines(bundle: Bundle) -> Iterator[str]:
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
    if bundle.adapters:
        yield f"adapters    {', '.join(bundle.adapters)}"
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
    if entry.tree_file is not None:
        yield f"  trees         {entry.tree_file}, weights of {entry.file}.data"
    elif contract.states:
        yield "  trees         none: the model has recurrent states"
    elif contract.kv_shapes and not contract.block:
        yield "  trees         none: the model attends in sliding windows"
    if entry.encoder_file is not None:
        most = f"sources of up to {contract.source_slots} tokens"
        if contract.source_bins:
            seconds = contract.source_slots * SLOT_SECONDS
            most = f"{contract.source_bins} mel bins, windows of {seconds:g} s"
        yield f"  encoder       {entry.encoder_file}, {most}"
    if entry.selection is not None:
        some = f"{entry.selection.rows} of {contract.capacity} KV rows in a pass"
        yield f"  select        {entry.select_file}, {some}: a drafter, or lossy"
    if entry.streams is not None:
        own = ", ".join(f"{name} {value}" for name, value in entry.streams.items())
        yield f"  streams       {own}"
    sizes = ("feature_input", "draft_vocab", "recent", "ahead")
    for field in (*sizes, "reads", "guesses", "block"):
        if value := getattr(contract, field):
            yield f"  {field:13} {value}"
    yield f"  parameters    {entry.parameters:,}"
    yield f"  quantization  {entry.scheme}; floats are {contract.dtype}"
    yield from _memory_lines(contract)
    for side, specs in (("inputs", contract.inputs), ("outputs", contract.outputs)):
        yield f"  {side}"
        for spec in specs:
            if spec.name.endswith(".0") or "." not in spec.name:
                axes = " x ".join(map(str, spec.shape))
                yield f"    {spec.name:22} {spec.dtype:8} {axes}"


def _memory_lines(contract: StepContract) -> Iterator[str]:
    buffers, states = (
        1e-6 * sum(prod(s.shape_for()) * np.dtype(s.dtype).itemsize for s in specs)
        for specs in (contract.buffers("past"), contract.state_tensors("past"))
    )
    if contract.kv_shapes:
        shapes = sorted(set(contract.kv_shapes))
        heads = " or ".join(f"{heads} x {size}" for heads, size in shapes)
        yield f"  KV layers     {len(contract.kv_shapes)}, KV heads {heads}"
        yield f"  KV buffers    {buffers:.1f} MB"
    if states:
        yield f"  states        {2 * states:.1f} MB, in use and at the prompt's end"
