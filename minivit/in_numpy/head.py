"""From the encoded tokens to class scores."""

import numpy as np

from .attention import cross_attention
from .half import narrow, total, wide
from .mlp import dense, mlp
from .norms import layer_norm


def pool(x, class_token=True):  # [B, N, D] -> [B, D]
    """The class token (eq. 4), or the mean over all tokens where there is none (D.3)."""
    y = x[:, 0] if class_token else narrow(wide(x).mean(1), x.dtype)

    def back(dy):
        dx = np.zeros_like(x)
        if class_token:
            dx[:, 0] = dy
        else:
            dx[:] = dy[:, None] / x.shape[1]
        return dx

    return y, back


def attention_pool(p, x, *, epsilon=1e-6, **options):  # [B, N, D] -> [B, D]
    """A learnable probe asks all tokens, and an MLP follows: big_vision's MAP head."""
    probe = np.broadcast_to(p["probe"], (len(x), *p["probe"].shape[1:]))
    a, back_attention = cross_attention(p["MultiHeadDotProductAttention_0"], probe, x)
    b, back_norm = layer_norm(p["LayerNorm_0"], a, epsilon)
    c, back_mlp = mlp(p["MlpBlock_0"], b, **options)

    def back(dy):
        dc = dy[:, None]
        dp = {}
        dp["MlpBlock_0"], db = back_mlp(dc)
        dp["LayerNorm_0"], da = back_norm(db)
        dp["MultiHeadDotProductAttention_0"], dprobe, dx = back_attention(da + dc)
        return dp | {"probe": total(dprobe, 0, keepdims=True)}, dx

    return (a + c)[:, 0], back


def pre_logits(p, x):  # [B, D] -> [B, R]
    """The hidden layer of the pre-training head, with tanh (section 3.1, D.3)."""
    hidden, back_dense = dense(p, x)
    y = np.tanh(hidden)
    return y, lambda dy: back_dense(dy * (1 - y * y))


def head(p, x):  # [B, D] -> [B, classes]
    """One dense layer to the class scores; it starts at zero for fine-tuning (section 3.2)."""
    return dense(p, x)
