"""The encoder of a checkpoint's pictures, and how its processor cuts them."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from jetdraft.bundle import GRID, PATCHES, SPLIT, TEXTS, WHOLE, Vision
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.folder import NO_OWN_CODE, as_checkpoint_error, stored_dtype
from jetdraft.devices.cost_model import Encoder, EncoderWork
from jetdraft.errors import UnsupportedModelError
from jetdraft.ort import no_progress_bars, silenced
from jetdraft.runtime.passes.pictures import Size, cut, encoder_inputs

# Files of which a folder has one if its pictures are read.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TABLE = "num_position_embeddings"  # Qwen's field for a table of positions.
ATTENTION = "MultiHeadAttention"  # onnxruntime's operator.
FULL = "jetdraft_flash"  # transformers gives an attention of such a name all rows.


@dataclass(frozen=True)
class Family:
    """How models of a type read pictures.

    `encode` makes rows from the inner model and the tensors of `encoder_inputs`.
    `fields` gives fields of `Vision` by processor and config; `text` has what `TEXTS`
    names. With `axes` the rows of a picture turn by line and column too.
    """

    encode: Callable[..., Tensor]
    fields: Callable[[Any, Any], dict[str, Any]]
    text: dict[str, str]
    axes: Callable[[list[int]], list[int]] | None = None


def _encode_idefics(model: Any, pixels: Tensor) -> Tensor:
    config = model.config.vision_config
    side = config.image_size // config.patch_size
    mask = torch.ones(1, side, side, dtype=torch.bool)
    states = model.vision_model(pixel_values=pixels, patch_attention_mask=mask)
    rows: Tensor = model.connector(states.last_hidden_state)
    return rows


def _encode_intern(model: Any, pixels: Tensor) -> Tensor:
    rows: Tensor = model.get_image_features(pixel_values=pixels).pooler_output
    return rows


def _encode_qwen(model: Any, *inputs: Tensor) -> Tensor:
    pixels, positions, *others = (x.flatten(0, 1) if x.dim() > 1 else x for x in inputs)
    names = ("window_index", "cu_window_seqlens")
    if hasattr(model.config.vision_config, _TABLE):
        names = ("interp_indices", "interp_weights")
    given: dict[str, Any] = dict(zip(names, others, strict=True))
    ends = torch.zeros(1, dtype=torch.int32)
    given |= {"cu_seqlens": ends, "max_seqlen": 1, "max_window_seqlen": 1}
    seen = model.visual(pixels, grid_thw=None, position_ids=positions, **given)
    deep = getattr(seen, "deepstack_features", None) or ()
    return torch.cat([seen.pooler_output, *deep], -1)


def attend_fully(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, n, d] in both directions, in windows if each row has a number.

    The numbers int64 [n] come in place of the bounds that FlashAttention reads. Without
    them a graph has an operator that holds no scores: a picture of 1920 x 1080 pixels
    has 4 GB of them.
    """
    if cu_seq_lens_q is not None and cu_seq_lens_q.dtype == torch.int64:
        scores = query @ key.transpose(-1, -2) * scaling
        is_other = cu_seq_lens_q[:, None] != cu_seq_lens_q
        scores = scores.masked_fill(is_other, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2), None
    if not torch.compiler.is_exporting():
        attended = scaled_dot_product_attention(query, key, value, scale=scaling)
        return attended.transpose(1, 2), None
    inputs = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    attended = torch.onnx.ops.symbolic(
        f"com.microsoft::{ATTENTION}",
        inputs,
        attrs={"num_heads": query.shape[1], "scale": scaling},
        dtype=query.dtype,
        shape=inputs[0].shape,
        version=1,
    )
    return attended.view(query.transpose(1, 2).shape), None


transformers.AttentionInterface.register(FULL, attend_fully)


def _idefics_fields(processor: Any, config: Any) -> dict[str, Any]:
    kind = SPLIT if processor.do_image_splitting else WHOLE
    side = processor.max_image_size["longest_edge"]
    return {"tiling": kind, "edge": processor.size["longest_edge"], "side": side}


def _intern_fields(processor: Any, config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"tiling": WHOLE, "side": processor.size["height"]}
    if processor.crop_to_patches:
        numbers = {"least": processor.min_patches, "most": processor.max_patches}
        fields |= {"tiling": GRID, **numbers}
    return fields


def _qwen_fields(processor: Any, config: Any) -> dict[str, Any]:
    own, edge, size = config.vision_config, processor.patch_size, processor.size
    fields = {"tiling": PATCHES, "edge": edge, "side": edge * processor.merge_size}
    fields |= {"least": size["shortest_edge"], "most": size["longest_edge"]}
    if hasattr(own, _TABLE):
        return fields | {"table": int(own.num_position_embeddings**0.5)}
    return fields | {"window": own.window_size // fields["side"]}


def _by_turns(sections: list[int]) -> list[int]:
    """The axis of each pair of a head: 0, 1, 2 in turn, then 0 for all the rest."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[place] = axis
    return axes


def _in_blocks(sections: list[int]) -> list[int]:
    return [axis for axis, size in enumerate(sections) for _ in range(size)]


_IDEFICS_TEXT = {
    "tile": "<fake_token_around_image><row_{row}_col_{column}>",
    "line": "\n",
    "grid": "\n",
    "whole": "<fake_token_around_image><global-img>",
    "end": "<fake_token_around_image>",
}
_IDEFICS = Family(_encode_idefics, _idefics_fields, _IDEFICS_TEXT)
_INTERN = Family(_encode_intern, _intern_fields, {"begin": "<img>", "end": "</img>"})
_QWEN = Family(_encode_qwen, _qwen_fields, {}, _by_turns)
FAMILIES = {
    **{"idefics3": _IDEFICS, "smolvlm": _IDEFICS, "internvl": _INTERN},
    **{"qwen3_vl": _QWEN, "qwen3_vl_moe": _QWEN, "qwen3_5": _QWEN},
    **{"qwen2_5_vl": Family(_encode_qwen, _qwen_fields, {}, _in_blocks)},
}
"""Types whose pictures are read; of other types the language model is read alone."""


def picture_sizes(source: str, model: Any) -> tuple[int, int]:
    """The sizes of a picture's row and of a slot's turns, see `StepContract`; or 0, 0.

    They are of a folder or hub id of `FAMILIES`, with its image processor.
    """
    fields = read_fields(source, "config.json") or {}
    family = _family_of(source)
    if family is None:
        return 0, 0
    deep = fields["vision_config"].get("deepstack_visual_indexes", ())
    width = model.get_input_embeddings().weight.shape[1]
    return width * (1 + len(deep)), len(_frequencies(model)) if family.axes else 0


def _family_of(source: str) -> Family | None:
    fields = read_fields(source, "config.json") or {}
    has_processor = any(read_fields(source, name) is not None for name in PROCESSORS)
    return FAMILIES.get(fields.get("model_type", "")) if has_processor else None


def _frequencies(model: Any) -> list[float]:
    """The rotary frequencies of a text's decoder."""
    (found,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
    if found.attention_scaling != 1.0:
        fact = f"{type(model).__name__} reads images and scales its rotation"
        raise UnsupportedModelError(f"{fact}; see docs/images.md")
    return list(found.inv_freq.tolist())


def read_vision(
    source: str, text: Any, file: str
) -> tuple[Any, Callable[..., Tensor], Vision]:
    """Return a checkpoint's model without its text decoder, `Family.encode`, `Vision`.

    `text` is its language model, and `file` the name of the encoder's graph. Raises
    `CheckpointError`.
    """
    with silenced(logging.WARNING), no_progress_bars(), as_checkpoint_error(source):
        whole = transformers.AutoModelForImageTextToText.from_pretrained(
            source,
            dtype=stored_dtype(source),
            attn_implementation="eager",
            **NO_OWN_CODE,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_OWN_CODE)
        config = whole.config
        family = FAMILIES[config.model_type]
        sections = config.get_text_config().rope_parameters.get("mrope_section", ())
        axes = family.axes(list(sections)) if family.axes else []
        vision = Vision(
            file=file,
            token=tokenizer.convert_ids_to_tokens(config.image_token_id),
            first_row=text.get_input_embeddings().weight.shape[0],
            frequencies=tuple(_frequencies(text) if axes else ()),
            axes=tuple(axes),
            **_cutting(source, family, config),
        )
        model = _without_text(whole).float().eval().requires_grad_(False)
        return model, family.encode, vision


def count_work(source: str, sizes: Sequence[Size]) -> Encoder | None:
    """Count what a checkpoint's encoder does for pictures of these widths and heights.

    It runs on tensors without numbers, so no weights are read. None without eyes;
    raises `CheckpointError`, or `OptionError` without Pillow.

        count_work("Qwen3-VL-2B-Instruct", [(1024, 768)]).work[0].rows    # 768
    """
    family = _family_of(source)
    if family is None:
        return None
    quiet = silenced(logging.WARNING), no_progress_bars(), as_checkpoint_error(source)
    with quiet[0], quiet[1], quiet[2], torch.no_grad(), FakeTensorMode() as mode:
        config = transformers.AutoConfig.from_pretrained(source, **NO_OWN_CODE)
        whole = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        model = _without_text(whole)
        fields = _cutting(source, family, config)
        vision = Vision(file="", token="", first_row=0, **fields)

        def encode(pixels: Any) -> tuple[Tensor, int, int]:
            """The rows of a tile or picture, operations, bytes at a layer's ends."""
            held = [0]

            def note(layer: Any, given: Any, out: Any) -> None:
                tensors = [t for t in (*given, out) if isinstance(t, Tensor)]
                held.append(sum(t.nbytes for t in tensors))

            inputs = map(torch.from_numpy, encoder_inputs(pixels, vision).values())
            with FlopCounterMode(display=False, custom_mapping=_OPERATIONS) as counter:
                hook = register_module_forward_hook(note)
                rows = family.encode(model, *map(mode.from_tensor, inputs))
                hook.remove()
            return rows, counter.get_total_flops(), max(held)

        rows = encode(np.zeros((vision.side, vision.side, 3), np.uint8))[0]
        vision, work = replace(vision, rows=rows.numel() // rows.shape[-1]), []
        for width, height in sizes:
            tiles = cut(np.zeros((height, width, 3), np.uint8), vision)
            passes, (_, operations, held) = len(tiles.pixels), encode(tiles.pixels[0])
            sums = round(passes * operations / 1e9, 3), round(held / 1e6, 3)
            work.append(EncoderWork(width, height, tiles.rows, passes, *sums))
        weights = sum(weight.numel() for weight in model.parameters())
        return Encoder(weights, rows.shape[-1], tuple(work))


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_OPERATIONS = {_FLASH: lambda q, k, *_, **__: 4 * math.prod(q) * k[2]}  # By shapes.


def _without_text(whole: Any) -> Any:
    """The inner model of a checkpoint, without its language model."""
    model = whole.model
    for name in ("text_model", "language_model"):
        if hasattr(model, name):
            setattr(model, name, None)
    for config in [m.config for m in model.modules() if hasattr(m, "config")]:
        config._attn_implementation = FULL
    return model


def _cutting(source: str, family: Family, config: Any) -> dict[str, Any]:
    """The fields of `Vision` that say how pictures are cut, but for a tile's rows."""
    processor = transformers.AutoImageProcessor.from_pretrained(
        source, backend="pil", **NO_OWN_CODE
    )
    _check_steps(source, processor)
    return {
        "filter": _FILTERS[int(processor.resample)],
        "mean": tuple(processor.image_mean),
        "std": tuple(processor.image_std),
        "text": {name: family.text.get(name, "") for name in TEXTS},
        **{"edge": 0, "least": 1, "most": 1, "rows": 1},
        **family.fields(processor, config),
    }


_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _check_steps(source: str, processor: Any) -> None:
    steps = ("do_resize", "do_rescale", "do_normalize")
    does_all = all(getattr(processor, step) for step in steps)
    if not does_all or abs(processor.rescale_factor * 255 - 1) > 1e-6:
        fact = f"the image processor of {source} does not resize, rescale and normalize"
        raise UnsupportedModelError(f"{fact}; see docs/images.md")
