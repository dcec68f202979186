"""Least squares with a penalty, in closed form: the paper's few-shot evaluation (section 4.1)."""

import jax.numpy as jnp


def ridge(x, y, l2, constant=None):  # [B, D], [B, K], [G] -> weights [G, D, K], bias [G, K]
    """Minimise |x w + b - y|^2 + l2 |w|^2 for every penalty of `l2`; see the NumPy twin."""
    l2 = jnp.asarray(l2, x.dtype)[:, None]
    if constant is None:
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
    else:
        x = jnp.concatenate([x, jnp.full_like(x[:, :1], constant)], axis=1)
    few = len(x) < x.shape[1]
    values, vectors = jnp.linalg.eigh(x @ x.T if few else x.T @ x)
    penalised = values.clip(0) + l2
    rounding = jnp.finfo(x.dtype).eps * max(x.shape) * values.max()
    inverse = (1 / jnp.where(penalised > rounding, penalised, jnp.inf))[..., None]
    if few:
        w = (x.T @ vectors) @ ((vectors.T @ y) * inverse)
    else:
        w = vectors @ ((vectors.T @ (x.T @ y)) * inverse)
    return (w, mean_y - mean_x @ w) if constant is None else (w[:, :-1], constant * w[:, -1])
