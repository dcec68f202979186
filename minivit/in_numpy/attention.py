"""Softmax and multi-head self-attention (appendix A)."""

import numpy as np

from .mlp import dense

PROJECTIONS = ("query", "key", "value")


def softmax(s):  # [..., N] -> [..., N]
    """Weights that sum to one along the last axis (eq. 6).

    The largest score is subtracted first: no exponential overflows, and the result is the same.
    """
    exponentials = np.exp(s - s.max(-1, keepdims=True))
    a = exponentials / exponentials.sum(-1, keepdims=True)

    def back(da):  # keeps a alone: the Jacobian diag(a) - a a^T is never formed
        return a * (da - (da * a).sum(-1, keepdims=True))

    return a, back


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


def attention(p, x, *, out=None):  # [B, N, D] -> [B, N, D]
    """Every token looks at all tokens, H times in parallel (eqs. 5 to 8).

    The three projections are one matrix product with their kernels side by side. A dictionary
    `out` receives the weights as "attention", [B, H, N, N].
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
    y, back_out = dense(p["out"], mixed.swapaxes(1, 2).reshape(batch, tokens, -1))

    def back(dy):
        dp = {}
        dp["out"], dmerged = back_out(dy)
        dmixed = dmerged.reshape(batch, tokens, heads, head_width).swapaxes(1, 2)
        dqkv = np.stack(back_mixed(dmixed)).transpose(1, 3, 0, 2, 4)
        djoined, dx = back_qkv(dqkv.reshape(qkv.shape))
        for i, name in enumerate(PROJECTIONS):
            dp[name] = {"kernel": djoined["kernel"][:, i], "bias": djoined["bias"][i]}
        return dp, dx

    return y, back
