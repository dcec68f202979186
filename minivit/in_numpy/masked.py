"""Masked patch prediction, the paper's objective without labels (section 4.6, B.1.2)."""

import numpy as np

from .half import narrow, total, wide
from .losses import softmax_cross_entropy
from .mlp import dense
from .positions import add_class_token
from .vit import embed, encoder


def corrupt(mask, x, masked, source):  # [1, 1, D], [B, N, D], 2 x [B, N] -> [B, N, D]
    """Replace embeddings of patches by the mask embedding, or by that of another patch."""
    rows = np.arange(len(x))[:, None]
    y = np.where(masked[..., None], mask, x[rows, source])

    def back(dy):
        dx = np.zeros_like(x)
        np.add.at(dx, (rows, source), np.where(masked[..., None], 0, dy))
        return total(np.where(masked[..., None], dy, 0), (0, 1), keepdims=True), dx

    return y, back


def masked_vit(p, images, masked, source, **options):  # [B, height, width, C] -> [B, N, outputs]
    """What the encoder says of every patch when some of their embeddings are corrupted.

    The parameters are those of `vit` with `mask` [1, 1, D] and `prediction` in place of `head`.
    """
    grid, back_embed = embed(p, images)
    x, back_corrupt = corrupt(
        p["mask"], grid.reshape(len(grid), -1, grid.shape[-1]), masked, source
    )
    prefix = p["cls"].shape[1] if "cls" in p else 0
    if prefix:
        x, back_cls = add_class_token(p["cls"], x)
    encoded, back_encoder = encoder(p["Transformer"], x, **options)
    y, back_dense = dense(p["prediction"], encoded[:, prefix:])

    def back(dy):
        dp, dencoded = {}, np.zeros_like(encoded)
        dp["prediction"], dencoded[:, prefix:] = back_dense(dy)
        dp["Transformer"], dx = back_encoder(dencoded)
        if prefix:
            dp["cls"], dx = back_cls(dx)
        dp["mask"], dx = back_corrupt(dx)
        dembed, dimages = back_embed(dx.reshape(grid.shape))
        return dp | dembed, dimages

    return y, back


def over_corrupted(losses, corrupted):  # 2 x [B, N] -> number
    """The mean over all corrupted patches, kept ones included; 0 where there are none.

    What stands at the other patches may be anything, NaN included.
    """
    count = max(corrupted.sum(), 1)
    mean = wide(np.where(corrupted, losses, 0)).sum() / count
    return mean.astype(losses.dtype), lambda d: (d * corrupted / count).astype(losses.dtype)


def color_loss(predictions, labels, corrupted):  # [B, N, T*K], [B, N, T], [B, N] -> number
    """Cross-entropy over K colours, a mean over the T cells of each corrupted patch."""
    # Chosen before anything is computed: 0 times NaN would be NaN.
    logits = np.where(corrupted[..., None], wide(predictions), 0).reshape(*labels.shape, -1)
    targets = (np.arange(logits.shape[-1]) == labels[..., None]).astype(logits.dtype)
    losses, back_losses = softmax_cross_entropy(logits, targets)
    loss, back_mean = over_corrupted(losses.mean(-1), corrupted)

    def back(dloss):
        dlosses = back_mean(dloss)[..., None] / labels.shape[-1]
        dlogits = back_losses(np.broadcast_to(dlosses, losses.shape))
        return narrow(dlogits.reshape(predictions.shape), predictions.dtype)

    return loss.astype(predictions.dtype), back


def pixel_loss(predictions, patches, corrupted):  # 2 x [B, N, P*P*C], [B, N] -> number
    """Mean squared error of the pixels in [-1, 1] of each corrupted patch."""
    error = np.zeros_like(wide(predictions))
    error[corrupted] = wide(predictions[corrupted]) - wide(patches[corrupted])
    loss, back_mean = over_corrupted((error * error).mean(-1), corrupted)

    def back(dloss):
        derror = back_mean(dloss)[..., None] * (2 / error.shape[-1]) * error
        return narrow(derror, predictions.dtype)

    return loss.astype(predictions.dtype), back
