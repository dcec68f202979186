"""How good the class scores are."""

import numpy as np

from .in_numpy import smooth_labels, softmax_cross_entropy


def top_k(logits, labels, k=1):  # [B, classes], [B] -> share of labels among the k best scores
    """Top-k accuracy; where there are k classes or fewer in all, every answer counts as right."""
    k = min(k, logits.shape[-1])
    best = np.argpartition(-logits, k - 1, axis=-1)[:, :k]
    return float((best == labels[:, None]).any(-1).mean())


def summary(logits, labels):  # [B, classes], [B] -> dictionary
    """Mean loss and accuracy over all examples, each counted once, and accuracy by class."""
    correct = logits.argmax(-1) == labels
    losses, _ = softmax_cross_entropy(logits, smooth_labels(labels, logits.shape[-1]))
    by_class = [
        float(correct[labels == label].mean()) if (labels == label).any() else float("nan")
        for label in range(logits.shape[-1])
    ]
    return {"loss": float(losses.mean()), "accuracy": float(correct.mean()), "by_class": by_class}
