"""Reads GGUF files: the format of llama.cpp, one file with everything in it.

transformers maps the names of configs and weights, and says how llama.cpp has changed
a weight. Matrices keep their integers where `gguf_types` knows their type; transformers
changes those by the order of their rows only, if at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderTensor, dequantize
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from jetdraft.checkpoints.defaults import Generation
from jetdraft.checkpoints.gguf_tokenizer import (
    ends_of_text,
    read_tokenizer,
    special_tokens,
)
from jetdraft.checkpoints.gguf_types import TYPES
from jetdraft.checkpoints.packed import PackedWeights
from jetdraft.checkpoints.preview.config_bounds import SPARE, Bounds, skeleton
from jetdraft.checkpoints.preview.unsupported_kinds import check_kinds
from jetdraft.checkpoints.reading.fields import REFUSED, by_name, passed_over, row_of
from jetdraft.checkpoints.reading.gguf_fields import FILE, MODEL
from jetdraft.errors import CheckpointError, JetdraftError, UnsupportedModelError
from jetdraft.quant.blocks import Blocks
from jetdraft.untrusted.printable import printable

_MAGIC = b"GGUF"

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
ROTATIONS = "rope_freqs.weight"

_NUMBERS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Fields behind the family's name, and the names that configs have for them."""

_NO_NUMBER = "the models of this family have no such number"

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

_ALIKE = 0.98
"""The cosine above which head and embedding are two copies of one matrix. Two random
matrices have 0, copies of 4 and 8 bits 0.997."""

_SAMPLE = 64
"""Rows of head and embedding that are compared."""

_DAMAGED = (ValueError, IndexError, KeyError, TypeError, OverflowError, RuntimeError)
"""What the reader raises for a file that is cut off."""

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class GgufContents:
    """Everything that a bundle takes from a GGUF file.

    `dtype` is the type in which torch keeps the floats.

        read_gguf("model.gguf").packed.blocks
    """

    config: Any
    packed: PackedWeights
    dtype: torch.dtype
    tokenizer: str | None
    chat_template: Any
    special_tokens: dict[str, str]
    generation: Generation
    passed_over: tuple[str, ...]


def is_gguf(source: str) -> bool:
    """Whether a source is a file; other checkpoints are folders or hub ids."""
    return os.path.isfile(source)  # False for a name that is too long


def read_gguf(source: str) -> GgufContents:
    """Read a file; raises `CheckpointError`, or `UnsupportedModelError` by name."""
    with _as_checkpoint_error(source):
        file = GgufFile(source)
        passed = file.passed_over()
        config = file.config()
        packed = file.weights(config)
        template = "tokenizer.chat_template"
        return GgufContents(
            config=config,
            packed=packed,
            dtype=file.dtype(),
            tokenizer=file.tokenizer(),
            chat_template={
                "default": file.field(template),
                "tool_use": file.field(f"{template}.tool_use"),
            },
            special_tokens=special_tokens(file.field),
            generation=file.generation(),
            passed_over=passed,
        )


def read_gguf_tokenizer(source: str) -> str | None:
    """The tokenizer alone; raises what `read_gguf` raises."""
    with _as_checkpoint_error(source):
        return GgufFile(source).tokenizer()


class GgufFile:
    """An open GGUF file; its tensors are mapped into memory.

    GgufFile("model.gguf").field("general.architecture")    # "llama"
    """

    def __init__(self, source: str) -> None:
        path = Path(source)
        if not path.is_file():
            raise CheckpointError(f"no GGUF file at {source}; give a file, or a folder")
        self.source, self.path = source, path
        _check_beginning(path)
        self.reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.family = str(self.field("general.architecture"))
        self._check()

    def field(self, name: str) -> Any:
        """The value of a field; None for a field that the file lacks."""
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def _check(self) -> None:
        """Refuse files that cannot become one decoder."""
        parts = self.field("split.count")
        if parts is not None and parts > 1:
            raise CheckpointError(
                f"{self.source} is one of {parts} parts; join them with "
                "llama-gguf-split --merge"
            )
        check_kinds(self.source, lambda name: self.field(f"{self.family}.{name}"))
        if self.family not in GGUF_SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.source} is a {self.family!r} model, which transformers cannot "
                "read from a GGUF file; export its Hugging Face folder"
            )
        if not self.tensors:
            raise CheckpointError(f"{self.source} has no weights; give a whole model")
        layers = self.field(f"{self.family}.block_count")
        if isinstance(layers, int) and layers > len(self.tensors):
            raise CheckpointError(
                f"{self.source} has {len(self.tensors)} weights for {layers} layers; "
                "fetch it again"
            )

    def tokenizer(self) -> str | None:
        """The text of a tokenizer.json; None without a vocabulary."""
        try:
            return read_tokenizer(self.source, self.field)
        except JetdraftError:
            raise
        except Exception as error:  # tokenizers raises bare exceptions
            raise CheckpointError(
                f"the tokenizer of {self.source} cannot be read ({error}); fetch the "
                "file again"
            ) from error

    def generation(self) -> Generation:
        """How the file wants its text to be chosen, by transformers' names."""
        names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}
        names["min_p"] = "min_p"
        fields = {n: self.field(f"general.sampling.{own}") for n, own in names.items()}
        if any(value is not None for value in fields.values()):
            fields["do_sample"], fields["top_k"] = True, fields["top_k"] or 0
            if fields["temperature"] is None:
                fields["temperature"] = 0.8  # of llama.cpp
        fields["suppress_tokens"] = self.field("tokenizer.ggml.suppress_tokens")
        found = Generation(self.source, "the metadata", fields)
        found.defaults()  # refuses bad values
        return found

    def passed_over(self) -> tuple[str, ...]:
        """A line for each field that would change the text, and does not.

        Raises `UnsupportedModelError` for a field with which no model here computes.
        """
        lines: list[str] = []
        for name in self.reader.fields:
            own = name.removeprefix(f"{self.family}.")
            rows = by_name(FILE if own == name else MODEL)
            row, value = row_of(own, rows), self.field(name)
            if row is not None and row.fate == REFUSED and not row.neutral(value):
                self._refuse(name, value, row.why)
            mine = own != name or name.startswith("tokenizer.")
            if row is not None or mine:  # other programs have fields of their own
                lines += passed_over("metadata", {own: value}, rows)
        return tuple(lines)

    def _refuse(self, name: str, value: Any, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{self.source} has {name} {printable(value, 40)}, and {why}; export its "
            "Hugging Face folder"
        )

    # --- the config -------------------------------------------------------------------

    def config(self) -> Any:
        """The config that transformers makes of the file, with what it leaves out."""
        folder = self.path.absolute().parent
        config = transformers.AutoConfig.from_pretrained(
            str(folder), gguf_file=self.path.name, trust_remote_code=False
        )
        size = self._own("attention.key_length")
        if size is not None and getattr(config, "head_dim", size) is not None:
            config.head_dim = size
        self._set_numbers(config)
        if getattr(config, "rope_parameters", None):
            self._set_rotations(config)
        config.tie_word_embeddings = self.tied
        config.eos_token_id = ends_of_text(self.field) or None
        return config

    def _own(self, name: str) -> Any:
        """The value of a field of the family; None for one that the file lacks."""
        return self.field(f"{self.family}.{name}")

    def _set_numbers(self, config: Any) -> None:
        """Set what transformers reads for some families only, or not at all."""
        for name, attributes in _NUMBERS.items():
            value = self._own(name)
            known = [each for each in attributes if hasattr(config, each)]
            if value is not None and known:
                setattr(config, known[0], value or None)
            elif value and "epsilon" not in name:  # a model has one kind of norms
                self._refuse(f"{self.family}.{name}", value, _NO_NUMBER)
        size, window = _head_size(config), self._own("attention.sliding_window")
        kinds = getattr(config, "layer_types", None)
        has_windows = not kinds or "sliding_attention" in kinds
        if window and has_windows and hasattr(config, "sliding_window"):
            config.sliding_window = window
        elif window and window < config.max_position_embeddings:
            self._refuse(f"{self.family}.attention.sliding_window", window, _NO_NUMBER)
        if hasattr(config, "query_pre_attn_scalar"):
            # So does llama.cpp: the models of 27 B scale by another size.
            is_27b = _LAYERS_OF_27B.get(self.family) == config.num_hidden_layers
            width = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = width if is_27b else size
        period = self._own("attention.sliding_window_pattern")
        kinds = kinds or [""] * config.num_hidden_layers
        windows = [kind == "sliding_attention" for kind in kinds]
        if isinstance(period, int):
            period = [(place + 1) % period != 0 for place in range(len(windows))]
        for name, expected, value in (
            ("attention.value_length", size, self._own("attention.value_length")),
            ("attention.sliding_window_pattern", windows, period),
            (
                "use_parallel_residual",
                getattr(config, "use_parallel_residual", False),
                self._own("use_parallel_residual"),
            ),
        ):
            if value is not None and value != expected:
                self._refuse(
                    f"{self.family}.{name}", self._own(name), f"the model {expected}"
                )

    def _set_rotations(self, config: Any) -> None:
        """Set the base and the scaling of rotations as llama.cpp reads them."""
        parameters = config.rope_parameters
        full = parameters.get("full_attention", parameters)
        base = self._own("rope.freq_base") or 10000.0
        local = self._own("rope.freq_base_swa")
        full["rope_theta"] = base
        if "sliding_attention" in parameters:
            parameters["sliding_attention"]["rope_theta"] = local or 10000.0
        elif local not in (None, base):
            self._refuse(f"{self.family}.rope.freq_base_swa", local, _NO_NUMBER)
        self._set_rotated(full, config)
        kind = self._own("rope.scaling.type") or "linear"
        factor = self._own("rope.scaling.factor") or self._own("rope.scale_linear") or 1
        strength = self._own("rope.scaling.attn_factor") or 1.0
        scaling: dict[str, Any] = {}
        if ROTATIONS in self.tensors:
            scaling = self._llama3_scaling(config)
        elif kind == "yarn":
            original = self._own("rope.scaling.original_context_length")
            scaling = {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original
                or config.max_position_embeddings,
                "attention_factor": strength * (0.1 * math.log(factor) + 1),
            }
            for name in ("beta_fast", "beta_slow"):
                value = self._own(f"rope.scaling.yarn_{name}")
                scaling |= {} if value is None else {name: value}
        elif kind == "linear" and factor != 1:
            scaling = {"rope_type": "linear", "factor": factor}
        elif kind not in ("none", "linear"):
            raise UnsupportedModelError(
                f"{self.source} scales its rotations by {kind!r}, which is not known; "
                "export its Hugging Face folder"
            )
        if kind != "yarn" and strength != 1:
            self._refuse(
                f"{self.family}.rope.scaling.attn_factor", strength, _NO_NUMBER
            )
        full.update(scaling)

    def _set_rotated(self, rope: dict[str, Any], config: Any) -> None:
        """Set how much of a head turns; refuse a family that turns another part."""
        size, turned = _head_size(config), self._own("rope.dimension_count")
        share = rope.get("partial_rotary_factor")
        if turned is None or turned == int(size * (share or 1)):
            return
        if share is None:
            self._refuse(f"{self.family}.rope.dimension_count", turned, _NO_NUMBER)
        rope["partial_rotary_factor"] = turned / size

    def _llama3_scaling(self, config: Any) -> dict[str, Any]:
        """Llama 3's scaling; llama.cpp stores the factor of each frequency only."""
        stored = np.asarray(self.tensors[ROTATIONS].data, np.float32)
        scaling = {
            "rope_type": "llama3",
            "factor": float(stored.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        turns = 8192 / (2 * np.pi) * _frequencies(config)
        smooth = ((turns - 1) / (4 - 1)).clip(0, 1)
        expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        if len(stored) != len(expected) or not np.allclose(stored, expected, rtol=1e-3):
            raise UnsupportedModelError(
                f"{self.source} scales its rotations in another way than Llama 3; "
                "export its Hugging Face folder"
            )
        return scaling

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one matrix.

        A file may hold a tied matrix twice, with different integers.
        """
        if HEAD not in self.tensors:
            return True
        head, embedding = self.tensors[HEAD], self.tensors[EMBEDDING]
        if tuple(head.shape) != tuple(embedding.shape):
            return False
        rows = np.linspace(0, len(head.data) - 1, _SAMPLE).astype(np.int64)
        a, b = (
            dequantize(tensor.data[rows], tensor.tensor_type).ravel()
            for tensor in (head, embedding)
        )
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        return length > 0 and float(a @ b) > _ALIKE * length

    # --- the weights ------------------------------------------------------------------

    def weights(self, config: Any) -> PackedWeights:
        """All weights by their names in transformers, integers where they are kept."""
        processor = TENSOR_PROCESSORS.get(self.family, TensorProcessor)(
            config=config.to_dict()
        )
        bounds = Bounds(tensors=100 + SPARE * len(self.tensors))
        model = skeleton(self.source, transformers.AutoModelForCausalLM, config, bounds)
        names = get_gguf_hf_weights_map(model, processor)
        packed = PackedWeights("gguf", {}, {}, {})
        for tensor in self._needed(config):
            name = names.get(tensor.name)
            if name is None:
                raise UnsupportedModelError(
                    f"{self.source} has the weight {tensor.name!r}, which the "
                    f"{self.family} models of transformers do not have; export its "
                    "Hugging Face folder"
                )
            if config.tie_word_embeddings and tensor.name in (HEAD, EMBEDDING):
                name = names[EMBEDDING]
            self._add(packed, tensor, name, processor)
        if config.tie_word_embeddings:
            _name_as_head(packed, names[EMBEDDING], model)
        return packed

    def _needed(self, config: Any) -> Iterator[ReaderTensor]:
        """The tensors to read: of two copies of a tied matrix, the finer one."""
        spare = {ROTATIONS}
        if config.tie_word_embeddings and HEAD in self.tensors:
            copies = [self.tensors[name] for name in (HEAD, EMBEDDING)]
            spare.add(min(reversed(copies), key=_bits).name)
        return (t for name, t in self.tensors.items() if name not in spare)

    def _add(
        self, packed: PackedWeights, tensor: ReaderTensor, name: str, processor: Any
    ) -> None:
        """Add one tensor, as integers if they can be kept, else as floats."""
        blocks = self._blocks(tensor, processor)
        if blocks is not None:
            packed.blocks[name] = blocks
            packed.forms[name] = TYPES[tensor.tensor_type.name].form
            packed.floats[name] = torch.from_numpy(blocks.floats.T).half()
            return
        try:
            floats = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.source} has weights of the type {tensor.tensor_type.name}, "
                "which cannot be read; choose another quantization of the model"
            ) from None
        parameters: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        result = processor.process(
            weights=floats,
            name=tensor.name,
            tensor_key_mapping={},
            parsed_parameters=parameters,
        )
        packed.floats.update(parameters["tensors"])
        if result.name is not None:
            changed = np.array(result.weights, np.float32, order="C")
            small = tensor.tensor_type.name not in ("F32", "BF16")
            whole = torch.from_numpy(changed)
            packed.floats[name] = whole.half() if small else whole

    def _blocks(self, tensor: ReaderTensor, processor: Any) -> Blocks | None:
        """The integers of a matrix; None if its type cannot be kept, or its layout."""
        if len(tensor.shape) != 2 or tensor.tensor_type.name not in TYPES:
            return None
        # What becomes of the numbers of the rows is what becomes of the rows.
        rows = np.arange(len(tensor.data))[:, None]
        try:
            result = processor.process(
                weights=rows, name=tensor.name, parsed_parameters={"tensors": {}}
            )
        except (ValueError, IndexError, TypeError):
            return None
        order = result.weights
        if result.name != tensor.name or order.shape != rows.shape:
            return None
        ordered = np.sort(order, axis=0)
        if not np.array_equal(ordered, rows):
            return None
        blocks = TYPES[tensor.tensor_type.name].read(tensor.data[order[:, 0]])
        if not np.isfinite(blocks.scales).all():
            raise CheckpointError(
                f"the weight {tensor.name} of {self.source} has scales that are not "
                "finite; fetch the file again"
            )
        return blocks

    def dtype(self) -> torch.dtype:
        """The type of the matrices that are stored as floats; half without any."""
        types = {
            tensor.tensor_type.name
            for tensor in self.tensors.values()
            if len(tensor.shape) == 2
        }
        if "F32" in types or {"F16", "BF16"} <= types:
            return torch.float32
        return torch.bfloat16 if "BF16" in types else torch.float16


def _name_as_head(packed: PackedWeights, embedding: str, model: Any) -> None:
    """Give the integers of a tied matrix the name of the head, as in the graph."""
    if embedding not in packed.blocks:
        return
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    packed.blocks[f"{name}.weight"] = packed.blocks.pop(embedding)
    packed.forms[f"{name}.weight"] = packed.forms.pop(embedding)


def _bits(tensor: ReaderTensor) -> float:
    """The bits of a weight."""
    weights, size = GGML_QUANT_SIZES[tensor.tensor_type]
    return float(8 * size / weights)


def _head_size(config: Any) -> int:
    """The numbers in a head's query."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _frequencies(config: Any) -> Floats:
    """The frequencies of rotations, in turns of 2 pi per token times 2 pi."""
    size = _head_size(config)
    powers = np.arange(0, size, 2) / size
    theta = config.rope_parameters["rope_theta"]
    return np.asarray(theta**-powers)


def _check_beginning(path: Path) -> None:
    """Raise `CheckpointError` for a file that never was a GGUF file."""
    with path.open("rb") as handle:
        beginning = handle.read(len(_MAGIC))
    if beginning == _MAGIC:
        return
    if not beginning:
        raise CheckpointError(f"{printable(path)} is empty; fetch it again")
    raise CheckpointError(
        f"{printable(path)} is not a GGUF file, it begins with {beginning!r}; give a "
        "GGUF file, or the folder of a checkpoint"
    )


@contextmanager
def _as_checkpoint_error(source: str) -> Iterator[None]:
    """Turn the reader's errors into `CheckpointError`s of one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read {source} ({error.strerror or error}); check the file"
        ) from error
    except _DAMAGED as error:
        # The reader's own words are about arrays; they stay in the traceback.
        raise CheckpointError(
            f"{source} is cut off, or is not a GGUF file that the package gguf can "
            "read; fetch it again, or upgrade gguf"
        ) from error
