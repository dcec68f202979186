"""Softmax and multi-head self-attention (appendix A)."""

import numpy as np

from .half import narrow, wide
from .mlp import dense

PROJECTIONS = ("query", "key", "value")


def softmax(s):  # [..., N] -> [..., N]
    """Weights that sum to one along the last axis (eq. 6).

    The largest score is subtracted first: no exponential overflows, and the result is the same.
    """
    dtype, s = s.dtype, wide(s)
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)

    def back(da):  # keeps a alone: the Jacobian diag(a) - a a^T is never formed
        return narrow(a * (da - np.vecdot(wide(da), a)[..., None]), dtype)

    return narrow(a, dtype), back


def scaled_dot_product(q, k, v):  # 3 x [B, H, N, K] -> [B, H, N, K], weights [B, H, N, N]
    """Average the values, weighted by how well each key answers the query (eqs. 6 and 7).

    The query is scaled by 1 / sqrt(K) before the product, so that float16 does not overflow.
    """
    scale = q.shape[-1] ** -0.5
    scaled = q * scale
    weights, back_softmax = softmax(scaled @ k.swapaxes(-1, -2))

    def back(dy):
        dv = weights.swapaxes(-1, -2) @ dy
        dscores = back_softmax(dy @ v.swapaxes(-1, -2))
        return dscores @ k * scale, dscores.swapaxes(-1, -2) @ scaled, dv

    return weights @ v, weights, back


def split_heads(x, heads):  # [B, N, H*K] -> [B, H, N, K]
    """Each head's features by themselves."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(x):  # [B, H, N, K] -> [B, N, H*K]
    """All heads' features side by side."""
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


def attention(p, x, *, out=None):  # [B, N, D] -> [B, N, D]
    """Every token looks at all tokens, H times in parallel (eqs. 5 to 8).

    The three projections are one matrix product with their kernels side by side. A dictionary
    `out` receives the weights as "attention", [B, H, N, N], and from `back` their gradient as
    "attention_gradient".
    """
    batch, tokens, _ = x.shape
    heads, head_width = p["query"]["bias"].shape
    joined = {
        "kernel": np.stack([p[name]["kernel"] for name in PROJECTIONS], axis=1),  # [D, 3, H, K]
        "bias": np.stack([p[name]["bias"] for name in PROJECTIONS]),
    }
    qkv, back_qkv = dense(joined, x)
    q, k, v = qkv.reshape(batch, tokens, 3, heads, head_width).transpose(2, 0, 3, 1, 4)
    mixed, weights, back_mixed = scaled_dot_product(q, k, v)
    if out is not None:
        out["attention"] = weights
    y, back_out = dense(p["out"], merge_heads(mixed))

    def back(dy):
        dp = {}
        dp["out"], dmerged = back_out(dy)
        dmixed = split_heads(dmerged, heads)
        if out is not None:
            out["attention_gradient"] = dmixed @ v.swapaxes(-1, -2)
        dqkv = np.stack(back_mixed(dmixed)).transpose(1, 3, 0, 2, 4)
        djoined, dx = back_qkv(dqkv.reshape(qkv.shape))
        for i, name in enumerate(PROJECTIONS):
            dp[name] = {"kernel": djoined["kernel"][:, i], "bias": djoined["bias"][i]}
        return dp, dx

    return y, back


def cross_attention(p, x, context):  # [B, Q, D], [B, N, D] -> [B, Q, D]
    """The same, with queries of x and with keys and values of another sequence."""
    heads = len(p["query"]["bias"])
    sources = {"query": x, "key": context, "value": context}
    dense_parts = {name: dense(p[name], source) for name, source in sources.items()}
    q, k, v = (split_heads(y, heads) for y, _ in dense_parts.values())
    mixed, _, back_mixed = scaled_dot_product(q, k, v)
    y, back_out = dense(p["out"], merge_heads(mixed))

    def back(dy):
        dp, dsources = {}, {}
        dp["out"], dmerged = back_out(dy)
        for name, dpart in zip(PROJECTIONS, back_mixed(split_heads(dmerged, heads)), strict=True):
            dp[name], dsources[name] = dense_parts[name][1](merge_heads(dpart))
        return dp, dsources["query"], dsources["key"] + dsources["value"]

    return y, back
