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


def titles(figure):
    return [axes.get_title() for axes in figure.get_axes()]


@pytest.mark.parametrize("shape", [(8, 12, 3), (8, 12, 1)])
def test_patches(shape):
    """Each patch of the row is the one whose number it has, row by row."""
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    figure = figures.patches(image, 4)
    whole, *row = figure.get_axes()
    assert whole.get_title() == "8x12 pixels, 6 patches of 4x4"
    assert [axes.get_title() for axes in row] == list("012345")
    for n, axes in enumerate(row):
        y, x = divmod(n, 3)
        expected = image[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].squeeze()
        np.testing.assert_array_equal(axes.images[0].get_array(), expected)
    assert len(figures.patches(image[:4, :4], 4).get_axes()) == 2


def test_gallery():
    images = [np.full((4, 4, c), 10 * c, np.uint8) for c in (1, 3)]
    figure = figures.gallery(images, ["grey", "colour"])
    assert titles(figure) == ["grey", "colour"]
    shown = [axes.images[0].get_array().ravel()[0] for axes in figure.get_axes()]
    assert shown == [10, 30]
    assert titles(figures.gallery(images[:1], ["grey"])) == ["grey"]


def test_matrices():
    """Every number is written into its cell."""
    array = np.array([[0.25, -1.0], [3.0, 0.5]])
    figure = figures.matrices([array, array.T], ["a", "b"], "key", "query")
    first = figure.get_axes()[0]
    assert [t.get_text() for t in first.texts] == ["0.25", "-1.00", "3.00", "0.50"]
    assert (first.get_xlabel(), first.get_ylabel()) == ("key", "query")
    assert titles(figures.matrices([array], ["a"], "key", "query"))[0] == "a"


def test_lines():
    figure = figures.lines(
        [1, 4, 16], {"a": [1, 2, 3], "b": [3, 2, 1]}, "x", "y", log_x=True, level=2
    )
    (axes,) = figure.get_axes()
    assert len(axes.lines) == 3
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "4", "16"]


def test_ratios():
    """A group for each configuration, our bars in colour, the fastest on top."""
    row = {"config": "tiny", "what": "train", "least": 0.5, "most": 2.0}
    rows = [row | {"contestant": n, "ratio": r} for n, r in (("timm", 1.0), ("minivit JAX", 1.5))]
    rows += [r | {"what": "forward"} for r in rows]
    figure = figures.ratios(rows)
    assert titles(figure) == ["tiny, training step", "tiny, forward pass"]
    bars = figure.get_axes()[0].patches
    assert [bar.get_width() for bar in bars] == [1.0, 1.5]
    assert bars[0].get_facecolor() != bars[1].get_facecolor()
