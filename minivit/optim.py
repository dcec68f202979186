"""Optimisers, schedules, clipping and averaging, written once for NumPy and JAX arrays.

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
    the last value stays. Cosine ends at 0, linear at `end` (1e-5 as in vit_jax), and "constant"
    has a warm-up only.
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
        end = min(end, base)
        rate = end + (base - end) * (1 - progress)
    elif decay == "constant":
        rate = base
    else:
        raise ValueError(f"unknown decay {decay!r}; choose cosine, linear or constant")
    return rate * min(1.0, step / warmup) if warmup else rate


def global_norm(grads, across=None):
    """Euclidean norm of all gradients together; infinite where it overflows itself.

    Where each device has a part of them, `across` adds a number up over the devices.
    """
    return clip_by_global_norm(grads, 0, across)[1]


def root_of_squares(grads, across=None):
    """The global norm, unless its square overflows: float32's does above 1.8e19."""
    square = sum((leaf * leaf).sum() for leaf in flatten(grads).values())
    return (across(square) if across else square) ** 0.5


def in_units(grads, across=None):  # -> gradients / unit in float32 at least, their norm, unit
    """Gradients whose squares can be summed: the unit is 1, or a large power of two if need be."""
    grads = tree_map(lambda g: g.astype("float32") if g.dtype.itemsize == 2 else g, grads)
    norm = root_of_squares(grads, across)
    xp = norm.__array_namespace__()
    unit = 2.0 ** (xp.finfo(norm.dtype).maxexp * 5 // 8)
    if not isinstance(norm, np.generic):  # JAX knows it only when the step runs
        unit = xp.where(xp.isfinite(norm), 1, unit)
    elif np.isfinite(norm):
        return grads, norm, 1.0
    grads = tree_map(lambda leaf: leaf / unit, grads)
    return grads, root_of_squares(grads, across), unit


@np.errstate(over="ignore", invalid="ignore")
def clip_by_global_norm(grads, limit, across=None):  # -> gradients, their norm before
    """Shrink all gradients by one factor so that their global norm is at most `limit`.

    A limit of 0 or None switches clipping off. At or below the limit nothing changes, to the bit.
    Finite gradients are clipped rightly also where their norm overflows.
    """
    small, norm, unit = in_units(grads, across)
    if not limit:
        return grads, norm * unit
    factor = 1 / norm.__array_namespace__().maximum(norm / limit, 1 / unit)
    clipped = tree_map(lambda s, g: (s * factor).astype(g.dtype, copy=False), small, grads)
    return clipped, norm * unit


def start(params, rule="adamw", *, average=False):
    """The state of a rule before its first step; `average` adds an average of the weights."""
    state = {name: tree_map(lambda leaf: leaf * 0, params) for name in MOMENTS[rule]}
    state |= {"mean_weight": 0.0, "square_weight": 0.0} if rule == "adamw" else {}
    return state | ({"average": params} if average else {}) | {"skipped": 0}


def adamw(params, grads, state, learning_rate, *, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8):
    """AdamW (arXiv 1711.05101).

    The bias correction divides each moving average by the sum of its weights, kept by the same
    recursion as the average: that equals 1 - b^t, without its cancellation in float32.
    """
    state = state | {
        "mean": tree_map(lambda m, g: b1 * m + (1 - b1) * g, state["mean"], grads),
        "square": tree_map(lambda v, g: b2 * v + (1 - b2) * (g * g), state["square"], grads),
        "mean_weight": b1 * state["mean_weight"] + (1 - b1),
        "square_weight": b2 * state["square_weight"] + (1 - b2),
    }

    def updated(name, p, m, v):
        step = m / state["mean_weight"] / ((v / state["square_weight"]) ** 0.5 + eps)
        return p - learning_rate * (step + weight_decay * p if is_kernel(name) else step)

    return map_with_name(updated, params, state["mean"], state["square"]), state


def sgd(params, grads, state, learning_rate, *, weight_decay=0.0, momentum=0.9):
    """Stochastic gradient descent with momentum, as the paper fine-tunes (Table 4)."""
    mean = tree_map(lambda m, g: g + momentum * m, state["momentum"], grads)

    def updated(name, p, m):
        return p - learning_rate * (m + weight_decay * p if is_kernel(name) else m)

    return map_with_name(updated, params, mean), state | {"momentum": mean}


RULES = {"adamw": adamw, "sgd": sgd}
MOMENTS = {"adamw": ("mean", "square"), "sgd": ("momentum",)}


def map_with_name(function, *trees):
    """`tree_map` for a function that is told the name of each leaf first."""
    flat = [flatten(tree) for tree in trees]
    return unflatten({name: function(name, *(f[name] for f in flat)) for name in flat[0]})


def polyak(average, params, keep):
    """Polyak averaging: `keep` of the old average, the rest of the new weights."""
    # By the difference: keep and 1 - keep, each rounded, need not sum to one.
    return tree_map(lambda a, p: a + (1 - keep) * (p - a), average, params)


def warm_keep(step, keep):
    """The share that an average keeps at a step: (1 + step) / (10 + step), until `keep` is reached.

    0.9999 from the first step on would remember the initial weights for 10,000 steps.
    """
    return min(keep, (1 + step) / (10 + step))


def update(
    params, grads, state, learning_rate, *, rule="adamw", clip=0.0, keep=1.0, across=None, **options
):  # -> params, state
    """One step of a rule, on gradients clipped by their global norm.

    A step to weights or moments that are not finite changes nothing, and is counted in `skipped`.
    `across` is for gradients of which each device has a part (`global_norm`).
    """
    if isinstance(learning_rate, np.generic):
        learning_rate = learning_rate.item()
    skipped = {"params": params, "state": state | {"skipped": state["skipped"] + 1}}
    with np.errstate(invalid="ignore", over="ignore"):
        grads = clip_by_global_norm(grads, clip, across)[0] if clip else grads
        new, new_state = RULES[rule](params, grads, state, learning_rate, **options)
        checked = new
        if rule == "adamw" and not clip:
            # An unclipped gradient's square may overflow, which would make a step of 0.
            checked = tree_map(lambda p, v: p * 0 + v, new, new_state["square"])
        # Nothing times zero is zero, unless it is infinite or no number.
        zero = sum((leaf * 0).sum() for leaf in flatten(checked).values())
        zero = across(zero) if across else zero
    if "average" in state:
        new_state = new_state | {"average": polyak(state["average"], new, keep)}
    result = {"params": new, "state": new_state}
    sound = zero == 0
    if isinstance(sound, np.bool):
        kept = result if sound else skipped
    else:  # JAX knows them only when the step runs
        where = zero.__array_namespace__().where
        kept = tree_map(lambda a, b: where(sound, a, b), result, skipped)
    return kept["params"], kept["state"]
