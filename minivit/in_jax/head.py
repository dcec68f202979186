"""From the encoded tokens to class scores."""

import jax.numpy as jnp

from .attention import cross_attention
from .half import spread
from .mlp import dense, mlp
from .norms import layer_norm


def pool(x, class_token=True):  # [B, N, D] -> [B, D]
    """The class token (eq. 4), or the mean over all tokens where there is none (D.3)."""
    return x[:, 0] if class_token else x.mean(1)


def attention_pool(p, x, *, epsilon=1e-6, **options):  # [B, N, D] -> [B, D]
    """A learnable probe asks all tokens, and an MLP follows: big_vision's MAP head."""
    probe = spread(p["probe"], (len(x), *p["probe"].shape[1:]))
    a = cross_attention(p["MultiHeadDotProductAttention_0"], probe, x)
    return (a + mlp(p["MlpBlock_0"], layer_norm(p["LayerNorm_0"], a, epsilon), **options))[:, 0]


def pre_logits(p, x):  # [B, D] -> [B, R]
    """The hidden layer of the pre-training head, with tanh (section 3.1, D.3)."""
    return jnp.tanh(dense(p, x))


def head(p, x):  # [B, D] -> [B, classes]
    """One dense layer to the class scores; it starts at zero for fine-tuning (section 3.2)."""
    return dense(p, x)
