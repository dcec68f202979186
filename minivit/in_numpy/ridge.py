"""Least squares with a penalty, in closed form: the paper's few-shot evaluation (section 4.1)."""

import numpy as np


def ridge(x, y, l2, constant=None):  # [B, D], [B, K], [G] -> weights [G, D, K], bias [G, K]
    """Minimise |x w + b - y|^2 + l2 |w|^2 for every penalty of `l2`.

    The bias is free: features and targets are centred first, which also keeps features with a
    large mean from drowning the rest. With `constant` it is the weight of one more feature of
    that value instead, and penalised with the others (big_vision: 100). Without a penalty, of all
    weights that fit equally well those of least norm are taken, as `numpy.linalg.lstsq` does.
    One eigendecomposition serves all penalties; it is of x^T x or of x x^T, whichever is smaller:
    (x^T x + l2)^-1 x^T = x^T (x x^T + l2)^-1.
    """
    l2 = np.asarray(l2, x.dtype)[:, None]
    if constant is None:
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
    else:
        x = np.concatenate([x, np.full_like(x[:, :1], constant)], axis=1)
    few = len(x) < x.shape[1]
    values, vectors = np.linalg.eigh(x @ x.T if few else x.T @ x)
    penalised = values.clip(0) + l2
    # Below the rounding of the largest eigenvalue nothing is known: such directions get no weight.
    rounding = np.finfo(x.dtype).eps * max(x.shape) * values.max()
    inverse = (1 / np.where(penalised > rounding, penalised, np.inf))[..., None]
    if few:
        w = (x.T @ vectors) @ ((vectors.T @ y) * inverse)
    else:
        w = vectors @ ((vectors.T @ (x.T @ y)) * inverse)
    return (w, mean_y - mean_x @ w) if constant is None else (w[:, :-1], constant * w[:, -1])
