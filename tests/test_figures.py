"""Figures say what they show; nothing is opened."""

import io

import numpy as np
import pytest

from minivit import figures


def texts(figure):
    """All words of a figure that has been drawn."""
    figure.savefig(io.BytesIO(), dpi=50)
    found = [t.get_text() for a in figure.axes for t in a.texts]
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        found += [
            t.get_text() for t in (axes.get_legend().get_texts() if axes.get_legend() else [])
        ]
    return found


def test_curves():
    """Axes keep their names when there are validations and a test; the unit is the objective's."""
    rows = [
        {"step": s, "loss": 1 / s, "accuracy": 0.1 * s, "learning_rate": 0.1} for s in (1, 2, 3)
    ]
    rows.append({"step": 2, "validation_loss": 0.7, "validation_accuracy": 0.25})
    rows.append({"step": 3, "test_loss": 0.6, "test_accuracy": 0.9})
    found = texts(figures.curves(rows))
    assert {"loss (nats)", "accuracy", "learning rate", "step"} <= set(found)
    assert {"validation 0.250", "test 0.900", "test 0.600"} <= set(found)
    assert "loss (mean square)" in texts(figures.curves(rows, "mean square"))


@pytest.mark.parametrize("channels", [1, 3])
def test_mosaic(channels):
    """A row for each view, a column for each image, and the views' names."""
    views = 4 * [np.zeros((5, 8, 12, channels), np.uint8)]
    figure = figures.mosaic(views)
    assert len(figure.axes) == 20
    assert {"input", "corrupted", "predicted", "target"} <= set(texts(figure))
    assert figure.axes[0].images[0].get_array().shape[:2] == (8, 12)


def test_confusion():
    """Per cent of each row, as numbers where classes are few; an absent class is no fault."""
    counts = np.array([[8, 2, 0], [0, 5, 0], [0, 0, 0]])
    found = texts(figures.confusion(counts, ("a", "b", "c")))
    assert {"80", "20", "100", "predicted", "true"} <= set(found)
    assert "nan" not in found
    many = figures.confusion(np.eye(30, dtype=int), [str(i) for i in range(30)])
    assert not many.axes[0].texts


def test_data_sizes():
    results = {"ViT": {10: [0.5, 0.7], 100: [0.8, 0.8]}, "ResNet": {10: [0.6], 100: [0.9]}}
    figure = figures.data_sizes(results, [10, 100])
    assert {"ViT", "ResNet", "training images"} <= set(texts(figure))
    line = figure.axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata().astype(float), [60, 80])
