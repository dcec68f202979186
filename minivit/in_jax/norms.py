"""Normalisation of activations."""

from functools import partial

import jax
import jax.numpy as jnp

from ..shapes import groups_of
from .half import bounded, narrow


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def standardise(x, epsilon, axes=-1):
    """Mean 0 and variance 1 along some axes."""
    return keep_deviation(x, epsilon, axes)[0]


def keep_deviation(x, epsilon, axes):
    """Keep the result and the deviation, not x."""
    centred = x - x.mean(axes, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(axes, keepdims=True) + epsilon)
    normal = centred / deviation
    return normal, (normal, deviation)


def back_by_hand(epsilon, axes, kept, dnormal):
    """As in the NumPy twin: less to compile than what autodiff makes of it, and faster."""
    normal, deviation = kept
    shift = dnormal.mean(axes, keepdims=True)
    stretch = (dnormal * normal).mean(axes, keepdims=True)
    return ((dnormal - shift - normal * stretch) / deviation,)


standardise.defvjp(keep_deviation, back_by_hand)


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1)."""
    normal = standardise(bounded(x, -1), epsilon)
    return narrow(normal * p["scale"] + p["bias"], x.dtype)


def group_norm(p, x, epsilon=1e-6):  # [B, height, width, C] -> [B, height, width, C]
    """Give each group of channels of each image mean 0 and variance 1, then scale and shift."""
    groups = groups_of(x.shape[-1])
    grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)  # [B, pixels, G, C/G]
    normal = standardise(bounded(grouped, (1, 3)), epsilon, (1, 3))
    return narrow(normal.reshape(x.shape) * p["scale"] + p["bias"], x.dtype)
