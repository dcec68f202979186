"""Pictures, matrices, curves and bars, of whatever they show."""

import numpy as np

from ..command import literal
from ..shapes import pair
from .canvas import Figure, MaxNLocator

NUMBERED = 100  # entries of a matrix beyond which its numbers would not be legible


def plain(name, most=60):
    """A name in a picture as it is: no formula, no control characters, and no endless line.

    matplotlib takes what stands between dollars for a formula; behind a backslash one is a dollar.
    """
    lines = (literal(line) for line in str(name).split("\n"))
    cut = (line if len(line) <= most else f"{line[: most - 1]}…" for line in lines)
    return "\n".join(cut).replace("$", r"\$")


def color_key(figure, image, axes, text):
    """What the colours of an image mean, beside all of some axes."""
    figure.colorbar(image, ax=axes, label=text, shrink=0.8)


def show(axes, image):
    """One picture of 0 ... 255 without ticks; grey where it has one channel."""
    grey = image.shape[-1] == 1
    # matplotlib would take floats for 0 ... 1, and a byte beyond the range turns round.
    image = np.rint(image).clip(0, 255).astype(np.uint8)
    axes.imshow(image[..., 0] if grey else image, cmap="gray" if grey else None, vmin=0, vmax=255)
    axes.set(xticks=[], yticks=[])


def gallery(images, titles):  # list of [height, width, C] -> Figure
    """Pictures side by side."""
    figure = Figure(figsize=(2.4 * len(images), 2.7), layout="constrained")
    row = figure.subplots(1, len(images), squeeze=False)[0]
    for axes, image, title in zip(row, images, titles, strict=True):
        show(axes, image)
        axes.set_title(plain(title), fontsize=10)
    return figure


def patches(image, patch):  # [height, width, C], P -> Figure
    """The grid of patches on the image, and below it the same patches as a row, 16 at most."""
    height, width, _ = image.shape
    down, right = pair(patch)
    rows, columns = height // down, width // right
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    whole, row = figure.subfigures(2, 1, height_ratios=(4, 1))
    axes = whole.subplots()
    show(axes, image)
    line = {"color": "crimson", "lw": min(1, 14 / max(rows, columns))}
    for i in range(1, rows):
        axes.axhline(i * down - 0.5, **line)
    for i in range(1, columns):
        axes.axvline(i * right - 0.5, **line)
    axes.set_title(f"{height}x{width} pixels, {rows * columns} patches of {down}x{right}")
    for n, axes in enumerate(row.subplots(1, min(16, rows * columns), squeeze=False)[0]):
        y, x = divmod(n, columns)
        show(axes, image[y * down : (y + 1) * down, x * right : (x + 1) * right])
        axes.set_title(n, fontsize=8)
    return figure


def matrices(arrays, titles, columns, rows):  # list of [N, M] -> Figure
    """Matrices as colours; small ones with their numbers."""
    figure = Figure(figsize=(4.2 * len(arrays), 3.6), layout="constrained")
    row = figure.subplots(1, len(arrays), squeeze=False)[0]
    for axes, array, title in zip(row, arrays, titles, strict=True):
        small = array.size <= NUMBERED
        image = axes.imshow(array, cmap="viridis", aspect="equal" if small else "auto")
        for (i, j), value in np.ndenumerate(array) if small else ():
            dark = value < (array.min() + array.max()) / 2
            color = "white" if dark else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
        axes.set(title=plain(title), xlabel=columns, ylabel=rows)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, shrink=0.8)
    return figure


def lines(x, series, xlabel, ylabel, *, log_x=False, log_y=False, level=None, marker="o"):
    # [n], {name: [n]} -> Figure
    """Curves over the same places; `level` is a dotted line to compare with."""
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, values in series.items():
        axes.plot(x, values, f"{marker}-", label=plain(name))
    if level is not None:
        axes.axhline(level, color="black", lw=0.8, ls=":")
    if log_x:
        axes.set_xscale("log")
        if len(x) <= 7:
            axes.set_xticks(x, [f"{n:g}" for n in x])
            axes.minorticks_off()
    elif all(float(n).is_integer() for n in x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log_y:
        axes.set_yscale("log")
    axes.set(xlabel=plain(xlabel), ylabel=plain(ylabel))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def bars(panels):  # {unit: {name: number}} -> Figure
    """A panel for each unit, a bar for each name, the first one on top."""
    names = [plain(name) for name in next(iter(panels.values()))]
    size = (4.2 * len(panels) + 1, 0.3 * len(names) + 1.1)
    figure = Figure(figsize=size, layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (unit, values) in zip(row, panels.items(), strict=True):
        axes.barh(range(len(names)), list(values.values()))
        axes.set_yticks(range(len(names)), names)
        least = 1e-3 * max(map(abs, values.values()))
        for place, value in enumerate(values.values()):
            text = f" {value:,.3g}" if abs(value) >= least else " ≈ 0"
            axes.text(max(value, 0), place, text, va="center", fontsize=8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_xlabel(plain(unit))
        axes.spines[["top", "right"]].set_visible(False)
    return figure
