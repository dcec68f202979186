"""One function a figure: arrays in, a matplotlib Figure out. No window, no global state.

`python -m minivit.figures --checkpoint FILE` draws what a model learned.
"""

from .basic import bars, gallery, lines, matrices, patches, show
from .inside import attention, distances, filters, heads, overlays, positions
from .training import confusion, curves, data_sizes, examples, mosaic, ratios

__all__ = [
    "attention",
    "bars",
    "confusion",
    "curves",
    "data_sizes",
    "distances",
    "examples",
    "filters",
    "gallery",
    "heads",
    "lines",
    "matrices",
    "mosaic",
    "overlays",
    "patches",
    "positions",
    "ratios",
    "show",
]
