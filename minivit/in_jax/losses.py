"""Losses over class scores, one number per example."""

import jax
import jax.numpy as jnp

from ..shapes import check_rate, check_targets
from .half import narrow, wide


def smooth_labels(labels, classes, smoothing=0.0, dtype="float32"):  # [B] -> [B, classes]
    """Targets that sum to one; labels out of range must be refused before they get here."""
    check_rate(smoothing, "label smoothing")
    one_hot = jnp.arange(classes) == jnp.asarray(labels)[..., None]
    return (one_hot * (1 - smoothing) + smoothing / classes).astype(dtype)


def guess(logits):  # [..., classes] -> [...]
    """The class with the best score, or -1, which is never right, where a score is not finite."""
    return jnp.where(jnp.isfinite(logits).all(-1), logits.argmax(-1), -1).astype("int32")


def softmax_cross_entropy(logits, targets):  # 2 x [..., classes] -> [...]
    """-sum(target log softmax(logits)), in nats; log(classes) when all scores are equal."""
    check_targets(logits.shape, targets.shape)
    scores, targets = wide(logits), wide(targets)
    shifted = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    log_probabilities = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    losses = -(targets * jnp.where(targets == 0, 0, log_probabilities)).sum(-1)
    return narrow(losses, logits.dtype)


def sigmoid_cross_entropy(logits, targets):  # 2 x [..., classes] -> [...]
    """An independent yes-or-no question for each class, summed; ImageNet-21k was trained so."""
    check_targets(logits.shape, targets.shape)
    scores, targets = wide(logits), wide(targets)
    claimed = jnp.where(targets == 0, 0, scores) * targets
    # logaddexp(0, x) is log(1 + exp(x)) without overflow, and smooth at 0 for autodiff.
    return narrow((jnp.logaddexp(scores, 0) - claimed).sum(-1), logits.dtype)


LOSSES = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}
