"""Dense layers, GELU, and the MLP of an encoder block."""

import math

import numpy as np
from scipy.special import erf

from ..shapes import check_gelu
from .dropout import dropout
from .half import narrow, total, wide

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)  # Python floats: a NumPy scalar would make float64
SQRT_HALF = math.sqrt(0.5)
DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)
FAR = 10  # from here on the probability is 0 or 1 in every type


def dense(p, x):  # [..., I] -> [..., O]
    """x W + b along the last axis, as one matrix product.

    A kernel with more axes, [P, P, C, D] or [H, K, D], is read as the matrix [I, O].
    """
    matrix = p["kernel"].reshape(-1, p["bias"].size)
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ matrix
    y += p["bias"].reshape(-1)

    def back(dy):  # keeps x
        drows = dy.reshape(-1, matrix.shape[1])
        dkernel, dbias = rows.T @ drows, total(drows, 0)
        dp = {"kernel": dkernel.reshape(p["kernel"].shape), "bias": dbias.reshape(p["bias"].shape)}
        return dp, (drows @ matrix.T).reshape(x.shape)

    return y.reshape(*x.shape[:-1], -1), back


def gelu(x, form="tanh"):  # [...] -> [...]
    """x times the normal distribution's probability of a value below x (arXiv 1606.08415).

    `form` is "tanh", the approximation of the official models, or "erf", the exact one of timm
    and Hugging Face. They differ by at most 4.8e-4.
    """
    check_gelu(form)
    dtype, x = x.dtype, wide(x)
    near = np.clip(x, -FAR, FAR)  # or the square could overflow, and 0 times infinity is NaN
    square = near * near
    if form == "tanh":
        tanh = np.tanh((SQRT_2_OVER_PI * near) * (1 + 0.044715 * square))
        probability = 0.5 + 0.5 * tanh
    else:
        probability = 0.5 + 0.5 * erf(SQRT_HALF * near)

    def back(dy):
        if form == "tanh":
            inner = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * square)
            density = 0.5 * (1 - tanh * tanh) * inner
        else:
            density = DENSITY_AT_0 * np.exp(-0.5 * square)
        return narrow(dy * (probability + near * density), dtype)

    return narrow(x * probability, dtype), back


def mlp(p, x, *, gelu_form="tanh", rate=0.0, rng=None):  # [..., D] -> [..., D]
    """Widen to M features, bend, narrow back to D (eq. 3), with dropout after both layers."""
    hidden, back_widen = dense(p["Dense_0"], x)
    bent, back_gelu = gelu(hidden, gelu_form)
    kept, back_inner = dropout(bent, rate, rng)
    y, back_narrow = dense(p["Dense_1"], kept)
    y, back_outer = dropout(y, rate, rng)

    def back(dy):
        dnarrow, dkept = back_narrow(back_outer(dy))
        dwiden, dx = back_widen(back_gelu(back_inner(dkept)))
        return {"Dense_0": dwiden, "Dense_1": dnarrow}, dx

    return y, back
