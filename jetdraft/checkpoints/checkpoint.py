"""Reads a Hugging Face checkpoint: its model, tokenizer and special tokens."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from optimum.exporters.tasks import TasksManager
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jetdraft.checkpoints.attention import IMPLEMENTATION
from jetdraft.checkpoints.defaults import read_defaults
from jetdraft.checkpoints.draft_vocabulary import read_ids
from jetdraft.checkpoints.gguf import is_gguf, read_gguf, read_gguf_tokenizer
from jetdraft.checkpoints.packed import PackedWeights
from jetdraft.checkpoints.parameters import compute_in, convert
from jetdraft.checkpoints.preview.config_bounds import Bounds, check_layers, skeleton
from jetdraft.checkpoints.preview.unread_layers import check_unread
from jetdraft.checkpoints.probing.probe_files import (
    ProbeSettings,
    load_probes,
    read_settings,
)
from jetdraft.checkpoints.probing.probed import Probed
from jetdraft.checkpoints.silence import silenced
from jetdraft.checkpoints.source_attention import (
    IMPLEMENTATION as SOURCE_IMPLEMENTATION,
)
from jetdraft.checkpoints.source_attention import implement
from jetdraft.checkpoints.sources.speech_reader import hears, read_speech
from jetdraft.checkpoints.streamed import SETTINGS, SHARED
from jetdraft.checkpoints.streamed import WEIGHTS as STREAM_WEIGHTS
from jetdraft.checkpoints.taps import Taps
from jetdraft.errors import CheckpointError, JetdraftError, UnsupportedModelError
from jetdraft.speech.speech_tokens import Speech
from jetdraft.untrusted.printable import printable


@dataclass(frozen=True)
class Checkpoint:
    """A loaded language model, and the parts of its folder that a bundle keeps.

    `tokenizer` is the text of a tokenizer.json and `chat_template` a Jinja text; both
    are None for a checkpoint without them. `generation` has sampling defaults, see
    `read_defaults`, and `special_tokens` the tokenizer's, see `Bundle`. `taps` are what
    a head reads of the model's states. `draft_ids` int64 [n] are the tokens that a
    drafter was trained to draft, None for all. `start_token_ids` are the tokens that an
    encoder-decoder's text begins with, empty for a decoder alone. `speech` has the
    tokens of a model that hears, None for other models.

        checkpoint = Checkpoint.load("examples/pycode/target", torch.float32)
    """

    source: str
    model: Any
    tokenizer: str | None
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    packed: PackedWeights | None = None
    streams: ProbeSettings | None = None
    generation: dict[str, float] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    taps: Taps | None = None
    draft_ids: Tensor | None = None
    start_token_ids: tuple[int, ...] = ()
    speech: Speech | None = None

    @classmethod
    def load(cls, source: str, dtype: torch.dtype) -> Checkpoint:
        """Load a local folder, a GGUF file or a hub id; raise `CheckpointError`.

        The model computes in `dtype`; its weights keep the type they are stored in.
        """
        if is_gguf(source):
            return cls._of_gguf(source, dtype)
        _check_folder(source)
        with silenced(logging.WARNING), _no_progress_bars():
            generation = read_defaults(source)
            config = _load_config(source)
            packed = _read_packed(source, config)
            model = _load_model(source, config, packed)
            compute_in(model, dtype)
            tokenizer = _load_tokenizer(source)
        return cls(
            source=source,
            model=model,
            tokenizer=tokenizer and tokenizer.backend_tokenizer.to_str(),
            chat_template=_chat_template(tokenizer),
            eos_token_ids=_eos_token_ids(source, model),
            packed=packed and replace(packed, floats={}),
            streams=read_settings(checkpoint_folder(source)),
            generation=generation,
            special_tokens=tokenizer.special_tokens_map if tokenizer else {},
            draft_ids=read_ids(
                checkpoint_folder(source), model.get_output_embeddings().weight.shape[0]
            ),
            start_token_ids=_start_token_ids(source, model),
            speech=read_speech(source, model),
        )

    @classmethod
    def _of_gguf(cls, source: str, dtype: torch.dtype) -> Checkpoint:
        with silenced(logging.WARNING), _no_progress_bars():
            contents = read_gguf(source)
            _check_config(source, contents.config)
            packed = contents.packed
            model = _load_model(source, contents.config, packed, contents.dtype)
            compute_in(model, dtype)
        return cls(
            source=source,
            model=model,
            tokenizer=contents.tokenizer,
            chat_template=contents.chat_template,
            eos_token_ids=_eos_token_ids(source, model),
            # Without integers it is a checkpoint of floats like any other.
            packed=replace(packed, floats={}) if packed.blocks else None,
            special_tokens=contents.special_tokens,
        )

    @property
    def head(self) -> str:
        """The name of the LM head's weight."""
        return self.names()[id(self.model.get_output_embeddings().weight)]

    @property
    def reads_source(self) -> bool:
        """Whether it is an encoder-decoder, which writes about a source."""
        return bool(self.model.config.is_encoder_decoder)

    def names(self) -> dict[int, str]:
        """The names of all weights by Python's `id`.

        A weight that the embedding and a linear layer share has the layer's name.
        """
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                names[id(layer.weight)] = f"{name}.weight"
        return names

    def matrices(self) -> set[str]:
        """The names of the weights of all linear layers, each matrix once."""
        names, layers = self.names(), self.model.modules()
        return {names[id(m.weight)] for m in layers if isinstance(m, torch.nn.Linear)}

    def with_streams(self, scale: float) -> Probed:
        """The model with the probes that were trained for it.

        In the shared mode the LoRA, times `scale`, is added to the model's weights.
        """
        assert self.streams is not None
        if self.packed is not None and self.streams.mode == SHARED:
            raise CheckpointError(
                f"{self.source} is quantized already, so LoRA cannot be added to its "
                "weights; train streams of mode lossless"
            )
        convert(self.model, torch.float32)  # LoRA may be added to the weights
        folder = checkpoint_folder(self.source)
        if weights_sha256(folder) != self.streams.base:
            raise CheckpointError(
                f"the streams in {self.source} were trained for other weights than "
                "this folder has; train the streams again"
            )
        return load_probes(self.model, self.streams, folder, scale)

    @cached_property
    def sha256(self) -> str:
        """One hash over the weight files.

        Raises `CheckpointError` where there are no safetensors.
        """
        return weights_sha256(checkpoint_folder(self.source))

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the LM head can choose."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def parameters(self) -> int:
        """The number of weights; a tied weight counts once."""
        return sum(p.numel() for p in self.model.parameters())


def _check_folder(source: str) -> None:
    """Raise `CheckpointError` for a local path without a config.

    Any other source may be a hub id.
    """
    path = Path(source)
    # Unlike those of `Path`, these functions take a name of any length.
    looks_local = os.path.exists(source) or source.startswith((".", "/", "~"))
    looks_local = looks_local or path.suffix == ".gguf"
    # A hub id has one slash, and its owner is no folder here.
    looks_local = looks_local or source.count("/") != 1
    looks_local = looks_local or os.path.isdir(path.parent)
    if not looks_local:
        return
    if not os.path.isdir(source):
        raise CheckpointError(
            f"no checkpoint at {printable(source)}; give a folder, a GGUF file, or a "
            "hub id like org/name"
        )
    if not (path / "config.json").is_file():
        for file in sorted(path.glob("*.gguf")):
            raise CheckpointError(f"{source} has no config.json; give the file {file}")
        raise CheckpointError(
            f"{source} has no config.json; give a folder that save_pretrained wrote"
        )
    check_entries(path)


def check_entries(folder: Path) -> None:
    """Raise `CheckpointError` for a pipe or a device, which might never end."""
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise CheckpointError(
                f"{printable(file)} is a pipe or a device; remove it, or fetch the "
                "files again"
            )


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint's files; for a hub id it is in the hub's cache.

    Raises `CheckpointError` for a GGUF file.
    """
    if is_gguf(source):
        raise CheckpointError(
            f"{source} is a GGUF file, not a folder of safetensors; give the model's "
            "Hugging Face folder"
        )
    if Path(source).is_dir():
        return Path(source)
    for name in (SETTINGS, STREAM_WEIGHTS):
        # transformers does not fetch streams; most checkpoints have none.
        transformers.utils.cached_file(
            source, name, _raise_exceptions_for_missing_entries=False
        )
    return Path(transformers.utils.cached_file(source, "config.json")).parent


def weights_sha256(folder: Path) -> str:
    """One hash over the weight files of a checkpoint."""
    digest = hashlib.sha256()
    files = [f for f in folder.glob("*.safetensors") if f.name != STREAM_WEIGHTS]
    if not files:
        raise CheckpointError(
            f"{folder} has no weights in .safetensors, by which a training names its "
            "target; save it again with save_pretrained"
        )
    for file in sorted(files):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def _load_config(source: str) -> Any:
    check_layers(source)
    with as_checkpoint_error(source):
        config = transformers.AutoConfig.from_pretrained(source, **_OWN_CODE)
        _check_config(source, config)
    return config


def _check_config(source: str, config: Any) -> None:
    """Raise `UnsupportedModelError` for a model that writes in both directions."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedModelError(
            f"{source} attends in both directions; only causal decoders can be exported"
        )


def _read_packed(source: str, config: Any) -> PackedWeights | None:
    """The integers of a checkpoint that is quantized already; None for floats."""
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


def _check_names(source: str, packed: PackedWeights, model: Any) -> None:
    """Raise `CheckpointError` for integers under a name that the model lacks."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = sorted(packed.blocks.keys() - names)
    if unknown:
        raise CheckpointError(
            f"{source} has quantized weights {unknown[0]!r} and {len(unknown) - 1} "
            "more under names that its architecture does not have; save it again with "
            "a current transformers"
        )


def _stored_dtype(source: str) -> torch.dtype:
    """The type of the floats in a folder's files, which config.json may not say.

    float32 if they have several types or another type.
    """
    types = set()
    for file in Path(source).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys() if file.name != STREAM_WEIGHTS else ()
            types |= {opened.get_slice(name).get_dtype() for name in names}
    floats = {name for name in types if name.startswith(("F", "BF"))}
    return (
        _DTYPES.get(floats.pop(), torch.float32) if len(floats) == 1 else torch.float32
    )


_OWN_CODE = {"trust_remote_code": False}
"""Otherwise transformers asks on the terminal whether to run a checkpoint's code."""

_DECODE, _REWRITE = "text-generation", "text2text-generation"
_HEAR = "automatic-speech-recognition"
"""The tasks of decoders alone, of encoder-decoders, and of those that hear, as optimum
names them."""

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def _load_model(
    source: str,
    config: Any,
    packed: PackedWeights | None,
    dtype: torch.dtype | None = None,
) -> Any:
    """The model that optimum finds, with jetdraft's attention and stored weights.

    The weights are kept in `dtype`, by default the type in a folder's files.
    """
    kind = config.model_type
    task = _REWRITE if config.is_encoder_decoder else _DECODE
    try:
        model_class = TasksManager.get_model_class_for_task(
            _HEAR if hears(config) else task,
            "pt",
            model_type=kind,
            library="transformers",
        )
    except (KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"{source} is a {kind!r} model, which optimum cannot load for text "
            "generation; export a language model"
        ) from error
    with as_checkpoint_error(source):
        empty = skeleton(source, model_class, config, Bounds.of(source))
        if packed is not None:
            # from_pretrained of a family needs a folder, and would load its weights.
            model_class = type(empty)
        model, info = model_class.from_pretrained(
            None if packed else source,
            config=config,
            state_dict=packed.floats if packed else None,
            dtype=dtype or _stored_dtype(source),
            output_loading_info=True,
            # Otherwise the reason goes to a log, which is silenced here.
            ignore_mismatched_sizes=True,
            **_OWN_CODE,
        )
    _check_loaded(source, model, info)
    if packed is not None:
        _check_names(source, packed, model)
    if packed is not None and not is_gguf(source):
        with contextlib.suppress(OSError):  # the file is optional
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                source, **_OWN_CODE
            )
    if config.is_encoder_decoder:
        implement(model, SOURCE_IMPLEMENTATION)
    else:
        model.set_attn_implementation(IMPLEMENTATION)
    model.requires_grad_(False)
    return model.eval()


def _check_loaded(source: str, model: Any, info: dict[str, Any]) -> None:
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
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    check_unread(source, names, info["unexpected_keys"])
    # What an encoder-decoder does beside the interface, `check_source_seams` sees.
    if not (model._supports_attention_backend or model.config.is_encoder_decoder):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} does not go through "
            "transformers' AttentionInterface; export another architecture"
        )


def _load_tokenizer(source: str) -> Any:
    """The fast tokenizer; None for a checkpoint without a tokenizer."""
    path = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / name).is_file() for name in names):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **_OWN_CODE)
    except Exception as error:  # tokenizers raises bare exceptions
        raise CheckpointError(
            f"the tokenizer of {source} cannot be read ({_first_line(error)}); check "
            "the folder or the hub id"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer of {source} has no tokenizer.json form; convert it first"
        )
    return tokenizer


def read_tokenizer(source: str) -> str | None:
    """The text of a source's tokenizer.json; no weight is read."""
    if is_gguf(source):
        return read_gguf_tokenizer(source)
    _check_folder(source)
    with silenced(logging.WARNING), _no_progress_bars():
        tokenizer = _load_tokenizer(source)
    return tokenizer and str(tokenizer.backend_tokenizer.to_str())


def _chat_template(tokenizer: Any) -> str | None:
    """The chat template; of several, the default and beside it that for tools."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, dict):
        return template
    default, tools = template.get("default"), template.get("tool_use")
    if default is None or tools is None:
        return default
    # Jinja drops the newline after a tag, and one at the end of a template.
    tools, default = (text.removesuffix("\n") for text in (tools, default))
    return f"{{% if tools is not none %}}{tools}{{% else %}}{default}{{% endif %}}"


def _eos_token_ids(source: str, model: Any) -> tuple[int, ...]:
    """The ends of text; ids beyond the vocabulary, often -1, cannot occur."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in ids):
            raise CheckpointError(
                f"the eos_token_id of {source} is {printable(ids, 40)}; correct its "
                "config.json or generation_config.json"
            )
        size = model.get_output_embeddings().weight.shape[0]
        return tuple(token for token in ids if 0 <= token < size)
    return ()


def _start_token_ids(source: str, model: Any) -> tuple[int, ...]:
    """The start token of an encoder-decoder, and the token that it forces after it."""
    if not model.config.is_encoder_decoder:
        return ()
    ids = [
        _setting(model, name)
        for name in ("decoder_start_token_id", "forced_bos_token_id")
    ]
    size = model.get_output_embeddings().weight.shape[0]
    if ids[0] is None or not all(
        id is None or (type(id) is int and 0 <= id < size) for id in ids
    ):
        raise CheckpointError(
            f"{source} does not say with which token its text begins "
            f"(decoder_start_token_id {printable(ids[0], 20)}); correct its "
            "config.json or generation_config.json"
        )
    return tuple(id for id in ids if id is not None)


def _setting(model: Any, name: str) -> Any:
    """A field of the generation's config, or else of the model's."""
    for config in (model.generation_config, model.config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


@contextlib.contextmanager
def as_checkpoint_error(source: str) -> Iterator[None]:
    """Turn the errors of loaders into `CheckpointError`s of one line.

    with as_checkpoint_error("org/name"): ...
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {source} are damaged ({error}); fetch them again"
        ) from error
    except JetdraftError:
        raise
    except Exception as error:  # pickle and transformers raise whatever they stumble on
        raise CheckpointError(
            f"cannot load {source} ({_first_line(error)}); check the folder or the "
            "hub id"
        ) from error


def _first_line(error: Exception) -> str:
    """The first line of a message, and the next one if the first announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return printable(" ".join(shown) or type(error).__name__)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the loaders' progress bars while the block runs."""
    shown = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
