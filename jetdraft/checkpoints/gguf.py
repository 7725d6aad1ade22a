"""Reads GGUF files of llama.cpp; transformers maps the names of configs and weights."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, ReaderTensor, dequantize
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from jetdraft import errors
from jetdraft.checkpoints import defaults, gguf_fields, gguf_tokenizer
from jetdraft.checkpoints.defaults import REFUSED, WARNED, GenerationFields
from jetdraft.checkpoints.layers import head_size
from jetdraft.checkpoints.packed import PackedWeights
from jetdraft.checkpoints.refusals import SPARE, Bounds, build_skeleton, check_kinds
from jetdraft.errors import CheckpointError, UnsupportedModelError, as_error, printable
from jetdraft.quant.algorithms import quantize
from jetdraft.quant.grids import GRIDS, GridMatrix
from jetdraft.quant.stored import GridStack, StoredTensor
from jetdraft.recipe import Recipe

_MAGIC = b"GGUF"

HEAD_TENSOR, EMBEDDING_TENSOR = "output.weight", "token_embd.weight"
ROPE_TENSOR = "rope_freqs.weight"
_MIXTURES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
# Above this cosine head and embedding are copies; copies of 4 and 8 bits have 0.997.
_TIED_COSINE = 0.98
_COMPARED_ROWS = 64  # Rows of head and embedding that are compared.
_MALFORMED = (ValueError, IndexError, KeyError, TypeError, OverflowError, RuntimeError)
# llama.cpp's defaults of the missing fields where a file has some of these.
_DEFAULTS = {"temp": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def is_gguf(source: str) -> bool:
    """Whether a source is a file; other checkpoints are folders or hub ids."""
    return os.path.isfile(source)  # False for a name that is too long


@contextmanager
def opened_gguf(source: str) -> "Iterator[GgufFile]":
    """Open a file to read; raises `CheckpointError` or `UnsupportedModelError`."""
    fact = f"{source} is cut off, or is not a GGUF file that the package gguf can read"
    other = CheckpointError(f"{fact}; fetch it again, or upgrade gguf")
    with (
        as_error(CheckpointError, OSError, f"cannot read {source}", "check the file"),
        errors.refusing(other, *_MALFORMED),
    ):
        yield GgufFile(source)


class GgufFile:
    """An open GGUF file, mapped into memory."""

    def __init__(self, source: str) -> None:
        self.source, self.path = source, Path(source)
        self._check_beginning()
        self.reader = GGUFReader(self.path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.family = str(self.field("general.architecture"))
        self._check_supported()

    def field(self, name: str) -> Any:
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def _check_beginning(self) -> None:
        with self.path.open("rb") as handle:
            beginning = handle.read(len(_MAGIC))
        if not beginning:
            raise CheckpointError(f"{printable(self.path)} is empty; fetch it again")
        if beginning != _MAGIC:
            fact = f"{printable(self.path)} is not a GGUF file, it begins with "
            fix = "give a GGUF file, or the folder of a checkpoint"
            raise CheckpointError(f"{fact}{beginning!r}; {fix}")

    def _check_supported(self) -> None:
        parts = self.field("split.count")
        if parts is not None and parts > 1:
            fact = f"{self.source} is one of {parts} parts"
            raise CheckpointError(f"{fact}; join them with llama-gguf-split --merge")
        known = {"model_type": _MIXTURES.get(self.family)}
        own = f"{self.family}."
        check_kinds(self.source, lambda name: known.get(name) or self.field(own + name))
        can_read = self.family in gguf_utils.GGUF_SUPPORTED_ARCHITECTURES
        if known["model_type"] is None and not can_read:
            raise UnsupportedModelError(
                f"{self.source} is a {self.family!r} model, which transformers reads "
                "from no GGUF file; export its Hugging Face folder, see docs/models.md"
            )
        if not self.tensors:
            raise CheckpointError(f"{self.source} has no weights; give a whole model")
        layers = self.field(f"{self.family}.block_count")
        if isinstance(layers, int) and layers > len(self.tensors):
            fact = f"{self.source} has {len(self.tensors)} weights for {layers} layers"
            raise CheckpointError(f"{fact}; fetch it again")

    def tokenizer_json(self) -> str | None:
        fact = f"the tokenizer of {self.source} cannot be read"
        # tokenizers raises bare exceptions
        with as_error(CheckpointError, Exception, fact, "fetch the file again"):
            return gguf_tokenizer.make_tokenizer_json(self.source, self.field)

    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens, by transformers' names."""
        return gguf_tokenizer.special_tokens(self.field)

    def chat_templates(self) -> dict[str, str | None]:
        """The chat template, and the one for tools, by transformers' names."""
        name = "tokenizer.chat_template"
        return {"default": self.field(name), "tool_use": self.field(f"{name}.tool_use")}

    def generation(self) -> GenerationFields:
        """Return the file's settings of sampling, by transformers' names."""
        fields: dict[str, Any] = {}
        stored = {name: self.field(f"general.sampling.{name}") for name in _DEFAULTS}
        if any(value is not None for value in stored.values()):
            sampling = _DEFAULTS | {n: v for n, v in stored.items() if v is not None}
            sampling["top_k"] = max(sampling["top_k"], 0)  # takes all from 0 down
            temperature = sampling.pop("temp")
            fields = {"do_sample": True, "temperature": temperature, **sampling}
        fields["suppress_tokens"] = self.field("tokenizer.ggml.suppress_tokens")
        generation = GenerationFields(self.source, "the metadata", fields)
        generation.defaults()  # refuses bad values
        return generation

    def passed_over(self) -> tuple[str, ...]:
        """Return a warning for each ignored field; raise for a field to be refused."""
        lines: list[str] = []
        tables = gguf_fields.FILE_FIELDS, gguf_fields.MODEL_FIELDS
        file_rules, model_rules = map(defaults.rules_by_name, tables)
        for name in self.reader.fields:
            suffix = name.removeprefix(f"{self.family}.")
            rules = file_rules if suffix == name else model_rules
            rule = defaults.find_rule(suffix, rules)
            if rule is None and suffix == name and not name.startswith("tokenizer."):
                continue  # other programs have fields of their own
            if rule is not None and rule.fate not in (REFUSED, WARNED):
                continue
            value = self.field(name)
            if rule is not None and rule.fate == REFUSED and not rule.neutral(value):
                raise gguf_fields.field_error(self.source, name, value, rule.why)
            lines += defaults.passed_over_fields("metadata", {suffix: value}, rules)
        if self.generation().defaults().get("temperature", 1.0) != 1.0:
            lines.append(
                "metadata: general.sampling.temp: the temperature comes before top_p "
                "and min_p, in llama.cpp behind them"
            )
        return tuple(lines)

    def config(self) -> Any:
        """Return the config that transformers reads, completed by `FamilyFields`."""
        folder = self.path.absolute().parent
        config = transformers.AutoConfig.from_pretrained(
            str(folder), gguf_file=self.path.name, trust_remote_code=False
        )
        fields = gguf_fields.FamilyFields(self.source, self.family, self.field)
        fields.set_attention_and_norms(config)
        if ROPE_TENSOR in self.tensors:
            fields.set_rotations(config, self._llama3_scaling(config))
        elif getattr(config, "rope_parameters", None):
            fields.set_rotations(config)
        config.tie_word_embeddings = self.has_tied_head
        config.eos_token_id = gguf_tokenizer.end_token_ids(self.field) or None
        return config

    def _llama3_scaling(self, config: Any) -> dict[str, Any]:
        """Return Llama 3's RoPE scaling, of which the file has only the factors."""
        stored = np.asarray(self.tensors[ROPE_TENSOR].data, np.float32)
        factor, low, high, length = float(stored.max()), 1.0, 4.0, 8192
        powers = np.arange(0, head_size(config), 2) / head_size(config)
        frequencies = config.rope_parameters["rope_theta"] ** -powers
        turns = length / (2 * np.pi) * frequencies
        smooth = ((turns - low) / (high - low)).clip(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if len(stored) != len(expected) or not np.allclose(stored, expected, rtol=1e-3):
            fact = f"{self.source} scales its rotations in another way than Llama 3"
            raise UnsupportedModelError(f"{fact}; export its Hugging Face folder")
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low}
        lengths = {"high_freq_factor": high, "original_max_position_embeddings": length}
        return scaling | lengths

    @property
    def has_tied_head(self) -> bool:
        """Whether head and embedding are one matrix, which a file may hold twice."""
        if HEAD_TENSOR not in self.tensors:
            return True
        head, embedding = self.tensors[HEAD_TENSOR], self.tensors[EMBEDDING_TENSOR]
        if tuple(head.shape) != tuple(embedding.shape):
            return False
        rows = np.linspace(0, len(head.data) - 1, _COMPARED_ROWS).astype(np.int64)
        both = head, embedding
        a, b = (dequantize(t.data[rows], t.tensor_type).ravel() for t in both)
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        return length > 0 and float(a @ b) > _TIED_COSINE * length

    def weights(self, config: Any, keeps_grids: bool) -> PackedWeights:
        """Read all weights by transformers' names; integers are kept where possible."""
        known, default = gguf_utils.TENSOR_PROCESSORS, gguf_utils.TensorProcessor
        processor = known.get(self.family, default)(config=config.to_dict())
        bounds = Bounds(tensors=100 + SPARE * len(self.tensors))
        kind = transformers.AutoModelForCausalLM
        model = build_skeleton(self.source, kind, config, bounds)
        names = gguf_utils.get_gguf_hf_weights_map(model, processor)
        packed = PackedWeights("gguf", {}, {}, {})
        stacks: dict[str, list[ReaderTensor]] = {}
        for tensor in self._tensors_to_read(config):
            if match := _EXPERTS.fullmatch(tensor.name):
                kind = "down" if match[2] == "down" else "gate_up"
                name = f"model.layers.{match[1]}.mlp.experts.{kind}_proj"
                # The gates come before the other columns.
                stacks.setdefault(name, []).insert(match[2] != "gate", tensor)
                continue
            name = names.get(tensor.name)
            if name is None:
                fact = f"{self.source} has the weight {tensor.name!r}, which the "
                fact += f"{self.family} models of transformers do not have"
                raise UnsupportedModelError(f"{fact}; export its Hugging Face folder")
            is_end = tensor.name in (HEAD_TENSOR, EMBEDDING_TENSOR)
            if config.tie_word_embeddings and is_end:
                name = names[EMBEDDING_TENSOR]
            self._add_tensor(packed, tensor, name, processor, keeps_grids)
        if config.tie_word_embeddings:
            _rename_to_head(packed, names[EMBEDDING_TENSOR], model)
        for name, parts in stacks.items():
            self._add_stack(packed, name, parts, keeps_grids)
        return packed

    def expert_columns(self) -> dict[str, int]:
        """The columns of each expert by the tensors that have them."""
        found = [name for name in self.tensors if _EXPERTS.fullmatch(name)]
        counts = {name: 1 if ".ffn_down_" in name else 2 for name in found}
        return {n: int(self.tensors[n].shape[1]) * counts[n] for n in found}

    def _add_stack(
        self, packed: PackedWeights, name: str, parts: list[ReaderTensor], keeps: bool
    ) -> None:
        (grid, *others) = {part.tensor_type.name for part in parts}
        shapes = {(len(p.data), int(p.shape[0]), p.data.ndim) for p in parts}
        if len(shapes) > 1 or parts[0].data.ndim != 3:
            fact = f"the experts {name} of {self.source} do not fit each other"
            raise CheckpointError(f"{fact}; fetch the file again")
        experts, rows = len(parts[0].data), int(parts[0].shape[0])
        columns = sum(part.data.shape[1] for part in parts)
        shape = experts, columns, rows
        if grid in GRIDS and not others:
            stack = GridStack(
                grid, shape, lambda i: np.concatenate([part.data[i] for part in parts])
            )
            packed.floats[name] = stack.floats()
            if keeps:
                packed.blocks[name], packed.forms[name] = stack, f"{grid} exact"
            return
        for part in parts:
            self._dequantize(part, part.data[0, :1])  # refuses an unknown type

        def read(index: int | None) -> torch.Tensor:
            if index is None:
                return torch.stack([read(i) for i in range(experts)])
            floats = [self._dequantize(part, part.data[index]) for part in parts]
            return torch.from_numpy(np.concatenate(floats))

        packed.floats[name] = StoredTensor(shape, torch.float32, read)

    def _dequantize(self, tensor: ReaderTensor, data: Any) -> Any:
        """The floats of a part of a tensor; `UnsupportedModelError` for its type."""
        fact = f"{self.source} has weights of the type {tensor.tensor_type.name}, "
        fact += "which cannot be read; choose another quantization of the model"
        with errors.refusing(UnsupportedModelError(fact), NotImplementedError):
            return dequantize(data, tensor.tensor_type)

    def _tensors_to_read(self, config: Any) -> Iterator[ReaderTensor]:
        """Return the tensors to read; of two tied copies, the one with more bits."""
        spare = {ROPE_TENSOR}
        if config.tie_word_embeddings and HEAD_TENSOR in self.tensors:
            copies = (EMBEDDING_TENSOR, HEAD_TENSOR)  # they have one shape
            spare.add(min(copies, key=lambda name: self.tensors[name].n_bytes))
        return (t for name, t in self.tensors.items() if name not in spare)

    def _add_tensor(
        self,
        packed: PackedWeights,
        tensor: ReaderTensor,
        name: str,
        processor: Any,
        keeps: bool,
    ) -> None:
        """Add a tensor to `packed`: as integers if they can be kept, else as floats."""
        grid = self._read_grid(tensor, processor)
        if grid is not None:
            exact = grid if keeps else grid.exact_blocks()
            kept = exact or quantize(grid.floats, Recipe("int8", 32), None)
            how, floats = "as int8" if exact is None else "exact", kept.floats
            packed.blocks[name] = kept
            packed.forms[name] = f"{grid.grid} {how}"
            if not np.isfinite(floats).all():
                fact = f"the scales of {tensor.name} in {self.source} are not finite"
                raise CheckpointError(f"{fact}; fetch the file again")
            packed.floats[name] = torch.from_numpy(floats.T).half()
            return
        floats = self._dequantize(tensor, tensor.data)
        parameters: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        given = {"weights": floats, "name": tensor.name, "tensor_key_mapping": {}}
        result = processor.process(**given, parsed_parameters=parameters)
        packed.floats.update(parameters["tensors"])
        if result.name is not None:
            changed = np.array(result.weights, np.float32, order="C")
            small = tensor.tensor_type.name not in ("F32", "BF16")
            whole = torch.from_numpy(changed)
            packed.floats[name] = whole.half() if small else whole

    def _read_grid(self, tensor: ReaderTensor, processor: Any) -> GridMatrix | None:
        """Return a matrix in its type; None if type or layout cannot be kept."""
        if len(tensor.shape) != 2 or tensor.tensor_type.name not in GRIDS:
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
        if not np.array_equal(np.sort(order, axis=0), rows):
            return None
        data = tensor.data[order[:, 0]]
        return GridMatrix(tensor.tensor_type.name, data, int(tensor.shape[0]))

    def dtype(self) -> torch.dtype:
        """Return the type of the matrices that are floats; float16 without any."""
        matrices = [t for t in self.tensors.values() if len(t.shape) == 2]
        types = {matrix.tensor_type.name for matrix in matrices}
        if "F32" in types or {"F16", "BF16"} <= types:
            return torch.float32
        return torch.bfloat16 if "BF16" in types else torch.float16


def _rename_to_head(packed: PackedWeights, embedding: str, model: Any) -> None:
    """Rename the integers of a tied matrix from the embedding to the head, in place."""
    if embedding not in packed.blocks:
        return
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    packed.blocks[f"{name}.weight"] = packed.blocks.pop(embedding)
    packed.forms[f"{name}.weight"] = packed.forms.pop(embedding)
