"""The one way by which every command reads a checkpoint: same options, same errors.

What a file is decides first; an option that says otherwise is refused, never obeyed in silence.
"""

import math
import os
from pathlib import Path

from . import checkpoint, command, dialects
from .shapes import image_shape


def add_reading_options(parser):
    """What a user may have to say of a file that does not tell it all."""
    text = "of a state dict whose width is unusual"
    parser.add_argument("--heads", type=command.whole(1), help=text)
    text = "a state dict saw v/127.5-1 (vit), or ImageNet's mean and deviation (many of timm's)"
    parser.add_argument("--pixels", choices=("vit", "imagenet"), help=text)
    text = "of the file's positions, if it is not square"
    parser.add_argument("--old-grid", type=image_shape, metavar="ROWSxCOLUMNS", help=text)
    text = "arrays that belong to no ViT are an error (the default), or are left out with a warning"
    parser.add_argument("--extra", choices=("error", "warn"), default="error", help=text)


def chosen(args):  # -> the options of `read`
    """What a user has said."""
    return {name: getattr(args, name) for name in ("heads", "pixels", "old_grid", "extra")}


def read(path, *, heads=None, pixels=None, old_grid=None, extra="error", head=True):
    # -> parameters, description
    """The model of a file, its pixels always v / 127.5 - 1, and what the file is.

    `description["pixels"]` says what was done for that. `head` False: its head will not be used.
    """
    params, description = checkpoint.inspect(path, heads=heads, extra=extra, head=head)
    if heads and description.get("heads") != heads:
        told = f"the shapes in {path} say {description.get('heads', 'that it is a ResNet')}"
        raise ValueError(f"--heads {heads}: {told}; leave it out")
    if old_grid:
        description = with_grid(path, description, old_grid)
    return with_pixels(path, params, description, pixels) if pixels else (params, description)


def with_grid(path, description, grid):  # -> description
    """The grid of the positions as the user says, which decides the image's size too."""
    said = f"--old-grid {grid[0]}x{grid[1]}"
    if not description["positions"]:
        raise ValueError(f"{said}: {path} has no table of positions; leave it out")
    if math.prod(grid) != (rows := description["positions"] - description["prefix_tokens"]):
        raise ValueError(f"{said}: {path} has {rows} positions, not {math.prod(grid)}")
    return description | {"grid": list(grid), "image_size": None}


def with_pixels(path, params, description, pixels):  # -> parameters, description
    """The model with ImageNet's scaling folded into its patches, once."""
    if description["pixels"] == dialects.FOLDED:
        raise ValueError(
            f"--pixels {pixels}: {path} saw ImageNet's mean and deviation, and such files "
            f"({description['dialect']}) are read so already; leave it out"
        )
    if pixels == "vit":
        return params, description
    if description["channels"] != 3:
        raise ValueError(f"--pixels imagenet is for colour, {path} is for grey")
    if "embedding" not in params or "conv_root" in params:
        raise ValueError("--pixels imagenet is for models that begin with patches, not ResNets")
    kernel, bias = dialects.fold_pixels(**params["embedding"])
    params = params | {"embedding": {"kernel": kernel, "bias": bias}}
    return params, description | {"pixels": dialects.FOLDED}


def class_names(description, labels_file=None):  # -> list of names
    """The class names in a file, one per line, or else those that the checkpoint has itself."""
    classes = description["classes"]
    if classes is None:
        raise ValueError("the checkpoint has no head, so it knows no classes")
    if labels_file is None:
        return description.get("class_names") or [f"class {i}" for i in range(classes)]
    try:
        text = Path(os.path.expanduser(labels_file)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{labels_file} is not UTF-8 text: {error}") from None
    names = text.rstrip().split("\n")
    if len(names) != classes:
        raise ValueError(f"{labels_file} names {len(names)} classes, the checkpoint has {classes}")
    return names
