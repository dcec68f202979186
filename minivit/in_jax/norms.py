"""Normalisation of activations."""

import jax.numpy as jnp


def layer_norm(p, x, epsilon=1e-6):  # [..., D] -> [..., D]
    """Give every token mean 0 and variance 1, then scale and shift each feature (section 3.1)."""
    wide = x.astype(jnp.promote_types(x.dtype, "float32"))
    centred = wide - wide.mean(-1, keepdims=True)
    deviation = jnp.sqrt((centred * centred).mean(-1, keepdims=True) + epsilon)
    return (centred / deviation * p["scale"] + p["bias"]).astype(x.dtype)
