"""What tells the encoder where a patch was: the class token's row and the position table."""

import jax.numpy as jnp

from ..shapes import check_positions


def add_class_token(cls, x):  # [1, 1, D], [B, N, D] -> [B, 1+N, D]
    """Put the learnable class token before the patches (eq. 1)."""
    return jnp.concatenate([jnp.broadcast_to(cls, (len(x), 1, x.shape[-1])), x], axis=1)


def add_positions(p, x):  # [B, N, D] -> [B, N, D]
    """Add the learnable position table, the class token's row first (eq. 1)."""
    check_positions(p["pos_embedding"].shape, x.shape)
    return x + p["pos_embedding"]
