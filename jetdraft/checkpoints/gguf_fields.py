"""What becomes of the fields of a GGUF file, by llama.cpp's names for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetdraft.checkpoints.defaults import read_rules
from jetdraft.checkpoints.layers import head_size
from jetdraft.errors import UnsupportedModelError, printable

# Fields whose names follow the name of the family, as in llama.context_length.
MODEL_FIELDS = read_rules("""
context_length embedding_length block_count feed_forward_length vocab_size
    attention.head_count attention.head_count_kv attention.key_length shortconv.l_cache
    expert_count expert_used_count expert_feed_forward_length
    expert_shared_feed_forward_length: honoured: the sizes of the model
attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.sliding_window
    attn_logit_softcapping final_logit_softcapping rope.dimension_count rope.freq_base
    rope.freq_base_swa: honoured: numbers of the model; refused where the family has no
    such number
rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    rope.scale_linear: honoured: linear, which is meant without a type too, and YaRN;
    others are refused
attention.value_length attention.sliding_window_pattern use_parallel_residual: refused
    unless the model's: where the family's model has another value
attention.causal: refused unless true: only causal decoders can be exported
logit_scale residual_scale embedding_scale attention.scale attention.output_scale
    attention.value_scale rope.scaling.alpha rope.scaling.yarn_attn_factor: refused
    unless 0, 1: no model that can be read from a GGUF file computes with it
rope.scaling.yarn_ext_factor: refused unless 1, -1: no model that can be read from a
    GGUF file computes with it
attention.clamp_kqv attention.max_alibi_bias attention.temperature_length
    attention.temperature_scale attention.shared_kv_layers swin_norm
    rope.scaling.yarn_log_multiplier rope.dimension_count_swa rope.dimension_sections
    rescale_every_n_layers hidden_activation swiglu_clamp_exp swiglu_clamp_shexp
    activation_sparsity_scale embedding_length_per_layer_input embedding_length_out
    nextn_predict_layers n_deepstack_layers deepstack_mapping target_layers
    target_hidden_size norm_before_residual full_attention_interval token_shift_count
    time_mix_extra_dim time_decay_extra_dim hash_layer_count router_logit_softcapping
    leading_dense_block_count moe_every_n_layers moe_latent_size
    interleave_moe_layer_step decoder_block_count decoder_start_token_id
    attention.group_norm_epsilon attention.group_norm_groups
    attention.relative_buckets_count attention.compress_ratios
    attention.compress_rope_freq_base attention.output_group_count
    attention.recurrent_layers attention.key_length_swa attention.value_length_swa
    attention.key_length_mla attention.value_length_mla attention.q_lora_rank
    attention.kv_lora_rank attention.output_lora_rank attention.decay_lora_rank
    attention.iclr_lora_rank attention.value_residual_mix_lora_rank
    attention.gate_lora_rank attention.indexer.* altup.* expert_* experts_per_group
    hyper_connection.* ssm.* kda.* wkv.* shortconv.*: refused unless 0: no model that
    can be read from a GGUF file computes with it
rope.scaling.finetuned tensor_data_layout pooling_type features_length classifier.*
    posnet.* convnext.* {dense}_feat_in {dense}_feat_out dense_2_feat_in
    dense_2_feat_out dense_3_feat_in dense_3_feat_out: changes no text: llama.cpp does
    not read it for decoders, or not for text
""")
FILE_FIELDS = read_rules("""
general.architecture: honoured: the family
general.alignment: honoured: where weights begin
general.type: refused unless "model": only whole models can be read
general.name: honoured: in Phi-3 tokens take the spaces behind them
general.sampling.temp general.sampling.top_k general.sampling.top_p
    general.sampling.min_p: honoured: the options of a generation; where the file has
    some of them, the others have llama.cpp's defaults: 0.8, 40, 0.95 and 0.05
general.sampling.sequence: warned of: the filters have one order
general.sampling.penalty_repeat: warned of unless 1: there is no penalty on the last
    tokens only
general.sampling.xtc_threshold general.sampling.penalty_last_n
    general.sampling.mirostat_tau general.sampling.mirostat_eta: changes no text: only
    the fields around them use it
general.sampling.*: warned of unless 0: no option does this
general.*: changes no text: where the file comes from
split.count: refused unless 0, 1: the parts must be joined
split.no split.tensors.count: changes no text: of a file that was split
tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type
    tokenizer.ggml.scores tokenizer.ggml.merges tokenizer.ggml.add_space_prefix
    tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token: honoured: the tokenizer;
    as in llama.cpp, tokens with the name of an end or of a mark for infilling are
    control tokens, whatever their type
tokenizer.ggml.eos_token_id tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id
    tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id
    tokenizer.ggml.fim_sep_token_id: honoured: they end a text, as do tokens with the
    name of an end
tokenizer.ggml.bos_token_id tokenizer.ggml.unknown_token_id
    tokenizer.ggml.seperator_token_id tokenizer.ggml.padding_token_id
    tokenizer.ggml.cls_token_id tokenizer.ggml.mask_token_id: honoured: BOS begins a
    text; the chat template may name them
tokenizer.ggml.suppress_tokens: honoured: the option `logit_bias`, which takes them out
tokenizer.chat_template tokenizer.chat_template.tool_use: honoured: the chat template,
    and the one for tools
tokenizer.chat_templates tokenizer.chat_template.*: changes no text: only who asks for
    it by name gets it
tokenizer.ggml.add_sep_token: refused unless false: decoders have no separator
tokenizer.ggml.token_type_count tokenizer.ggml.remove_extra_whitespaces
    tokenizer.ggml.precompiled_charsmap tokenizer.ggml.normalizer.*
    tokenizer.huggingface.json tokenizer.rwkv.world: changes no text: llama.cpp does not
    read it for the kinds gpt2 and llama; others are refused
tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id
    tokenizer.ggml.fim_mid_token_id tokenizer.ggml.prefix_token_id
    tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id: changes no text: a
    prompt has the tokens for infilling itself
adapter.* diffusion.* xielu.*: refused: no model that can be read from a GGUF file
    computes with it
imatrix.* clip.* quantize.* GGUF.*: changes no text: of quantization, of other parts, or
    of the format
""")

_CONFIG_NAMES = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_NO_SUCH_NUMBER = "the models of this family have no such number"
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # The layers of the models of 27 B.
_DEFAULT_ROPE_BASE = 10000.0  # The base without `rope.freq_base`.


@dataclass(frozen=True)
class FamilyFields:
    """A family's fields of a GGUF file; raises `UnsupportedModelError`."""

    source: str
    family: str
    field: Callable[[str], Any]

    def family_field(self, name: str) -> Any:
        return self.field(f"{self.family}.{name}")

    def set_attention_and_norms(self, config: Any) -> None:
        """Set fields of `config`, in place; raises `UnsupportedModelError`."""
        size = self.family_field("attention.key_length")
        if size is not None and getattr(config, "head_dim", size) is not None:
            config.head_dim = size
        for name, attributes in _CONFIG_NAMES.items():
            value = self.family_field(name)
            known = [each for each in attributes if hasattr(config, each)]
            if value is not None and known:
                setattr(config, known[0], value or None)
            elif value and "epsilon" not in name:  # a model has one kind of norms
                raise self._unsupported_field(name)
        if hasattr(config, "query_pre_attn_scalar"):
            # So does llama.cpp: the models of 27 B scale by another size.
            is_27b = _LAYERS_OF_27B.get(self.family) == config.num_hidden_layers
            width = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = width if is_27b else head_size(config)
        self._set_windows(config)
        parallel = getattr(config, "use_parallel_residual", False)
        self._check_equal("use_parallel_residual", parallel)
        self._check_equal("attention.value_length", head_size(config))

    def _set_windows(self, config: Any) -> None:
        """Set the width of sliding windows; raise if other layers should have them."""
        name = "attention.sliding_window"
        window, kinds = self.family_field(name), getattr(config, "layer_types", None)
        has_windows = not kinds or "sliding_attention" in kinds
        if window and has_windows and hasattr(config, "sliding_window"):
            config.sliding_window = window
        elif window and window < config.max_position_embeddings:
            raise self._unsupported_field(name)
        kinds = kinds or [""] * config.num_hidden_layers
        windows = [kind == "sliding_attention" for kind in kinds]
        pattern = self.family_field(f"{name}_pattern")
        if isinstance(pattern, int) and pattern > 0:  # all layers but each such one
            pattern = [place % pattern != 0 for place in range(1, len(kinds) + 1)]
        if pattern not in (None, windows):
            raise self._unsupported_field(f"{name}_pattern")

    def set_rotations(self, config: Any, scaling: dict[str, Any] | None = None) -> None:
        """Set base and scaling of RoPE; `scaling` is given where no field has it."""
        base = self.family_field("rope.freq_base") or _DEFAULT_ROPE_BASE
        parameters = config.rope_parameters
        full = parameters.get("full_attention", parameters)
        local = self.family_field("rope.freq_base_swa")
        full["rope_theta"] = base
        if "sliding_attention" in parameters:
            parameters["sliding_attention"]["rope_theta"] = local or _DEFAULT_ROPE_BASE
        elif local not in (None, base):
            raise self._unsupported_field("rope.freq_base_swa")
        size, turned = head_size(config), self.family_field("rope.dimension_count")
        share = full.get("partial_rotary_factor")
        if turned is not None and turned != int(size * (share or 1)):
            if share is None:
                raise self._unsupported_field("rope.dimension_count")
            full["partial_rotary_factor"] = turned / size
        own = self._rope_scaling(config)
        if scaling and own:
            raise self._unsupported_field("rope.scaling.factor")
        full.update(scaling or own)

    def _rope_scaling(self, config: Any) -> dict[str, Any]:
        """Return the file's scaling of RoPE, by transformers' names; {} without any."""
        field = self.family_field
        kind = field("rope.scaling.type") or "linear"
        factor = field("rope.scaling.factor") or field("rope.scale_linear") or 1
        strength = field("rope.scaling.attn_factor") or 1.0
        if kind not in ("none", "linear", "yarn"):
            fact = f"{self.source} scales its rotations by {kind!r}, which is not known"
            raise UnsupportedModelError(f"{fact}; export its Hugging Face folder")
        if kind != "yarn" and strength != 1:
            raise self._unsupported_field("rope.scaling.attn_factor")
        if kind == "none" or (kind == "linear" and factor == 1):
            return {}
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "linear":
            return scaling
        original = field("rope.scaling.original_context_length")
        length = original or config.max_position_embeddings
        scaling["original_max_position_embeddings"] = length
        scaling["attention_factor"] = strength * (0.1 * math.log(factor) + 1)
        names = "beta_fast", "beta_slow"
        bounds = {name: field(f"rope.scaling.yarn_{name}") for name in names}
        return scaling | {n: bound for n, bound in bounds.items() if bound is not None}

    def _check_equal(self, name: str, expected: object) -> None:
        if self.family_field(name) not in (None, expected):
            raise self._unsupported_field(name, f"its model here has {expected}")

    def _unsupported_field(self, name: str, why: str = "") -> UnsupportedModelError:
        full, value = f"{self.family}.{name}", self.family_field(name)
        return field_error(self.source, full, value, why or _NO_SUCH_NUMBER)


def field_error(file: str, name: str, value: object, why: str) -> UnsupportedModelError:
    """Return the error for a field whose value no exported model supports."""
    fact = f"{file} has {name} {printable(value, 40)}"
    return UnsupportedModelError(f"{fact}, and {why}; export its Hugging Face folder")
