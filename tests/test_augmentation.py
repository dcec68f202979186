"""Augmentation: what stays, what moves, and that (seed, epoch, index) decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import augmentation
from minivit.augmentation import Augmentation, augment, crop, crop_boxes, flip, mixup, shift

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 10, 14, 3), np.uint8)


def test_flip():
    """Left and right, half of the time, and twice is nothing."""
    u = np.array([0.0, 0.4, 0.49, 0.5, 0.7, 0.99])
    flipped = flip(IMAGES, u)
    np.testing.assert_array_equal(flipped[:3], IMAGES[:3, :, ::-1])
    np.testing.assert_array_equal(flipped[3:], IMAGES[3:])
    np.testing.assert_array_equal(flip(flipped, u), IMAGES)


@given(st.floats(0, 0.999), st.floats(0, 0.999), st.integers(1, 5))
def test_shift_moves_by_whole_pixels(a, b, pixels):
    """Whatever stays in view is unchanged, the rest is black."""
    moved = shift(IMAGES[:1], np.array([[a, b]]), pixels)[0]
    down, right = (pixels - int(v * (2 * pixels + 1)) for v in (a, b))
    expected = np.zeros_like(IMAGES[0])
    rows = slice(max(down, 0), 10 + min(down, 0)), slice(max(-down, 0), 10 + min(-down, 0))
    columns = slice(max(right, 0), 14 + min(right, 0)), slice(max(-right, 0), 14 + min(-right, 0))
    expected[rows[0], columns[0]] = IMAGES[0][rows[1], columns[1]]
    np.testing.assert_array_equal(moved, expected)


def test_every_shift_occurs():
    """2 pixels: 25 places, all of them equally likely within 5 sigma."""
    u = RNG.random((10_000, 2))
    dot = np.zeros((10_000, 9, 9, 1), np.uint8)
    dot[:, 4, 4] = 255
    where = shift(dot, u, 2).reshape(10_000, -1).argmax(1)
    places, counts = np.unique(where, return_counts=True)
    assert len(places) == 25
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400)


@given(st.integers(0, 99), st.floats(0.05, 1))
def test_crop_boxes(seed, least):
    """Inside the image; the area as asked, and the ratio unless a side is the image's own."""
    u = np.random.default_rng(seed).random((50, 4))
    top, left, h, w = crop_boxes(u, least, 20, 30)
    for low, length, side in ((top, h, 20), (left, w, 30)):
        assert (low >= 0).all()
        assert (low + length <= side + 1e-9).all()
    area = h * w / 600
    np.testing.assert_allclose(area, least + (1 - least) * u[:, 0], rtol=1e-9)
    ratio = (w / h)[(h < 20 - 1e-9) & (w < 30 - 1e-9)]
    assert ((ratio > 0.75 - 1e-9) & (ratio < 4 / 3 + 1e-9)).all()


def test_crop_is_bilinear():
    """A ramp stays a ramp, of the slope that the box says; a constant stays itself."""
    ramp = np.broadcast_to(np.arange(0, 200, 10, np.uint8)[:, None, None], (4, 20, 20, 1))
    u = RNG.random((4, 4))
    top, _, h, _ = crop_boxes(u, 0.3, 20, 20)
    centres = top[:, None] + (np.arange(20) + 0.5) * h[:, None] / 20 - 0.5
    expected = 10 * centres.clip(0, 19)
    got = crop(ramp, u, 0.3)
    # Rounded to a byte: half a level.
    assert np.abs(got[..., 0] - expected[:, :, None]).max() <= 0.5 + 1e-3
    flat = np.full((4, 10, 14, 3), 77, np.uint8)
    np.testing.assert_array_equal(crop(flat, u, 0.1), flat)
    whole = np.array([[1 - 1e-12, 0.5, 0, 0]])
    np.testing.assert_array_equal(crop(IMAGES[:1, :, :10], whole, 0.5), IMAGES[:1, :, :10])


def test_decided_by_seed_epoch_and_index():
    """The row of an example does not depend on how many there are; another epoch is another."""
    few, many = augmentation.uniform(10, 3, 1), augmentation.uniform(1000, 3, 1)
    np.testing.assert_array_equal(few, many[:10])
    assert (augmentation.uniform(10, 3, 2) != few).any()
    assert (augmentation.uniform(10, 4, 1) != few).any()
    how = Augmentation(crop_area=0.5, shift=2, flip=True)
    one_by_one = [augment(IMAGES[i : i + 1], few[i : i + 1], how)[0] for i in range(6)]
    np.testing.assert_array_equal(augment(IMAGES, few[:6], how), one_by_one)
    assert augment(IMAGES, few[:6], Augmentation()) is IMAGES


def test_mixup():
    """Images and targets are mixed alike, with the one before in the batch; sums are kept."""
    targets = np.eye(6, dtype="float32")
    shares = np.array([1, 0.5, 0.75, 0.9, 0.6, 1])
    images, mixed = mixup(IMAGES, targets, shares)
    np.testing.assert_array_equal(images[[0, 5]], IMAGES[[0, 5]])
    np.testing.assert_allclose(mixed.sum(1), 1, rtol=1e-6)
    assert mixed[2].tolist() == [0, 0.25, 0.75, 0, 0, 0]
    expected = 0.75 * IMAGES[2].astype(float) + 0.25 * IMAGES[1]
    assert np.abs(images[2] - expected).max() <= 0.5 + 1e-3
    assert images.dtype == np.uint8
    drawn = augmentation.mixup_shares(5000, 0, 0, 0.2)
    assert drawn.min() >= 0.5
    # Beta(0.2, 0.2) folded at one half: its mean is 0.5 + E|a - 0.5|, about 0.90.
    a = np.random.default_rng(1).beta(0.2, 0.2, 200_000)
    assert drawn.mean() == pytest.approx(np.maximum(a, 1 - a).mean(), abs=0.01)
