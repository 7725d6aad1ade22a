"""An export as the command line and Python ask for it; torch loads when it starts."""

import importlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from jetdraft import recipe as recipes
from jetdraft.bundle import DRAFTER, FLAVOURS, TARGET, Bundle
from jetdraft.contracts.tensors import CAPACITY, MAX_WIDTH
from jetdraft.devices.cost_model import gguf_recipe
from jetdraft.devices.device import Device
from jetdraft.devices.plan import Question, does_not_fit_error, plan
from jetdraft.devices.providers import AUTO, PROVIDERS, fastest_provider, provider_named
from jetdraft.errors import OptionError, importing
from jetdraft.manifest import check_output
from jetdraft.options import declared, takes
from jetdraft.recipe import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, KERNELS, Recipe

# The block size of a drafter's recipe that names none.
_DRAFTER_BLOCK_SIZE = 32
# Fields in two sections of help.
_checkpoint = partial(declared, "checkpoint")
_quantization = partial(declared, "quantization")


@dataclass(frozen=True)
class ExportRequest:
    """An export; a field with a text of help is an option of `jetdraft export` too.

    drafter: A small checkpoint with the same tokenizer.
    head: A head that reads the target's states, or a drafter that fills blocks, in
        place of a drafter: the folder or hub id of EAGLE-1, 2 or 3 (speculators' too),
        Medusa, Hydra, DFlash, a diffusion or block drafter, Kangaroo, GliDe, Chimera or
        Falcon; default: the MTP module in the target's own folder, if there is one;
        none: leave it out.
    adapter_scale: How far streams of the shared mode move the target from its base, 0
        to 1.
    adapters: LoRA in a folder of peft, which texts can ask for by its name; give the
        option again for each further adapter.
    capacity: The most tokens of a prompt and its text together.
    max_width: The most rows of a pass.
    dtype: Type of the activations; default: fp32 on the CPU, fp16 elsewhere.
    flavour: contrib: onnxruntime's own operators; standard: only ai.onnx operators.
        Default: standard for TensorRT, contrib elsewhere.
    kernel: Whose operators multiply matrices and attend on the CPU: jetdraft's hold
        llama.cpp's types, and need its library; onnxruntime's need none, and a GGUF
        file loses minima there. Default: jetdraft.
    quantize_drafter: A recipe for the drafter; default: the fastest for the pair, which
        is measured, or none with --quantize none.
    calibration: A text like the texts to come, for all that is measured; default: the
        target writes one.
    max_bytes: Give the most sensitive layers of the target more bits, up to this size
        of its matrices in bytes.
    max_kl: Give layers more bits until the mean KL divergence from the full target is
        below this, in nats per token.
    draft_vocab: Let the drafter, head or streams choose among this many tokens only,
        the most frequent in --calibration or in what the target writes; their LM head
        gets as many rows, and the text stays the same.
    select_kv: Add a graph that can read this many of the KV rows only, which each layer
        selects for each pass: for long contexts, as a drafter of itself (--method
        select, lossless), or as the target (--drafting select-kv=true --no-exact,
        lossy).
    device: Refuse a bundle that does not fit this device, and take its recipe, which
        measures; jetdraft doctor --devices lists the names.
    provider: What will run the target; auto: the fastest provider on this machine.
    drafter_provider: What will run the drafter; default: the target's provider.
    """

    target: str | Path
    output: str | Path
    drafter: str | Path | None = _checkpoint(None, kind=str)
    _: KW_ONLY
    head: str | Path | None = _checkpoint(None, kind=str)
    adapter_scale: float = _checkpoint(1.0)
    adapters: tuple[str, ...] = _checkpoint(
        (), names=("--adapter",), metavar="NAME=FOLDER"
    )
    capacity: int = _checkpoint(CAPACITY)
    max_width: int = _checkpoint(MAX_WIDTH)
    dtype: str | None = _checkpoint(None, choices=("fp32", "fp16"))
    flavour: str | None = _checkpoint(None, choices=FLAVOURS)
    kernel: str | None = _checkpoint(None, choices=KERNELS)
    quantize: str | None = _quantization(
        None,
        f"A recipe of weights: {', '.join(recipes.SCHEMES)}, followed by overrides, "
        f"for example int4-gptq-b64-head8. Algorithms: {', '.join(recipes.ALGORITHMS)}"
        ". Default: the recipe of --device, or else the cheapest that keeps the "
        "target's text, which is measured.",
    )
    block_size: int | None = _quantization(
        None,
        "Weights that share a scale, if the recipe does not say; default: "
        f"{DEFAULT_BLOCK_SIZE}.",
        choices=BLOCK_SIZES,
    )
    quantize_drafter: str | None = _quantization(None)
    calibration: str | Path | None = _quantization(None)
    fast: bool = _quantization(
        False,
        f"Measure nothing and take {recipes.FAST_DEFAULTS[KERNELS[0]]}, which suits "
        f"large models ({recipes.FAST_DEFAULTS[KERNELS[1]]} with kernels of "
        "onnxruntime), and eight bits for the drafter, with --device too; options that "
        "need a measure are refused.",
    )
    max_bytes: int | None = _quantization(None)
    max_kl: float | None = _quantization(None)
    draft_vocab: int | None = declared("drafting", None)
    select_kv: int | None = declared("drafting", None)
    device: str | None = declared("device", None)
    provider: str = declared("runtime", "cpu", choices=(*PROVIDERS, AUTO))
    drafter_provider: str | None = declared("runtime", None, choices=tuple(PROVIDERS))
    progress: Callable[[str, int, int], None] | None = None

    @property
    def limited(self) -> bool:
        """Whether layers get more bits up to a limit."""
        return self.max_bytes is not None or self.max_kl is not None

    @property
    def recipe(self) -> Recipe | None:
        """The target's recipe; None if the export is to choose it."""
        if self.quantize is not None:
            return Recipe.parse(self.quantize, self.block_size or DEFAULT_BLOCK_SIZE)
        best = provider_named(self.provider).kernel(self.flavour, self.dtype)
        kernel = self.kernel or (best if self.block_size is None else KERNELS[1])
        if self.limited and kernel == KERNELS[1]:
            recipe = Recipe.parse(recipes.CALIBRATED_DEFAULT)
        elif self.device is not None and not (
            self.fast or gguf_recipe(Path(self.target))
        ):
            recipe = Recipe.parse(Device.named(self.device).recipe)
        elif self.limited or self.fast or self.block_size is not None:
            recipe = Recipe.parse(recipes.FAST_DEFAULTS[kernel])
        else:
            return None
        return replace(recipe, block_size=self.block_size or recipe.block_size)


@takes(ExportRequest)
def export(request: ExportRequest) -> Bundle:
    """Export checkpoints, folders, GGUF files or hub ids, to a bundle folder.

    A `head` takes the place of a `drafter`. `progress` is called with a stage, the
    steps done and their number. Raises a `JetdraftError`; `output` is then unchanged.

        jetdraft.export("target/", "bundle", "drafter/", quantize="int8-rtn-b32")
    """
    check_output(Path(request.output))
    if request.provider == AUTO:
        request = replace(request, provider=fastest_provider())
    if request.device is not None:
        _check_fits(request)
    with importing("exporting", "export"):
        exporter = importlib.import_module("jetdraft.export.exporter")
    # Options that have the names of the request's fields, and of its property `recipe`.
    names = [field.name for field in fields(exporter.ExportOptions)]
    settings = {name: getattr(request, name, None) for name in names}
    settings["max_width"] = min(request.max_width, request.capacity)
    if (recipe := request.quantize_drafter) is not None:
        settings["drafter_recipe"] = Recipe.parse(recipe, _DRAFTER_BLOCK_SIZE)
    if request.calibration is not None:
        settings["calibration"] = Path(request.calibration)
    if request.limited:
        settings["limit"] = exporter.Limit(request.max_bytes, request.max_kl)
    options = exporter.ExportOptions(**settings)
    if request.fast:
        _refuse_measuring(options)
    places = request.drafter, request.head
    drafter, head = (None if place is None else str(place) for place in places)
    bundle: Bundle = exporter.export(
        str(request.target), request.output, drafter, options, request.progress, head
    )
    return bundle


def _refuse_measuring(options: Any) -> None:
    recipes = [options.recipe_of(name) for name in (TARGET, DRAFTER)]
    needs_measures = {
        "a limit of bytes or KL": options.limit is not None,
        **{f"the recipe {r.name}": r.needs_calibration for r in recipes},
        "a draft vocabulary without --calibration": options.draft_vocab is not None
        and options.calibration is None,
    }
    for option, is_given in needs_measures.items():
        if is_given:
            fact = f"a fast export measures nothing, but {option} needs a measurement"
            raise OptionError(f"{fact}; leave one of the two out")


def _check_fits(request: ExportRequest) -> None:
    assert request.device is not None
    folders = [Path(source) for source in (request.target, request.drafter) if source]
    for folder in folders:
        if not folder.exists():
            fact = f"--device reads a folder or a GGUF file, and {folder} is not there"
            raise OptionError(f"{fact}; download it first")
    drafter = folders[1] if request.drafter else None
    scheme = request.recipe.scheme if request.recipe else None
    own = request.device, drafter, scheme, request.capacity
    question = Question(folders[0], *own, provider=request.provider)
    answer = plan(question)
    if not answer.fits:
        raise does_not_fit_error(question, answer)
