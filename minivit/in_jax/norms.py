"""Normalisation of activations."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def standardise(x, epsilon):  # [..., D] -> [..., D]
    """Mean 0 and variance 1 along the last axis."""
    return keep_deviation(x, epsilon)[0]


def keep_deviation(x, epsilon):
    """Keep the result and the deviation, not x."""
    centred = x - x.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    normal = centred / deviation
    return normal, (normal, deviation)


def back_by_hand(epsilon, kept, dnormal):
    """As in the NumPy twin: less to compile than what autodiff makes of it, and faster."""
    normal, deviation = kept
    shift = dnormal.mean(-1, keepdims=True)
    stretch = (dnormal * normal).mean(-1, keepdims=True)
    return ((dnormal - shift - normal * stretch) / deviation,)


standardise.defvjp(keep_deviation, back_by_hand)


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1)."""
    wide = x.astype(jnp.promote_types(x.dtype, "float32"))
    return (standardise(wide, epsilon) * p["scale"] + p["bias"]).astype(x.dtype)
