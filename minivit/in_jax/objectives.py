"""What training makes small: one number a batch, from the parameters and the arrays of a batch."""

import jax.numpy as jnp

from .losses import sigmoid_cross_entropy, softmax_cross_entropy
from .masked import color_loss, masked_vit, pixel_loss
from .model import model
from .patches import patchify


def wide(x):
    """Losses are computed in float32 at least, also of a half-precision model."""
    return x.astype(jnp.promote_types(x.dtype, "float32"))


def classification(p, images, targets, *, loss="softmax", metrics=None, **options):  # -> number
    """Mean cross-entropy of the class scores; `targets` [B, classes] may be soft.

    Options and `metrics` are those of the NumPy twin.
    """
    logits = wide(model(p, images, **options))
    cross_entropy = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}[loss]
    if metrics is not None:
        metrics["accuracy"] = (logits.argmax(-1) == targets.argmax(-1)).mean()
    return cross_entropy(logits, targets).mean()


def masked_colors(p, images, labels, corrupted, masked, source, *, metrics=None, **options):
    # -> number
    """Cross-entropy of the colours of corrupted patches (`masked.color_loss`)."""
    predictions = wide(masked_vit(p, images, masked, source, **options))
    if metrics is not None:
        right = predictions.reshape(*labels.shape, -1).argmax(-1) == labels
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
