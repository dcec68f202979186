"""Optimisers, schedules and clipping, written once for NumPy and JAX arrays.

Every array brings its own namespace (`x.__array_namespace__()` is NumPy or jax.numpy), so the
same lines run in both twins. All numbers are Python floats: a NumPy scalar would turn float32
weights into float64.

Weight decay follows AdamW as in optax and PyTorch: each step takes lr * weight_decay * kernel off
a kernel. (big_vision states decay times the schedule alone: its 1e-4 at lr 1e-3 is 0.1 here.)
"""

import math

import numpy as np

from .params import flatten, is_kernel, tree_map, unflatten


def schedule(step, *, base, total, warmup=0, decay="cosine", end=1e-5):  # -> learning rate
    """The official learning rate: a linear ramp times a cosine or linear decay.

    Counts from 0: with a warm-up the first step has rate 0, as in vit_jax, and from `total` on
    the last value stays. Cosine ends at 0, linear at `end` (1e-5 as in vit_jax).
    """
    step, base = float(step), float(base)
    if warmup < 0 or total < warmup:
        raise ValueError(f"warm-up of {warmup} steps does not fit into {total} steps")
    span = total - warmup
    # A warm-up as long as the whole run is a pure ramp.
    progress = min(1.0, max(0.0, (step - warmup) / span)) if span else 0.0
    if decay == "cosine":
        rate = base * 0.5 * (1 + math.cos(math.pi * progress))
    elif decay == "linear":
        rate = end + (base - end) * (1 - progress)
    elif decay == "constant":
        rate = base
    else:
        raise ValueError(f"unknown decay {decay!r}; choose cosine, linear or constant")
    return rate * min(1.0, step / warmup) if warmup else rate


def global_norm(grads):
    """Euclidean norm of all gradients together."""
    return sum((leaf * leaf).sum() for leaf in flatten(grads).values()) ** 0.5


def clip_by_global_norm(grads, limit):  # -> gradients, their norm before
    """Shrink all gradients by one factor so that their global norm is at most `limit`.

    A limit of 0 or None switches clipping off. At or below the limit nothing changes, to the bit.
    """
    norm = global_norm(grads)
    if not limit:
        return grads, norm
    xp = norm.__array_namespace__()
    factor = limit / xp.maximum(norm, limit)
    with np.errstate(invalid="ignore"):  # an infinite gradient times zero; `adamw` skips it
        return tree_map(lambda leaf: leaf * factor, grads), norm


def keep_if_finite(norm, new, old):
    """The new tree, or the old one, to the bit, where the gradient's norm is not finite."""
    if isinstance(norm, np.generic):  # NumPy: known now
        return new if np.isfinite(norm) else old
    xp = norm.__array_namespace__()  # JAX: known when the step runs
    return tree_map(lambda a, b: xp.where(xp.isfinite(norm), a, b), new, old)


def adamw_init(params):
    """The moving averages, the sums of their weights, and the skipped steps, all zero."""
    zeros = tree_map(lambda leaf: leaf * 0, params)
    state = {"mean": zeros, "square": tree_map(lambda leaf: leaf * 0, params)}
    return state | {"mean_weight": 0.0, "square_weight": 0.0, "skipped": 0}


def adamw(
    params, grads, state, learning_rate, *, weight_decay=0.0, clip=0.0, b1=0.9, b2=0.999, eps=1e-8
):  # -> params, state
    """One AdamW step (arXiv 1711.05101) on gradients clipped by their global norm.

    A gradient that is not finite changes nothing, and the step is counted in `skipped`.
    The bias correction divides each moving average by the sum of its weights, kept by the same
    recursion as the average: that equals 1 - b^t, without its cancellation in float32.
    """
    if isinstance(learning_rate, np.generic):
        learning_rate = learning_rate.item()
    grads, norm = clip_by_global_norm(grads, clip)
    unchanged = {"params": params, "state": state | {"skipped": state["skipped"] + 1}}
    state = state | {
        "mean": tree_map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], grads),
        "square": tree_map(lambda v, g: b2 * v + (1 - b2) * (g * g), state["square"], grads),
        "mean_weight": b1 * state["mean_weight"] + (1 - b1),
        "square_weight": b2 * state["square_weight"] + (1 - b2),
    }

    def updated(name, p, m, v):
        step = m / state["mean_weight"] / ((v / state["square_weight"]) ** 0.5 + eps)
        if weight_decay and is_kernel(name):
            step = step + weight_decay * p
        return p - learning_rate * step

    trees = (flatten(tree).items() for tree in (params, state["mean"], state["square"]))
    new = {name: updated(name, p, m, v) for (name, p), (_, m), (_, v) in zip(*trees, strict=True)}
    kept = keep_if_finite(norm, {"params": unflatten(new), "state": state}, unchanged)
    return kept["params"], kept["state"]
