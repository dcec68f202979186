"""Checks of the course's exercises: right, not yet, or the smallest case that goes wrong.

A check takes the reader's function, compares it with a specification (in plain loops, or the
package's own tested piece) on cases that hypothesis finds and shrinks, and prints what it saw. It
returns whether all was right, and raises nothing: a notebook runs from top to bottom with no
exercise done.
"""

from .pieces import (
    attention,
    embed,
    encoder_block,
    gelu_slope,
    layer_norm_back,
    parameter_count,
    patchify,
    shapes,
    softmax,
    softmax_back,
)
from .practice import (
    adam,
    attention_distance,
    conv2d,
    cosine,
    mean_color,
    resize_row,
    rollout,
    traced_once,
)

__all__ = [
    "adam",
    "attention",
    "attention_distance",
    "conv2d",
    "cosine",
    "embed",
    "encoder_block",
    "gelu_slope",
    "layer_norm_back",
    "mean_color",
    "parameter_count",
    "patchify",
    "resize_row",
    "rollout",
    "shapes",
    "softmax",
    "softmax_back",
    "traced_once",
]
