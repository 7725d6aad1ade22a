"""The files of a head, and what their config and their tensors say of it."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import check_file_types, check_shards
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.layers import D2T, MAX_PADDING, T2D, ids_from_d2t
from jetdraft.errors import CheckpointError, as_error, printable, refusing
from jetdraft.parsing import read_json_file

# The last is Medusa's and Hydra's; other files of torch belong to a training.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt")
FIRST_LAYER = "stack.layers.0."
EMBEDDING_WEIGHT, LM_HEAD_WEIGHT = "embed_tokens.weight", "lm_head.weight"
LAYER_KEYS = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "max_position_embeddings", "vocab_size"),
    *("attention_bias", "mlp_bias", "model_type"),
}
SPECULATOR_KEYS = {
    *("speculators_model_type", "speculators_version", "speculators_config"),
    *("transformer_layer_config", "embed_requires_grad"),
}
_IGNORED_KEYS = {
    *("attention_dropout", "auto_map", "bos_token_id", "eos_token_id", "use_cache"),
    *("initializer_range", "pad_token_id", "pretraining_tp", "torch_dtype"),
    *("_name_or_path", "name_or_path"),
    "max_window_layers",  # means nothing without use_sliding_window
    "num_hidden_layers",  # some files have the target's; the tensors are counted
    "tie_word_embeddings",  # the tensors say it
    *PreTrainedConfig().to_dict(),
}
# Features that jetdraft does not support, with the values that turn them off.
_OFF = {"use_sliding_window": False, "sliding_window": None, "qkv_bias": False}
_OTHER_TARGET = "give the head of this target"  # The fix for a head of another.
Tensors = dict[str, Tensor]  # The tensors of a head by their names.
Sizes = tuple[HeadConfig, Tensor | None]


@dataclass(frozen=True)
class HeadFiles:
    """The config.json of a head's folder, and its tensors by their names."""

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, source: str) -> "HeadFiles":
        """Read a folder or a hub id, without code; raises `CheckpointError`."""
        folder = _find_folder(source)
        fact = f"{source} has no readable config.json"
        fix = "give the folder of a published head"
        with as_error(CheckpointError, (OSError, ValueError), fact, fix):
            config = read_json_file(folder / "config.json")
        if not isinstance(config, dict):
            fact = f"the config.json of {source} is no object"
            raise CheckpointError(f"{fact}; fetch it again")
        return cls(source, config, _read_tensors(source, folder))

    @property
    def architecture(self) -> str:
        """The first name in `architectures` of the config; "" without one."""
        return str((self.config.get("architectures") or [""])[0])

    @property
    def is_speculators(self) -> bool:
        """Whether the library speculators wrote them; its flags mean other things."""
        return "speculators_model_type" in self.config

    @property
    def is_model(self) -> bool:
        """Whether these are a whole model: layers without an fc that joins inputs."""
        names = {name.removeprefix("model.") for name in self.tensors}
        norms = (f"{layer}.hidden_norm.weight" for layer in ("layers.0", "midlayer"))
        first = "layers.0.input_layernorm.weight"  # EAGLE-1 has none
        return first in names and names.isdisjoint(("fc.weight", *norms))

    def has_tensor(self, pattern: str) -> bool:
        """Whether a pattern matches the whole name of some tensor."""
        return any(re.fullmatch(pattern, name) for name in self.tensors)

    def rename_tensors(self, table: Iterable[tuple[str, str | None]]) -> Tensors:
        """Return tensors renamed by the first matching pattern, or dropped for None."""
        patterns = [(re.compile(old), new) for old, new in table]
        tensors = {}
        for name, tensor in self.tensors.items():
            found = ((m, new) for old, new in patterns if (m := old.fullmatch(name)))
            match, new = next(found, (None, name))
            if new is not None:
                tensors[match.expand(new) if match else name] = tensor
        return tensors

    def stored_name(self, name: str, renamed: Mapping[str, Tensor]) -> str:
        """Return a tensor's name in the files, or guess it from its neighbours'."""
        names = {id(tensor): own for own, tensor in self.tensors.items()}
        known = {new: names[id(t)] for new, t in renamed.items() if id(t) in names}
        if name in known:
            return known[name]
        stems = [_differing_prefixes(new, own) for new, own in known.items()]
        fitting = [stem for stem in stems if name.startswith(stem[0])]
        new, own = max(fitting, key=lambda stem: len(stem[0]), default=("", ""))
        return own + name.removeprefix(new)

    def configured(self, config: dict[str, Any]) -> "HeadFiles":
        return replace(self, config=config)

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise `CheckpointError` for keys that are neither known nor harmless."""
        config = self.config
        off = {name for name, value in _OFF.items() if config.get(name, value) == value}
        unknown = config.keys() - set(known) - _IGNORED_KEYS - off - {"layer_types"}
        if set(config.get("layer_types") or ()) - {"full_attention"}:
            unknown.add("layer_types")
        if unknown:
            first = [(printable(n, 60), repr(config[n])) for n in sorted(unknown)[:9]]
            names = ", ".join(f"{name}={printable(value, 60)}" for name, value in first)
            raise CheckpointError(
                f"the config of {self.source} has {names}, which jetdraft does not "
                "know; a head is never read in part, so give another head"
            )

    def flattened(self, keys: Iterable[str], outer: Iterable[str]) -> "HeadFiles":
        """These files with one flat config; other keys are a `CheckpointError`."""
        if not self.is_speculators:
            self.check_keys(keys)
            return self
        self.check_keys({*outer, *SPECULATOR_KEYS})
        layer = self.config.get("transformer_layer_config") or {}
        self.configured(layer).check_keys(keys)
        return self.configured({**self.config, **layer})

    def positive_integer(self, name: str, default: int = 0) -> int:
        """Return a whole number of the config, from 1 on; default 0: it is required."""
        value = default if self.config.get(name) is None else self.config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._field_error(name, "a whole number from 1 on")
        return value

    def positive_number(self, name: str, default: float) -> float:
        """Return a number above 0 of the config, or the default."""
        value = default if self.config.get(name) is None else self.config[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (0 < value < math.inf):
            raise self._field_error(name, "a number above 0")
        return float(value)

    def refusal(self, fact: str, fix: str = "fetch it again") -> CheckpointError:
        """The error for what the head is, has or does."""
        return CheckpointError(f"{self.source} {fact}; {fix}")

    def _field_error(self, name: str, needed: str) -> CheckpointError:
        fact = f"no {name}"
        if name in self.config:
            fact = f"{name}={printable(repr(self.config[name]), 60)}"
        of = self.source
        return CheckpointError(f"the config of {of} has {fact}; it needs {needed}")

    def _rope(self) -> dict[str, Any]:
        """Return RoPE settings in transformers 5's form; the base is 10000 if unset."""
        config = self.config
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            own = self.configured({"rope_scaling": scaling})
            raise own._field_error("rope_scaling", "an object")
        rope = {"rope_theta": config.get("rope_theta"), **scaling}
        own = self.configured(rope)
        rope["rope_theta"] = own.positive_number("rope_theta", 10000.0)
        if "factor" in rope:
            rope["factor"] = own.positive_number("factor", 1.0)
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
        return rope

    def layer_fields(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return `HeadConfig` fields; sizes are the tensors', since configs err."""
        hidden = self.positive_integer("hidden_size")
        heads = self.positive_integer("num_attention_heads")
        query = tensors.get(f"{FIRST_LAYER}self_attn.q_proj.weight")
        if query is None or query.shape[0] % heads:
            raise self.refusal(f"has no q_proj of {heads} heads in its first layer")
        own = [name for name in tensors if name.startswith("stack.layers.")]
        activation = self.config.get("hidden_act") or "silu"
        if not isinstance(activation, str) or activation not in ACT2FN:
            needed = "an activation of transformers, for example silu or gelu"
            raise self._field_error("hidden_act", needed)
        return {
            "hidden_size": hidden,
            "num_layers": len({name.split(".")[2] for name in own}),
            "num_heads": heads,
            "num_kv_heads": self.positive_integer("num_key_value_heads", heads),
            "head_dim": query.shape[0] // heads,
            "intermediate_size": self.positive_integer("intermediate_size"),
            "hidden_act": activation,
            "rms_norm_eps": self.positive_number("rms_norm_eps", 1e-6),
            "rope": self._rope(),
            "max_positions": self.positive_integer("max_position_embeddings", 2048),
            "attention_bias": bool(self.config.get("attention_bias")),
            "mlp_bias": bool(self.config.get("mlp_bias")),
            "qk_norm": f"{FIRST_LAYER}self_attn.q_norm.weight" in tensors,
        }

    def fields_beside(self, tensors: Tensors, target: Checkpoint) -> dict[str, Any]:
        """Return the layers' fields, and the target's width and vocabulary size."""
        fields = self.layer_fields(tensors)
        size = target.model.config.get_text_config(decoder=True).hidden_size
        reads = self.config.get("target_hidden_size") or fields["hidden_size"]
        if reads != size:
            fact = f"reads states of {reads} numbers, but {target.source} has {size}"
            raise self.refusal(fact, _OTHER_TARGET)
        vocabulary = self.check_vocabulary(target)
        return fields | {"target_hidden_size": int(size), "vocab_size": vocabulary}

    def check_vocabulary(self, target: Checkpoint, own: int | None = None) -> int:
        """Return the target's number of tokens; raise if the head's number differs."""
        own = self.positive_integer("vocab_size") if own is None else own
        if abs(own - target.vocab_size) > MAX_PADDING:
            fact = f"is for a vocabulary of {own} tokens, but {target.source} has "
            raise self.refusal(f"{fact}{target.vocab_size}", _OTHER_TARGET)
        return target.vocab_size

    def mapped_ids(self, tensors: Tensors, target: Checkpoint) -> Tensor | None:
        """Take the map out of `tensors`; return the target's id of each LM head row."""
        own, size = self.positive_integer("vocab_size"), target.vocab_size
        rows = self.config.get("draft_vocab_size") or own
        maps = {n: tensors.pop(n) for n in list(tensors) if n.startswith((T2D, D2T))}
        if D2T not in maps and rows != own:
            fact = f"drafts from {rows} of {own} tokens but has no d2t that names them"
            raise self.refusal(fact)
        if own != size:
            embedding = target.model.get_input_embeddings()
            _fit_rows(tensors, EMBEDDING_WEIGHT, own, embedding.weight)
        if D2T in maps:
            ids = ids_from_d2t(self.source, maps, rows, own)
            return _drop_unknown_ids(tensors, ids, size)
        if own != size:
            head = target.model.get_output_embeddings()
            _fit_rows(tensors, LM_HEAD_WEIGHT, own, head.weight)
        if own >= size or LM_HEAD_WEIGHT not in tensors:
            return None
        return _drop_unknown_ids(tensors, torch.arange(size), own)

    def fit_heads(self, tensors: dict[str, Tensor], target: Checkpoint) -> int:
        """Cut LM heads in `tensors` to the target's rows; return how many they have."""
        first = tensors.get("lm_heads.0.weight")
        if first is None or first.ndim != 2:
            raise self.refusal("has no first LM head")
        rows = self.check_vocabulary(target, len(first))
        for name, rows_of_head in tensors.items():
            if name.startswith("lm_heads.") and len(rows_of_head) > rows:
                tensors[name] = rows_of_head[:rows]
        return min(len(first), rows)

    def taps_of(self, ids: Any, layers: int, shift: int = 0) -> tuple[int, ...]:
        """Return `ids` plus `shift` as taps; `CheckpointError` unless all are there."""
        known = isinstance(ids, list) and all(type(index) is int for index in ids)
        taps = tuple(index + shift for index in ids or ()) if known else ()
        if not taps or any(not 0 <= tap <= layers for tap in taps):
            fact = f"reads the target at {ids}, but its {layers} layers give {-shift} "
            raise self.refusal(f"{fact}to {layers - shift}", _OTHER_TARGET)
        return taps

    def check_fusion(self, tensors: Mapping[str, Tensor], size: int, taps: str) -> None:
        """Raise `CheckpointError` unless fc reads `size` numbers; `taps` names them."""
        if "fc.weight" not in tensors:
            raise self.refusal("has no fc.weight")
        width = tensors["fc.weight"].shape[1]
        if width != size:
            raise CheckpointError(
                f"the fc of {self.source} reads {width} numbers, but {taps} of "
                f"this target have {size}; {_OTHER_TARGET}"
            )


def _differing_prefixes(new: str, own: str) -> tuple[str, str]:
    """Return what is left of two dotted names without their common last parts."""
    parts = [name.split(".") for name in (new, own)]
    while parts[0] and parts[1] and parts[0][-1] == parts[1][-1]:
        parts = [names[:-1] for names in parts]
    first, second = ("".join(f"{part}." for part in names) for names in parts)
    return first, second


def _find_folder(source: str) -> Path:
    if os.path.isdir(source):
        check_file_types(Path(source))
        check_shards(Path(source))
        return Path(source)
    fact = f"no head at {printable(source)}; give a folder, or a hub id like org/name"
    with refusing(CheckpointError(fact), OSError, ValueError):
        return Path(snapshot_download(source, allow_patterns=["*.json", *_WEIGHTS]))


def _read_tensors(source: str, folder: Path) -> dict[str, Tensor]:
    """All tensors of the first format of which there are files, sharded or not."""
    for pattern in _WEIGHTS:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob(pattern)):
            tensors |= _read_weight_file(file)
        if tensors:
            return tensors
    fact = f"{source} has no weights in .safetensors, pytorch_model.bin or *_lm_head.pt"
    raise CheckpointError(f"{fact}; fetch it again")


def _read_weight_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        contents = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error
    except UnpicklingError as error:
        fact = f"{file} holds code beside its weights, which is never run"
        raise CheckpointError(f"{fact}; give a file of tensors only") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} holds no table of tensors; fetch it again")
    return {str(name): t for name, t in contents.items() if torch.is_tensor(t)}


def resize_rows(table: Tensor, rows: int) -> Tensor:
    """Return a table with `rows` rows: cut off, or filled up with rows of zeros."""
    known = table[:rows]
    return F.pad(known, (0, 0, 0, rows - len(known)))


def _fit_rows(tensors: dict[str, Tensor], name: str, own: int, theirs: Tensor) -> None:
    """Resize a table of `own` rows to the rows of `theirs`; drop it if it is theirs."""
    table = tensors.get(name)
    if table is None or table.ndim != 2 or len(table) != own:
        return  # filling the head says what is wrong
    shared = theirs.detach()[:own].float()
    if torch.equal(table[: len(theirs)].float(), shared):
        del tensors[name]
    else:
        tensors[name] = resize_rows(table, len(theirs))


def _drop_unknown_ids(tensors: dict[str, Tensor], ids: Tensor, size: int) -> Tensor:
    """Return ids below `size`; cut the other ids' rows from an LM head in `tensors`."""
    known = ids < size
    if LM_HEAD_WEIGHT in tensors and len(tensors[LM_HEAD_WEIGHT]) == len(ids):
        tensors[LM_HEAD_WEIGHT] = tensors[LM_HEAD_WEIGHT][known]
    return ids[known]
