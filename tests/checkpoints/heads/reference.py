"""What heads compute, written from the papers and their authors' code, row by row."""

import torch
import torch.nn.functional as F


def rms(x, weight, eps=1e-6):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x, positions, theta):
    """Llama's rotation, half-split: x is [rows, heads, d]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
    one, two = x[..., :half], x[..., half:]
    turned = one * angles.cos() - two * angles.sin()
    return torch.cat([turned, two * angles.cos() + one * angles.sin()], -1)


def attention(w, asking, rows, hidden, theta, d, eps):
    """Attention of the last rows [m, width] over all `rows` [n, width] but `hidden`."""

    def project(name, x):
        out = F.linear(x, w[f"self_attn.{name}_proj.weight"])
        out = out + w.get(f"self_attn.{name}_proj.bias", 0)
        out = out.view(len(x), -1, d)
        if f"self_attn.{name}_norm.weight" in w:
            out = rms(out, w[f"self_attn.{name}_norm.weight"], eps)
        return out

    positions = torch.arange(len(rows))
    q = rotated(project("q", asking), positions[-len(asking) :], theta)
    k = rotated(project("k", rows), positions, theta)
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, project("v", rows)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return F.linear(mixed, w["self_attn.o_proj.weight"])


def mlp(w, x):
    gate = F.silu(F.linear(x, w["mlp.gate_proj.weight"]))
    up = F.linear(x, w["mlp.up_proj.weight"])
    return F.linear(gate * up, w["mlp.down_proj.weight"])


def under(weights, prefix):
    return {n[len(prefix) :]: t for n, t in weights.items() if n.startswith(prefix)}


def layer(w, x, theta, d, eps, before=None, hidden=None):
    """A layer over rows x; `before` are rows that are read too, after no norm."""
    normed = rms(x, w["input_layernorm.weight"], eps)
    rows = normed if before is None else torch.cat([before, normed])
    hidden = later(len(x)) if hidden is None else hidden
    y = x + attention(w, normed, rows, hidden, theta, d, eps)
    return y + mlp(w, rms(y, w["post_attention_layernorm.weight"], eps))


def eagle1(weights, embedded, f, theta=10000.0, d=16, eps=1e-5):
    if "embedding_layernorm.weight" in weights:
        embedded = rms(embedded, weights["embedding_layernorm.weight"], eps)
        f = rms(f, weights["hidden_states_layernorm.weight"], eps)
    x = F.linear(torch.cat([embedded, f], -1), weights["fc.weight"])
    x = x + weights.get("fc.bias", 0)
    w = under(weights, "layers.0.")
    y = x + attention(w, x, x, later(len(x)), theta, d, eps)
    z = y + mlp(w, rms(y, w["post_attention_layernorm.weight"], eps))
    return z, z


def eagle3_fuse(weights, taps, eps):
    joined = torch.cat(taps, -1)
    if "input_norm.weight" in weights:
        joined = rms(joined, weights["input_norm.weight"], eps)
    if "fc_norm.0.weight" in weights:
        parts = joined.split(taps[0].shape[-1], -1)
        norms = (weights[f"fc_norm.{i}.weight"] for i in range(len(parts)))
        normed = [rms(part, own, eps) for part, own in zip(parts, norms, strict=True)]
        joined = torch.cat(normed, -1)
    return F.linear(joined, weights["fc.weight"])


def eagle3(
    weights,
    embedded,
    g,
    norm_before_residual=False,
    feeds_normed=False,
    theta=10000.0,
    d=16,
    eps=1e-5,
):
    """The state for the LM head, and the state that the next step gets."""
    weights = {n.replace("midlayer.", "layers.0."): t for n, t in weights.items()}
    w = under(weights, "layers.0.")
    e = rms(embedded, w["input_layernorm.weight"], eps)
    u = rms(g, w["hidden_norm.weight"], eps)
    r = u if norm_before_residual else g
    joined = torch.cat([e, u], -1)
    y = r + attention(w, joined, joined, later(len(g)), theta, d, eps)
    z = y + mlp(w, rms(y, w["post_attention_layernorm.weight"], eps))
    index = 1
    while w := under(weights, f"layers.{index}."):
        z, index = layer(w, z, theta, d, eps), index + 1
    normed = rms(z, weights["norm.weight"], eps)
    return normed, (normed if feeds_normed else z)


def medusa(weights, f):
    """Logits [n, heads, vocabulary]."""
    logits, head = [], 0
    while w := under(weights, f"{head}."):
        x, layer = f, 0
        while f"{layer}.linear.weight" in w:
            linear = F.linear(x, w[f"{layer}.linear.weight"], w[f"{layer}.linear.bias"])
            x, layer = x + F.silu(linear), layer + 1
        logits.append(F.linear(x, w[f"{layer}.weight"]))
        head += 1
    return torch.stack(logits, 1)


def hydra(weights, head, f, path):
    """Logits of one head, from the feature and the embeddings of the path [n, k, h]."""
    x = torch.cat([f, path.flatten(1)], -1)
    layer = 0
    while w := under(weights, f"hydra_mlp.{head}.{layer}."):
        kept = x
        if "res_connection.weight" in w:
            kept = F.linear(x, w["res_connection.weight"], w["res_connection.bias"])
        x = kept + F.silu(F.linear(x, w["linear.weight"], w["linear.bias"]))
        layer += 1
    return F.linear(x, weights[f"hydra_lm_head.{head}.weight"])


def later(count):
    return torch.ones(count, count, dtype=torch.bool).triu(1)


def dflash_context(weights, taps, eps=1e-5):
    joined = F.linear(torch.cat(taps, -1), weights["fc.weight"])
    return rms(joined, weights["hidden_norm.weight"], eps)


def dflash(weights, context, block, theta=1e6, d=16, eps=1e-5):
    """The states [m, h] of a block, from features [n, h] and embeddings [m, h]."""
    x, index = block, 0
    hidden = torch.zeros(len(block), len(context) + len(block), dtype=torch.bool)
    while w := under(weights, f"layers.{index}."):
        x, index = layer(w, x, theta, d, eps, context, hidden), index + 1
    return rms(x, weights["norm.weight"], eps)


def markov(weights, logits, tokens, ids=None):
    """Logits with what the token before says: of `tokens`, then the likeliest."""
    first, second = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    rows, tokens = [], [*tokens]
    for slot, row in enumerate(logits):
        if slot == len(tokens):
            best = int(rows[-1].argmax())
            tokens.append(best if ids is None else int(ids[best]))
        rows.append(row + second @ first[tokens[slot]])
    return torch.stack(rows)


def diffusion(weights, tokens, block, theta=10000.0, d=16, eps=1e-5):
    """The states [m, h] of a block of tokens behind others; None stands for a mask."""
    table = weights["embed_tokens.weight"]
    rows = [weights["mask"] if t is None else table[t] for t in (*tokens, *block)]
    x, index, count = torch.stack(rows), 0, len(tokens)
    hidden = later(len(rows))
    hidden[count:] = False
    while w := under(weights, f"layers.{index}."):
        x, index = layer(w, x, theta, d, eps, hidden=hidden), index + 1
    return rms(x, weights["norm.weight"], eps)[count:]
