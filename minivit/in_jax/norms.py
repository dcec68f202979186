"""Normalisation of activations."""

from functools import partial

import jax
import jax.numpy as jnp

from ..shapes import groups_of
from .half import narrow, wide


def centre(x, axes, far):  # -> x minus its mean in some unit, the unit
    """The unit is 1, or `far` so large that no square or sum overflows: bfloat16 reaches 3e38."""
    if not far:
        return x - x.mean(axes, keepdims=True), 1
    small = 2.0**-32
    centred = x * small - (x * small).mean(axes, keepdims=True)
    unit = jax.lax.stop_gradient(abs(centred).max(axes, keepdims=True).clip(small))
    return centred / unit, unit / small


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def standardise(x, epsilon, axes=-1, far=False):
    """Mean 0 and variance 1 along some axes."""
    return keep_deviation(x, epsilon, axes, far)[0]


def keep_deviation(x, epsilon, axes, far):
    """Keep the result and the deviation, not x."""
    centred, unit = centre(x, axes, far)
    deviation = jnp.sqrt((centred * centred).mean(axes, keepdims=True) + epsilon / unit / unit)
    normal = centred / deviation
    return normal, (normal, deviation * unit)


def back_by_hand(epsilon, axes, far, kept, dnormal):
    """As in the NumPy twin: less to compile than what autodiff makes of it, and faster."""
    normal, deviation = kept
    shift = dnormal.mean(axes, keepdims=True)
    stretch = (dnormal * normal).mean(axes, keepdims=True)
    return ((dnormal - shift - normal * stretch) / deviation,)


standardise.defvjp(keep_deviation, back_by_hand)


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1)."""
    normal = standardise(wide(x), epsilon, -1, x.dtype == "bfloat16")
    return narrow(normal * p["scale"] + p["bias"], x)


def group_norm(p, x, epsilon=1e-6):  # [B, height, width, C] -> [B, height, width, C]
    """Give each group of channels of each image mean 0 and variance 1, then scale and shift."""
    groups = groups_of(x.shape[-1])
    grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)  # [B, pixels, G, C/G]
    normal = standardise(wide(grouped), epsilon, (1, 3), x.dtype == "bfloat16")
    return narrow(normal.reshape(x.shape) * p["scale"] + p["bias"], x)
