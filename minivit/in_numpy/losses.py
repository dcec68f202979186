"""Losses over class scores, one number per example."""

import numpy as np

from ..shapes import check_rate, check_targets
from .half import narrow, wide


def smooth_labels(labels, classes, smoothing=0.0, dtype="float32"):  # [B] -> [B, classes]
    """Targets that sum to one: (1 - smoothing) on the label, smoothing / classes on every class.

    Only the convention of PyTorch and TensorFlow; big_vision's spreads it over the other classes.
    """
    check_rate(smoothing, "label smoothing")
    labels = np.asarray(labels)
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        wrong = labels[(labels < 0) | (labels >= classes)].ravel()[0]
        raise ValueError(f"label {wrong} is outside 0 to {classes - 1} of {classes} classes")
    one_hot = np.arange(classes) == labels[..., None]
    return (one_hot * (1 - smoothing) + smoothing / classes).astype(dtype)


def guess(logits):  # [..., classes] -> [...]
    """The class with the best score, or -1, which is never right, where a score is not finite."""
    return np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1).astype("int32")


def softmax_cross_entropy(logits, targets):  # 2 x [..., classes] -> [...]
    """-sum(target log softmax(logits)), in nats; log(classes) when all scores are equal.

    `targets` are constants that sum to one (`smooth_labels`). The gradient is the difference of
    the probabilities from the targets: the softmax's Jacobian and the logarithm cancel.
    """
    check_targets(logits.shape, targets.shape)
    dtype, logits, targets = logits.dtype, wide(logits), wide(targets)
    shifted = logits - logits.max(-1, keepdims=True)
    log_total = np.log(np.exp(shifted).sum(-1, keepdims=True))
    log_probabilities = shifted - log_total

    def back(dlosses):
        total = targets.sum(-1, keepdims=True)
        dlogits = dlosses[..., None] * (np.exp(log_probabilities) * total - targets)
        return narrow(dlogits, dtype)

    # 0 times a log-probability of -inf would be NaN: a class with target 0 adds nothing.
    terms = targets * np.where(targets == 0, 0, log_probabilities)
    return -narrow(terms.sum(-1), dtype), back


def sigmoid_cross_entropy(logits, targets):  # 2 x [..., classes] -> [...]
    """An independent yes-or-no question for each class, summed; ImageNet-21k pre-training used it.

    `targets` are constants between 0 and 1. log(1 + exp(-|x|)) never overflows.
    """
    check_targets(logits.shape, targets.shape)
    dtype, logits, targets = logits.dtype, wide(logits), wide(targets)
    claimed = np.where(targets == 0, 0, logits) * targets  # 0 times a score of -inf would be NaN
    losses = np.maximum(logits, 0) - claimed + np.log1p(np.exp(-np.abs(logits)))

    def back(dlosses):
        decayed = np.exp(-np.abs(logits))
        probabilities = np.where(logits >= 0, 1, decayed) / (1 + decayed)
        return narrow(dlosses[..., None] * (probabilities - targets), dtype)

    return narrow(losses.sum(-1), dtype), back


LOSSES = {"softmax": softmax_cross_entropy, "sigmoid": sigmoid_cross_entropy}
