"""Masked patch prediction (cases MPP-01 to MPP-12)."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import in_jax, in_numpy, masking, params, variants
from minivit.datasets import normalise
from minivit.params import flatten, tree_map

TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])


def flat_image(colors, patch=4):
    """An image of patches of one colour each, in one row of patches."""
    return np.array(colors, np.uint8)[None, None].repeat(patch, 1).repeat(patch, 2)


@pytest.mark.parametrize("prepare", [lambda x: x, normalise], ids=["bytes", "normalised"])
def test_every_byte_and_the_cube_of_colours(prepare):
    """MPP-01, MPP-02: v >> 5 for all 256 values, also after normalisation to [-1, 1]."""
    values = np.arange(256)
    grey = flat_image(values[:, None])
    np.testing.assert_array_equal(masking.color_labels(prepare(grey), 4)[0, :, 0], values >> 5)
    corners = [(r, g, b) for r in (0, 255) for g in (0, 255) for b in (0, 255)]
    labels = masking.color_labels(prepare(flat_image(corners)), 4)[0, :, 0]
    assert labels.tolist() == [0, 7, 56, 63, 448, 455, 504, 511]


def test_digits():
    """MPP-05: the first channel is the highest; decode and encode are inverse on all labels."""
    pure = flat_image([(255, 0, 0), (0, 255, 0), (0, 0, 255)])
    assert masking.color_labels(pure, 4)[0, :, 0].tolist() == [448, 56, 7]
    labels = np.arange(512)
    colors = masking.label_colors(labels, 3)
    np.testing.assert_array_equal(masking.color_labels(flat_image(colors), 4)[0, :, 0], labels)
    exact = np.random.default_rng(0).integers(0, 256, (99, 3))
    decoded = masking.label_colors(masking.color_labels(flat_image(exact), 4)[0, :, 0], 3)
    assert np.abs(decoded.astype(int) - exact).max() < 32


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
def test_labels_are_means(patch, channels, seed):
    """Against floating-point means of each patch, one by one."""
    images = np.random.default_rng(seed).integers(0, 256, (2, 2 * patch, 3 * patch, channels))
    labels = masking.color_labels(images.astype(np.uint8), patch)
    patches = in_numpy.patchify(images, patch).reshape(2, 6, -1, channels)
    expected = np.floor(patches.mean(2) / 32 + 1e-9) @ (8 ** np.arange(channels)[::-1])
    np.testing.assert_array_equal(labels[..., 0], expected)


def test_downsampled_cells():
    """Sixteen cells a patch; where they do not divide it, neighbours share a row of pixels."""
    image = np.zeros((1, 8, 8, 1), np.uint8)
    image[0, 2:4, 4:6] = 255
    labels = masking.color_labels(image, 8, cells=4).reshape(4, 4)
    assert labels[1, 2] == 7
    assert labels.sum() == 7
    assert masking.cell_edges(7, 4) == [(0, 2), (1, 4), (3, 6), (5, 7)]
    with pytest.raises(ValueError, match="3 pixels cannot be shrunk to 4"):
        masking.color_labels(np.zeros((1, 3, 3, 1), np.uint8), 3, cells=4)


@pytest.mark.parametrize(
    ("patches", "share", "count"),
    [
        (100, 0.07, 7),
        (100, 0.14, 14),
        (100, 0.29, 29),
        (100, 0.57, 57),
        (25, 0.28, 7),
        (25, 0.56, 14),
        (5, 0.5, 3),
        (64, 0.1, 6),
        (64, 0.75, 48),
        (4, 0.01, 0),
        (7, 0, 0),
        (7, 1, 7),
    ],
)
def test_number_of_corrupted_patches(patches, share, count):
    """MPP-06: exact, rounded half up."""
    drawn = masking.draw_corruption(np.random.default_rng(0), 3, patches, share=share)
    assert drawn.corrupted.sum(1).tolist() == 3 * [count]
    with pytest.raises(ValueError, match="between 0 and 1"):
        masking.corrupted_count(patches, 1.5)


def test_fates():
    """MPP-11: 80/10/10 of 40,000 within 4 sigma; the extreme shares work."""
    rng = np.random.default_rng(0)
    drawn = masking.draw_corruption(rng, 100, 800)
    own = np.arange(800)
    swapped = drawn.source != own
    assert drawn.corrupted.sum() == 40_000
    assert drawn.masked.sum() == pytest.approx(32_000, abs=320)
    assert swapped.sum() == pytest.approx(4000, abs=240)
    assert not (swapped & drawn.masked).any()
    assert not ((swapped | drawn.masked) & ~drawn.corrupted).any()
    everything = masking.draw_corruption(rng, 4, 50, parts=(1, 0, 0))
    np.testing.assert_array_equal(everything.masked, everything.corrupted)
    kept = masking.draw_corruption(rng, 4, 50, parts=(0, 0, 1))
    assert not kept.masked.any()
    assert (kept.source == np.arange(50)).all()
    others = masking.draw_corruption(rng, 4, 50, share=1, parts=(0, 1, 0))
    assert (others.source != np.arange(50)).all()
    alone = masking.draw_corruption(rng, 4, 1, share=1, parts=(0, 1, 0))
    assert (alone.source == 0).all()
    with pytest.raises(ValueError, match="must sum to one"):
        masking.draw_corruption(rng, 4, 50, parts=(0.8, 0.1, 0.2))


def test_same_seed_same_corruption():
    first, again, other = (
        masking.draw_corruption(np.random.default_rng(seed), 2, 30) for seed in (5, 5, 6)
    )
    for name in ("corrupted", "masked", "source"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert (first.corrupted != other.corrupted).any()


def loss_and_gradient(twin, name, predictions, targets, corrupted):
    if twin == "numpy":
        loss, back = getattr(in_numpy, name)(predictions, targets, corrupted)
        return loss, back(np.ones_like(loss))
    loss = getattr(in_jax, name)
    return jax.value_and_grad(loss)(predictions, targets, corrupted)


@TWINS
def test_loss_is_of_corrupted_patches(twin):
    """MPP-09: visible patches enter neither the mean nor the gradient."""
    predictions = np.zeros((1, 4, 512), "float32")
    predictions[0, [1, 3], 7] = 50
    corrupted = np.array([[True, False, True, False]])
    labels = np.full((1, 4, 1), 100)
    loss, grads = loss_and_gradient(twin, "color_loss", predictions, labels, corrupted)
    assert float(loss) == pytest.approx(6.238325, abs=1e-5)
    np.testing.assert_array_equal(grads[0, [1, 3]], 0)
    assert (np.abs(grads[0, [0, 2]]) > 0).all()
    patches = np.random.default_rng(0).random((1, 4, 512)).astype("float32")
    _, grads = loss_and_gradient(twin, "pixel_loss", predictions, patches, corrupted)
    np.testing.assert_array_equal(grads[0, [1, 3]], 0)


@TWINS
def test_nothing_corrupted(twin):
    """MPP-07: loss 0, gradient 0, no NaN."""
    nothing = np.zeros((2, 4), bool)
    predictions = np.random.default_rng(0).random((2, 4, 8)).astype("float32")
    for name, targets in (
        ("color_loss", np.zeros((2, 4, 1), int)),
        ("pixel_loss", predictions + 1),
    ):
        loss, grads = loss_and_gradient(twin, name, predictions, targets, nothing)
        assert float(loss) == 0
        np.testing.assert_array_equal(grads, 0)


@TWINS
@pytest.mark.parametrize("width", [20, 48, 64])
@pytest.mark.parametrize("share", [0, 0.5])
def test_mask_has_the_width_of_embeddings(twin, width, share):
    """MPP-12: whatever the patch's length; its gradient is zero exactly when nothing is masked."""
    variant = variants.Variant("x", 4, width, 24, 4, 1)
    p = params.initialise(variant, 0, image_size=8, classes=None)
    rng = np.random.default_rng(0)
    p["mask"] = rng.standard_normal((1, 1, width)).astype("float32")
    kernel = rng.standard_normal((width, 512)).astype("float32")
    p["prediction"] = {"kernel": kernel, "bias": np.zeros(512, "float32")}
    images = rng.integers(0, 256, (3, 8, 8, 3), np.uint8)
    drawn = masking.draw_corruption(rng, 3, 4, share=share, parts=(1, 0, 0))
    labels, x = masking.color_labels(images, 4), normalise(images)
    if twin == "numpy":
        predictions, back = in_numpy.masked_vit(p, x, drawn.masked, drawn.source)
        _, back_loss = in_numpy.color_loss(predictions, labels, drawn.corrupted)
        grads, _ = back(back_loss(np.float32(1)))
    else:

        def loss(p):
            predictions = in_jax.masked_vit(p, x, drawn.masked, drawn.source)
            return in_jax.color_loss(predictions, labels, drawn.corrupted)

        grads = jax.grad(loss)(tree_map(jax.numpy.asarray, p))
    assert np.asarray(grads["mask"]).any() == bool(share)
    assert all(np.isfinite(leaf).all() for leaf in flatten(grads).values())


@pytest.mark.parametrize("objective", masking.OBJECTIVES)
def test_mosaic(objective, corrupt_batch):
    """Perfect answers: predicted equals target; whatever is not corrupted is the image's own."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 8, 16, 3), np.uint8)
    batch = corrupt_batch(images, objective, (4, 8), rng, share=0.5)
    if objective == "pixels":
        predictions = masking.patches_of(normalise(images), (4, 8)).reshape(3, 4, -1)
    else:
        predictions = np.eye(512)[batch["labels"]].reshape(3, 4, -1)
    views = masking.mosaic(batch, predictions, objective, (4, 8))
    inputs, seen, said, asked = (masking.patches_of(view, (4, 8)) for view in views)
    np.testing.assert_array_equal(views[0], images)
    np.testing.assert_array_equal(said, asked)
    np.testing.assert_array_equal(asked[~batch["corrupted"]], inputs[~batch["corrupted"]])
    assert (seen[batch["masked"]] == masking.GREY).all()
    shown = seen[~batch["masked"]]
    origin = inputs[np.arange(3)[:, None], batch["source"]][~batch["masked"]]
    np.testing.assert_array_equal(shown, origin)
    if objective == "pixels":
        np.testing.assert_array_equal(asked, inputs)
    else:
        assert (asked != inputs).any()


def test_cells_of_a_patch_are_painted_where_they_are():
    """An image of flat cells is its own picture, up to the middle of each colour's box."""
    colors = masking.label_colors(np.random.default_rng(0).integers(0, 512, (1, 2, 16)), 3)
    image = masking.joined(masking.paint_cells(colors, 8), 8, 16)
    labels = masking.color_labels(image, 8, cells=4)
    np.testing.assert_array_equal(masking.label_colors(labels, 3), colors)


def test_wrong_patch_for_cells():
    with pytest.raises(ValueError, match="2 pixels cannot be shrunk to 4 cells"):
        masking.outputs("downsampled", (2, 8), 3)
    assert masking.outputs("downsampled", (4, 8), 3) == 16 * 512
    assert masking.outputs("mean-color", (2, 8), 1) == 8
    assert masking.outputs("pixels", (2, 8), 3) == 48
