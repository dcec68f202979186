"""Half precision: float16 overflows above 65504, and sums in either type lose small terms."""

import jax.numpy as jnp


def wide(x):
    """The same numbers as float32 at least."""
    return x.astype(jnp.promote_types(x.dtype, "float32"))


def bounded(x, axes):
    """As `wide`; but bfloat16, whose squares overflow float32, is shrunk: norms see no scale."""
    y = wide(x)
    if x.dtype != "bfloat16":
        return y
    _, exponent = jnp.frexp(abs(y).max(axes, keepdims=True))
    return y * jnp.ldexp(jnp.float32(1), -jnp.maximum(exponent - 50, 0))


def narrow(y, dtype):
    """A result in the type that its input had."""
    return y.astype(dtype)


def spread(p, shape):
    """A parameter for many rows, whose gradients are added up in `wide`."""
    p = jnp.asarray(p)
    return narrow(jnp.broadcast_to(wide(p), shape), p.dtype)
