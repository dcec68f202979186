"""Softmax and multi-head self-attention (appendix A)."""

import re
from functools import partial

import jax
import jax.numpy as jnp

from .half import narrow, wide
from .mlp import dense

PROJECTIONS = ("query", "key", "value")
FEW_TOKENS = 32
MANY_TOKENS, CHUNK = 1024, 256  # above so many tokens, attention goes by chunks of queries


def softmax(s):  # [..., N] -> [..., N]
    """Weights that sum to one along the last axis (eq. 6).

    Half precision would lose small weights: softmax is at least float32.
    """
    scores = wide(s)
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return narrow(exponentials / exponentials.sum(-1, keepdims=True), s.dtype)


@jax.custom_vjp
def scaled_dot_product(q, k, v):  # 3 x [B, H, N, K] -> [B, H, N, K], weights [B, H, N, N]
    """Average the values, weighted by how well each key answers the query (eqs. 6 and 7)."""
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    weights = softmax(scores)
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
    share = narrow((wide(dweights) * weights).sum(-1, keepdims=True), weights.dtype)
    dscores = weights * (dweights - share)
    dscores = dscores * q.shape[-1] ** -0.5
    transposed, weights = copied((dscores.swapaxes(-1, -2), weights.swapaxes(-1, -2)))
    return dscores @ k, transposed @ q, weights @ dy


scaled_dot_product.defvjp(keep_weights, back_by_hand)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked_dot_product(q, k, v, size):  # 3 x [B, H, N, K] -> [B, H, N, K]
    """The same for `size` queries at a time: memory grows with N, not with its square.

    Each chunk sees all keys, so its softmax is whole and nothing is approximate. No weights are
    kept for the backward pass, which computes them again.
    """
    return unchunk(
        jax.lax.map(lambda part: scaled_dot_product(part, k, v)[0], chunks(q, size)), q.shape
    )


def chunks(x, size):  # [B, H, N, K] -> [chunks, B, H, size, K]
    """Queries in chunks, the last one filled up with zeros."""
    batch, heads, tokens, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -tokens % size), (0, 0)))
    return x.reshape(batch, heads, -1, size, width).transpose(2, 0, 1, 3, 4)


def unchunk(x, shape):  # [chunks, B, H, size, K] -> [B, H, N, K]
    """The inverse of `chunks`."""
    x = x.transpose(1, 2, 0, 3, 4).reshape(*shape[:2], -1, shape[3])
    return x[:, :, : shape[2]]


def keep_inputs(q, k, v, size):
    """Keep what is linear in N."""
    return chunked_dot_product(q, k, v, size), (q, k, v)


def back_by_chunks(size, kept, dy):
    """Queries' gradients chunk by chunk; those of keys and values are sums over chunks."""
    q, k, v = kept

    def body(sums, part):
        queries, dmixed = part
        _, residuals = keep_weights(queries, k, v)
        dq, dk, dv = back_by_hand(residuals, (dmixed, 0))
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = wide(jnp.zeros_like(k)), wide(jnp.zeros_like(v))
    (dk, dv), dq = jax.lax.scan(body, match(zeros, k), (chunks(q, size), chunks(dy, size)))
    return unchunk(dq, q.shape), narrow(dk, k.dtype), narrow(dv, v.dtype)


def match(zeros, like):
    """Zeros that differ between devices as `like` does, which a loop's sums must say beforehand."""
    return tuple(z + 0 * like.ravel()[0] for z in zeros)


chunked_dot_product.defvjp(keep_inputs, back_by_chunks)


def fused_dot_product(q, k, v):  # 3 x [B, H, N, K] -> [B, H, N, K]
    """The same in one kernel of NVIDIA's cuDNN, which never writes the weights to memory.

    JAX hands it [B, N, H, K], to train only with an even N (it counts an absent bias as one): a
    token is added and not looked at.
    """
    batch, _, tokens, _ = q.shape
    lengths, odd = {}, tokens % 2
    if odd:
        count = jnp.full((batch,), tokens, "int32")
        lengths = {"query_seq_lengths": count, "key_value_seq_lengths": count}
    turned = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, odd), (0, 0), (0, 0))) for x in (q, k, v)]
    mixed = jax.nn.dot_product_attention(*turned, implementation="cudnn", **lengths)
    return mixed[:, :tokens].swapaxes(1, 2)


def fusible(q):  # [B, H, N, K] -> whether cuDNN has a kernel for it here
    """Half precision, heads of at most 128 by eights, NVIDIA from compute capability 8 on."""
    if q.dtype not in ("bfloat16", "float16") or q.shape[-1] % 8 or q.shape[-1] > 128:
        return False
    device = jax.local_devices()[0]
    # AMD's devices are called gpu too, and their capability is a word.
    numbers = re.match(r"\d+", str(getattr(device, "compute_capability", "")))
    return device.platform == "gpu" and bool(numbers) and int(numbers[0]) >= 8


def by_default(tokens):  # -> queries at a time, or 0: all
    """Chunks where there are many tokens."""
    return CHUNK if tokens > MANY_TOKENS else 0


def by_size(q, k, v, chunk):  # 3 x [B, H, N, K] -> [B, H, N, K]
    """By chunks where that was asked for, or else where there are many tokens."""
    if chunk is None:
        chunk = by_default(q.shape[-2])
    # A chunk that holds all queries would only be filled up with zeros.
    few = 0 < chunk < q.shape[-2]
    return chunked_dot_product(q, k, v, chunk) if few else scaled_dot_product(q, k, v)[0]


def split_heads(x, heads):  # [B, N, H*K] -> [B, H, N, K]
    """Each head's features by themselves."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(x):  # [B, H, N, K] -> [B, N, H*K]
    """All heads' features side by side."""
    return x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)


def attention(p, x, *, out=None, chunk=None):  # [B, N, D] -> [B, N, D]
    """Every token looks at all tokens, H times in parallel (eqs. 5 to 8).

    `chunk` queries at a time, 0 for all at once; by default in one fused kernel where there is
    one, else by chunks where there are many tokens. `out` needs all weights, all at once.
    """
    batch, tokens, _ = x.shape
    heads, head_width = p["query"]["bias"].shape
    joined = {
        "kernel": jnp.stack([p[name]["kernel"] for name in PROJECTIONS], axis=1),
        "bias": jnp.stack([p[name]["bias"] for name in PROJECTIONS]),
    }
    # One product and one transposition to [3, B, H, N, K]: on a CPU far faster than einsums.
    qkv = dense(joined, x).reshape(batch, tokens, 3, heads, head_width).transpose(2, 0, 3, 1, 4)
    if out is not None:
        mixed, out["attention"] = scaled_dot_product(*qkv)
    elif chunk is None and fusible(qkv[0]):
        # By the device that the program is for: there may be others.
        mixed = jax.lax.platform_dependent(
            *qkv, cuda=fused_dot_product, default=partial(by_size, chunk=None)
        )
    else:
        mixed = by_size(*qkv, chunk)
    return dense(p["out"], merge_heads(mixed))


def cross_attention(p, x, context):  # [B, Q, D], [B, N, D] -> [B, Q, D]
    """The same, with queries of x and with keys and values of another sequence."""
    sources = {"query": x, "key": context, "value": context}
    heads = len(p["query"]["bias"])
    mixed, _ = scaled_dot_product(*(split_heads(dense(p[n], s), heads) for n, s in sources.items()))
    return dense(p["out"], merge_heads(mixed))
