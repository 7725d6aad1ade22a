"""Reads what a checkpoint that hears says of its tokens and of its spectrum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.parsing import RecordError, read_json_file, read_record
from jetdraft.speech_tokens import HOP, SAMPLE_RATE, WINDOW, Speech

PREPROCESSOR = "preprocessor_config.json"
_SPECTRUM = {"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": WINDOW}


def hears(config: Any) -> bool:
    """Whether a config is that of an encoder-decoder which reads log-mel features."""
    return bool(config.is_encoder_decoder and getattr(config, "num_mel_bins", 0))


def read_speech(source: str, model: Any) -> Speech | None:
    """The tokens of a model that hears; None for other models.

    Raises `CheckpointError` for a generation_config.json without them, and
    `UnsupportedModelError` for another spectrum than Whisper's.

        read_speech("whisper-tiny/", model).languages["en"]    # 50259
    """
    if not hears(model.config):
        return None
    _check_spectrum(source, model.config.num_mel_bins)
    settings = model.generation_config
    fields = {
        "no_timestamps": getattr(settings, "no_timestamps_token_id", None),
        "languages": _languages(getattr(settings, "lang_to_id", None) or {}),
        "tasks": getattr(settings, "task_to_id", None) or {},
        "suppressed": _ids(settings.suppress_tokens),
        "suppressed_first": _ids(settings.begin_suppress_tokens),
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


def _languages(ids: Any) -> Any:
    """Ids by codes, from ids by tokens such as <|en|>."""
    if not isinstance(ids, dict):
        return ids
    return {str(token).strip("<|>"): id for token, id in ids.items()}


def _ids(ids: Any) -> Any:
    """A list of ids; OpenAI's files have -1 in it for none."""
    return [id for id in ids if id != -1] if isinstance(ids, list) else []


def _check_spectrum(source: str, bins: int) -> None:
    """Raise `UnsupportedModelError` for a spectrum that is not Whisper's."""
    file = transformers.utils.cached_file(
        source, PREPROCESSOR, _raise_exceptions_for_missing_entries=False
    )
    if file is None:
        return
    try:
        fields = dict(read_json_file(Path(file)))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{PREPROCESSOR} of {source} cannot be read ({error}); fetch it again"
        ) from error
    for name, number in {**_SPECTRUM, "feature_size": bins}.items():
        if fields.get(name, number) != number:
            raise UnsupportedModelError(
                f"{PREPROCESSOR} of {source} has {name} {printable(fields[name], 20)}, "
                f"and only {number} can be exported; export another checkpoint"
            )
