"""Masked patch prediction: which patches are corrupted, and what is to be predicted (B.1.2).

Decided here, with NumPy and from a seeded generator, so that both twins see the same. The
gradients are in `in_numpy/masked.py` and `in_jax/masked.py`.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .shapes import pair, patch_grid

GREY = 128  # what a masked patch looks like in a picture

BITS = 3  # of each colour channel: 8 levels
LEVELS = 2**BITS
# Side of the grid of cells whose colours are asked for; "pixels" asks for all pixels instead.
OBJECTIVES = {"mean-color": 1, "downsampled": 4, "pixels": None}


@dataclass(frozen=True)
class Corruption:
    """What happens to the embedding of each patch, all [B, N]."""

    corrupted: np.ndarray  # the loss counts these, also those that were kept
    masked: np.ndarray  # becomes the mask embedding
    source: np.ndarray  # otherwise becomes the embedding of this patch; mostly its own

    def rows(self, which):  # -> Corruption
        """That of some of the images."""
        return Corruption(self.corrupted[which], self.masked[which], self.source[which])


def corrupted_count(patches, share):
    """How many of the patches, rounded half up; exactly: in binary 0.29 times 100 is below 29."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} of corrupted patches must lie between 0 and 1")
    return int(Fraction(str(share)) * patches + Fraction(1, 2))


def draw_corruption(rng, batch, patches, *, share=0.5, parts=(0.8, 0.1, 0.1)):  # -> Corruption
    """Choose patches of every image, and for each one of three fates.

    The paper corrupts half of the patches: of these 80 % become the mask embedding, 10 % another
    random patch's embedding of the same image, and 10 % are kept. Where an image is one patch
    there is no other: what would be swapped is kept, and the loss counts it all the same.
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
    rows, columns = pair(patch)
    pixels = patches_of(to_bytes(images), patch)
    levels = [
        pixels[:, :, top:bottom, left:right].sum((2, 3))
        // ((bottom - top) * (right - left) * (256 // LEVELS))
        for top, bottom in cell_edges(rows, cells)
        for left, right in cell_edges(columns, cells)
    ]
    digits = LEVELS ** np.arange(images.shape[-1])[::-1]
    return (np.stack(levels, axis=2) * digits).sum(-1)


def label_colors(labels, channels):  # integers [...] -> uint8 [..., C]
    """The colour in the middle of each label's box."""
    digits = LEVELS ** np.arange(channels)[::-1]
    level = np.asarray(labels)[..., None] // digits % LEVELS
    return (level * (256 // LEVELS) + 128 // LEVELS).astype(np.uint8)


def outputs(objective, patch, channels):  # -> how many numbers a patch is predicted by
    """Scores of 8^C colours for each cell, or every pixel."""
    if cells := OBJECTIVES[objective]:
        cell_edges(min(patch), cells)
        return cells * cells * LEVELS**channels
    return math.prod(patch) * channels


def add_prediction(params, objective, rng):  # -> parameters
    """What `masked_vit` needs in place of a head: a mask embedding, and a layer of zeros.

    Like the head, the layer starts at zero, so that all colours are equally likely.
    """
    *patch, channels, width = params["embedding"]["kernel"].shape
    size = outputs(objective, patch, channels)
    mask = 0.02 * np.random.default_rng(rng).standard_normal((1, 1, width))
    body = {name: value for name, value in params.items() if name not in ("head", "pre_logits")}
    zeros = {"kernel": np.zeros((width, size), "f4"), "bias": np.zeros(size, "f4")}
    return body | {"mask": mask.astype("float32"), "prediction": zeros}


def check_share(params, image_size, share):
    """Refuse a share that corrupts no patch at all, from which nothing could be learnt."""
    rows, columns = patch_grid(*image_size, params["embedding"]["kernel"].shape[:2])
    if not corrupted_count(rows * columns, share):
        raise ValueError(
            f"a share of {share} corrupts none of {rows * columns} patches; "
            f"take at least {0.5 / (rows * columns):.2g}"
        )


def masked_batch(images, drawn, objective, patch):  # -> {name: [B, ...]}
    """The arrays that a masked objective takes: the images, their corruption, and its labels."""
    batch = {"images": images, **vars(drawn)}
    if cells := OBJECTIVES[objective]:
        batch["labels"] = color_labels(images, patch, cells).astype(np.int32)
    return batch


def patches_of(images, patch):  # [B, height, width, C] -> [B, N, P, P, C]
    """Patches as small pictures."""
    rows, columns = pair(patch)
    batch, height, width, channels = images.shape
    h, w = patch_grid(height, width, patch)
    cut = images.reshape(batch, h, rows, w, columns, channels).swapaxes(2, 3)
    return cut.reshape(batch, h * w, rows, columns, channels)


def joined(patches, height, width):  # [B, N, P, P, C] -> [B, height, width, C]
    """The inverse of `patches_of`."""
    batch, _, rows, columns, channels = patches.shape
    grid = patches.reshape(batch, height // rows, width // columns, rows, columns, channels)
    return grid.swapaxes(2, 3).reshape(batch, height, width, channels)


def paint_cells(colors, patch):  # uint8 [B, N, T, C] -> uint8 [B, N, P, P, C]
    """Patches of T cells of one colour each."""
    rows, columns = pair(patch)
    side = math.isqrt(colors.shape[2])
    y, x = np.arange(rows) * side // rows, np.arange(columns) * side // columns
    return colors[:, :, y[:, None] * side + x]


def mosaic(batch, predictions, objective, patch):  # -> input, corrupted, predicted, target
    """What the model is given, sees, says and should say, all uint8 [B, height, width, C].

    A mask is grey. The answers are shown on corrupted patches, the image everywhere else; colours
    are the middle of their label's box.
    """
    images = batch["images"]
    height, width, channels = images.shape[1:]
    patches = patches_of(images, patch)
    seen = patches[np.arange(len(images))[:, None], batch["source"]]
    seen = np.where(batch["masked"][:, :, None, None, None], np.uint8(GREY), seen)
    if objective == "pixels":
        said = np.rint((predictions.clip(-1, 1) + 1) * 127.5).astype(np.uint8)
        said, asked = said.reshape(patches.shape), patches
    else:
        labels = predictions.reshape(*batch["labels"].shape, -1).argmax(-1)
        said, asked = (
            paint_cells(label_colors(which, channels), patch) for which in (labels, batch["labels"])
        )
    corrupted = batch["corrupted"][:, :, None, None, None]
    views = (patches, seen, np.where(corrupted, said, patches), np.where(corrupted, asked, patches))
    return tuple(joined(view, height, width) for view in views)
