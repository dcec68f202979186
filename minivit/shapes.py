"""What shapes must fit together, for both twins; plain Python, and errors that name a remedy."""

import argparse
import math
import re
from numbers import Integral

LONGEST_SIDE = 10_000  # of images in pixels, and of grids


def pair(patch):  # P or (P, Q) -> (P, Q)
    """A patch size as rows and columns."""
    return (patch, patch) if isinstance(patch, Integral) else tuple(patch)


def image_shape(text):  # "224" or "28x56" -> height, width
    """An image size, or a grid, on a command line."""
    match = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text)
    sides = match and (int(match[1]), int(match[2] or match[1]))
    if not sides or 0 in sides or max(sides) > LONGEST_SIDE:
        raise argparse.ArgumentTypeError(
            f"is {text[:40]}, neither a side nor HEIGHTxWIDTH of 1 to {LONGEST_SIDE:,} each"
        )
    return sides


def patch_grid(height, width, patch):  # -> rows, columns of patches
    """How many patches an image holds; the official model's convolution would drop a remainder."""
    rows, columns = pair(patch)
    if height % rows or width % columns or 0 in (height, width):
        raise ValueError(
            f"image {height}x{width} is not divisible by patch {rows}x{columns}; resize it to "
            f"{max(1, round(height / rows)) * rows}x{max(1, round(width / columns)) * columns}"
        )
    return height // rows, width // columns


def grid_of(patches):  # [B, h, w, F], or of a square [B, N, F] -> h, w
    """The grid of an array of patches, by its shape."""
    if len(patches) == 4:
        return patches[1:3]
    side = math.isqrt(patches[1]) if len(patches) == 3 else 0
    if not side or side * side != patches[1]:
        raise ValueError(
            f"patches of shape {tuple(patches)} form no square; reshape them to [B, h, w, P*P*C]"
        )
    return side, side


def feature_grid(height, width, stages):  # -> rows, columns of a ResNet's feature map
    """The root's convolution and pooling halve an image, each later stage too; odd sides round up.

    Both ResNets round so, whatever their padding.
    """
    halvings = 2 + max(stages - 1, 0)
    return -(-height // 2**halvings), -(-width // 2**halvings)


def hybrid_grid(size, stages, patch):  # height, width -> rows, columns of patches
    """A hybrid's patches; the error speaks of the image, not of the feature map."""
    features = feature_grid(*size, stages)
    try:
        return patch_grid(*features, patch)
    except ValueError:
        shrink = 2 ** (2 + max(stages - 1, 0))
        sides = (
            max(1, round(n / p)) * p * shrink for n, p in zip(features, pair(patch), strict=True)
        )
        raise ValueError(
            f"image {size[0]}x{size[1]} gives a feature map of {features[0]}x{features[1]}, which "
            f"patch {patch} does not divide; resize it to {'x'.join(map(str, sides))}"
        ) from None


def check_pixels(images):
    """Images [B, height, width, C] in [-1, 1]."""
    shape = images.shape
    if len(shape) != 4:
        raise ValueError(f"images must be [B, height, width, C], got shape {shape}")
    if "int" in str(images.dtype):
        raise ValueError(f"pixels are {images.dtype}; apply datasets.normalise to get [-1, 1]")


def check_images(images, kernel):
    """Images [B, height, width, C] in [-1, 1] that a patch kernel [P, Q, C, D] can embed."""
    check_pixels(images)
    shape = images.shape
    if shape[3] != kernel[2]:
        raise ValueError(
            f"images have {shape[3]} channels, the embedding expects {kernel[2]}; "
            "convert the images or initialise a model for them"
        )
    patch_grid(shape[1], shape[2], kernel[:2])


def check_targets(logits, targets):
    """Shapes of class scores and of targets, which are a number for every class, not a label."""
    if logits != targets:
        raise ValueError(
            f"logits of shape {logits} need targets of the same shape, not {targets}; "
            "smooth_labels makes them from labels"
        )


def check_positions(table, tokens):
    """A position table [1, N, D] for tokens [B, N, D]."""
    if table[1:] != tokens[1:]:
        raise ValueError(
            f"{tokens[1]} tokens of width {tokens[2]} meet a position table for {table[1]} of "
            f"width {table[2]}; use the image size that the model was made for, or resize the table"
        )


def check_rate(rate, name="dropout rate"):
    """A share of entries to drop, or of certainty to give up."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} {rate} must be at least 0 and below 1")


def check_gelu(form):
    """The two forms of GELU in use."""
    if form not in ("tanh", "erf"):
        raise ValueError(f"unknown GELU form {form!r}; choose 'tanh' or 'erf'")


def check_loss(loss):
    """The two losses over class scores."""
    if loss not in ("softmax", "sigmoid"):
        raise ValueError(f"unknown loss {loss!r}; choose 'softmax' or 'sigmoid'")


def check_names(options, known):
    """Options that nothing else would miss if they were misspelt."""
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r}; there are {', '.join(known)}")


def depth(encoder):  # parameters of an encoder -> L
    """How many blocks an encoder has, by their names, which count from 0."""
    count = sum(name.startswith("encoderblock_") for name in encoder)
    for i in range(count):
        if f"encoderblock_{i}" not in encoder:
            raise ValueError(f"encoderblock_{i} is missing among {count} blocks")
    return count


def padded(shape, kernel, stride, padding):  # -> (before, after) of rows and of columns
    """The border that a convolution or pooling adds: "SAME", or a number of pixels on all sides."""
    if padding != "SAME":
        return ((padding, padding), (padding, padding))
    pads = []
    for length, size in zip(shape[1:3], kernel, strict=True):
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((total // 2, total - total // 2))
    return tuple(pads)


def check_channels(shape, kernel):
    """Images [B, height, width, C] for a convolution's kernel [rows, columns, C, F]."""
    if len(shape) != 4 or shape[-1] != kernel[2]:
        raise ValueError(
            f"images of shape {list(shape)} do not fit a kernel of shape {list(kernel)}; "
            f"they need 4 axes, the last of {kernel[2]} channels"
        )


def groups_of(channels, groups=32):  # -> number of groups
    """GroupNorm's groups: 32, or one per channel where there are fewer."""
    groups = min(groups, channels)
    if channels % groups:
        raise ValueError(f"{channels} channels do not divide into {groups} groups; use a multiple")
    return groups


def numbered(p, prefix):  # parameters -> number of `prefix`1, `prefix`2, ... (also 01, 02)
    """How many stages or units there are; their names count from 1 without a gap."""
    found = sorted(int(n.removeprefix(prefix)) for n in p if re.fullmatch(rf"{prefix}\d+", n))
    if found != list(range(1, len(found) + 1)):
        raise ValueError(f"{prefix} numbers {found} do not count from 1 without a gap")
    return len(found)
