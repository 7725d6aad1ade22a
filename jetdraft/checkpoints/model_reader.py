"""Reads a checkpoint's config, model, tokenizer, and what it says of speech."""

import contextlib
import statistics
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from optimum.exporters.tasks import TasksManager
from tokenizers.models import BPE
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from jetdraft import errors
from jetdraft.bundle import HOP, SAMPLE_RATE, WINDOW, Speech, is_token_name
from jetdraft.checkpoints import attention, folder, refusals
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.embedding import embeds
from jetdraft.checkpoints.folder import NO_OWN_CODE, as_checkpoint_error, check_folder
from jetdraft.checkpoints.gguf import is_gguf, opened_gguf
from jetdraft.checkpoints.packed import MXFP4, PackedWeights, load_tensors
from jetdraft.checkpoints.recurrence import connect
from jetdraft.contracts.tensors import EXPERTS
from jetdraft.errors import CheckpointError, UnsupportedModelError, as_error, printable
from jetdraft.ort import quiet_loaders
from jetdraft.parsing import RecordError, read_record

# Tasks of decoders and encoder-decoders, as optimum names them.
_DECODER_TASK, _SOURCE_TASK = "text-generation", "text2text-generation"
_SPEECH_TASK = "automatic-speech-recognition"
# Types of which only the language model is built and read.
_TOWERED = (
    *("aria", "cohere_compass", "deepseek_vl", "deepseek_vl_hybrid", "emu3"),
    *("exaone4_5", "fuyu", "gemma3n", "gemma4", "gemma4_unified", "glm46v", "glm4v"),
    *("glm4v_moe", "glm_ocr", "glmga", "got_ocr2", "granite_docling", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "lfm2_vl"),
    *("lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mistral3"),
    *("ovis2", "pp_chart2table", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"),
    *("smolvlm", "video_llama_3", "video_llava", "vipllava"),
)
# Types whose texts are computed as by another type: MiMo is Qwen2 with an MTP module.
_SAME_AS = {
    **dict.fromkeys(("mimo", "qwen2_vl_text", "qwen2_5_vl_text"), "qwen2"),
    **{"qwen2_5_omni_text": "qwen2", "qwen3_vl_text": "qwen3"},
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), "qwen3_moe"),
    **{"glm4v_text": "glm4", "glm_ocr_text": "glm4", "glm4v_moe_text": "glm4_moe"},
    **{"emu3_text_model": "llama", "granite_docling_text": "granite"},
    **{"hunyuan_vl_text": "hunyuan_v1_dense"},
}
# What such a type does whatever its config says.
_ALWAYS = {
    "glm4v_text": {"attention_bias": True},
    "glm_ocr_text": {"attention_bias": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
# How weights of a language model are renamed where it is read alone.
_TEXT_NAMES = {
    r"^(?:language|text)_model\.lm_head\.": "lm_head.",
    r"^(?:(?:language|text)_model\.model|model\.(?:language|text)_model)\.": "model.",
}


def load_config(source: str) -> Any:
    """Read a checkpoint's config; its own code never runs; `CheckpointError`."""
    refusals.check_layers(source)
    with as_checkpoint_error(source):
        read = transformers.AutoConfig.from_pretrained
        config = _config_of_known_type(source) or read(source, **NO_OWN_CODE)
        if not embeds(source):
            check_causal(source, config)
        elif config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            raise UnsupportedModelError(
                f"{source} embeds with an encoder, a {config.model_type!r} model; only "
                "decoders embed, and EmbeddingGemma; see docs/models.md"
            )
        else:
            config.tie_word_embeddings = True  # its LM head is missing, and never run
    return config


def check_exportable(source: str) -> None:
    """Raise `UnsupportedModelError` for a config of a kind that cannot be exported."""
    if is_gguf(source):
        return
    check_folder(source)
    with quiet_loaders():
        config = load_config(source)
    _model_class(source, config)
    text = config.get_text_config(decoder=True)
    refusals.check_family_fields(source, text)
    fields = text.to_dict()
    if isinstance(of_dbrx := fields.get("ffn_config"), dict):
        fields = of_dbrx | fields
    refusals.check_kinds(source, lambda n: fields.get(n, getattr(text, n, None)))


def _config_of_known_type(source: str) -> Any:
    """Return a config of `_TOWERED`'s language model or `_SAME_AS`, or None."""
    fields, _ = transformers.PreTrainedConfig.get_config_dict(source)
    kind, text = str(fields.get("model_type")), None
    if kind in _TOWERED:
        whole = transformers.AutoConfig.from_pretrained(source, **NO_OWN_CODE)
        text = whole.get_text_config(decoder=True)
        if hasattr(whole, "tie_word_embeddings"):
            text.tie_word_embeddings = whole.tie_word_embeddings
        if packing := fields.get("quantization_config"):
            text.quantization_config = packing
        kind, fields = text.model_type, text.to_dict()
    if kind not in _SAME_AS:
        return text
    own = {"model_type", "architectures", "auto_map"}
    known = {name: value for name, value in fields.items() if name not in own}
    known |= _ALWAYS.get(kind, {})
    if not known.get("head_dim"):
        known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
    return transformers.AutoConfig.for_model(_SAME_AS[kind], **known)


def check_causal(source: str, config: Any) -> None:
    """Raise `UnsupportedModelError` for a model that attends in both directions."""
    if attention.attends_both_ways(config.get_text_config(decoder=True)):
        raise UnsupportedModelError(
            f"{source} attends in both directions and writes no text; to embed, it "
            "needs sentence-transformers' files (modules.json); see docs/models.md"
        )


def read_packed(source: str, config: Any, keeps_grids: bool) -> PackedWeights | None:
    """Read quantized weights, and drop the config's entry for them; None for floats."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    # With it transformers would look for a GPU's kernels.
    del config.quantization_config
    with as_checkpoint_error(source):
        return PackedWeights.read(_whole_folder(source), settings, keeps_grids)


def _whole_folder(source: str) -> Path:
    """The folder of a checkpoint with its weights, fetched for a hub id."""
    if Path(source).is_dir():
        return Path(source)
    files = ["*.safetensors", "*.json"]
    return Path(snapshot_download(source, allow_patterns=files, ignore_patterns="*/*"))


def _expert_count(config: Any) -> int:
    """The experts of a layer by the config; 0 for a dense model."""
    text = config.get_text_config(decoder=True)
    counts = [getattr(text, name, None) for name in EXPERTS]
    return max((n for n in counts if isinstance(n, int)), default=0)


def load_model(
    source: str, config: Any, packed: PackedWeights | None, dtype: Any = None
) -> Any:
    """Load a model with jetdraft's attention; weights are as stored, or in `dtype`."""
    model_class = _model_class(source, config)
    is_text_alone = config.get_text_config(decoder=True) is config
    with as_checkpoint_error(source):
        bounds = refusals.Bounds.of(source)
        empty = refusals.build_skeleton(source, model_class, config, bounds)
        refusals.check_modules(source, empty)
        weights = packed and packed.floats
        if weights is None and _expert_count(config) > 1:
            weights = load_tensors(_whole_folder(source), stores_experts=True)
            if config.model_type == "qwen3_moe":
                weights = _turned_back(weights, config)
        if weights is not None:
            # from_pretrained of a family needs a folder, and would load its weights.
            model_class, config = type(empty), empty.config
        model, info = model_class.from_pretrained(
            source if weights is None else None,
            config=config,
            state_dict=weights,
            dtype=dtype or folder.stored_dtype(source),
            output_loading_info=True,
            # Otherwise the reason goes to a log, which is silenced here.
            ignore_mismatched_sizes=True,
            key_mapping=_TEXT_NAMES if is_text_alone else None,
            **NO_OWN_CODE,
        )
    if packed:  # AutoGPTQ gives each matrix a bias, often of zeros
        zeros = {n for n, t in packed.floats.items() if ".bias" in n and not t.any()}
        info["unexpected_keys"] = set(info["unexpected_keys"]) - zeros
    _check_loaded(source, model, info, packed.blocks if packed else ())
    if weights is not None and not is_gguf(source):
        with contextlib.suppress(OSError):  # the file is optional
            read = transformers.GenerationConfig.from_pretrained
            model.generation_config = read(source, **NO_OWN_CODE)
    if config.is_encoder_decoder:
        attention.set_attention(model, attention.SOURCE_ATTENTION)
    else:
        model.set_attn_implementation(attention.IMPLEMENTATION)
        with as_checkpoint_error(source):
            _fix_sparsity(model)
        _fix_rotation(model)
    model.set_experts_implementation(attention.IMPLEMENTATION)
    model.requires_grad_(False)
    return model.eval()


def expert_columns(source: str) -> tuple[dict[str, int], bool]:
    """The columns of each stack's experts, and whether they are llama.cpp's already."""
    if is_gguf(source):
        with opened_gguf(source) as file:
            return file.expert_columns(), True
    with quiet_loaders():
        config = load_config(source)
        if _expert_count(config) < 2:
            return {}, False
        kind = _model_class(source, config)
        with as_checkpoint_error(source):
            bounds = refusals.Bounds.of(source)
            model = refusals.build_skeleton(source, kind, config, bounds)
            packing = getattr(config, "quantization_config", None) or {}
            is_kept = packing.get("quant_method") == MXFP4
    return {
        f"{name}.{weight}": stack.shape[2 if module.is_transposed else 1]
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed")
        for weight, stack in module.named_parameters(recurse=False)
        if stack.dim() == 3
    }, is_kept


def _turned_back(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights as Qwen3-MoE has them: files of Qwen3-VL-MoE have experts turned."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    stacks = {
        name: sizes[last]
        for name, weight in weights.items()
        if (last := name.rpartition(".experts.")[2]) in sizes and weight.dim() == 3
    }
    # A square stack does not say whether it is turned, but the others do.
    found = [((*weights[name].shape[1:],), size) for name, size in stacks.items()]
    is_turned = any(shape != size == shape[::-1] for shape, size in found)
    turned = {name: weights[name].transpose(1, 2) for name in stacks}
    return {**weights, **turned} if is_turned else dict(weights)


def _model_class(source: str, config: Any) -> Any:
    kind = config.model_type
    task = _SOURCE_TASK if config.is_encoder_decoder else _DECODER_TASK
    task = _SPEECH_TASK if is_speech_model(config) else task
    find, library = TasksManager.get_model_class_for_task, "transformers"
    fact = f"{source} is a {kind!r} model, which optimum cannot load for text "
    fact += "generation; export a language model"
    with errors.refusing(UnsupportedModelError(fact), KeyError, ValueError):
        model_class = find(task, "pt", model_type=kind, library=library)
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None and type(config) not in mapping:
        is_text = config.get_text_config(decoder=True) is config
        does = "writes no text" if is_text else "reads more than text"
        fact = f"{source} is a {kind!r} model, which {does}, and jetdraft exports "
        raise UnsupportedModelError(f"{fact}language models alone; see docs/models.md")
    return model_class


def _fix_sparsity(model: Any) -> None:
    """Compute the bounds of Gemma 3n's sparse layers once: no graph inverts erf."""
    for module in model.modules():
        if share := getattr(module, "activation_sparsity", 0.0):
            bound = statistics.NormalDist().inv_cdf(float(share))
            module._gaussian_topk = partial(_keep_largest, bound)


def _keep_largest(bound: float, numbers: Tensor) -> Tensor:
    """Return by how much numbers exceed the mean plus `bound` deviations, or 0."""
    mean = numbers.mean(-1, keepdim=True)
    deviation = numbers.std(-1, keepdim=True, unbiased=False)
    return torch.relu(numbers - (mean + deviation * bound))


def _fix_rotation(model: Any) -> None:
    """Let DeepSeek V2 rotate with real numbers in a pass: complex ones do not trace."""
    scope, name = vars(sys.modules[type(model).__module__]), "apply_rotary_emb"
    if model.config.model_type != "deepseek_v2" or hasattr(scope[name], "own"):
        return
    own = scope[name]

    def rotate(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        if attention.active_states() is None:
            return own(query, key, turns)  # type: ignore[no-any-return]
        cos, sin = torch.view_as_real(turns).unsqueeze(1).unbind(-1)
        parts = (part.float().reshape(*part.shape[:-1], -1, 2) for part in (query, key))
        both = (part.unbind(-1) for part in parts)
        mixed = ([x * cos - y * sin, x * sin + y * cos] for x, y in both)
        turned = [torch.stack(pair, -1).flatten(3) for pair in mixed]
        return turned[0].type_as(query), turned[1].type_as(key)

    rotate.own = own  # type: ignore[attr-defined]
    scope[name] = rotate


def _check_loaded(
    source: str, model: Any, info: dict[str, Any], integers: Iterable[str]
) -> None:
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        fact = f"the weights of {source} do not fit its config.json ({name} is "
        fact += f"{list(stored)}, expected {list(expected)})"
        raise CheckpointError(f"{fact}; fetch it again")
    if info["missing_keys"]:
        first, count = min(info["missing_keys"]), len(info["missing_keys"])
        fact = f"{source} lacks the weights {first!r} of its config ({count} in all)"
        raise CheckpointError(f"{fact}; correct config.json, or fetch it again")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    refusals.check_unread(source, names, info["unexpected_keys"])
    # `check_source_seams` and `check_seams` see what others do beside the interface.
    family = model.config.get_text_config(decoder=True).model_type
    is_seen = model.config.is_encoder_decoder or family in ("stablelm", "biogpt")
    if family in refusals.RECURRENT_FAMILIES:
        is_seen |= connect(model, attention.active_states)
    if not (model._supports_attention_backend or is_seen):
        fact = "attends by code of its own, or not at all, in place of transformers' "
        raise UnsupportedModelError.of(model, f"{fact}AttentionInterface")
    if unknown := sorted(set(integers).difference(names)):
        fact = f"{source} has quantized weights {unknown[0]!r} and {len(unknown) - 1} "
        fact += "more under names that its architecture does not have"
        raise CheckpointError(f"{fact}; save it again with a current transformers")


PREPROCESSOR = "preprocessor_config.json"
_SPECTRUM_FIELDS = {"sampling_rate": SAMPLE_RATE, "hop_length": HOP, "n_fft": WINDOW}


def is_speech_model(config: Any) -> bool:
    """Whether a config describes an encoder-decoder that reads log-mel features."""
    return bool(config.is_encoder_decoder and getattr(config, "num_mel_bins", 0))


def read_speech(source: str, model: Any) -> Speech | None:
    """Return a speech model's special tokens, else None; `UnsupportedModelError`."""
    if not is_speech_model(model.config):
        return None
    spectrum = read_fields(source, PREPROCESSOR) or {}
    known = _SPECTRUM_FIELDS | {"feature_size": model.config.num_mel_bins}
    for name, number in known.items():
        if spectrum.get(name, number) != number:
            raise UnsupportedModelError(
                f"{PREPROCESSOR} of {source} has {name} {printable(spectrum[name], 20)}"
                f", and only {number} can be exported; export another checkpoint"
            )
    settings, rows = model.generation_config, model.get_output_embeddings().weight
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
    fact = f"generation_config.json of {source} lacks tokens of speech, or is wrong"
    fix = "fetch the current file of the checkpoint"
    with as_error(CheckpointError, RecordError, fact, fix):
        speech: Speech = read_record(Speech, fields)
    if not speech.fits(len(rows)):
        raise CheckpointError(
            f"the tokens of speech in generation_config.json of {source} do not fit "
            f"its {len(rows)} tokens; fetch the current file of the checkpoint"
        )
    return speech


def _valid_ids(ids: Any) -> Any:
    """Return a list of ids without -1, which stands for none; [] for other values."""
    return [id for id in ids if id != -1] if isinstance(ids, list) else []


def load_tokenizer(source: str) -> Any:
    """Load the fast tokenizer, with truncation and padding off; None without files."""
    path = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / name).is_file() for name in names):
        return None
    fact = f"the tokenizer of {source} cannot be read"
    # tokenizers raises bare exceptions
    with as_error(CheckpointError, Exception, fact, "check the folder or the hub id"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_OWN_CODE)
    if not getattr(tokenizer, "is_fast", False):
        fact = f"the tokenizer of {source} has no tokenizer.json form"
        raise CheckpointError(f"{fact}; convert it first")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_tokenizer(source: str) -> str | None:
    """Return the text of a source's tokenizer.json; None without a tokenizer."""
    if is_gguf(source):
        with opened_gguf(source) as file:
            return file.tokenizer_json()
    check_folder(source)
    with quiet_loaders():
        tokenizer = load_tokenizer(source)
    return tokenizer and str(tokenizer.backend_tokenizer.to_str())


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Map the names of special tokens that a chat template may use to their texts."""
    tokens = tokenizer.special_tokens_map if tokenizer else {}
    return {name: token for name, token in tokens.items() if is_token_name(name)}


# The setting with which transformers removes spaces in the text of BPE too.
_CLEANUP = "clean_up_tokenization_spaces"
_BPE_CLEANUP = f"{_CLEANUP}_for_bpe_even_though_it_will_corrupt_output"


def passed_over_settings(tokenizer: Any, ends: Collection[int]) -> Iterator[str]:
    """Yield a warning for each setting that a bundle ignores; `ends` are end ids."""
    file = "tokenizer_config.json"
    if tokenizer.split_special_tokens:
        yield f"{file}: split_special_tokens True: special tokens are never split"
    # transformers ignores it for BPE, unless another flag says otherwise
    is_bpe = isinstance(tokenizer.backend_tokenizer.model, BPE)
    heeded = getattr(tokenizer, _BPE_CLEANUP, False) or not is_bpe
    if tokenizer.clean_up_tokenization_spaces and heeded:
        yield f"{file}: {_CLEANUP} True: spaces before punctuation are shown"
    end = tokenizer.eos_token
    if ends and end is not None and tokenizer.eos_token_id not in ends:
        yield (
            f"{file}: eos_token {printable(end, 40)}: as in transformers, the "
            "eos_token_id of generation_config.json or config.json rules"
        )


def chat_template(template: Any) -> str | None:
    """Return a chat template; of several, default and tool use as one; or None."""
    if not isinstance(template, dict):
        return template if isinstance(template, str) else None
    default, tools = template.get("default"), template.get("tool_use")
    if default is None or tools is None:
        return default
    # Jinja drops the newline after a tag, and one at the end of a template.
    tools, default = (text.removesuffix("\n") for text in (tools, default))
    return f"{{% if tools is not none %}}{tools}{{% else %}}{default}{{% endif %}}"
