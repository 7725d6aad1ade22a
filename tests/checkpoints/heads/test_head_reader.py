"""Contents heads and diffusion drafters compute what their authors' code computes."""

import pickle
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from jetdraft.checkpoints.attention import PassThroughCache, StepState, attending
from jetdraft.checkpoints.heads.blocks import masked_attention
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts, reference
from tests.checkpoints.heads.conftest import ROWS
from tests.checkpoints.heads.layouts import BLOCK, MASK, TAPS, VD, write
from tests.tiny import VOCAB_SIZE

CLOSE = {"rtol": 0, "atol": 2e-5}
STEPS = 3
FILES = ("pytorch_model.bin", "model.safetensors")
ANCHOR = 9
UNKNOWN = VOCAB_SIZE
BLOCK_TAPS = (2, 3, 5)
THETA = {"theta": 5000.0}
DFLASH = {
    "authors": (layouts.dflash, {}, {}),
    "ids beside": (layouts.dflash, {"nested": False, "prefix": "model."}, {}),
    "one layer": (layouts.dflash, {"layers": 1}, {}),
    "speculators": (layouts.speculators_dflash, {}, THETA),
    "speculators, all tokens": (layouts.speculators_dflash, {"cut": False}, THETA),
    "DSpark": (layouts.dspark, {}, {}),
    "DSpark of SpecForge": (layouts.dspark, {"kind": "nested"}, {}),
    "DSpark of speculators": (layouts.dspark, {"kind": "speculators"}, THETA),
}
CAUSAL = torch.ones(BLOCK, ROWS + BLOCK, dtype=torch.bool).tril(ROWS)
MISTAKES = {
    "a causal block": ({"mask": CAUSAL}, None),
    "taps off by one": ({"taps": (1, 2, 4)}, None),
    "taps reversed": ({"taps": (5, 3, 2)}, None),
    "a block moved": ({"shift": 1}, None),
    "a context not normed": (
        {}, lambda head, _: setattr(head, "hidden_norm", torch.nn.Identity())),
    "rotations of the target": (
        {}, lambda head, target: setattr(head.stack, "rotary", target.rotary_emb)),
    "another mask token": (
        {},
        lambda head, _: setattr(head, "config", replace(head.config, mask_token=3))),
}  # fmt: skip


def drafted(head, states, taps):
    """Logits of every row, then of `STEPS` rows that each get what the last carried."""
    with torch.no_grad():
        features = head.fuse([tap[None] for tap in taps])
        cache = DynamicCache()
        tokens, positions = states.tokens[None], states.positions[None]
        hidden, carried = head(tokens, features, positions, cache)
        rows = [head.lm_head(hidden)[0]]
        for step in range(STEPS):
            token, position = torch.tensor([[7 + step]]), torch.tensor([[ROWS + step]])
            hidden, carried = head(token, carried[:, -1:], position, cache)
            rows.append(head.lm_head(hidden)[0])
    return torch.cat(rows)


def expected(compute, embedding, lm_head, states, features):
    tokens, rows = states.tokens, []
    for step in range(STEPS + 1):
        hidden, carried = compute(embedding[tokens], features)
        logits = F.linear(hidden, lm_head)
        rows.append(logits if step == 0 else logits[-1:])
        tokens = torch.cat([tokens, torch.tensor([7 + step])])
        features = torch.cat([features, carried[-1:]])
    return torch.cat(rows)


def target_embedding(target):
    return target.model.get_input_embeddings().weight.detach()


def target_head(target):
    return target.model.get_output_embeddings().weight.detach()


@pytest.mark.parametrize("file", [*FILES, *(f"shards of {file}" for file in FILES)])
@pytest.mark.parametrize(
    "shape",
    [{}, {"fc_bias": False}, {"embedding": False}, {"para_norm": True}],
    ids=["bias", "no bias", "no embedding", "HASS"],
)
def test_eagle1(target, states, tmp_path, shape, file):
    """The embedding comes first in fc; no first norm, no last norm."""
    torch.manual_seed(3)
    config, tensors = layouts.eagle1(**shape)
    stored = {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    if file in FILES[:1]:  # as some converters write them
        stored = {f"model.{name}": tensor for name, tensor in stored.items()}
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(print))
    head = load_head(write(tmp_path, config, stored, file), target, torch.float32)
    compute = partial(reference.eagle1, tensors)
    embedding = tensors.get("embed_tokens.weight", target_embedding(target))
    wanted = expected(compute, embedding, target_head(target), states, states.final)
    torch.testing.assert_close(drafted(head, states, [states.final]), wanted, **CLOSE)


def test_eagle1_as_old_vllm_wrapped_it(target, states, tmp_path):
    torch.manual_seed(3)
    config, tensors = layouts.eagle1()
    wrapped = {"model_type": "eagle", "model": config}
    one = load_head(write(tmp_path / "1", config, tensors), target, torch.float32)
    two = load_head(write(tmp_path / "2", wrapped, tensors), target, torch.float32)
    assert one.config == two.config


LIKE_SPECULATORS = {"norm_before_residual": True, "theta": 5000.0, "eps": 1e-6}
OUTPUTS = "eagle_aux_hidden_state_layer_ids"
# fmt: off
EAGLE3 = {
    "authors, no rope_theta": (layouts.eagle3, {}, {}, TAPS),
    "AngelSlim, Qwen3's theta, a wrong head_dim": (
        layouts.eagle3,
        {"rope_theta": 1000000, "head_dim": 80, "num_hidden_layers": 36},
        {"theta": 1e6}, TAPS),
    "converted, layers.0": (
        layouts.eagle3, {"prefix": "layers.0.", "head_dim": ...}, {}, TAPS),
    "model. before each name": (
        layouts.eagle3, {"prefix": "model.midlayer."}, {}, TAPS),
    "nvidia, ids of outputs": (
        layouts.eagle3,
        {"eagle_config": {OUTPUTS: [0, 3, 5], "use_aux_hidden_state": True}},
        {}, (1, 4, 6)),
    "nvidia, the last layer's output": (
        layouts.eagle3, {"eagle_config": {OUTPUTS: [0, 3, 6]}}, {}, (1, 4, 7)),
    "without norm_output": (layouts.eagle3, {"norm_output": False}, {}, TAPS),
    "3.1, flat": (
        layouts.eagle3, {"norm_output": True, "fc_norm": True},
        {"feeds_normed": True}, TAPS),
    "speculators, nested": (layouts.speculators, {}, LIKE_SPECULATORS, TAPS),
    "speculators, flat": (
        layouts.speculators, {"nested": False}, {"theta": 5000.0, "eps": 1e-6}, TAPS),
    "speculators, nested, converted": (
        layouts.speculators, {"norm_before_residual": False},
        {"theta": 5000.0, "eps": 1e-6}, TAPS),
    "speculators 3.1: a norm for each tap, the normed state is fed back": (
        layouts.speculators, {"fc_norm": True, "norm_output": True},
        {**LIKE_SPECULATORS, "feeds_normed": True}, TAPS),
    "speculators, four taps, one norm over all": (
        layouts.speculators,
        {"taps": 4, "norm_before_fc": True, OUTPUTS: [1, 3, 5, 7]},
        LIKE_SPECULATORS, (1, 3, 5, 7)),
    "speculators, one tap": (
        layouts.speculators, {"taps": 1, OUTPUTS: [5]}, LIKE_SPECULATORS, (5,)),
    "speculators, two layers of Qwen3": (
        layouts.speculators, {"qk_norm": True, "layers": 2}, LIKE_SPECULATORS, TAPS),
}
# fmt: on


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3(target, states, tmp_path, case):
    torch.manual_seed(4)
    make, shape, flags, wanted_taps = EAGLE3[case]
    config, tensors = make(**shape)
    file = "pytorch_model.bin" if make is layouts.eagle3 else "model.safetensors"
    head = load_head(write(tmp_path, config, tensors, file), target, torch.float32)
    plain = {name.removeprefix("model."): t for name, t in tensors.items()}
    taps = [states.streams[tap] for tap in wanted_taps]
    features = reference.eagle3_fuse(plain, taps, flags.get("eps", 1e-5))
    compute = partial(reference.eagle3, plain, **flags)
    embedding = plain.get("embed_tokens.weight", target_embedding(target))
    wanted = expected(compute, embedding, plain["lm_head.weight"], states, features)
    chosen = [states.streams[tap] for tap in head.config.taps]
    torch.testing.assert_close(drafted(head, states, chosen), wanted, **CLOSE)
    assert torch.equal(head.ids, torch.arange(VD) + plain["d2t"])


def test_a_head_without_an_lm_head_has_rows_of_the_targets(target, tmp_path):
    config, tensors = layouts.speculators()
    del tensors["lm_head.weight"]
    head = load_head(write(tmp_path, config, tensors), target, torch.float32)
    assert torch.equal(head.lm_head.weight, target_head(target)[head.ids])


def test_over_fixed_buffers_a_head_computes_the_same(target, states, tmp_path):
    config, tensors = layouts.speculators(layers=2)
    head = load_head(write(tmp_path, config, tensors), target, torch.float32)
    taps = [states.streams[tap] for tap in TAPS]
    wanted = drafted(head, states, taps)[:ROWS]
    head.attend_with("jetdraft")
    past = [(torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16)) for _ in range(2)]
    rows = []
    for start, end in ((0, 8), (8, ROWS)):
        places = {"cursor": start, "last_row": end - 1, "total_length": end}
        places = {name: torch.tensor([place]) for name, place in places.items()}
        state = StepState(past=past, **places)
        with attending(state), torch.no_grad():
            features = head.fuse([tap[None] for tap in taps])[:, start:end]
            tokens = states.tokens[None, start:end]
            hidden, _ = head(
                tokens, features, states.positions[None, start:end], PassThroughCache()
            )
            rows.append(head.lm_head(hidden)[0])
        past = [state.present[layer] for layer in (0, 1)]
    torch.testing.assert_close(torch.cat(rows), wanted, **CLOSE)


def test_a_head_in_half_precision_keeps_its_fusion_in_float32(target, tmp_path):
    """Residual streams of some targets overflow in float16."""
    config, tensors = layouts.eagle3()
    tensors = {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()}
    head = load_head(write(tmp_path, config, tensors), target, torch.float32)
    assert head.norm.weight.dtype == torch.float16  # as stored
    features = head.fuse([torch.full((1, 2, layouts.H), 60000.0)] * 3)
    assert features.dtype == torch.float32
    assert torch.isfinite(features).all()
    hidden, _ = head(torch.tensor([[1, 2]]), features, torch.tensor([[0, 1]]))
    assert hidden.dtype == torch.float32


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa(target, states, tmp_path, layers):
    """The config counts its heads wrong; head i reads one state."""
    config, tensors = layouts.medusa(layers=layers)
    source = write(tmp_path, config, tensors, "medusa_lm_head.pt")
    head = load_head(source, target, torch.float32)
    assert head.config.slots == 3
    with torch.no_grad():
        logits = head.logits(head(states.final[None]))[0]
    torch.testing.assert_close(logits, reference.medusa(tensors, states.final), **CLOSE)


@pytest.mark.parametrize("biased", [False, True])
def test_medusa_as_vllm_names_it(target, states, tmp_path, biased):
    _, tensors = layouts.medusa(layers=2)
    if not biased:
        tensors |= {n: t * 0 for n, t in tensors.items() if n.endswith(".bias")}
    kept = {}
    for name, tensor in tensors.items():
        if biased or not name.endswith(".bias"):
            named = re.sub(r"^(\d+)\.(\d)\.linear", r"blocks.\1.layers.\2", name)
            named = re.sub(r"^(\d+)\.2\.", r"lm_heads.\1.", named)
            kept[f"medusa_heads.{named}"] = tensor
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3}
    config |= {"num_hidden_layers": 2, "hidden_size": layouts.H}
    config |= dict.fromkeys(("vocab_size", "truncated_vocab_size"), VOCAB_SIZE)
    config["medusa_fc_bias"] = biased
    head = load_head(write(tmp_path, config, kept), target, torch.float32)
    with torch.no_grad():
        logits = head.logits(head(states.final[None]))[0]
    torch.testing.assert_close(logits, reference.medusa(tensors, states.final), **CLOSE)
    spare = torch.zeros(32, layouts.H)
    wide = {n: torch.cat([t, spare]) if "lm_heads" in n else t for n, t in kept.items()}
    config["truncated_vocab_size"] = VOCAB_SIZE + 32
    load_head(write(tmp_path, config, wide), target, torch.float32)
    config["truncated_vocab_size"] = 100
    with pytest.raises(CheckpointError, match="truncated_vocab_size=100"):
        load_head(write(tmp_path, config, kept), target, torch.float32)


def test_hydra(target, states, tmp_path):
    config, tensors = layouts.hydra()
    source = write(tmp_path, config, tensors, "hydra_lm_head.pt")
    head = load_head(source, target, torch.float32)
    assert head.config.slots == 3
    for slot in range(3):
        tokens = torch.randint(VOCAB_SIZE, (ROWS, slot + 1))
        with torch.no_grad():
            logits = head.lm_heads[slot](head(slot, states.final[None], tokens[None]))
        path = target_embedding(target)[tokens]
        wanted = reference.hydra(tensors, slot, states.final, path)
        torch.testing.assert_close(logits[0], wanted, **CLOSE)


def filled(drafter, states, known=(), taps=BLOCK_TAPS, mask=None, shift=0):
    """The logits [slots, n] of a block behind rows of the target's states."""
    block = torch.tensor([[ANCHOR, *known, *[UNKNOWN] * (BLOCK - 1 - len(known))]])
    positions = torch.arange(ROWS + BLOCK)[None]
    positions[:, ROWS:] += shift
    with torch.no_grad():
        context = drafter.fuse([states.streams[tap][None] for tap in taps])
        rows = drafter(context, block, positions, masked_attention(mask))
        return drafter.logits(rows, block)[0]


@pytest.mark.parametrize("known", [(), (4, 8)], ids=["masks", "known"])
@pytest.mark.parametrize("case", DFLASH)
def test_dflash(target, states, tmp_path, case, known):
    make, shape, numerics = DFLASH[case]
    torch.manual_seed(3)
    config, tensors = make(**shape)
    drafter = load_head(write(tmp_path, config, tensors), target, torch.float32)
    assert drafter.config.taps == BLOCK_TAPS
    chained = make is layouts.dspark  # then the row of the last token drafts too
    assert drafter.config.slots == BLOCK - (not chained)
    taps = [states.streams[tap] for tap in BLOCK_TAPS]
    weights = {n.removeprefix("model."): t for n, t in tensors.items()}
    tokens = [ANCHOR, *known, *[MASK] * (BLOCK - 1 - len(known))]
    context = reference.dflash_context(weights, taps)
    rows = target_embedding(target)[tokens]
    wanted = reference.dflash(weights, context, rows, **numerics)
    lm_head = weights.get("lm_head.weight", target_head(target))
    wanted = F.linear(wanted[not chained :], lm_head)
    if chained:
        wanted = reference.markov(weights, wanted, [ANCHOR, *known], drafter.ids)
    torch.testing.assert_close(filled(drafter, states, known), wanted, **CLOSE)
    assert (drafter.ids is None) == ("d2t" not in weights)
    if drafter.ids is not None:
        assert torch.equal(drafter.ids, torch.arange(VD) + weights["d2t"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_changes_a_block(target, states, tmp_path, mistake):
    torch.manual_seed(3)
    drafter = load_head(write(tmp_path, *layouts.dflash()), target, torch.float32)
    right = filled(drafter, states)
    how, change = MISTAKES[mistake]
    if change is not None:
        change(drafter, target.model.model)
    assert (filled(drafter, states, **how) - right).abs().max() > 1e-2


@pytest.mark.parametrize("known", [(), (4, 8)], ids=["masks", "known"])
def test_diffusion(target, tmp_path, known):
    """Its context is text, whose rows see only the rows before them."""
    torch.manual_seed(4)
    config, tensors = layouts.diffusion()
    drafter = load_head(write(tmp_path, config, tensors), target, torch.float32)
    tokens = torch.arange(5, 5 + ROWS)
    unknown = BLOCK - len(known)
    block = torch.tensor([*known, *[UNKNOWN] * unknown])
    mask = torch.ones(ROWS + BLOCK, ROWS + BLOCK, dtype=torch.bool).tril()
    mask[ROWS:] = True
    with torch.no_grad():
        positions = torch.arange(ROWS + BLOCK)[None]
        states = drafter(tokens[None], block[None], positions, masked_attention(mask))
        logits = drafter.lm_head(drafter.mask_states(states))[0]
    wanted = reference.diffusion(tensors, tokens, [*known, *[None] * unknown])
    wanted = F.linear(wanted, tensors["embed_tokens.weight"])
    torch.testing.assert_close(logits, wanted, **CLOSE)
    assert drafter.lm_head.weight is drafter.embed_tokens.weight
