"""A trained model made ready for other classes, and for images of another size (section 3.2)."""

import numpy as np

from . import in_numpy
from .interpolation import source_grid
from .shapes import pair, patch_grid


def image_size(params, grid=None):  # -> height, width in pixels
    """The size of the images that a model with a position table was made for."""
    encoder = params["Transformer"]
    if "posembed_input" not in encoder:
        raise ValueError("the model has no positions and so no image size; say which one")
    prefix = params["cls"].shape[1] if "cls" in params else 0
    rows = encoder["posembed_input"]["pos_embedding"].shape[1]
    patch = params["embedding"]["kernel"].shape[:2]
    return tuple(n * p for n, p in zip(source_grid(rows, prefix, grid), patch, strict=True))


def adapt(params, *, image_size, classes, old_grid=None, method="corners", antialias=False):
    # -> parameters
    """Parameters for fine-tuning: a new head of zeros, and positions resized to the new images.

    `image_size` is a side or (height, width) in pixels; `old_grid` (rows, columns) of the position
    table is needed where it is not square. `pre_logits` is dropped, as the paper does. Everything
    else is the same array.
    """
    width = params["Transformer"]["encoder_norm"]["scale"].size
    head = {"kernel": np.zeros((width, classes)), "bias": np.zeros(classes)}
    new = {name: value for name, value in params.items() if name != "pre_logits"}
    new["head"] = {name: value.astype("float32") for name, value in head.items()}
    if "posembed_input" in params["Transformer"]:
        table = params["Transformer"]["posembed_input"]["pos_embedding"]
        grid = patch_grid(*pair(image_size), params["embedding"]["kernel"].shape[:2])
        prefix = params["cls"].shape[1] if "cls" in params else 0
        options = {"old_grid": old_grid, "prefix": prefix, "method": method, "antialias": antialias}
        table, _ = in_numpy.resize(table, grid, **options)
        new["Transformer"] = params["Transformer"] | {"posembed_input": {"pos_embedding": table}}
    return new
