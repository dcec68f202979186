"""Normalisation of activations."""

import numpy as np


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1).

    The variance is that of the centred values and divides by D, not D - 1. The official models
    use epsilon 1e-6 (timm too; Hugging Face 1e-12). Half precision is computed in float32.
    """
    dtype = x.dtype
    x = x.astype(np.promote_types(dtype, "float32"), copy=False)
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    normal = centred / deviation
    y = (normal * p["scale"] + p["bias"]).astype(dtype, copy=False)

    def back(dy):  # keeps `normal` and `deviation`: x itself is not needed again
        axes = tuple(range(dy.ndim - 1))
        dscale = (dy * normal).sum(axes).astype(p["scale"].dtype, copy=False)
        dp = {"scale": dscale, "bias": dy.sum(axes).astype(p["bias"].dtype, copy=False)}
        # Mean and variance depend on every entry of the row: their share is projected out.
        dnormal = dy * p["scale"]
        shift = dnormal.mean(-1, keepdims=True)
        stretch = (dnormal * normal).mean(-1, keepdims=True)
        return dp, ((dnormal - shift - normal * stretch) / deviation).astype(dtype, copy=False)

    return y, back
