"""Softmax and multi-head self-attention (appendix A)."""

import jax
import jax.numpy as jnp

from .mlp import dense

PROJECTIONS = ("query", "key", "value")
FEW_TOKENS = 32


def softmax(s):  # [..., N] -> [..., N]
    """Weights that sum to one along the last axis (eq. 6)."""
    exponentials = jnp.exp(s - s.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@jax.custom_vjp
def scaled_dot_product(q, k, v):  # 3 x [B, H, N, K] -> [B, H, N, K], weights [B, H, N, N]
    """Average the values, weighted by how well each key answers the query (eqs. 6 and 7)."""
    weights = softmax((q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2))
    return weights @ v, weights


def keep_weights(q, k, v):
    """Keep the weights, which autodiff would keep in several forms."""
    mixed, weights = scaled_dot_product(q, k, v)
    return (mixed, weights), (q, k, v, weights)


def back_by_hand(kept, gradients):
    """By hand, as in the NumPy twin: on a CPU a fifth of the tiny model's training time is saved.

    For few tokens the transposed copies are made first, behind a barrier, since XLA's products
    with a transposed operand take twice as long there; for many the copies would cost more.
    """
    (q, k, v, weights), (dy, dweights) = kept, gradients
    copied = jax.lax.optimization_barrier if q.shape[-2] <= FEW_TOKENS else lambda x: x
    dweights = dweights + dy @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
    dscores = dscores * q.shape[-1] ** -0.5
    transposed, weights = copied((dscores.swapaxes(-1, -2), weights.swapaxes(-1, -2)))
    return dscores @ k, transposed @ q, weights @ dy


scaled_dot_product.defvjp(keep_weights, back_by_hand)


def split_heads(x, heads):  # [B, N, H*K] -> [B, H, N, K]
    """Each head's features by themselves."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(x):  # [B, H, N, K] -> [B, N, H*K]
    """All heads' features side by side."""
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


def attention(p, x, *, out=None):  # [B, N, D] -> [B, N, D]
    """Every token looks at all tokens, H times in parallel (eqs. 5 to 8)."""
    batch, tokens, _ = x.shape
    heads, head_width = p["query"]["bias"].shape
    joined = {
        "kernel": jnp.stack([p[name]["kernel"] for name in PROJECTIONS], axis=1),
        "bias": jnp.stack([p[name]["bias"] for name in PROJECTIONS]),
    }
    # One product and one transposition to [3, B, H, N, K]: on a CPU far faster than einsums.
    qkv = dense(joined, x).reshape(batch, tokens, 3, heads, head_width).transpose(2, 0, 3, 1, 4)
    mixed, weights = scaled_dot_product(*qkv)
    if out is not None:
        out["attention"] = weights
    return dense(p["out"], merge_heads(mixed))


def cross_attention(p, x, context):  # [B, Q, D], [B, N, D] -> [B, Q, D]
    """The same, with queries of x and with keys and values of another sequence."""
    sources = {"query": x, "key": context, "value": context}
    heads = len(p["query"]["bias"])
    mixed, _ = scaled_dot_product(*(split_heads(dense(p[n], s), heads) for n, s in sources.items()))
    return dense(p["out"], merge_heads(mixed))
