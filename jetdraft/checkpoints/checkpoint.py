"""Reads a Hugging Face checkpoint: its model, tokenizer and special tokens."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from jetdraft.bundle import Defaults, Embedding, Speech
from jetdraft.checkpoints import model_reader, streams
from jetdraft.checkpoints.defaults import GenerationFields
from jetdraft.checkpoints.embedding import read_embedding
from jetdraft.checkpoints.folder import check_folder, checkpoint_folder, weights_sha256
from jetdraft.checkpoints.gguf import is_gguf, opened_gguf
from jetdraft.checkpoints.layers import Taps, limit_vocab, read_draft_vocabulary
from jetdraft.checkpoints.model_reader import is_speech_model
from jetdraft.checkpoints.packed import PackedWeights
from jetdraft.checkpoints.parameters import set_compute_dtype, store_weights_in
from jetdraft.checkpoints.streams import ProbedModel, ProbeSettings
from jetdraft.checkpoints.vision import picture_sizes
from jetdraft.errors import CheckpointError, as_error, printable
from jetdraft.ort import quiet_loaders
from jetdraft.parsing import read_json_file, read_record


@dataclass(frozen=True)
class Checkpoint:
    """A loaded language model, and the parts of its folder that a bundle keeps.

    `tokenizer` is the text of a tokenizer.json. A drafter may draft `draft_ids` int64
    [n], None for all, and is `beside` a target of `target_rows` tokens.

        checkpoint = Checkpoint.load("examples/pycode/target", torch.float32)
    """

    source: str
    model: Any
    tokenizer: str | None
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    packed: PackedWeights | None = None
    streams: ProbeSettings | None = None
    generation: Defaults = field(default_factory=Defaults)
    passed_over: tuple[str, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    taps: Taps | None = None
    draft_ids: Tensor | None = None
    target_rows: int | None = None
    start_token_ids: tuple[int, ...] = ()
    speech: Speech | None = None
    embedding: Embedding | None = None
    picture_sizes: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def load(cls, source: str, dtype: torch.dtype, keeps_grids: bool = False) -> Self:
        """Load a local folder, a GGUF file or a hub id; raises `CheckpointError`.

        The model computes in `dtype`; its weights keep their stored type. With
        `keeps_grids` matrices of a GGUF file and experts of MXFP4 stay as they are.
        """
        if is_gguf(source):
            return cls._load_gguf(source, dtype, keeps_grids)
        check_folder(source)
        with quiet_loaders():
            config = model_reader.load_config(source)
            generation = GenerationFields.read(source)
            packed = model_reader.read_packed(source, config, keeps_grids)
            model = model_reader.load_model(source, config, packed)
            set_compute_dtype(model, dtype)
            tokenizer = model_reader.load_tokenizer(source)
        ends, heard = _eos_token_ids(source, model), is_speech_model(config)
        template = getattr(tokenizer, "chat_template", None)
        embedding, taps = read_embedding(source, model)
        size = model.get_output_embeddings().weight.shape[0]
        passed_over = generation.passed_over(config.is_encoder_decoder, heard)
        if tokenizer:
            passed_over += tuple(model_reader.passed_over_settings(tokenizer, ends))
        return cls(
            source=source,
            model=model,
            tokenizer=tokenizer and tokenizer.backend_tokenizer.to_str(),
            chat_template=model_reader.chat_template(template),
            eos_token_ids=ends,
            packed=replace(packed, floats={}) if packed and packed.blocks else None,
            streams=read_settings(checkpoint_folder(source)),
            generation=generation.defaults(size, ends, heard),
            passed_over=passed_over,
            special_tokens=model_reader.special_tokens(tokenizer),
            taps=taps,
            draft_ids=read_draft_vocabulary(checkpoint_folder(source), size),
            start_token_ids=_start_token_ids(source, model),
            speech=model_reader.read_speech(source, model),
            embedding=embedding,
            picture_sizes=picture_sizes(source, model),
        )

    @classmethod
    def _load_gguf(cls, source: str, dtype: torch.dtype, keeps_grids: bool) -> Self:
        with quiet_loaders():
            with opened_gguf(source) as file:
                passed_over, config = file.passed_over(), file.config()
                packed, text = file.weights(config, keeps_grids), file.tokenizer_json()
                generation, templates = file.generation(), file.chat_templates()
                named, kept_in = file.special_tokens(), file.dtype()
            model_reader.check_causal(source, config)
            model = model_reader.load_model(source, config, packed, kept_in)
            set_compute_dtype(model, dtype)
        ends = _eos_token_ids(source, model)
        size = model.get_output_embeddings().weight.shape[0]
        return cls(
            source=source,
            model=model,
            tokenizer=text,
            chat_template=model_reader.chat_template(templates),
            eos_token_ids=ends,
            # Without integers it is a checkpoint of floats like any other.
            packed=replace(packed, floats={}) if packed.blocks else None,
            special_tokens=named,
            generation=generation.defaults(size, ends),
            passed_over=passed_over,
        )

    @property
    def lm_head_name(self) -> str:
        return self.weight_names()[id(self.model.get_output_embeddings().weight)]

    @property
    def reads_source(self) -> bool:
        """Whether it is an encoder-decoder, which reads a source beside its text."""
        return bool(self.model.config.is_encoder_decoder)

    def weight_names(self) -> dict[int, str]:
        """Map weights' Python `id` to names; of tied weights, to the linear layer's."""
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                names[id(layer.weight)] = f"{name}.weight"
        return names

    def add_probes(self, scale: float) -> ProbedModel:
        """Return the model with probes, changed in place; raises `CheckpointError`."""
        assert self.streams is not None
        if self.packed is not None and self.streams.mode == streams.SHARED:
            raise CheckpointError(
                f"{self.source} is quantized already, so LoRA cannot be added to its "
                "weights; train stream of mode lossless"
            )
        store_weights_in(self.model, torch.float32)  # LoRA may be added to the weights
        folder = checkpoint_folder(self.source)
        if weights_sha256(folder) != self.streams.base:
            raise CheckpointError(
                f"the streams in {self.source} were trained for other weights than "
                "this folder has; train the streams again"
            )
        return streams.load_probes(self.model, self.streams, folder, scale)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the LM head can choose, and the target has."""
        rows = int(self.model.get_output_embeddings().weight.shape[0])
        return min(rows, self.target_rows or rows)

    def fit_to_target(self, target_rows: int) -> "Checkpoint":
        """Fit this drafter to a target of `target_rows` by `limit_vocab`; return it."""
        limit_vocab(self.model, self.vocab_size, target_rows)
        ids = self.draft_ids
        known = None if ids is None else ids[ids < target_rows]
        return replace(self, target_rows=target_rows, draft_ids=known)

    @property
    def parameters(self) -> int:
        """The number of weights; a tied matrix counts once."""
        return sum(p.numel() for p in self.model.parameters())


def read_settings(folder: Path) -> ProbeSettings | None:
    """Read the settings of a checkpoint's probes; None if it has no probes."""
    file, mark = folder / streams.SETTINGS, folder / streams.UNFINISHED
    fact, fix = f"{file} cannot be read", "train the streams again"
    causes = OSError, ValueError, KeyError, TypeError
    with as_error(CheckpointError, causes, fact, fix):
        if not file.is_file():
            added = mark.read_text(encoding="utf-8") if mark.is_file() else ""
            if added:
                fact = f"the training in {folder} has saved no {added} yet"
                raise CheckpointError(f"{fact}; let it go on")
            return None
        fields = read_json_file(file)
        is_prompt = fields["mode"] in streams.PROMPT_MODES
        kind = streams.PromptSettings if is_prompt else streams.StreamSettings
        settings = {name: fields[name] for name in kind.__dataclass_fields__}
        return read_record(kind, settings)  # type: ignore[no-any-return]


_CORRECT_IT = "correct its config.json or generation_config.json"


def _eos_token_ids(source: str, model: Any) -> tuple[int, ...]:
    """Return the ids that end a text, without ids outside the vocabulary (often -1)."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in ids):
            fact = f"the eos_token_id of {source} is {printable(ids, 40)}"
            raise CheckpointError(f"{fact}; {_CORRECT_IT}")
        size = model.get_output_embeddings().weight.shape[0]
        return tuple(token for token in ids if 0 <= token < size)
    return ()


def _start_token_ids(source: str, model: Any) -> tuple[int, ...]:
    """The start token of an encoder-decoder, and the token forced after it."""
    if not model.config.is_encoder_decoder:
        return ()
    configs = model.generation_config, model.config
    ids: list[Any] = []
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        values = (getattr(config, name, None) for config in configs)
        ids.append(next((value for value in values if value is not None), None))
    size = model.get_output_embeddings().weight.shape[0]
    if ids[0] is None or not all(
        id is None or (type(id) is int and 0 <= id < size) for id in ids
    ):
        fact = f"{source} does not say with which token its text begins "
        fact += f"(decoder_start_token_id {printable(ids[0], 20)})"
        raise CheckpointError(f"{fact}; {_CORRECT_IT}")
    return tuple(id for id in ids if id is not None)
