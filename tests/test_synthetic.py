"""The drawn data set: its answers are those of the pictures."""

import numpy as np
import pytest

from minivit import datasets, synthetic
from minivit.synthetic import QUESTIONS

COUNT = 400


@pytest.fixture(scope="module")
def drawn():
    return synthetic.draw(np.random.default_rng(0), COUNT, 32)


def test_seed_decides():
    """Any number of pictures begins alike; another seed, another part, other pictures."""
    few, more = (synthetic.shapes(train=n, test=20) for n in (30, 700))
    np.testing.assert_array_equal(few[1], more[1][:30])
    np.testing.assert_array_equal(few[2], more[2][:30])
    np.testing.assert_array_equal(few[3], more[3])
    assert (few[1][:20] != few[3]).any()
    assert (synthetic.shapes(train=20, test=20, seed=1)[1] != few[1][:20]).any()
    assert few[1].shape == (30, 32, 32, 3)
    assert synthetic.shapes(train=2, test=2, size=50)[1].shape == (2, 50, 50, 3)


def test_all_questions_are_about_the_same_pictures():
    """The label set changes the labels alone."""
    sets = {name: datasets.load(f"shapes:{name}", train=40, test=10) for name in QUESTIONS}
    first = sets["shape"]
    np.testing.assert_array_equal(
        first.train_images, datasets.load("shapes", train=40, test=10).train_images
    )
    for name, dataset in sets.items():
        np.testing.assert_array_equal(dataset.train_images, first.train_images)
        assert dataset.classes == QUESTIONS[name]


def test_classes_are_balanced(drawn):
    """Within 5 sigma of equal shares; the distance, which placing decides, within a third."""
    _, labels = drawn
    for name, classes in QUESTIONS.items():
        counts = np.bincount(labels[name], minlength=len(classes))
        expected = COUNT / len(classes)
        slack = expected / 3 if name == "distance" else 5 * np.sqrt(expected)
        assert np.abs(counts - expected).max() < slack, name


def saturation(images):
    x = images.astype(float)
    return x.max(-1) - x.min(-1)


def test_quadrant_and_color(drawn):
    """The most colourful spot lies in the quadrant, and has the hue, that the labels say."""
    images, labels = drawn
    x = images.astype(float)
    # Mean over 5x5 pixels, so that a spot of the background does not win by one pixel.
    power = saturation(images)
    padded = np.pad(power, ((0, 0), (2, 2), (2, 2)))
    power = sum(padded[:, i : i + 32, j : j + 32] for i in range(5) for j in range(5))
    where = power.reshape(COUNT, -1).argmax(1)
    row, column = where // 32, where % 32
    guess = 2 * (row >= 16) + (column >= 16)
    assert (guess == labels["quadrant"]).mean() > 0.9
    right = guess == labels["quadrant"]
    centre = (slice(None), row.clip(1, 30), column.clip(1, 30))
    patch = np.stack([x[np.arange(COUNT), r, c] for r, c in [(centre[1], centre[2])]])[0]
    hue = hue_of(patch)
    distance = np.abs((hue - labels["color"] / 8 + 0.5) % 1 - 0.5)
    assert (distance[right] < 1 / 16 + 0.05).mean() > 0.8


def hue_of(colors):  # [B, 3] -> [B] in [0, 1)
    r, g, b = colors.T
    return (np.arctan2(np.sqrt(3) * (g - b), 2 * r - g - b) / (2 * np.pi)) % 1


def test_colors_of_hsv():
    """Against the standard library."""
    import colorsys

    values = np.random.default_rng(1).random((50, 3))
    expected = [colorsys.hsv_to_rgb(*v) for v in values]
    np.testing.assert_allclose(synthetic.saturated(*values.T), expected, atol=1e-12)


def test_dots_can_be_counted(drawn):
    """Pale spots that touch, each counted once by flooding, give the label."""
    ndimage = pytest.importorskip("scipy.ndimage")
    images, labels = drawn
    pale = (images.min(-1) > 175).astype(int)
    counts = [ndimage.label(p, np.ones((3, 3)))[1] for p in pale]
    # Two dots may stand in neighbouring cells and touch, and a bright background may be pale.
    assert (np.array(counts) == labels["count"] + 1).mean() > 0.9


def test_dots_keep_their_distance():
    """The nearest is never nearer than the shape allows, and the label is its band."""
    rng = np.random.default_rng(2)
    _, centre = synthetic.answers(rng, 500)
    dots, exists = synthetic.place_dots(rng, centre, rng.integers(1, 6, 500))
    distance = np.linalg.norm(dots - centre[:, None], axis=-1)
    assert distance[exists].min() > synthetic.DISTANCES[0]
    assert set(exists.sum(1)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("kind", QUESTIONS["shape"])
def test_outlines(kind):
    """Inside the unit disc, with something inside and something outside, of similar area."""
    y, x = np.mgrid[-1.5:1.5:301j, -1.5:1.5:301j]
    inside = synthetic.outline(kind, x, y) < 0
    assert np.hypot(x, y)[inside].max() < 1.1
    assert 1.2 < inside.mean() * 9 < 2.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "taste"}, "unknown labels 'taste'; choose one of shape, color"),
        ({"size": 8}, "size is 8"),
    ],
)
def test_wrong_values(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic.shapes(**options)
