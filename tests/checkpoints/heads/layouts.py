"""Tiny random heads, written as each publisher writes its files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny import VOCAB_SIZE

H, HEADS, KV, D, FF, VD = 64, 4, 2, 16, 96, 100
LAYERS = 7
TAPS = (2, 3, 4)
"""What EAGLE reads of a target of 7 layers: 2, N // 2 and N - 3."""
VICUNA = "lmsys/vicuna-7b-v1.3"
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
BLOCK, MASK = 6, 287
"""Rows of a block with its first token, and the token of a mask."""


def rand(*shape):
    return torch.randn(*shape) * shape[-1] ** -0.5


def norm(width=H):
    return 1 + torch.randn(width) * 0.3


def layer_tensors(prefix, inputs=H, qk_norm=False, first_norm=True, bias=False):
    tensors = {
        "self_attn.q_proj.weight": 3 * rand(HEADS * D, inputs),
        "self_attn.k_proj.weight": 3 * rand(KV * D, inputs),
        "self_attn.v_proj.weight": rand(KV * D, inputs),
        "self_attn.o_proj.weight": rand(H, HEADS * D),
        "post_attention_layernorm.weight": norm(),
        "mlp.gate_proj.weight": rand(FF, H),
        "mlp.up_proj.weight": rand(FF, H),
        "mlp.down_proj.weight": rand(H, FF),
    }
    if first_norm:
        tensors["input_layernorm.weight"] = norm()
    if qk_norm:
        tensors["self_attn.q_norm.weight"] = norm(D)
        tensors["self_attn.k_norm.weight"] = norm(D)
    if bias:
        for name, size in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
            tensors[f"self_attn.{name}_proj.bias"] = torch.randn(size) * 0.1
    return {prefix + name: tensor for name, tensor in tensors.items()}


def layers_of(count, **shape):
    layers = [layer_tensors(f"layers.{index}.", **shape) for index in range(count)]
    return {name: tensor for layer in layers for name, tensor in layer.items()}


def layer_config(**changes):
    config = {"hidden_size": H, "intermediate_size": FF, "num_attention_heads": HEADS}
    config |= {"num_key_value_heads": KV, "num_hidden_layers": 1, "hidden_act": "silu"}
    config |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
    config |= {"vocab_size": VOCAB_SIZE}
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def map_of(ids, rows=VOCAB_SIZE):
    """d2t and t2d of some tokens; d2t is the offset of an id to its row."""
    marked = torch.zeros(rows, dtype=torch.bool)
    marked[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def draft_map():
    return map_of(torch.randperm(VOCAB_SIZE)[:VD].sort().values)


def write(folder, config, tensors, file="model.safetensors"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.startswith("shards of "):
        name, _, ending = file.removeprefix("shards of ").partition(".")
        save = save_file if ending == "safetensors" else torch.save
        names = sorted(tensors)
        weight_map = {}
        for part in (0, 1):
            shard = f"{name}-0000{part + 1}-of-00002.{ending}"
            own = {name: tensors[name] for name in names[part::2]}
            save(own, folder / shard)
            weight_map |= dict.fromkeys(own, shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{name}.{ending}.index.json").write_text(json.dumps(index))
    elif file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def eagle1(fc_bias=True, embedding=True, para_norm=False):
    config = layer_config(architectures=["LlamaForCausalLM"], model_type="llama")
    if not fc_bias:
        config["bias"] = False
    tensors = {"fc.weight": rand(H, 2 * H)}
    tensors |= layer_tensors("layers.0.", first_norm=False)
    if fc_bias:
        tensors["fc.bias"] = torch.randn(H) * 0.1
    if embedding:
        tensors["embed_tokens.weight"] = rand(VOCAB_SIZE, H)
    if para_norm:
        config["add_para_norm"] = True
        tensors["embedding_layernorm.weight"] = norm()
        tensors["hidden_states_layernorm.weight"] = norm()
    return config, tensors


def eagle3(prefix="midlayer.", **changes):
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    fields |= {"draft_vocab_size": VD, "rope_scaling": None, "attention_bias": False}
    fields |= {"tie_word_embeddings": False, "torch_dtype": "float16"}
    config = layer_config(**fields, **changes)
    tensors = {"fc.weight": rand(H, 3 * H), "norm.weight": norm()}
    tensors |= {"lm_head.weight": rand(VD, H), f"{prefix}hidden_norm.weight": norm()}
    tensors |= {**layer_tensors(prefix, inputs=2 * H), **draft_map()}
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(3)}
    return config, tensors


def of_speculators(kind, version, **fields):
    """The fields of every config of vLLM's speculators."""
    config = {"architectures": [f"{kind}Speculator"], "target_hidden_size": None}
    config |= {"speculators_model_type": kind.lower(), "draft_vocab_size": VD}
    config |= {"speculators_config": {"algorithm": kind.lower()}}
    return {**config, "speculators_version": version, **fields}


def speculators(nested=True, taps=3, layers=1, qk_norm=False, **changes):
    layer = {"model_type": "qwen3" if qk_norm else "llama", "rope_parameters": ROPE}
    layer |= {"rms_norm_eps": 1e-6, "attention_bias": False}
    layer = layer_config(head_dim=D, num_hidden_layers=layers, **layer)
    norms = ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
    own = {"transformer_layer_config": layer} if nested else layer
    own = {**own, **dict.fromkeys(norms, False)}
    own["eagle_aux_hidden_state_layer_ids"] = None
    config = of_speculators("Eagle3", "0.4.0", **own) | changes
    tensors = {"fc.weight": rand(H, taps * H), "norm.weight": norm()}
    tensors |= {"lm_head.weight": rand(VD, H)}
    tensors |= {"embed_tokens.weight": rand(VOCAB_SIZE, H)}
    tensors |= {"layers.0.hidden_norm.weight": norm()}
    tensors |= layer_tensors("layers.0.", inputs=2 * H, qk_norm=qk_norm) | draft_map()
    for index in range(1, layers):
        tensors |= layer_tensors(f"layers.{index}.", qk_norm=qk_norm)
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = norm(taps * H)
    if config["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(taps)}
    return config, tensors


def medusa(heads=3, layers=1):
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers}
    config["base_model_name_or_path"] = VICUNA
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = rand(H, H)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(H) * 0.1
        tensors[f"{head}.{layers}.weight"] = rand(VOCAB_SIZE, H)
    return config, tensors


def hydra(heads=3, layers=2):
    config = {"hydra_num_heads": heads, "hydra_num_layers": layers}
    config |= {"hydra_head_arch": "mlp", "grounded_heads": True}
    config |= {"hidden_state_offset": 0, "base_model_name_or_path": VICUNA}
    tensors = {}
    for head in range(heads):
        wide = (head + 2) * H
        first = f"hydra_mlp.{head}.0."
        for part in ("linear", "res_connection"):
            tensors[f"{first}{part}.weight"] = rand(H, wide)
            tensors[f"{first}{part}.bias"] = torch.randn(H) * 0.1
        for layer in range(1, layers):
            tensors[f"hydra_mlp.{head}.{layer}.linear.weight"] = rand(H, H)
            tensors[f"hydra_mlp.{head}.{layer}.linear.bias"] = torch.randn(H) * 0.1
        tensors[f"hydra_lm_head.{head}.weight"] = rand(VOCAB_SIZE, H)
    return config, tensors


def dflash(layers=2, outputs=(1, 2, 4), nested=True, prefix="", **changes):
    own = {"mask_token_id": MASK, "target_layer_ids": list(outputs)}
    fields = {"dflash_config": own} if nested else own
    fields |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    fields |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    fields |= {"head_dim": D, "rope_theta": 1000000, "rope_scaling": None}
    fields |= {"attention_bias": False, "attention_dropout": 0.0}
    fields |= {"use_sliding_window": False, "sliding_window": None}
    fields |= {"layer_types": ["full_attention"] * layers, "num_hidden_layers": layers}
    config = layer_config(block_size=BLOCK, num_target_layers=LAYERS, **fields)
    tensors = {
        "fc.weight": rand(H, len(outputs) * H),
        "hidden_norm.weight": norm(),
        "norm.weight": norm(),
        **layers_of(layers, qk_norm=True),
    }
    return config | changes, {prefix + name: value for name, value in tensors.items()}


def speculators_dflash(cut=True, **changes):
    _, tensors = dflash()
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "rope_parameters": ROPE}
    own = {"transformer_layer_config": layer_config(head_dim=D, **layer)}
    own |= {"draft_vocab_size": VD if cut else VOCAB_SIZE, "mask_token_id": MASK}
    own |= {"block_size": BLOCK, "aux_hidden_state_layer_ids": [2, 3, 5]}
    own |= {"sample_from_anchor": False, "projector_type": "dflash"}
    config = of_speculators("DFlash", "0.6.0", **own) | changes
    if cut:
        tensors |= {"lm_head.weight": rand(VD, H), **draft_map()}
    return config, tensors


def dspark(kind="authors", taps=(2, 3, 5), **changes):
    outputs, rows, rank = [tap - 1 for tap in taps], VOCAB_SIZE, 8
    own = {"markov_rank": rank, "markov_head_type": "vanilla"}
    own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if kind == "speculators":
        config, tensors = speculators_dflash(aux_hidden_state_layer_ids=list(taps))
        own |= {"speculators_model_type": "dspark", "sample_from_anchor": True}
        config, rows = config | own, VD
    else:
        nested = kind == "nested"
        config, tensors = dflash(outputs=outputs, nested=nested, num_target_layers=None)
        own |= {"attention_mode": "gqa", "projector_type": "dspark"} if nested else {}
        (config["dflash_config"] if nested else config).update(own)
        config["architectures"] = ["DSparkDraftModel" if nested else "Qwen3DSparkModel"]
    head = {"markov_w1": rank * rand(VOCAB_SIZE, rank), "markov_w2": rand(rows, rank)}
    tensors |= {f"markov_head.{name}.weight": weight for name, weight in head.items()}
    tensors["confidence_head.proj.weight"] = rand(1, H + rank)
    return config | changes, tensors


def one_layer(kind, layers=1, qk_norm=False, **changes):
    own = {
        "kangaroo": {"norm": (H,)},
        "chimera": {
            "trigram.block": (3 * H, 3 * H),
            "trigram.down": (H, 3 * H),
            "out": (H, 2 * H),
            "norm": (H,),
        },
        "glide": {"cross.q_proj": (H, H), "cross.o_proj": (H, H), "norm": (H,)},
        "falcon": {
            "recurrence.inputs.0": (4 * H, 2 * H),
            "recurrence.inputs.1": (4 * H, H),
            **{f"recurrence.states.{i}": (4 * H, H) for i in (0, 1)},
        },
    }[kind]
    tensors = {f"{name}.weight": rand(*shape) for name, shape in own.items()}
    if kind == "falcon":
        tensors |= {f"recurrence.inputs.{i}.bias": rand(4 * H) for i in (0, 1)}
        changes = {"block_size": 3, **changes}
    tensors |= layers_of(layers, qk_norm=qk_norm)
    if kind == "kangaroo":
        cut = (".mlp.", ".post_attention_layernorm.")
        tensors = {n: t for n, t in tensors.items() if not any(c in n for c in cut)}
        changes = {"exit_layer": 1, **changes}
    return layer_config(**changes), tensors


def diffusion(layers=2, **changes):
    sizes = {"num_hidden_layers": layers, "head_dim": D, "block_size": BLOCK}
    config = layer_config(model_type="jetdraft-diffusion", rope_theta=10000.0, **sizes)
    return config | changes, {
        "embed_tokens.weight": rand(VOCAB_SIZE, H),
        "mask": rand(H),
        "norm.weight": norm(),
        **layers_of(layers, qk_norm=True),
    }
