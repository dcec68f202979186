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
