"""From the encoded tokens to class scores."""

import jax.numpy as jnp

from .mlp import dense


def pool(x, token=True):  # [B, N, D] -> [B, D]
    """The class token (eq. 4), or the mean over all tokens where there is none (D.3)."""
    return x[:, 0] if token else x.mean(1)


def pre_logits(p, x):  # [B, D] -> [B, R]
    """The hidden layer of the pre-training head, with tanh (section 3.1)."""
    return jnp.tanh(dense(p, x))


def head(p, x):  # [B, D] -> [B, classes]
    """One dense layer to the class scores; it starts at zero for fine-tuning (section 3.2)."""
    return dense(p, x)
