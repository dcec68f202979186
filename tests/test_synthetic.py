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
    np.testing.assert_array_equal(counts, labels["count"] + 1)


def flooded_dots(image):
    """Centres of the pale spots, in shares of the side."""
    ndimage = pytest.importorskip("scipy.ndimage")
    spots, count = ndimage.label(image.min(-1) > 175, np.ones((3, 3)))
    weights = image.min(-1).astype(float)
    centres = ndimage.center_of_mass(weights, spots, range(1, count + 1))
    return (np.array(centres) + 0.5) / len(image)


def test_distance_label_is_of_the_picture(monkeypatch):
    """The shape's centre as drawn, dots found by flooding: the band that the label says."""
    centres = []
    monkeypatch.setattr(
        synthetic,
        "draw_shapes",
        lambda rng, picture, labels, centre, pixels: centres.append(centre),
    )
    images, labels = synthetic.draw(np.random.default_rng(3), 200, 64)
    wrong = 0
    for image, centre, label in zip(images, centres[0], labels["distance"], strict=True):
        nearest = np.linalg.norm(flooded_dots(image) - centre, axis=1).min()
        low, high = synthetic.DISTANCES[label], synthetic.DISTANCES[label + 1]
        # A dot's centre is found to about a third of a pixel.
        wrong += not low - 0.006 < nearest < (high + 0.006 if label < 3 else 2)
    assert wrong == 0


@pytest.mark.parametrize("number", range(len(QUESTIONS["orientation"])))
def test_stripes_run_as_labelled(number):
    """Brightness changes most across the stripes: the mean structure tensor gives the angle."""
    rng, size = np.random.default_rng(number), 64
    labels = {"shape": np.zeros(40, int), "color": np.zeros(40, int)}
    labels["orientation"] = np.full(40, number)
    picture = np.zeros((40, size, size, 3), "float32")
    centre = np.full((40, 2), 0.5, "float32")
    pixels = (np.arange(size, dtype="float32") + 0.5) / size
    synthetic.draw_shapes(rng, picture, labels, centre, pixels)
    middle = picture[:, 26:38, 26:38].max(-1).astype(float)
    dy, dx = np.gradient(middle, axis=(1, 2))
    angle = 0.5 * np.arctan2(2 * (dx * dy).sum((1, 2)), (dx * dx - dy * dy).sum((1, 2)))
    # Across "|" is 0 degrees, across "/" 45 (downwards to the right), and so on; 11 are drawn off.
    off = (np.degrees(angle) - 45 * number + 90) % 180 - 90
    assert np.abs(off).max() < 22.5


@pytest.mark.parametrize("number", range(len(QUESTIONS["shape"])))
def test_shapes_are_those_of_their_labels(number):
    """What is painted is inside the outline of the label's shape, and of no other as well."""
    size, count = 96, 20
    labels = {n: np.zeros(count, int) for n in ("color", "orientation")}
    labels["shape"] = np.full(count, number)
    picture = np.zeros((count, size, size, 3), "float32")
    pixels = (np.arange(size, dtype="float32") + 0.5) / size
    centre = np.full((count, 2), 0.5, "float32")
    synthetic.draw_shapes(np.random.default_rng(0), picture, labels, centre, pixels)
    rng = np.random.default_rng(0)  # the same radius and turn
    radius, turn = rng.uniform(0.13, 0.19, count), rng.uniform(0, 2 * np.pi, count)
    overlap = []
    for kind in QUESTIONS["shape"]:
        y, x = (
            ((pixels - 0.5) / radius[:, None])[:, :, None],
            ((pixels - 0.5) / radius[:, None])[:, None],
        )
        cos, sin = np.cos(turn)[:, None, None], np.sin(turn)[:, None, None]
        inside = synthetic.outline(kind, cos * x - sin * y, sin * x + cos * y) < 0
        painted = picture.max(-1) > 0.3
        overlap.append((inside & painted).sum() / (inside | painted).sum())
    assert np.argmax(overlap) == number
    assert overlap[number] > 0.9


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
