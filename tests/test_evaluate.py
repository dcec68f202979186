"""Metrics (cases LOS-03, LOS-05)."""

import numpy as np
import pytest

from minivit import evaluate


def test_every_example_counts_once():
    """LOS-03: no mean of batch means."""
    logits = np.array([[1, 0], [1, 0], [1, 0], [1, 0], [0, 1]], "float32")
    result = evaluate.summary(logits, np.zeros(5, int))
    assert result["accuracy"] == pytest.approx(0.8)
    expected = (4 * np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 5
    assert result["loss"] == pytest.approx(expected, rel=1e-6)
    assert result["by_class"][0] == pytest.approx(0.8)
    assert np.isnan(result["by_class"][1])


def test_top_k():
    """LOS-05: k may exceed the number of classes."""
    logits = np.array([[3.0, 2, 1], [1, 2, 3]])
    assert evaluate.top_k(logits, np.array([1, 0])) == 0
    assert evaluate.top_k(logits, np.array([1, 0]), 2) == 0.5
    assert evaluate.top_k(logits, np.array([1, 0]), 5) == 1


def scores(features, labels, classes, l2, at):
    weights, bias = evaluate.ridge(np.array(features), labels, classes, l2)
    return np.array(at) @ weights + bias, weights


@pytest.mark.parametrize("shift", [0, 10_000])
def test_ridge_does_not_shrink_the_bias(shift):
    """FEW-01, FEW-02: also for float32 features with a large mean."""
    x = (np.arange(4.0)[:, None] + shift).astype("float32")
    at, weights = scores(x, [0, 0, 1, 1], 2, 1.0, x[3:])
    assert weights[0, 1] == pytest.approx(2 / 3, abs=1e-6)
    assert at[0, 1] == pytest.approx(1.0, abs=1e-6)
    at, _ = scores(x, [0, 1, 1, 1], 2, 1e6, x[[0, 3]])
    np.testing.assert_allclose(at[:, 1], [0.49999, 0.5], atol=1e-5)


def test_ridge_with_fewer_examples_than_features():
    """FEW-03: scikit-learn's numbers, and both forms agree."""
    x = np.array([[1, 0, 2, 0, 0], [0, 1, 0, 3, 0], [1, 1, 0, 0, 1]], float)
    weights, bias = evaluate.ridge(x, [1, 0, 1], 2, 0.5)
    expected = [0.17125382, -0.03669725, 0.07339450, -0.51376147, 0.13455657]
    np.testing.assert_allclose(weights[:, 1], expected, atol=1e-8)
    assert bias[1] == pytest.approx(0.66360856, abs=1e-8)
    repeated = np.concatenate([x, x])  # six examples: solved by features
    primal, _ = evaluate.ridge(repeated, [1, 0, 1, 1, 0, 1], 2, 1.0)
    np.testing.assert_allclose(primal, weights, atol=1e-10)
