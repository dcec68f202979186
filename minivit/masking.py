"""Masked patch prediction: which patches are corrupted, and what is to be predicted (B.1.2).

Decided here, with NumPy and from a seeded generator, so that both twins see the same. The
gradients are in `in_numpy/masked.py` and `in_jax/masked.py`.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

BITS = 3  # of each colour channel: 8 levels
LEVELS = 2**BITS
CELLS = 4  # side of the downsampled target


@dataclass(frozen=True)
class Corruption:
    """What happens to the embedding of each patch, all [B, N]."""

    corrupted: np.ndarray  # the loss counts these, also those that were kept
    masked: np.ndarray  # becomes the mask embedding
    source: np.ndarray  # otherwise becomes the embedding of this patch; mostly its own


def corrupted_count(patches, share):
    """How many of the patches, rounded half up; exactly: in binary 0.29 times 100 is below 29."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} of corrupted patches must lie between 0 and 1")
    return int(Fraction(str(share)) * patches + Fraction(1, 2))


def draw_corruption(rng, batch, patches, *, share=0.5, parts=(0.8, 0.1, 0.1)):  # -> Corruption
    """Choose patches of every image, and for each one of three fates.

    The paper corrupts half of the patches: of these 80 % become the mask embedding, 10 % another
    random patch's embedding of the same image, and 10 % are kept.
    """
    if min(parts) < 0 or abs(sum(parts) - 1) > 1e-9:
        raise ValueError(f"parts {parts} must not be negative and must sum to one")
    order = rng.random((batch, patches)).argsort(axis=1)
    corrupted = order.argsort(axis=1) < corrupted_count(patches, share)
    fate = rng.random((batch, patches))
    masked = corrupted & (fate < parts[0])
    swapped = corrupted & ~masked & (fate < parts[0] + parts[1])
    own = np.broadcast_to(np.arange(patches), (batch, patches))
    other = rng.integers(0, max(patches - 1, 1), (batch, patches))
    other = np.minimum(other + (other >= own), patches - 1)  # never itself, if there is another
    return Corruption(corrupted, masked, np.where(swapped, other, own))


def to_bytes(images):  # uint8, or float in [-1, 1] -> integers 0 ... 255
    """The bytes that `datasets.normalise` was given."""
    if images.dtype == np.uint8:
        return images.astype(np.int64)
    return np.rint((images + 1) * 127.5).astype(np.int64)


def cell_edges(patch, cells):
    """Where each of the cells begins and ends; they overlap where they do not divide the patch."""
    if patch < cells:
        raise ValueError(f"a patch of {patch} pixels cannot be shrunk to {cells} cells a side")
    return [(i * patch // cells, -(-(i + 1) * patch // cells)) for i in range(cells)]


def color_labels(images, patch, cells=1):  # [B, height, width, C] -> [B, N, cells*cells]
    """The mean colour of each cell of each patch as one number below 8^C: 512 for RGB.

    Three bits a channel, the first channel highest. Integers throughout: a byte v alone gives
    v >> 5. `cells` 1 is the paper's target, 4 its downsampled variant.
    """
    batch, height, width, channels = images.shape
    pixels = to_bytes(images).reshape(batch, height // patch, patch, width // patch, patch, -1)
    pixels = pixels.swapaxes(2, 3)  # [B, h, w, P, P, C]
    edges = cell_edges(patch, cells)
    levels = [
        pixels[..., top:bottom, left:right, :].sum((3, 4))
        // ((bottom - top) * (right - left) * (256 // LEVELS))
        for top, bottom in edges
        for left, right in edges
    ]
    digits = LEVELS ** np.arange(channels)[::-1]
    labels = (np.stack(levels, axis=3) * digits).sum(-1)
    return labels.reshape(batch, -1, cells * cells)


def label_colors(labels, channels):  # integers [...] -> uint8 [..., C]
    """The colour in the middle of each label's box."""
    digits = LEVELS ** np.arange(channels)[::-1]
    level = np.asarray(labels)[..., None] // digits % LEVELS
    return (level * (256 // LEVELS) + 128 // LEVELS).astype(np.uint8)
