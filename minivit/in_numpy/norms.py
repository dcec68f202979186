"""Normalisation of activations."""

import numpy as np

from ..shapes import groups_of
from .half import narrow, wide


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1).

    The variance is that of the centred values and divides by D, not D - 1. The official models
    use epsilon 1e-6 (timm too; Hugging Face 1e-12). Half precision is computed in float64.
    """
    dtype, width, x = x.dtype, x.shape[-1], wide(x)
    # `vecdot` and changes in place write no further array: half of the time goes for those.
    normal = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(np.vecdot(normal, normal)[..., None] / width + epsilon)
    normal /= deviation
    y = normal * p["scale"]
    y += p["bias"]

    def back(dy):  # keeps `normal` and `deviation`: x itself is not needed again
        dy, axes = wide(dy), tuple(range(dy.ndim - 1))
        dscale = narrow((dy * normal).sum(axes), p["scale"].dtype)
        dp = {"scale": dscale, "bias": narrow(dy.sum(axes), p["bias"].dtype)}
        # Mean and variance depend on every entry of the row: their share is projected out.
        dx = dy * p["scale"]
        shift = dx.mean(-1, keepdims=True)
        stretch = np.vecdot(dx, normal)[..., None] / width
        dx -= shift + normal * stretch
        dx /= deviation
        return dp, narrow(dx, dtype)

    return narrow(y, dtype), back


def group_norm(p, x, epsilon=1e-6):  # [B, height, width, C] -> [B, height, width, C]
    """Give each group of channels of each image mean 0 and variance 1, then scale and shift.

    32 groups, or one per channel where there are fewer (arXiv 1803.08494). vit_jax's hybrid uses
    epsilon 1e-6, BiT 1e-5. The variance is that of the centred values, so a large mean does no
    harm. Half precision is computed in float64.
    """
    groups, dtype, x = groups_of(x.shape[-1]), x.dtype, wide(x)
    grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)  # [B, pixels, G, C/G]
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    deviation = np.sqrt((centred * centred).mean((1, 3), keepdims=True) + epsilon)
    normal = centred / deviation
    y = narrow(normal.reshape(x.shape) * p["scale"] + p["bias"], dtype)

    def back(dy):  # as in `layer_norm`, over other axes
        dy = wide(dy)
        dscale = narrow((dy * normal.reshape(x.shape)).sum((0, 1, 2)), p["scale"].dtype)
        dp = {"scale": dscale, "bias": narrow(dy.sum((0, 1, 2)), p["bias"].dtype)}
        dnormal = (dy * p["scale"]).reshape(grouped.shape)
        shift = dnormal.mean((1, 3), keepdims=True)
        stretch = (dnormal * normal).mean((1, 3), keepdims=True)
        dx = ((dnormal - shift - normal * stretch) / deviation).reshape(x.shape)
        return dp, narrow(dx, dtype)

    return y, back
