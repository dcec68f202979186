"""Masked patch prediction, the paper's objective without labels (section 4.6, B.1.2)."""

import jax.numpy as jnp

from .half import narrow, wide
from .losses import softmax_cross_entropy
from .mlp import dense
from .positions import add_class_token
from .vit import embed, encoder


def corrupt(mask, x, masked, source):  # [1, 1, D], [B, N, D], 2 x [B, N] -> [B, N, D]
    """Replace embeddings of patches by the mask embedding, or by that of another patch."""
    return jnp.where(masked[..., None], mask, jnp.take_along_axis(x, source[..., None], axis=1))


def masked_vit(p, images, masked, source, **options):  # [B, height, width, C] -> [B, N, outputs]
    """What the encoder says of every patch when some of their embeddings are corrupted."""
    grid = embed(p, images)
    x = corrupt(p["mask"], grid.reshape(len(grid), -1, grid.shape[-1]), masked, source)
    prefix = p["cls"].shape[1] if "cls" in p else 0
    if prefix:
        x = add_class_token(p["cls"], x)
    return dense(p["prediction"], encoder(p["Transformer"], x, **options)[:, prefix:])


def over_corrupted(losses, corrupted):  # 2 x [B, N] -> number
    """The mean over all corrupted patches, kept ones included; 0 where there are none."""
    return jnp.where(corrupted, losses, 0).sum() / jnp.maximum(corrupted.sum(), 1)


def color_loss(predictions, labels, corrupted):  # [B, N, T*K], [B, N, T], [B, N] -> number
    """Cross-entropy over K colours, a mean over the T cells of each corrupted patch."""
    # Chosen before anything is computed: a gradient of 0 times NaN would be NaN.
    logits = jnp.where(corrupted[..., None], wide(predictions), 0).reshape(*labels.shape, -1)
    targets = (jnp.arange(logits.shape[-1]) == labels[..., None]).astype(logits.dtype)
    loss = over_corrupted(softmax_cross_entropy(logits, targets).mean(-1), corrupted)
    return narrow(loss, predictions.dtype)


def pixel_loss(predictions, patches, corrupted):  # 2 x [B, N, P*P*C], [B, N] -> number
    """Mean squared error of the pixels in [-1, 1] of each corrupted patch."""
    error = jnp.where(corrupted[..., None], wide(predictions) - wide(patches), 0)
    return narrow(over_corrupted((error * error).mean(-1), corrupted), predictions.dtype)
