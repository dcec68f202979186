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


def ridge(features, labels, classes, l2=1.0):  # [B, D], [B] -> weights [D, classes], bias
    """Closed-form least squares to {-1, 1} with a penalty on the weights (section 4.1).

    The bias is not penalised: features and targets are centred first, in float64, which also keeps
    features with a large mean from drowning the rest. Solved by features or by examples,
    whichever are fewer; both give the same.
    """
    x = np.asarray(features, np.float64)
    y = 2.0 * (np.arange(classes) == np.asarray(labels)[:, None]) - 1
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    if len(x) < x.shape[1]:
        weights = x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(len(x)), y)
    else:
        weights = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)
    return weights, mean_y - mean_x @ weights
