"""Dense layers, GELU, and the MLP of an encoder block."""

import math

import jax.numpy as jnp
from jax.scipy.special import erf

from ..shapes import check_gelu
from .dropout import dropout, split
from .half import spread

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
SQRT_HALF = math.sqrt(0.5)
FAR = 10  # from here on the probability is 0 or 1 in every type


def dense(p, x):  # [..., I] -> [..., O]
    """x W + b along the last axis; a kernel with more axes is read as the matrix [I, O]."""
    rows = x.reshape(-1, x.shape[-1])  # two axes: else the kernel's gradient copies transposes
    y = rows @ p["kernel"].reshape(-1, p["bias"].size)
    y = y + spread(p["bias"].reshape(-1), y.shape)
    return y.reshape(*x.shape[:-1], -1)


def gelu(x, form="tanh"):  # [...] -> [...]
    """x times the normal distribution's probability of a value below x (arXiv 1606.08415)."""
    check_gelu(form)
    near = jnp.clip(x, -FAR, FAR)  # or the square could overflow, and 0 times infinity is NaN
    if form == "tanh":
        return x * (0.5 + 0.5 * jnp.tanh((SQRT_2_OVER_PI * near) * (1 + 0.044715 * (near * near))))
    return x * (0.5 + 0.5 * erf(SQRT_HALF * near))


def mlp(p, x, *, gelu_form="tanh", rate=0.0, rng=None):  # [..., D] -> [..., D]
    """Widen to M features, bend, narrow back to D (eq. 3), with dropout after both layers."""
    inner, outer = split(rng, 2)
    bent = dropout(gelu(dense(p["Dense_0"], x), gelu_form), rate, inner)
    return dropout(dense(p["Dense_1"], bent), rate, outer)
