"""Dropout."""

import jax

from ..shapes import check_rate


def keep_mask(rng, rate, shape, dtype):  # -> shape, entries 0 or 1 / (1 - rate)
    """Which entries survive, already scaled so that the expected value stays the same."""
    return jax.random.bernoulli(rng, 1 - rate, shape).astype(dtype) * (1 / (1 - rate))


def dropout(x, rate=0.0, rng=None):  # [...] -> [...]
    """Zero a random share `rate` of the entries and enlarge the others by 1 / (1 - rate).

    `rng` is a JAX key for this call alone; without one this is evaluation.
    """
    check_rate(rate)
    if rng is None or rate == 0:
        return x
    return x * keep_mask(rng, rate, x.shape, x.dtype)


def split(rng, count):  # key -> list of `count` keys, or of None
    """Independent keys, so that no two places share a mask; nothing to split in evaluation."""
    return [None] * count if rng is None else list(jax.random.split(rng, count))
