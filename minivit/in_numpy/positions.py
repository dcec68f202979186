"""The class token, and the position table: what tells the encoder where a patch was."""

import numpy as np

from ..interpolation import resize_weights, source_grid
from ..shapes import check_positions
from .half import total, wide


def add_class_token(cls, x):  # [1, 1, D], [B, N, D] -> [B, 1+N, D]
    """Put the learnable class token before the patches (eq. 1); any registers come with it."""
    prefix = cls.shape[1]
    tokens = np.concatenate([np.broadcast_to(cls, (len(x), *cls.shape[1:])), x], axis=1)

    def back(dy):
        return total(dy[:, :prefix], 0, keepdims=True), dy[:, prefix:]

    return tokens, back


def add_positions(p, x):  # [B, N, D] -> [B, N, D]
    """Add the learnable position table, the class token's row first (eq. 1)."""
    check_positions(p["pos_embedding"].shape, x.shape)

    def back(dy):
        return {"pos_embedding": total(dy, 0, keepdims=True)}, dy

    return x + p["pos_embedding"], back


def resize(table, grid, *, old_grid=None, prefix=1, method="corners", antialias=False):
    # [1, prefix+h*w, D] -> [1, prefix+H*W, D]
    """Interpolate a position table to another grid, for another image size (section 3.2).

    `grid` is (rows, columns); `old_grid` is inferred where it is square. The first `prefix` rows
    belong to no place and are copied. The default is the official rule; `interpolation.py` has
    the others. The same grid returns the same table.
    """
    old = source_grid(table.shape[1], prefix, old_grid)
    if tuple(grid) == old:
        return table, lambda dy: dy
    sides = zip(old, grid, strict=True)
    rows, columns = (np.array(resize_weights(*n, method, antialias)) for n in sides)
    cells = wide(table[:, prefix:]).reshape(*old, -1)
    new = np.einsum("ri,cj,ijd->rcd", rows, columns, cells, optimize=True)
    new = new.reshape(1, -1, table.shape[-1]).astype(table.dtype)

    def back(dy):  # the transposed matrices
        dnew = wide(dy[:, prefix:]).reshape(*grid, -1)
        dcells = np.einsum("ri,cj,rcd->ijd", rows, columns, dnew, optimize=True)
        dcells = dcells.reshape(1, -1, table.shape[-1]).astype(table.dtype)
        return np.concatenate([dy[:, :prefix], dcells], axis=1)

    return np.concatenate([table[:, :prefix], new], axis=1), back


def sincos2d(rows, columns, width, dtype="float32"):  # -> [1, rows*columns, D]
    """The fixed positions of big_vision: sines and cosines of x, then of y, at D/4 frequencies."""
    if width % 4:
        raise ValueError(f"sincos2d needs a width that is a multiple of 4, not {width}")
    frequencies = 1e4 ** -(np.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1) * frequencies
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)[None].astype(dtype)
