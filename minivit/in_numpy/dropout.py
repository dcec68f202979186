"""Dropout."""

from ..shapes import check_rate


def keep_mask(rng, rate, shape, dtype):  # -> shape, entries 0 or 1 / (1 - rate)
    """Which entries survive, already scaled so that the expected value stays the same."""
    return (rng.random(shape, dtype="float32") >= rate).astype(dtype) * (1 / (1 - rate))


def dropout(x, rate=0.0, rng=None):  # [...] -> [...]
    """Zero a random share `rate` of the entries and enlarge the others by 1 / (1 - rate).

    `rng` is a NumPy Generator, and each call draws from it anew; without one this is evaluation
    and x passes unchanged.
    """
    check_rate(rate)
    if rng is None or rate == 0:
        return x, lambda dy: dy
    mask = keep_mask(rng, rate, x.shape, x.dtype)
    return x * mask, lambda dy: dy * mask
