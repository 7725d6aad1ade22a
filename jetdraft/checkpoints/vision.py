"""The encoder of a checkpoint's pictures, and how its processor cuts them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from jetdraft.bundle import GRID, MAX_TILES, SPLIT, TEXTS, WHOLE, Vision
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.folder import NO_OWN_CODE, as_checkpoint_error, stored_dtype
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.errors import UnsupportedModelError
from jetdraft.ort import no_progress_bars, silenced

# Files of which a folder has one if its pictures are read.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Family:
    """How models of a type read pictures; `text` has what `TEXTS` names.

    `encode` makes rows [n, rows, width] of pixels [n, 3, side, side].
    """

    encode: Callable[[Any, Tensor], Tensor]
    text: dict[str, str]
    tiling: Callable[[Any], dict[str, Any]]


def _encode_idefics(model: Any, pixels: Tensor) -> Tensor:
    side = model.config.vision_config.image_size // model.config.vision_config.patch_size
    mask = torch.ones(1, side, side, dtype=torch.bool)
    states = model.vision_model(pixel_values=pixels, patch_attention_mask=mask)
    rows: Tensor = model.connector(states.last_hidden_state)
    return rows


def _encode(model: Any, pixels: Tensor) -> Tensor:
    rows: Tensor = model.get_image_features(pixel_values=pixels).pooler_output
    return rows


def _idefics_tiling(processor: Any) -> dict[str, Any]:
    kind = SPLIT if processor.do_image_splitting else WHOLE
    side = processor.max_image_size["longest_edge"]
    return {"tiling": kind, "edge": processor.size["longest_edge"], "side": side}


def _got_tiling(processor: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"tiling": WHOLE, "side": processor.size["height"]}
    if processor.crop_to_patches:
        most = {"most_tiles": processor.max_patches}
        fields |= {"tiling": GRID, "least_tiles": processor.min_patches, **most}
    return fields


_IDEFICS = Family(
    _encode_idefics,
    {
        "tile": "<fake_token_around_image><row_{row}_col_{column}>",
        "line": "\n",
        "grid": "\n",
        "whole": "<fake_token_around_image><global-img>",
        "end": "<fake_token_around_image>",
    },
    _idefics_tiling,
)
_INTERN = Family(_encode, {"begin": "<img>", "end": "</img>"}, _got_tiling)
FAMILIES = {"idefics3": _IDEFICS, "smolvlm": _IDEFICS, "internvl": _INTERN}
"""Types whose pictures are read; of other types the language model is read alone."""


def reads_pictures(source: str) -> bool:
    """Whether a folder or hub id is of `FAMILIES`, with its image processor."""
    if is_gguf(source):
        return False
    fields = read_fields(source, "config.json") or {}
    return fields.get("model_type") in FAMILIES and any(
        read_fields(source, name) is not None for name in PROCESSORS
    )


class VisionTower(torch.nn.Module):
    """The part of a model that makes rows of tiles: its weights, and `Family.encode`."""

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model, self._family = model, family

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the rows [1, rows, width] of pixels [1, 3, side, side]."""
        return self._family.encode(self.model, pixels)


def read_vision(source: str, first_row: int, file: str) -> tuple[VisionTower, Vision]:
    """Read the encoder of a checkpoint that `reads_pictures`; `CheckpointError`.

    `first_row` is the id of the first row, and `file` the name of the graph.
    """
    with silenced(logging.WARNING), no_progress_bars(), as_checkpoint_error(source):
        whole = transformers.AutoModelForImageTextToText.from_pretrained(
            source, dtype=stored_dtype(source), attn_implementation="eager", **NO_OWN_CODE
        )
        processor = transformers.AutoImageProcessor.from_pretrained(
            source, backend="pil", **NO_OWN_CODE
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_OWN_CODE)
        config, model = whole.config, whole.model
        family = FAMILIES[config.model_type]
        for name in ("text_model", "language_model"):
            if hasattr(model, name):
                setattr(model, name, None)
        tiling = {"edge": 0, "least_tiles": 1, "most_tiles": MAX_TILES}
        tiling |= family.tiling(processor)
        tower = VisionTower(model.float().eval().requires_grad_(False), family)
        side = tiling["side"]
        with torch.no_grad():
            rows = tower(torch.zeros(1, 3, side, side)).shape[1]
        filters = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
        steps = ("do_resize", "do_rescale", "do_normalize")
        is_usual = all(getattr(processor, step) for step in steps)
        if not is_usual or abs(processor.rescale_factor * 255 - 1) > 1e-6:
            raise UnsupportedModelError(
                f"the image processor of {source} does not resize, rescale and "
                "normalize; see docs/images.md"
            )
        return tower, Vision(
            file=file,
            token=tokenizer.convert_ids_to_tokens(_token_id(config)),
            first_row=first_row,
            rows=rows,
            filter=filters[int(processor.resample)],
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            text={name: family.text.get(name, "") for name in TEXTS},
            **tiling,
        )


def _token_id(config: Any) -> int:
    """The id of the token that stands for a row of a picture."""
    return int(config.image_token_id)
