"""Cutting images into patches, and putting them together again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import in_jax, in_numpy
from minivit.shapes import patch_grid

TWINS = pytest.mark.parametrize("twin", [in_numpy, in_jax], ids=["numpy", "jax"])
SMALL = st.integers(1, 5)


@given(SMALL, SMALL, SMALL, SMALL, SMALL, st.integers(0, 3))
def test_round_trip(rows, columns, high, wide, channels, batch):
    """Any height, width, patch and number of channels, to the bit; an empty batch too."""
    shape = (batch, rows * high, columns * wide, channels)
    images = np.arange(np.prod(shape)).reshape(shape)
    patches = in_numpy.patchify(images, (high, wide))
    assert patches.shape == (batch, rows, columns, high * wide * channels)
    if batch:
        np.testing.assert_array_equal(in_numpy.unpatchify(patches, (high, wide)), images)


@TWINS
@pytest.mark.parametrize("patch", [2, (2, 3), (4, 1)])
def test_twins_are_the_permutation(twin, patch):
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = twin.patchify(images, patch)
    np.testing.assert_array_equal(patches, in_numpy.patchify(images, patch))
    np.testing.assert_array_equal(twin.unpatchify(patches, patch), images)


@TWINS
def test_row_column_channel(twin):
    """PAT-02: the order inside a patch is that of the official kernel's axes."""
    patches = twin.patchify(np.arange(48).reshape(1, 4, 6, 2), 2).reshape(6, 8)
    assert patches[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert patches[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert patches[5].tolist() == [32, 33, 34, 35, 44, 45, 46, 47]


@TWINS
def test_raster_order(twin):
    """PAT-03: patches follow each other along the rows of the image."""
    ids = np.arange(6).reshape(2, 3).repeat(2, axis=0).repeat(2, axis=1)
    patches = twin.patchify(ids[None, :, :, None], 2)
    assert patches.mean(-1).reshape(-1).tolist() == [0, 1, 2, 3, 4, 5]


@TWINS
@pytest.mark.parametrize("channels", [1, 4, 5])
def test_any_number_of_channels(twin, channels):
    """PAT-04: three is written nowhere."""
    images = np.random.default_rng(0).random((1, 4, 4, channels))
    patches = twin.patchify(images, 2)
    assert patches.shape[-1] == 4 * channels
    np.testing.assert_array_equal(twin.unpatchify(patches, 2), images)


@TWINS
@pytest.mark.parametrize(("height", "width"), [(121, 256), (15, 15), (0, 16)])
def test_not_divisible(twin, height, width):
    """PAT-05: the error names both sizes, the patch, and a size that works."""
    kernel = {"kernel": np.zeros((16, 16, 3, 8)), "bias": np.zeros(8)}
    for call in (
        lambda: twin.patchify(np.zeros((1, height, width, 3)), 16),
        lambda: twin.patch_embedding(kernel, np.zeros((1, height, width, 3))),
    ):
        with pytest.raises(ValueError, match=rf"{height}x{width}.*16x16.*resize it to") as error:
            call()
        remedy = str(error.value).rsplit(" ", 1)[1]
        assert patch_grid(*map(int, remedy.split("x")), 16)


@TWINS
def test_wrong_images(twin):
    kernel = {"kernel": np.zeros((2, 2, 3, 8)), "bias": np.zeros(8)}
    with pytest.raises(ValueError, match=r"1 channels.*expects 3"):
        twin.patch_embedding(kernel, np.zeros((1, 4, 4, 1)))
    with pytest.raises(ValueError, match=r"\(4, 4, 3\)"):
        twin.patch_embedding(kernel, np.zeros((4, 4, 3)))


def test_embedding_is_a_strided_convolution():
    """The same product as a convolution with stride P, by XLA and by loops."""
    rng = np.random.default_rng(0)
    images, kernel, bias = rng.random((2, 6, 8, 3)), rng.random((2, 2, 3, 5)), rng.random(5)
    y, _ = in_numpy.patch_embedding({"kernel": kernel, "bias": bias}, images)
    loops = np.empty((2, 3, 4, 5))
    for b, r, c, d in np.ndindex(loops.shape):
        window = images[b, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2]
        loops[b, r, c, d] = (window * kernel[..., d]).sum() + bias[d]
    np.testing.assert_allclose(y, loops, rtol=1e-13)
    with jax.enable_x64(True):
        convolved = jax.lax.conv_general_dilated(
            images, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        np.testing.assert_allclose(y, convolved + bias, rtol=1e-13)


def test_gradient_of_patchify_is_unpatchify():
    """A permutation's transpose is its inverse."""
    images = jnp.zeros((2, 4, 6, 1))
    dy = np.random.default_rng(0).random((2, 2, 2, 6)).astype("float32")
    _, back = jax.vjp(lambda x: in_jax.patchify(x, (2, 3)), images)
    np.testing.assert_array_equal(back(dy)[0], in_numpy.unpatchify(dy, (2, 3)))
