"""From the encoded tokens to class scores."""

import numpy as np

from .mlp import dense


def pool(x, token=True):  # [B, N, D] -> [B, D]
    """The class token (eq. 4), or the mean over all tokens where there is none (D.3)."""
    y = x[:, 0] if token else x.mean(1)

    def back(dy):
        dx = np.zeros_like(x)
        if token:
            dx[:, 0] = dy
        else:
            dx[:] = dy[:, None] / x.shape[1]
        return dx

    return y, back


def pre_logits(p, x):  # [B, D] -> [B, R]
    """The hidden layer of the pre-training head, with tanh (section 3.1)."""
    hidden, back_dense = dense(p, x)
    y = np.tanh(hidden)
    return y, lambda dy: back_dense(dy * (1 - y * y))


def head(p, x):  # [B, D] -> [B, classes]
    """One dense layer to the class scores; it starts at zero for fine-tuning (section 3.2)."""
    return dense(p, x)
