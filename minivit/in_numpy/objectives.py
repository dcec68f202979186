"""What training makes small: one number per batch, from parameters and the batch's arrays."""

import numpy as np

from ..shapes import check_loss
from .half import narrow, wide
from .losses import LOSSES, guess
from .masked import color_loss, masked_vit, pixel_loss
from .model import model
from .patches import patchify, unpatchify


def classification(p, images, targets, *, loss="softmax", metrics=None, **options):  # -> number
    """Mean cross-entropy of the class scores; `targets` [B, classes] may be soft.

    `loss` is "softmax", or "sigmoid" as in the paper's pre-training on ImageNet-21k. A dictionary
    `metrics` receives `accuracy`: how often the best score is at the largest target. Options of
    every objective: those of `vit`.
    """
    check_loss(loss)
    logits, back_model = model(p, images, **options)
    losses, back_losses = LOSSES[loss](wide(logits), targets)
    if metrics is not None:
        metrics["accuracy"] = (guess(logits) == targets.argmax(-1)).mean()

    def back(dloss):
        dlogits = back_losses(np.full_like(losses, dloss / len(losses)))
        return back_model(narrow(dlogits, logits.dtype))

    return losses.mean(), back


def masked_colors(p, images, labels, corrupted, masked, source, *, metrics=None, **options):
    # -> number
    """Cross-entropy of the colours of corrupted patches (`masked.color_loss`).

    `metrics` receives `accuracy`: the share of the corrupted patches' cells that are right.
    """
    predictions, back_vit = masked_vit(p, images, masked, source, **options)
    loss, back_loss = color_loss(wide(predictions), labels, corrupted)
    if metrics is not None:
        right = guess(predictions.reshape(*labels.shape, -1)) == labels
        metrics["accuracy"] = right[corrupted].mean() if corrupted.any() else 0.0
    return loss, lambda dloss: back_vit(narrow(back_loss(dloss), predictions.dtype))


def masked_pixels(p, images, corrupted, masked, source, *, metrics=None, **options):  # -> number
    """Mean squared error of the pixels of corrupted patches (`masked.pixel_loss`)."""
    predictions, back_vit = masked_vit(p, images, masked, source, **options)
    patch = p["embedding"]["kernel"].shape[:2]
    patches = patchify(images, patch)
    loss, back_loss = pixel_loss(wide(predictions), patches.reshape(predictions.shape), corrupted)

    def back(dloss):
        dpredictions = narrow(back_loss(dloss), predictions.dtype)
        dp, dimages = back_vit(dpredictions)
        # The images are also what is asked for, with the opposite gradient.
        return dp, dimages - unpatchify(dpredictions.reshape(patches.shape), patch)

    return loss, back


OBJECTIVES = {
    "classes": classification,
    "mean-color": masked_colors,
    "downsampled": masked_colors,
    "pixels": masked_pixels,
}
