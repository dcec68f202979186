"""How much each old grid point counts for each new one; plain Python, for both twins.

Resizing a grid is separable: one such matrix for the rows, one for the columns. Source: the rules
of SciPy's `zoom` as vit_jax uses it, `jax.image.resize`, `torch.nn.functional.interpolate`.
"""

import math

# method: corners on corners, cubic kernel's a (None: the linear kernel), outside points clamped
METHODS = {
    "corners": (True, None, False),
    "bilinear": (False, None, False),
    "bicubic": (False, -0.5, False),
    "bicubic-torch": (False, -0.75, True),
}


def linear(x):
    """The triangle: interpolation along straight lines."""
    return max(0.0, 1.0 - abs(x))


def cubic(x, a):
    """Keys' kernel: through the points, with a continuous slope."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def resize_weights(old, new, method="corners", antialias=False):  # -> new rows of old numbers
    """Weights that take `old` values to `new` ones along one axis; each row sums to one.

    - corners: end points stay on end points, src = i (old - 1) / (new - 1), straight lines
      between; the official fine-tuning code. A single new point takes the first old one.
    - bilinear, bicubic (a = -0.5, jax "cubic"), bicubic-torch (a = -0.75): half-pixel centres,
      src = (i + 1/2) old / new - 1/2.

    Neighbours outside are dropped and the rest renormalised; bicubic-torch takes the border value
    instead. With antialias the kernel is as wide as a new pixel when shrinking, and bicubic-torch
    becomes bicubic, as in torch.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if min(old, new) < 1:
        raise ValueError(f"cannot resize {old} points to {new}; both must be at least 1")
    corners, a, clamp = METHODS["bicubic" if antialias and method == "bicubic-torch" else method]
    ratio = (old - 1) / max(new - 1, 1) if corners else old / new
    width = max(ratio, 1.0) if antialias else 1.0
    kernel = linear if a is None else lambda x: cubic(x, a)
    rows = []
    for i in range(new):
        # Integers first: i (old - 1) / (new - 1) then ends exactly at old - 1. SciPy multiplies by
        # a rounded ratio, may end beyond the border, and writes zeros there.
        source = i * (old - 1) / max(new - 1, 1) if corners else (i + 0.5) * old / new - 0.5
        row = [0.0] * old
        reach = math.ceil(width) * (1 if a is None else 2)
        for j in range(math.floor(source) - reach, math.floor(source) + reach + 2):
            if clamp or 0 <= j < old:
                row[min(max(j, 0), old - 1)] += kernel((source - j) / width)
        total = math.fsum(row)
        rows.append([weight / total for weight in row])
    return rows


def source_grid(count, prefix, grid=None):  # number of table rows -> rows, columns of the grid
    """The grid of a position table: as told, or square where the count allows it."""
    cells = count - prefix
    if grid is None:
        side = math.isqrt(max(cells, 0))
        grid = (side, side)
        if side * side != cells or not cells:
            raise ValueError(
                f"a position table with {count} rows, {prefix} of them before the grid, leaves "
                f"{cells} positions, which is no square; say which grid they form"
            )
    if grid[0] * grid[1] != cells:
        raise ValueError(f"grid {grid[0]}x{grid[1]} does not hold {cells} positions")
    return tuple(grid)
