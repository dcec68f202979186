"""Augmentation in plain NumPy, decided by (seed, epoch, index); mixup's partner by the batch.

Each function takes a batch of images uint8 [B, height, width, C] and numbers drawn uniformly from
[0, 1), a row for each image, so that the same row always gives the same picture.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .datasets import AUGMENTATION

FLIP, CROP, SHIFT = 0, slice(1, 5), slice(5, 7)  # columns of the numbers


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images, in this order."""

    crop_area: float = 1.0  # least share of the area that a random crop keeps; 1 is off
    shift: int = 0  # pixels of black padding within which the image moves
    flip: bool = False  # left and right, half of the time
    mixup: float = 0.0  # both parameters of the Beta distribution of the share; 0 is off


@lru_cache(maxsize=2)
def uniform(examples, seed, epoch):  # -> [examples, 7]
    """One row for each example of an epoch."""
    numbers = np.random.default_rng([seed, AUGMENTATION, epoch]).random((examples, 7))
    numbers.setflags(write=False)  # they are shared by all who ask
    return numbers


def flip(images, u):  # u [B]
    """Mirror left and right where u < 1/2."""
    return np.where((u < 0.5)[:, None, None, None], images[:, :, ::-1], images)


def shift(images, u, pixels):  # u [B, 2]
    """Pad with black on all sides, and cut a window of the old size out at random."""
    batch, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
    top, left = (u * (2 * pixels + 1)).astype(int).T
    rows, columns = top[:, None] + np.arange(height), left[:, None] + np.arange(width)
    return padded[np.arange(batch)[:, None, None], rows[:, :, None], columns[:, None]]


def crop_boxes(u, least, height, width):  # u [B, 4] -> top, left, height, width of each crop
    """Area uniform in [least, 1] of the image, anywhere inside.

    The ratio of its sides is 3:4 to 4:3, or as near as a crop of that area fits into the image.
    """
    area = (least + (1 - least) * u[:, 0]) * height * width
    ratio = ((4 / 3) ** (2 * u[:, 1] - 1)).clip(area / height**2, width**2 / area)
    h, w = np.sqrt(area / ratio), np.sqrt(area * ratio)
    return u[:, 2] * (height - h), u[:, 3] * (width - w), h, w


def between(start, length, size):  # [B], [B] -> lower, upper pixel and upper's share, all [B, size]
    """Where `size` points spread over part of an axis fall; half-pixel centres, kept inside."""
    centres = start[:, None] + (np.arange(size) + 0.5) * (length / size)[:, None] - 0.5
    centres = centres.clip(0, size - 1)
    lower = centres.astype(int)
    return lower, np.minimum(lower + 1, size - 1), (centres - lower).astype("float32")


def crop(images, u, least):  # u [B, 4]
    """A random part of the image, enlarged to the whole ("inception crop"); bilinear."""
    batch, height, width, _ = images.shape
    top, left, h, w = crop_boxes(u, least, height, width)
    y0, y1, y = between(top, h, height)
    x0, x1, x = between(left, w, width)
    b, y, x = np.arange(batch)[:, None], y[..., None, None], x[..., None, None]
    rows = images[b, y0] * (1 - y) + images[b, y1] * y  # [B, height, width, C]
    columns = rows.swapaxes(1, 2)
    columns = columns[b, x0] * (1 - x) + columns[b, x1] * x
    return np.rint(columns.swapaxes(1, 2)).astype(np.uint8)


def augment(images, u, how):  # u [B, 7] -> uint8 [B, height, width, C]
    """Crop, shift and flip, as far as `how` asks for them; sizes stay."""
    if how.crop_area < 1:
        images = crop(images, u[:, CROP], how.crop_area)
    if how.shift:
        images = shift(images, u[:, SHIFT], how.shift)
    return flip(images, u[:, FLIP]) if how.flip else images


@lru_cache(maxsize=2)
def mixup_shares(examples, seed, epoch, parameter):  # -> [examples]
    """How much of itself each example keeps: Beta distributed, the larger part, as big_vision."""
    a = np.random.default_rng([seed, AUGMENTATION, epoch, 1]).beta(parameter, parameter, examples)
    a = np.maximum(a, 1 - a)
    a.setflags(write=False)
    return a


def mixup(images, targets, shares):  # [B, ...], [B, K], [B] -> mixed images, mixed targets
    """Each image with the one before it in the batch (arXiv 1710.09412), rounded to bytes."""
    a = shares.astype("float32")[:, None]
    pixels = a[..., None, None]
    mixed = np.rint(images * pixels + np.roll(images, 1, axis=0) * (1 - pixels)).astype(np.uint8)
    return mixed, targets * a + np.roll(targets, 1, axis=0) * (1 - a)
