"""The class token, and the position table: what tells the encoder where a patch was."""

import jax.numpy as jnp

from ..interpolation import resize_weights, source_grid
from ..shapes import check_positions
from .half import spread


def add_class_token(cls, x):  # [1, 1, D], [B, N, D] -> [B, 1+N, D]
    """Put the learnable class token before the patches (eq. 1); any registers come with it."""
    return jnp.concatenate([spread(cls, (len(x), *cls.shape[1:])), x], axis=1)


def add_positions(p, x):  # [B, N, D] -> [B, N, D]
    """Add the learnable position table, the class token's row first (eq. 1)."""
    check_positions(p["pos_embedding"].shape, x.shape)
    return x + spread(p["pos_embedding"], x.shape)


def resize(table, grid, *, old_grid=None, prefix=1, method="corners", antialias=False):
    # [1, prefix+h*w, D] -> [1, prefix+H*W, D]
    """Interpolate a position table to another grid, for another image size (section 3.2)."""
    table, old = jnp.asarray(table), source_grid(table.shape[1], prefix, old_grid)
    if tuple(grid) == old:
        return table
    sides = zip(old, grid, strict=True)
    rows, columns = (jnp.array(resize_weights(*n, method, antialias)) for n in sides)
    cells = table[:, prefix:].reshape(*old, -1)
    new = jnp.einsum("ri,cj,ijd->rcd", rows, columns, cells, precision="highest")
    new = new.reshape(1, -1, table.shape[-1]).astype(table.dtype)
    return jnp.concatenate([table[:, :prefix], new], axis=1)


def sincos2d(rows, columns, width, dtype="float32"):  # -> [1, rows*columns, D]
    """The fixed positions of big_vision: sines and cosines of x, then of y, at D/4 frequencies."""
    if width % 4:
        raise ValueError(f"sincos2d needs a width that is a multiple of 4, not {width}")
    frequencies = 1e4 ** -(jnp.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = jnp.mgrid[:rows, :columns].reshape(2, -1, 1) * frequencies
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None].astype(
        dtype
    )
