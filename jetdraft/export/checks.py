"""What an export refuses: checkpoints and heads that do not fit its options."""

from collections.abc import Mapping
from typing import Any

from jetdraft.bundle import CONTRIB, DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.streams import SHARED
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices.providers import HALVES, check_on_cpu
from jetdraft.errors import OptionError, PairError
from jetdraft.export.adapters import read_adapter
from jetdraft.export.export_options import ExportOptions
from jetdraft.quant.weights import check_stack
from jetdraft.recipe import GRIDS, KERNELS, Recipe


def check_drafter(options: ExportOptions, *drafters: str | None) -> None:
    """Raise `OptionError` for two drafters, or for options of a missing drafter."""
    count, fact = 2 - drafters.count(None), ""
    if count > 1:
        fact = "a bundle has one drafter; give --drafter or --head, not both"
    elif not count and options.drafter_provider:
        fact = "a drafter's provider needs a drafter; give --drafter too"
    if fact:
        raise OptionError(fact)


def check_embedding(target: Checkpoint, drafter: str | None, head: str | None) -> None:
    """Raise `OptionError` for a drafter beside a target that only embeds texts."""
    if target.embedding and (drafter is not None or head is not None):
        fact = f"{target.source} embeds texts and writes none, so nothing is drafted"
        raise OptionError(f"{fact}; leave --drafter and --head out")


def check_experts(
    name: str, columns: Mapping[str, int], are_kept: bool, options: ExportOptions
) -> None:
    """Raise `OptionError` if no operator multiplies the experts as a recipe says."""
    is_own = name == TARGET or options.drafter_recipe is None
    is_open, recipe = options.recipe is None and is_own, options.recipe_of(name)
    if recipe.bits is None and not is_open:
        return
    is_grid = is_open or are_kept or recipe.scheme in GRIDS
    is_grid &= options.kernel_of(name) == KERNELS[0]
    for stack, count in columns.items():
        check_stack(stack, is_grid, count)


def _check_source(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    if not (checkpoint.reads_source or checkpoint.embedding):
        return
    kind = "an encoder-decoder" if checkpoint.reads_source else "a model of embeddings"
    recipe, fact = options.recipe, ""
    reads = recipe is not None and (recipe.needs_calibration or recipe.kv_bits)
    if checkpoint.embedding and (name != TARGET or options.select_kv is not None):
        fact = "which drafts nothing and reads whole texts; give it as the target, "
        fact += "without --select-kv"
    elif options.effective_flavour != CONTRIB:
        fact = "which only contrib graphs hold; choose provider cpu or cuda"
    elif options.draft_vocab is not None:
        fact = "which writes no text to count tokens in; leave --draft-vocab out"
    elif options.limit is not None or reads:
        fact = "whose recipe reads no text yet; choose a recipe of rtn without kv8, "
        fact += "for example int8-rtn-b32"
    if fact:
        raise OptionError(f"{checkpoint.source} is {kind}, {fact}")


def _check_probes(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    if name != TARGET:
        if checkpoint.streams:
            fact = f"{checkpoint.source} has streams"
            raise PairError(f"{fact}; only a target can have them")
        return
    tuned = checkpoint.streams is not None and checkpoint.streams.mode == SHARED
    if options.adapter_scale != 1.0 and not tuned:
        raise OptionError(
            f"adapter scale {options.adapter_scale} needs streams of the shared mode, "
            f"since {checkpoint.source} has no LoRA to merge into its weights; leave "
            "the adapter scale out"
        )


def _check_taps(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    if checkpoint.taps is None:
        return
    if checkpoint.streams is not None:
        fact = f"{checkpoint.source} has streams, so it drafts without a head"
        raise PairError(f"{fact}; leave one of them out")
    if checkpoint.taps.cut:
        fix = "export for --provider cpu, or with another head"
        check_on_cpu(HALVES, options.provider_of(name).name, fix)
    checkpoint.taps.check(checkpoint.model)


def _check_select(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    if options.select_kv is None or name != TARGET:
        return
    fact = ""
    if not _runs_in_fp32_on_cpu(name, options):
        fact = "runs on the CPU, in fp32; leave --provider, --dtype and --flavour out"
    elif options.recipe is not None and options.recipe.kv:
        fact = "reads floats; leave kv out of the recipe"
    elif checkpoint.streams:
        fact = "reads no probes; choose a target without streams"
    elif checkpoint.reads_source:
        fact = "needs a decoder without an encoder"
    if fact:
        raise OptionError(f"a selection of KV rows (--select-kv) {fact}")


def _runs_in_fp32_on_cpu(name: str, options: ExportOptions) -> bool:
    runs = options.provider_of(name).name, options.effective_flavour
    return (*runs, options.dtype_of(name)) == ("cpu", CONTRIB, "fp32")


def _check_adapters(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    folders, taps = options.adapter_folders, checkpoint.taps
    if not folders or name != TARGET:
        return
    kind, fact = (options.provider_of(name).name, options.effective_flavour), ""
    if kind != ("cpu", CONTRIB):
        fact = "run on the CPU; leave --provider and --flavour out"
    elif options.select_kv is not None:
        fact = "read all KV rows; leave --select-kv out"
    elif checkpoint.streams or (taps and taps.cut):
        fact = "change a whole target; leave streams, and heads that cut it in halves, "
        fact += "out"
    elif checkpoint.reads_source or checkpoint.embedding:
        fact = "change a decoder that writes; merge them into the checkpoint"
    if fact:
        raise OptionError(f"adapters {fact}", "adapters")
    for folder in folders.values():
        read_adapter(folder, checkpoint.model)


def check_buffers(
    name: str, contract: StepContract, checkpoint: Checkpoint, options: ExportOptions
) -> None:
    """Raise a `JetdraftError` for what the buffers of a model cannot do."""
    if contract.whole_pictures and options.recipe_of(name).kv_bits:
        fact = f"{checkpoint.source} reads images whose rows see each other"
        raise OptionError(f"{fact}, in buffers of floats; leave kv out of the recipe")
    if not contract.states:
        layers = 0 if checkpoint.reads_source else len(decoder_layers(checkpoint.model))
        integers, probes = options.recipe_of(name).kv_bits, checkpoint.streams
        if len(contract.kv_shapes) < layers and (integers or probes):
            fix = "leave kv out of the recipe" if integers else "choose another target"
            fact = f"{checkpoint.source} has layers that share keys and values"
            raise OptionError(f"{fact}, of floats and without probes only; {fix}")
        return
    fact = ""
    if name != TARGET:
        fact = "so it is no drafter; choose a drafter of attention alone"
    elif not _runs_in_fp32_on_cpu(name, options):
        fact = "which only the CPU provider runs so far, in fp32; leave --provider, "
        fact += "--dtype and --flavour out"
    elif options.kernel == KERNELS[1]:
        fact = "which jetdraft's operators compute; leave --kernel out"
    elif options.select_kv is not None:
        fact = "so no KV rows of it are selected; leave --select-kv out"
    elif checkpoint.taps is not None and checkpoint.taps.cut:
        fact = "so it is not cut in halves; choose another head"
    elif checkpoint.streams is not None:
        fact = "and its rows carry no probes; choose a target without streams"
    elif options.recipe_of(name).kv_bits:
        fact = "and its KV buffers are floats; leave kv out of the recipe"
    if fact:
        raise OptionError(f"{checkpoint.source} has recurrent states, {fact}")


def check_draft_vocabulary(
    options: ExportOptions,
    checkpoints: Mapping[str, Checkpoint],
    head: DraftModule | None,
) -> None:
    """Raise `OptionError` unless these models can have this draft vocabulary."""
    count = options.draft_vocab
    most = min(checkpoint.vocab_size for checkpoint in checkpoints.values()) - 1
    if count is None:
        return
    if len(checkpoints) == 1 and head is None and checkpoints[TARGET].streams is None:
        fact = "a draft vocabulary needs a drafter or streams (jetdraft train stream)"
        raise OptionError(f"{fact}; give --drafter or --head too")
    if count > most:
        raise OptionError(
            f"a draft vocabulary of {count} tokens is not a part of the models' "
            f"{most + 1}; give 1 to {most}, or leave it out"
        )
    if head is not None and not head.cuts_vocabulary:
        fact = f"{type(head).__name__.lower()} drafters draft from the whole vocabulary"
        raise OptionError(f"{fact}; leave --draft-vocab out")
    drafter = checkpoints.get(DRAFTER)
    own: Any = {"head": head and head.ids, DRAFTER: drafter and drafter.draft_ids}
    for name, ids in own.items():
        if ids is not None:
            raise OptionError(
                f"the {name} was trained with its own draft vocabulary of {len(ids)} "
                "tokens, which rules; leave --draft-vocab out"
            )


def check_raised(recipe: Recipe, contract: StepContract, target: Checkpoint) -> None:
    """Raise `OptionError` for a recipe that raises a layer which the model lacks."""
    layers = len(contract.kv_shapes)
    if not target.reads_source:  # not all layers have buffers
        layers = len(decoder_layers(target.model))
    if recipe.raised and recipe.raised[-1] >= layers:
        fact = f"{recipe.name} raises layer {recipe.raised[-1]}"
        raise OptionError(f"{fact}; the model has layers 0 to {layers - 1}")


# Each raises a `JetdraftError` if the options cannot export a checkpoint of this name.
RULES = _check_source, _check_probes, _check_taps, _check_select, _check_adapters
