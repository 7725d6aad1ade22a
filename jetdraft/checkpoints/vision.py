"""The encoder of a checkpoint's pictures, and how its processor cuts them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from jetdraft.bundle import GRID, SPLIT, TEXTS, WHOLE, Vision
from jetdraft.checkpoints.attention import BOTH_WAYS
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.folder import NO_OWN_CODE, as_checkpoint_error, stored_dtype
from jetdraft.devices.cost_model import Encoder, EncoderWork
from jetdraft.errors import UnsupportedModelError
from jetdraft.ort import quiet_loaders
from jetdraft.parsing import MAX_SIZE
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
    names, or the config's field with a token's id. With `axes` the rows of a picture
    turn by line and column too.
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


def _encode_tile(model: Any, pixels: Tensor) -> Tensor:
    rows: Tensor = model.get_image_features(pixel_values=pixels).pooler_output
    return rows


def _encode_qwen(model: Any, *inputs: Tensor) -> Tensor:
    pixels, positions, *others = (x.flatten(0, 1) if x.dim() > 1 else x for x in inputs)
    pixels = pixels.view(pixels.shape[0], 3, 1, -1).expand(-1, -1, 2, -1)  # two frames
    names = ("window_index", "cu_window_seqlens")
    if hasattr(model.config.vision_config, _TABLE):
        names = ("interp_indices", "interp_weights")
        others = _taps(positions, model.visual.num_grid_per_side)
    given: dict[str, Any] = dict(zip(names, others, strict=True))
    ends = torch.zeros(1, dtype=torch.int32)
    given |= {"cu_seqlens": ends, "max_seqlen": 1, "max_window_seqlen": 1}
    seen = model.visual(pixels.flatten(1), None, position_ids=positions, **given)
    deep = getattr(seen, "deepstack_features", None) or ()
    return torch.cat([seen.pooler_output, *deep], -1)


def _taps(positions: Tensor, side: int) -> list[Tensor]:
    """The four entries of a table [side, side] nearest to each patch, and weights."""
    exact = positions * (side - 1) / positions.amax(0).clamp(min=1)
    near = exact.floor()[..., None] + torch.arange(2)  # [n, 2, 2]
    shares = (1 - (exact[..., None] - near).abs()).clamp(min=0)
    near = near.clamp(max=side - 1).long()
    taps = near[:, 0, :, None] * side + near[:, 1, None]
    return [taps.flatten(1), (shares[:, 0, :, None] * shares[:, 1, None]).flatten(1)]


def _encode_mistral(model: Any, pixels: Tensor, positions: Tensor) -> Tensor:
    tower, projector = model.vision_tower, model.multi_modal_projector
    patches = pixels.view(-1, 3, tower.patch_size, tower.patch_size)
    last = range(tower.config.num_hidden_layers + 1)[model.config.vision_feature_layer]
    tower.transformer.layers = tower.transformer.layers[:last]
    states = tower.ln_pre(tower.patch_conv(patches).flatten(1)[None])
    turns = tower.patch_positional_embedding(states, positions.flatten(0, 1))
    states = tower.transformer(states, position_embeddings=turns).last_hidden_state
    squares = projector.norm(states).view(*positions.shape[:2], -1).transpose(1, 2)
    merged = projector.patch_merger.merging_layer(squares.flatten(1))
    rows: Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
    return rows


def _encode_lfm(model: Any, pixels: Tensor, positions: Tensor) -> Tensor:
    tower, projector = model.vision_tower, model.multi_modal_projector
    own, places = tower.embeddings, positions.flatten(0, 1)
    # The table of positions is resized as by a bilinear filter with antialiasing.
    entries = torch.arange(own.position_embedding_size)
    scale = len(entries) / (places.amax(0) + 1)
    middle = (places + 0.5) * scale - 0.5
    distance = (entries - middle[..., None]).abs() / scale.clamp(min=1)[:, None]
    shares = (1 - distance).clamp(min=0)  # [n, 2, entries]
    shares = shares / shares.sum(-1, keepdim=True)
    shares = (shares[:, 0, :, None] * shares[:, 1, None]).flatten(1)
    states = own.patch_embedding(_colours_last(pixels))
    states = states + shares @ own.position_embedding.weight
    states = tower.encoder(states[None], attention_mask=None).last_hidden_state
    projector.factor = 1  # The patches of a square stand together already.
    squares = tower.post_layernorm(states).view(1, pixels.shape[0], 1, -1)
    rows: Tensor = projector(squares)
    return rows


def _encode_gemma(model: Any, pixels: Tensor, positions: Tensor) -> Tensor:
    tower, places = model.vision_tower, positions.flatten(0, 1).flip(-1)[None]
    colours, is_padding = _colours_last(pixels)[None], places[..., 0] < 0
    states = tower.patch_embedder(colours, places, is_padding)
    states = tower.encoder(states, None, places).last_hidden_state
    squares = states.view(*positions.shape[:2], -1).mean(1) * states.shape[-1] ** 0.5
    if tower.config.standardize:
        squares = (squares - tower.std_bias) * tower.std_scale
    rows: Tensor = model.embed_vision(squares)
    return rows


def _colours_last(pixels: Tensor) -> Tensor:
    """Patches [n, numbers] with the three numbers of a pixel side by side."""
    return pixels.flatten(0, 1).view(-1, 3, pixels.shape[2] // 3).mT.flatten(1)


def attend_fully(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, n, d] in both directions, in windows if each row has a number.

    The numbers int64 [n] come in place of the bounds that FlashAttention reads. Without
    them a graph has an operator that holds no scores: a picture of 1920 x 1080 pixels
    has 4 GB of them. Raises `UnsupportedModelError` for what it would leave out.
    """
    is_grouped = key.shape[1] != query.shape[1]
    if attention_mask is not None or others.get("softcap") or is_grouped:
        fact = "has a mask, a soft cap, or fewer heads of keys"
        raise UnsupportedModelError.of(module, fact, "see docs/images.md")
    if cu_seq_lens_q is not None and cu_seq_lens_q.dtype == torch.int64:
        scores = query @ key.transpose(-1, -2) * scaling
        is_other = cu_seq_lens_q[:, None] != cu_seq_lens_q
        scores = scores.masked_fill(is_other, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2), None
    if not torch.compiler.is_exporting():
        attended = scaled_dot_product_attention(query, key, value, scale=scaling)
        return attended.transpose(1, 2), None
    inputs = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    numbers: Any = {"num_heads": query.shape[1], "scale": scaling}
    form: Any = {"dtype": query.dtype, "shape": inputs[0].shape, "version": 1}
    node = f"com.microsoft::{ATTENTION}"
    attended = torch.onnx.ops.symbolic(node, inputs, numbers, **form)
    return attended.view(query.transpose(1, 2).shape), None


transformers.AttentionInterface.register(FULL, attend_fully)


def _idefics_fields(processor: Any, config: Any) -> dict[str, Any]:
    kind = SPLIT if processor.do_image_splitting else WHOLE
    side = processor.max_image_size["longest_edge"]
    return {"tiling": kind, "edge": processor.size["longest_edge"], "side": side}


def _tile_fields(processor: Any, config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"side": processor.size["height"]}
    if getattr(processor, "crop_to_patches", False):
        tiles = processor.min_patches, processor.max_patches
        fields |= {"tiling": GRID, "tiles": tiles}
    return fields


def _qwen_fields(processor: Any, config: Any) -> dict[str, Any]:
    own, patch, size = config.vision_config, processor.patch_size, processor.size
    fields = {"patch": patch, "side": patch * processor.merge_size}
    fields |= {"least": size["shortest_edge"], "most": size["longest_edge"]}
    windows = 0 if hasattr(own, _TABLE) else own.window_size // fields["side"]
    return fields | {"window": windows}


def _mistral_fields(processor: Any, config: Any) -> dict[str, Any]:
    patch, edge = config.vision_config.patch_size, processor.size["longest_edge"]
    return {"patch": patch, "side": patch * config.spatial_merge_size, "edge": edge}


def _lfm_fields(processor: Any, config: Any) -> dict[str, Any]:
    patch = processor.encoder_patch_size
    tiles = processor.min_tiles, processor.max_tiles
    side = patch * config.downsample_factor
    most, least = processor.max_image_tokens * side**2, processor.min_image_tokens
    fields = {"patch": patch, "side": side, "least": least * side**2, "most": most}
    splits = processor.do_image_splitting and tiles != (1, 1)
    large = int(most * processor.max_pixels_tolerance) + 1 if splits else MAX_SIZE
    fields |= {"large": large, "span": processor.tile_size // side}
    return fields | {"tiling": GRID, "tiles": tiles}


def _gemma_fields(processor: Any, config: Any) -> dict[str, Any]:
    side = processor.patch_size * processor.pooling_kernel_size
    area = processor.max_soft_tokens * side**2
    return {"patch": processor.patch_size, "side": side, "least": area, "most": area}


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
    "whole": "<fake_token_around_image><global-img>",
    **{"line": "\n", "grid": "\n", "end": "<fake_token_around_image>"},
}
_IDEFICS = Family(_encode_idefics, _idefics_fields, _IDEFICS_TEXT)
_INTERN = Family(_encode_tile, _tile_fields, {"begin": "<img>", "end": "</img>"})
_GEMMA3_TEXT = {
    "place": "<start_of_image>",
    "begin": "\n\n<start_of_image>",
    "end": "<end_of_image>\n\n",
}
_LFM_TEXT = {
    **{"begin": "<|image_start|>", "end": "<|image_end|>"},
    **{"tile": "<|img_row_{row}_col_{column}|>", "grid": "<|img_thumbnail|>"},
}
_GEMMA_TEXT = {"begin": "boi_token_id", "end": "eoi_token_id"}
_MISTRAL_TEXT = {"break": "[IMG_BREAK]", "end": "[IMG_END]"}
_QWEN = Family(_encode_qwen, _qwen_fields, {}, _by_turns)
FAMILIES = {
    **{"idefics3": _IDEFICS, "smolvlm": _IDEFICS, "internvl": _INTERN},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **{"qwen2_5_vl": Family(_encode_qwen, _qwen_fields, {}, _in_blocks)},
    **{"mistral3": Family(_encode_mistral, _mistral_fields, _MISTRAL_TEXT)},
    **{"lfm2_vl": Family(_encode_lfm, _lfm_fields, _LFM_TEXT)},
    **{"gemma3": Family(_encode_tile, _tile_fields, _GEMMA3_TEXT)},
    **{"gemma4": Family(_encode_gemma, _gemma_fields, _GEMMA_TEXT)},
}
"""Types whose pictures are read; of other types the language model is read alone."""


def picture_sizes(source: str, model: Any) -> tuple[int, int, int]:
    """The sizes of a picture's row, of a slot's turns, and of a picture read whole.

    They are of a folder or hub id of `FAMILIES`, with its image processor, or else 0;
    see `StepContract`.
    """
    fields = read_fields(source, "config.json") or {}
    own, family = fields.get("vision_config") or {}, _family_of(source)
    if family is None:
        return 0, 0, 0
    deep = own.get("deepstack_visual_indexes", ())
    width = model.get_input_embeddings().weight.shape[1]
    turns = len(_frequencies(model)) if family.axes else 0
    with as_checkpoint_error(source):
        processor = _read_processor(source)  # It may be refused.
        config = transformers.AutoConfig.from_pretrained(source, **NO_OWN_CODE)
        whole = getattr(config, "mm_tokens_per_image", 0)
        if getattr(config.get_text_config(), BOTH_WAYS, None) == "vision":
            whole = processor.max_soft_tokens
    return width * (1 + len(deep)), turns, whole


def _family_of(source: str) -> Family | None:
    fields = read_fields(source, "config.json") or {}
    has_processor = any(read_fields(source, name) is not None for name in PROCESSORS)
    sees = has_processor and fields.get("vision_config")
    return FAMILIES.get(fields.get("model_type", "")) if sees else None


def _frequencies(model: Any) -> list[float]:
    """The rotary frequencies of a text's decoder."""
    (found,) = (m for m in model.modules() if hasattr(m, "inv_freq"))
    if found.attention_scaling != 1.0:
        fact = "reads images and scales its rotation"
        raise UnsupportedModelError.of(model, fact, "see docs/images.md")
    return list(found.inv_freq.tolist())


def read_vision(
    source: str, text: Any, file: str
) -> tuple[Any, Callable[..., Tensor], Vision]:
    """Return a checkpoint's model without its text decoder, `Family.encode`, `Vision`.

    `text` is its language model, and `file` the name of the encoder's graph. Raises
    `CheckpointError`.
    """
    with quiet_loaders(), as_checkpoint_error(source):
        how = {"attn_implementation": "eager", "dtype": stored_dtype(source)}
        how |= NO_OWN_CODE
        whole = transformers.AutoModelForImageTextToText.from_pretrained(source, **how)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_OWN_CODE)
        config = whole.config
        family = FAMILIES[config.model_type]
        sections = config.get_text_config().rope_parameters.get("mrope_section", ())
        axes = family.axes(list(sections)) if family.axes else []
        marks = {
            name: tokenizer.convert_ids_to_tokens(getattr(config, mark))
            for name, mark in family.text.items()
            if hasattr(config, mark)
        }
        words = dict.fromkeys(TEXTS, "") | family.text | marks
        vision = Vision(
            file=file,
            token=tokenizer.convert_ids_to_tokens(config.image_token_id),
            first_row=text.get_input_embeddings().weight.shape[0],
            frequencies=tuple(_frequencies(text) if axes else ()),
            axes=tuple(axes),
            **_cutting(source, family, config) | {"text": words},
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
    with (
        quiet_loaders(),
        as_checkpoint_error(source),
        torch.no_grad(),
        FakeTensorMode() as mode,
    ):
        config = transformers.AutoConfig.from_pretrained(source, **NO_OWN_CODE)
        with no_init_weights():
            how = {"dtype": torch.float32, "attn_implementation": "eager"}
            whole = transformers.AutoModelForImageTextToText.from_config(config, **how)
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
            counter = FlopCounterMode(display=False, custom_mapping=_OPERATIONS)
            with counter, register_module_forward_hook(note):
                rows = family.encode(model, *map(mode.from_tensor, inputs))
            return rows, counter.get_total_flops(), max(held)

        rows = encode(np.zeros((vision.side, vision.side, 3), np.uint8))[0]
        vision, work = replace(vision, rows=rows.numel() // rows.shape[-1]), []
        for width, height in sizes:
            tiles = cut(np.zeros((height, width, 3), np.uint8), vision)
            shapes = Counter(tile.shape for tile in tiles.pixels)
            each = [(n, *encode(np.zeros(s, np.uint8))[1:]) for s, n in shapes.items()]
            gflop = round(sum(n * operations for n, operations, _ in each) / 1e9, 3)
            held = round(max(held for *_, held in each) / 1e6, 3)
            passes = len(tiles.pixels)
            work.append(EncoderWork(width, height, tiles.rows, passes, gflop, held))
        # SigLIP's head, which pools a picture, is in no graph.
        named = model.named_parameters()
        weights = sum(x.numel() for name, x in named if ".head." not in name)
        return Encoder(weights, rows.shape[-1], tuple(work))


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_OPERATIONS = {_FLASH: lambda q, k, *_, **__: 4 * math.prod(q) * k[2]}  # By shapes.


def _without_text(whole: Any) -> Any:
    """The inner model of a checkpoint, without its language model."""
    model = whole.model
    for name in ("text_model", "language_model", "audio_tower", "embed_audio"):
        if hasattr(model, name):
            setattr(model, name, None)
    for config in [m.config for m in model.modules() if hasattr(m, "config")]:
        config._attn_implementation = FULL
    return model


def _cutting(source: str, family: Family, config: Any) -> dict[str, Any]:
    """The fields of `Vision` that say how pictures are cut, but for a tile's rows."""
    processor = _read_processor(source)
    fields: dict[str, Any] = dict.fromkeys(("least", "most", "rows"), 1)
    fields |= {"tiling": WHOLE, "edge": 0, "text": dict.fromkeys(TEXTS, "")}
    fields |= {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}
    fields["filter"] = _FILTERS[int(processor.resample)]
    return fields | family.fields(processor, config)


_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


def _read_processor(source: str) -> Any:
    """The fields of an image processor, if it has the usual steps."""
    files = [read_fields(source, name) or {} for name in PROCESSORS]
    fields = files[1].get("image_processor", {}) | files[0]
    if str(fields.get("image_processor_type")).startswith("Lfm2Vl"):
        processor = SimpleNamespace(**fields)  # transformers' needs torchvision
    else:
        processor = transformers.AutoImageProcessor.from_pretrained(
            source, backend="pil", **NO_OWN_CODE
        )
    steps = dict.fromkeys(("do_resize", "do_rescale", "use_thumbnail"), 1)
    for step, does in {**steps, "do_center_crop": 0, "do_pan_and_scan": 0}.items():
        if bool(getattr(processor, step, does)) != does:
            fact = f"the image processor of {source} has {step}: {not does}"
            raise UnsupportedModelError(f"{fact}; see docs/images.md")
    if not processor.do_normalize:
        processor.image_mean, processor.image_std = [0.0] * 3, [1.0] * 3
    if abs(processor.rescale_factor * 255 - 1) > 1e-6:
        fact = f"the image processor of {source} scales by {processor.rescale_factor}"
        raise UnsupportedModelError(f"{fact}; see docs/images.md")
    return processor
