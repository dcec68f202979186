"""Losses over class scores, one number an example."""

import jax.numpy as jnp


def smooth_labels(labels, classes, smoothing=0.0, dtype="float32"):  # [B] -> [B, classes]
    """Targets that sum to one; labels out of range must be refused before they get here."""
    one_hot = jnp.arange(classes) == labels[..., None]
    return (one_hot * (1 - smoothing) + smoothing / classes).astype(dtype)


def softmax_cross_entropy(logits, targets):  # 2 x [..., K] -> [...]
    """-sum(target log softmax(logits)), in nats; log K when every score is equal."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    return -jnp.where(targets == 0, 0, targets * log_probabilities).sum(-1)


def sigmoid_cross_entropy(logits, targets):  # 2 x [..., K] -> [...]
    """K independent yes-or-no questions, summed; ImageNet-21k pre-training used it."""
    # logaddexp(0, x) is log(1 + exp(x)) without overflow, and smooth at 0 for autodiff.
    return (jnp.logaddexp(logits, 0) - logits * targets).sum(-1)
