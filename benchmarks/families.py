"""Every decoder of transformers, from a tiny random checkpoint of its structure.

A family is exported or refused by name. If it is exported, its logits are compared with
the logits of transformers (eager, float32), and texts with plain decoding: greedy,
drafted by lookup and by a proposer that is right now and then, in floats and in q4_0.
Of models that read images too, the oracle is the whole model.

    python benchmarks/families.py [NAME...] --json OUT --page docs/models.md
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import jetdraft
from jetdraft.checkpoints.model_reader import check_exportable
from jetdraft.checkpoints.refusals import EXPERT_FAMILIES, RECURRENT_FAMILIES
from jetdraft.errors import JetdraftError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.recipe import Recipe

VOCAB, CAPACITY, NEW_TOKENS, TOLERANCE = 320, 96, 24, 2e-4
MOST_WEIGHTS, RECIPES = 120_000_000, ("none", "q4_0")
BY_SIZE: dict[Any, str] = {
    VOCAB: "vocab_size", 256: "max_position_embeddings",
    64: "hidden_size word_embed_proj_dim",
    96: "intermediate_size ffn_dim ffn_hidden_size",
    4: "num_attention_heads linear_num_value_heads",
    2: "num_key_value_heads num_hidden_layers linear_num_key_heads mamba_n_groups "
       "n_groups mamba_expand num_experts_per_tok num_experts_per_token moe_topk moe_k",
    16: "head_dim kv_lora_rank qk_nope_head_dim linear_key_head_dim mamba_d_head "
        "mamba_d_state mamba_head_dim ssm_state_size",
    8: "rotary_dim sliding_window qk_rope_head_dim linear_value_head_dim mamba_n_heads "
       "mamba_num_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    24: "q_lora_rank", 12: "v_head_dim", 128: "mamba_d_ssm",
    48: "moe_intermediate_size expert_ffn_hidden_size",
    80: "shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size",
    1: "num_shared_experts n_shared_experts moe_num_shared_experts topk_group n_group "
       "first_k_dense_replace num_dense_layers",
    # Fields whose neutral value would prove nothing.
    3.0: "embedding_multiplier final_logit_softcapping", 0.3: "attention_multiplier",
    0.5: "residual_multiplier logit_scale", 1.5: "routed_scaling_factor logits_scaling",
    20: "query_pre_attn_scalar", "yes": "attention_bias mlp_bias use_qk_norm "
        "qk_layernorm",
}  # fmt: skip
SIZES = {
    name: True if size == "yes" else size
    for size, names in BY_SIZE.items()
    for name in names.split()
}
SEEING = {
    name: size
    for size, names in {
        32: "hidden_size embed_dim", 1: "num_hidden_layers depth", 28: "image_size",
        2: "num_attention_heads num_heads", 48: "intermediate_size mlp_dim",
        14: "patch_size", 64: "out_hidden_size",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Sizes of what reads images."""

SPECIAL = {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2}
KINDS_OF_LAYERS = "layer_types", "layers_block_type"
KINDS = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
    "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
}  # fmt: skip
THREE_WAYS = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
HALF_TURNED = {
    "rope_parameters": {
        **ROPE,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
OF_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": KINDS * 3, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 32,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, ROPE)
    },
    "deepseek_v3": {"rope_parameters": YARN},
    "gemma3n_text": {
        **OF_LAYERS, "activation_sparsity_pattern": [0.5, 0.0] * 3,
        "altup_num_inputs": 3, "laurel_rank": 8,
    },
    "dory": {"num_hidden_layers": 3, "layer_types": [*KINDS, KINDS[0]],
             "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1},
    "gemma4_text": {**OF_LAYERS, "use_double_wide_mlp": True, "num_experts": None},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": KINDS},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "gemma4_unified_text": {
        **OF_LAYERS, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    # Its window is in no argument of attention; the published one is of all positions.
    "phimoe": {"sliding_window": None},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 16},
    # transformers reads its row of padding as zeros.
    "youtu": {"pad_token_id": None},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text",
         "qwen3_vl_moe_text", "qwen3_omni_moe_text", "paddleocr_vl_text",
         "hunyuan_vl_text", "ernie4_5_vl_moe_text", "cosmos3_edge_text"), THREE_WAYS
    ),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "glm4v_moe_text"), HALF_TURNED),
}  # fmt: skip
"""Fields of single families: `SIZES` does not fit, or would prove less."""

EVERY = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
}  # fmt: skip
NAMES = sorted(
    name
    for name in EVERY
    if not name.endswith("_assistant") and not CONFIG_MAPPING[name]().is_encoder_decoder
)
"""The `model_type`s of all decoders, and of what reads images and has one. Assistants
are drafters, and encoder-decoders are in docs/sources.md."""

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
Model = Any
IDS = np.random.default_rng(0).integers(3, VOCAB - 40, 40)


@dataclass
class Outcome:
    """What became of a family: exact, refused or wrong; `text` is its decoder."""

    family: str
    result: str
    reason: str = ""
    text: str = ""
    gap: float = 0.0


def shrunk(kind: type, sizes: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Make a config with all fields of `sizes` that it has, and with `changes`."""
    known = kind().to_dict()
    names = {*known, *getattr(kind, "attribute_map", {})}
    fields = {name: size for name, size in sizes.items() if name in names}
    if "kv_lora_rank" in fields:  # all heads have keys, of a size that is a sum
        fields = {**fields, "num_key_value_heads": 4}
        fields.pop("head_dim", None)
    lists = {n: v for n, v in known.items() if v and n.endswith(KINDS_OF_LAYERS)}
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items()}
    if kinds:
        fields["num_hidden_layers"] = max(2, *map(len, kinds.values()))
    for name, value in known.items():
        if name in SPECIAL:
            fields[name] = SPECIAL[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            fields[name] = VOCAB - 1
        elif name in kinds:
            layers = fields["num_hidden_layers"]
            fields[name] = (kinds[name] * layers)[:layers]
    return kind(**{**fields, **changes})


def config_of(name: str) -> Any:
    """Make the tiny config of a family; its text half is tiny, and its other parts."""
    kind = CONFIG_MAPPING[name]
    parts = getattr(kind, "sub_configs", None) or {}
    changes = CHANGES.get(name, {})
    default, made = kind(), {}
    for part in parts:
        own: Any = type(getattr(default, part))
        if own is type(None):
            continue
        sizes = SIZES if part == "text_config" else SEEING
        made[part] = shrunk(own, sizes, CHANGES.get(own.model_type, {}))
    sizes = {} if "text_config" in parts else SIZES
    return shrunk(kind, sizes, {**made, **changes})


def random_model(config: Any, seed: int) -> Model:
    """Make a model of a config in which no weight has a neutral value."""
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = sum(p.numel() for p in kind.from_config(config).parameters())
    assert size < MOST_WEIGHTS, f"{size:,} weights are not tiny"
    model = kind.from_config(config, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in model.state_dict().values():
            if weight.is_floating_point():
                wide = weight.ndim > 1
                (weight.zero_() if wide else weight).add_(
                    torch.randn_like(weight) * (0.2 if wide else 0.1)
                )
    model.tie_weights()
    return model


def logits_of(model: Model, ids: Iterable[int]) -> np.ndarray:
    """What transformers computes for all tokens at once, [n, vocab]."""
    with torch.no_grad():
        given = torch.tensor([[int(token) for token in ids]])
        result: np.ndarray = model(input_ids=given, use_cache=False).logits[0].numpy()
    return result


class Known(Proposer):
    """Drafts what plain decoding wrote, with an error now and then."""

    traits = Traits("known", max_draft_tokens=15)
    text: list[int] = []  # noqa: RUF012

    def propose(self, context: Any, budget: int, parents: Any = None) -> Rows:
        """Return the root and a chain of the known text."""
        draw, rest = Random(len(context)), self.text[len(context) :]
        tokens = [token ^ (draw.random() < 0.2) for token in rest[:budget]]
        return Rows.chain([int(context[-1]), *tokens])


def try_family(name: str, folder: Path, seed: int = 0) -> Outcome:
    """Export a family from a random checkpoint, and compare all that it computes."""
    source, outcome = folder / "checkpoint", Outcome(name, "exact")
    try:
        model = save_tiny(name, source, seed)
        if model is not None:
            config = model.config.get_text_config(decoder=True)
            outcome.text = config.model_type
        for recipe in RECIPES:
            options = ExportOptions(
                Recipe.parse(recipe), capacity=CAPACITY, max_width=32, fast=True
            )
            bundle = export(str(source), folder / recipe, options=options)
            with jetdraft.load(bundle.path, threads=1) as loaded:
                text = compare_texts(loaded)
                if recipe == "none":
                    outcome.gap = compare_logits(loaded, model, text)
    except UnsupportedModelError as error:
        outcome.result = "refused"
        outcome.reason = str(error).replace(f"{source} ", "")
    except (AssertionError, JetdraftError) as error:
        outcome.result, outcome.reason = "wrong", str(error)
    return outcome


def save_tiny(name: str, source: Path, seed: int) -> Model | None:
    """Save a random checkpoint; None where no tiny one can be made, but its config."""
    try:
        config = config_of(name)
        config.save_pretrained(source)
        check_exportable(str(source))
        model = random_model(config, seed)
        model.save_pretrained(source)
    except UnsupportedModelError:
        raise
    except Exception:  # only a refusal of the config is an outcome then
        CONFIG_MAPPING[name]().save_pretrained(source)
        return None
    return model


def compare_texts(loaded: jetdraft.Model) -> list[int]:
    """Return the greedy text; raise `AssertionError` if a draft changes it."""
    given: dict[str, Any] = {"token_ids": IDS.tolist(), "max_new_tokens": NEW_TOKENS}
    given["ignore_eos"] = True
    plain = loaded.generate(method="none", **given).token_ids
    Known.text = [*IDS.tolist(), *plain]
    with registered(Method("known", "the known text", lambda *_: Known())):
        for method, length in (("lookup", 4), ("known", 3), ("known", 15)):
            way = {"method": method, "num_draft_tokens": length}
            drafted = loaded.generate(**given, **way).token_ids
            assert drafted == plain, f"another text with {way}"
    return list(Known.text)


def compare_logits(loaded: jetdraft.Model, model: Model, text: list[int]) -> float:
    """Return the largest gap of logits; raise `AssertionError` for a large one."""
    expected, graph, logits = logits_of(model, text), loaded.parts.target, []
    assert expected.std(-1).min() > 0.05, "the logits are too flat to prove something"
    graph.cache.rewind(0)
    for start, end in ((0, 20), (20, 21), (21, 47), (47, len(text))):
        logits.append(graph.run(np.array(text[start:end])).logits.copy())
        graph.cache.advance(end - start)
    gap = float(np.abs(np.concatenate(logits) - expected).max())
    assert gap < TOLERANCE, f"logits differ by {gap:.2g}"
    written, best = text[len(IDS) :], expected[len(IDS) - 1 : -1]
    chosen = best[np.arange(len(written)), written]
    assert (best.max(-1) - chosen).max() < TOLERANCE, "another greedy text"
    return gap


def title(outcome: Outcome) -> str:
    """Return the row of the page in which an outcome stands."""
    if outcome.result != "exact":
        reason = re.sub(r" \(.*?\)| in \d+ of its \d+ layers", "", outcome.reason)
        reason = reason.partition(";")[0].partition(", which jetdraft")[0]
        return f"{outcome.result}: {re.sub(r'^[A-Z][A-Za-z0-9_]+ ', '', reason)}"
    text = outcome.text
    kind = "recurrent states" if text in RECURRENT_FAMILIES else "attention alone"
    kind += ", experts" * (text in EXPERT_FAMILIES)
    if outcome.family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "exact: the language model of what reads images too"
    return f"exact: {kind}"


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of the page, a row for each title."""
    rows = defaultdict(list)
    for outcome in outcomes:
        rows[title(outcome)].append(outcome.family)
    lines = [
        f"| {row} | {len(n)} | {', '.join(n)} |" for row, n in sorted(rows.items())
    ]
    return "\n".join(["| outcome | | families |", "| --- | --- | --- |", *lines, ""])


def documented(page: Path) -> dict[str, str]:
    """Return the title of each family in the table of a page."""
    rows = re.findall(r"^\| (\w+: .*?) \| \d+ \| (.*) \|$", page.read_text(), re.M)
    return {name: row for row, names in rows for name in names.split(", ")}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--json", "output", type=click.Path(path_type=Path))
@click.option("--page", type=click.Path(path_type=Path))
def main(names: tuple[str, ...], output: Path | None, page: Path | None) -> None:
    """Try the families NAMES, or all; write the table into the page."""
    outcomes = []
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(try_family(name, Path(folder)))
        found = outcomes[-1]
        line = f"{name:24} {found.text:22} {found.result:8} {found.gap:.1e}"
        click.echo(f"{line} {found.reason}")
    if output is not None:
        output.write_text(json.dumps([asdict(x) for x in outcomes], indent=1) + "\n")
    if page is not None:
        text, made = page.read_text(), table(outcomes)
        page.write_text(re.sub(r"\| outcome \|.*?\n(?!\|)", made, text, flags=re.S))
    raise SystemExit(any(found.result == "wrong" for found in outcomes))


if __name__ == "__main__":
    main()
