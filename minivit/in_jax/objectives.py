"""What training makes small: one number per batch, from parameters and the batch's arrays."""

import jax.numpy as jnp

from ..shapes import check_loss
from .half import wide
from .losses import LOSSES, guess
from .masked import color_loss, masked_vit, pixel_loss
from .model import model
from .patches import patchify


def classification(p, images, targets, *, loss="softmax", metrics=None, **options):  # -> number
    """Mean cross-entropy of the class scores; `targets` [B, classes] may be soft.

    Options and `metrics` are those of the NumPy twin.
    """
    check_loss(loss)
    logits = wide(model(p, images, **options))
    if metrics is not None:
        metrics["accuracy"] = (guess(logits) == targets.argmax(-1)).mean()
    return LOSSES[loss](logits, targets).mean()


def masked_colors(p, images, labels, corrupted, masked, source, *, metrics=None, **options):
    # -> number
    """Cross-entropy of the colours of corrupted patches (`masked.color_loss`)."""
    predictions = wide(masked_vit(p, images, masked, source, **options))
    if metrics is not None:
        right = guess(predictions.reshape(*labels.shape, -1)) == labels
        cells = jnp.maximum(corrupted.sum() * labels.shape[-1], 1)
        metrics["accuracy"] = (right & corrupted[..., None]).sum() / cells
    return color_loss(predictions, labels, corrupted)


def masked_pixels(p, images, corrupted, masked, source, *, metrics=None, **options):  # -> number
    """Mean squared error of the pixels of corrupted patches (`masked.pixel_loss`)."""
    predictions = wide(masked_vit(p, images, masked, source, **options))
    patches = patchify(images, p["embedding"]["kernel"].shape[:2]).reshape(predictions.shape)
    return pixel_loss(predictions, patches, corrupted)


OBJECTIVES = {
    "classes": classification,
    "mean-color": masked_colors,
    "downsampled": masked_colors,
    "pixels": masked_pixels,
}
