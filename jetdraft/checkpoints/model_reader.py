"""Reads a checkpoint's config and model, and what it says of speech."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from optimum.exporters.tasks import TasksManager

from jetdraft.bundle import HOP, SAMPLE_RATE, WINDOW, Speech
from jetdraft.checkpoints.attention import IMPLEMENTATION
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.folder import (
    NO_OWN_CODE,
    as_checkpoint_error,
    check_folder,
    stored_dtype,
)
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.packed import PackedWeights
from jetdraft.checkpoints.refusals import (
    Bounds,
    build_skeleton,
    check_kinds,
    check_layers,
    check_unread,
)
from jetdraft.checkpoints.silence import no_progress_bars, silenced
from jetdraft.checkpoints.source_attention import IMPLEMENTATION as SOURCE_ATTENTION
from jetdraft.checkpoints.source_attention import set_attention
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.parsing import RecordError, read_record

_DECODER_TASK, _SOURCE_TASK = "text-generation", "text2text-generation"
_SPEECH_TASK = "automatic-speech-recognition"
"""The tasks of decoders alone, of encoder-decoders, and of those that hear, as optimum
names them."""

_KNOWN_ARCHITECTURES = {"mimo": "qwen2"}
"""Model types that come with their own code, which is never run, and the type of
transformers that computes the same: MiMo is Qwen2 with an MTP module."""


def load_config(source: str) -> Any:
    """Read a checkpoint's config; its own code never runs; `CheckpointError`."""
    check_layers(source)
    with as_checkpoint_error(source):
        config = _config_of_known_type(
            source
        ) or transformers.AutoConfig.from_pretrained(source, **NO_OWN_CODE)
        check_causal(source, config)
    return config


def check_exportable(source: str) -> None:
    """Raise `UnsupportedModelError` for a config of a kind that cannot be exported."""
    if is_gguf(source):
        return
    check_folder(source)
    with silenced(logging.WARNING), no_progress_bars():
        text = load_config(source).get_text_config(decoder=True)
    fields = text.to_dict()
    if isinstance(of_dbrx := fields.get("ffn_config"), dict):
        fields = of_dbrx | fields
    # Some configs compute the types of their layers.
    check_kinds(
        source,
        lambda name: fields[name] if name in fields else getattr(text, name, None),
    )


def _config_of_known_type(source: str) -> Any:
    """Return the config of a type in `_KNOWN_ARCHITECTURES`; None for other types."""
    fields, _ = transformers.PreTrainedConfig.get_config_dict(source)
    kind = _KNOWN_ARCHITECTURES.get(str(fields.get("model_type")))
    if kind is None:
        return None
    own = {"model_type", "architectures", "auto_map"}
    known = {name: value for name, value in fields.items() if name not in own}
    return transformers.AutoConfig.for_model(kind, **known)


def check_causal(source: str, config: Any) -> None:
    """Raise `UnsupportedModelError` for a model that attends in both directions."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{source} attends in both directions; only causal decoders can be exported"
        )


def read_packed(source: str, config: Any) -> PackedWeights | None:
    """Read quantized weights, and drop the config's entry for them; None for floats."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    # With it transformers would look for a GPU's kernels.
    del config.quantization_config
    with as_checkpoint_error(source):
        folder = Path(source)
        if not folder.is_dir():
            patterns = ["*.safetensors", "*.json"]
            folder = Path(snapshot_download(source, allow_patterns=patterns))
        return PackedWeights.read(folder, settings)


def load_model(
    source: str,
    config: Any,
    packed: PackedWeights | None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a model with jetdraft's attention; weights are as stored, or in `dtype`."""
    kind = config.model_type
    task = _SOURCE_TASK if config.is_encoder_decoder else _DECODER_TASK
    try:
        model_class = TasksManager.get_model_class_for_task(
            _SPEECH_TASK if is_speech_model(config) else task,
            "pt",
            model_type=kind,
            library="transformers",
        )
    except (KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"{source} is a {kind!r} model, which optimum cannot load for text "
            "generation; export a language model"
        ) from error
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None and type(config) not in mapping:
        more = config.get_text_config(decoder=True) is not config
        raise UnsupportedModelError(
            f"{source} is a {kind!r} model, which "
            f"{'reads more than text' if more else 'writes no text'}, and jetdraft "
            "exports language models alone; see docs/models.md"
        )
    with as_checkpoint_error(source):
        empty = build_skeleton(source, model_class, config, Bounds.of(source))
        if packed is not None:
            # from_pretrained of a family needs a folder, and would load its weights.
            model_class = type(empty)
        model, info = model_class.from_pretrained(
            None if packed else source,
            config=config,
            state_dict=packed.floats if packed else None,
            dtype=dtype or stored_dtype(source),
            output_loading_info=True,
            # Otherwise the reason goes to a log, which is silenced here.
            ignore_mismatched_sizes=True,
            **NO_OWN_CODE,
        )
    _check_loaded(source, model, info, packed.blocks if packed else ())
    if packed is not None and not is_gguf(source):
        with contextlib.suppress(OSError):  # the file is optional
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                source, **NO_OWN_CODE
            )
    if config.is_encoder_decoder:
        set_attention(model, SOURCE_ATTENTION)
    else:
        model.set_attn_implementation(IMPLEMENTATION)
    model.requires_grad_(False)
    return model.eval()


def _check_loaded(
    source: str, model: Any, info: dict[str, Any], integers: Iterable[str]
) -> None:
    """Raise `CheckpointError` for weights or an architecture that cannot be used."""
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"the weights of {source} do not fit its config.json ({name} is "
            f"{list(stored)}, expected {list(expected)}); fetch it again"
        )
    if info["missing_keys"]:
        # transformers fills them with random numbers, with a warning.
        raise CheckpointError(
            f"{source} lacks the weights {sorted(info['missing_keys'])[0]!r} and "
            f"{len(info['missing_keys']) - 1} more; fetch it again"
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    check_unread(source, names, info["unexpected_keys"])
    # What an encoder-decoder does beside the interface, `check_source_seams` sees.
    if not (model._supports_attention_backend or model.config.is_encoder_decoder):
        raise UnsupportedModelError(
            f"{type(model).__name__} attends by code of its own, or not at all, in "
            "place of transformers' AttentionInterface; see docs/models.md"
        )
    if unknown := sorted(set(integers).difference(names)):
        raise CheckpointError(
            f"{source} has quantized weights {unknown[0]!r} and {len(unknown) - 1} "
            "more under names that its architecture does not have; save it again with "
            "a current transformers"
        )


PREPROCESSOR = "preprocessor_config.json"
"""The file that describes the spectrum of a speech model."""

_SPECTRUM_FIELDS = {"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": WINDOW}


def is_speech_model(config: Any) -> bool:
    """Whether a config describes an encoder-decoder that reads log-mel features."""
    return bool(config.is_encoder_decoder and getattr(config, "num_mel_bins", 0))


def read_speech(source: str, model: Any) -> Speech | None:
    """Return the special tokens of a speech model; None for other models.

    Raises `CheckpointError` for a file without them, `UnsupportedModelError` for
    another spectrum than Whisper's.
    """
    if not is_speech_model(model.config):
        return None
    _check_spectrum(source, model.config.num_mel_bins)
    settings = model.generation_config
    languages = getattr(settings, "lang_to_id", None) or {}
    if isinstance(languages, dict):  # by tokens such as <|en|>
        languages = {str(name).strip("<|>"): id for name, id in languages.items()}
    fields = {
        "no_timestamps": getattr(settings, "no_timestamps_token_id", None),
        "languages": languages,
        "tasks": getattr(settings, "task_to_id", None) or {},
        "suppressed": _valid_ids(settings.suppress_tokens),
        "suppressed_first": _valid_ids(settings.begin_suppress_tokens),
        "latest_first": getattr(settings, "max_initial_timestamp_index", None) or 0,
    }
    try:
        speech: Speech = read_record(Speech, fields)
    except RecordError as error:
        raise CheckpointError(
            f"generation_config.json of {source} lacks tokens of speech, or has wrong "
            f"ones ({error}); fetch the current file of the checkpoint"
        ) from error
    size = model.get_output_embeddings().weight.shape[0]
    if not speech.fits(size):
        raise CheckpointError(
            f"the tokens of speech in generation_config.json of {source} do not fit "
            f"its {size} tokens; fetch the current file of the checkpoint"
        )
    return speech


def _valid_ids(ids: Any) -> Any:
    """Return a list of ids without -1, which stands for none; [] for other values."""
    return [id for id in ids if id != -1] if isinstance(ids, list) else []


def _check_spectrum(source: str, bins: int) -> None:
    fields = read_fields(source, PREPROCESSOR) or {}
    for name, number in {**_SPECTRUM_FIELDS, "feature_size": bins}.items():
        if fields.get(name, number) != number:
            raise UnsupportedModelError(
                f"{PREPROCESSOR} of {source} has {name} {printable(fields[name], 20)}, "
                f"and only {number} can be exported; export another checkpoint"
            )
