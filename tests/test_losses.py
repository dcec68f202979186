"""Losses (cases LOS-01, -02, -07) against torch and big_vision."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minivit import in_jax, in_numpy

TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])


def loss_and_gradient(twin, name, logits, targets):
    """Losses of each example, and the gradient of their mean."""
    logits, targets = np.asarray(logits, "float32"), np.asarray(targets, "float32")
    if twin == "numpy":
        losses, back = getattr(in_numpy, name)(logits, targets)
        return losses, back(np.full_like(losses, 1 / len(losses)))
    loss = getattr(in_jax, name)
    return loss(logits, targets), jax.grad(lambda x: loss(x, targets).mean())(logits)


@TWINS
@pytest.mark.parametrize(
    ("peer", "name", "smoothing"),
    [
        ("torch_softmax_smooth0", "softmax_cross_entropy", 0),
        ("torch_softmax_smooth0.1", "softmax_cross_entropy", 0.1),
        ("bigvision_softmax", "softmax_cross_entropy", 0),
        ("bigvision_sigmoid", "sigmoid_cross_entropy", None),
        ("torch_sigmoid", "sigmoid_cross_entropy", None),
    ],
)
def test_peers(peers, twin, peer, name, smoothing):
    """Logits up to 80: the peers' own rounding is 1.6e-7 relative."""
    f = peers("losses")
    targets = f["in/multihot"]
    if smoothing is not None:
        targets = in_numpy.smooth_labels(f["in/labels"], 6, smoothing)
    losses, grads = loss_and_gradient(twin, name, f["in/logits"], targets)
    expected = f[f"out/{peer}/per_example"]
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(grads, f[f"grad/{peer}/logits"], rtol=1e-6, atol=1e-7)


def test_smoothing_convention():
    """LOS-01: torch's convention; the targets sum to one."""
    targets = in_numpy.smooth_labels([0], 7, 0.1)
    np.testing.assert_allclose(targets[0], [0.9142857] + 6 * [0.0142857], atol=1e-7)
    logits = np.array([[2, 0, 0, 0, 0, 0, 0]], "float32")
    for t, value in ((targets, 0.7658662), (in_numpy.smooth_labels([0], 7), 0.5944376)):
        assert in_numpy.softmax_cross_entropy(logits, t)[0][0] == pytest.approx(value, abs=1e-6)
    zero = in_numpy.softmax_cross_entropy(0 * logits, targets)[0][0]
    assert zero == pytest.approx(1.9459101, abs=1e-6)


@pytest.mark.parametrize("label", [4, -1])
def test_label_outside_the_classes(label):
    """LOS-02: refused, with label and number of classes."""
    with pytest.raises(ValueError, match=f"label {label} .*4 classes"):
        in_numpy.smooth_labels([0, label], 4)


@TWINS
def test_huge_logits(twin):
    """LOS-07."""
    logits = [[1e4, 0], [0, -1e4]]
    losses, grads = loss_and_gradient(twin, "softmax_cross_entropy", logits, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(losses, [1e4, 0])
    np.testing.assert_array_equal(2 * grads, [[1, -1], [0, 0]])


@TWINS
def test_impossible_class(twin):
    """A score of -inf is fine for a class that is not the target."""
    losses, _ = loss_and_gradient(twin, "softmax_cross_entropy", [[0, -np.inf]], [[1, 0]])
    np.testing.assert_array_equal(losses, 0)


@TWINS
def test_labels_are_not_targets(twin):
    """They would broadcast to nonsense."""
    for name in ("softmax_cross_entropy", "sigmoid_cross_entropy"):
        with pytest.raises(ValueError, match=r"\(5, 5\) need targets.*\(5,\).*smooth_labels"):
            loss_and_gradient(twin, name, np.zeros((5, 5)), np.zeros(5))
    with pytest.raises(ValueError, match="smoothing 2 must be"):
        in_numpy.smooth_labels([0], 3, 2)


@given(arrays(np.float64, (3, 4), elements=st.floats(-20, 20)), st.floats(-30, 30))
def test_shift_and_bounds(logits, shift):
    """A shift changes nothing, the loss is not negative, the gradient sums to zero."""
    targets = in_numpy.smooth_labels([0, 3, 1], 4, 0.2, "float64")
    losses, back = in_numpy.softmax_cross_entropy(logits, targets)
    moved, _ = in_numpy.softmax_cross_entropy(logits + shift, targets)
    np.testing.assert_allclose(moved, losses, atol=1e-12)
    assert (losses >= 0).all()
    np.testing.assert_allclose(back(np.ones(3)).sum(-1), 0, atol=1e-14)
