"""What a model learned: its filters, its positions, and where it looks."""

import numpy as np

from .basic import color_key, plain, show
from .canvas import Figure

OF_LARGEST = "share of each\nmap's largest weight"  # each map has a scale of its own


def overlay(axes, image, weights):  # -> the map, for its colour key
    """A picture under a map of weights, each patch's weight over its pixels; black is 0."""
    height, width = image.shape[:2]
    show(axes, image)
    frame = (-0.5, width - 0.5, height - 0.5, -0.5)
    shares = weights / max(weights.max(), np.finfo(float).tiny)
    return axes.imshow(shares, cmap="inferno", alpha=0.65, extent=frame, vmin=0, vmax=1)


def attention(images, maps, titles, columns=4):  # [B, height, width, C], [B, h, w] -> Figure
    """Each image beside itself under its attention; bright is where the model looks."""
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(4 * columns + 0.8, 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for i, (image, weights, title) in enumerate(zip(images, maps, titles, strict=True)):
        show(grid[2 * i], image)
        grid[2 * i].set_title(plain(title, 30), fontsize=8)
        key = overlay(grid[2 * i + 1], image, weights)
        grid[2 * i + 1].set_title(f"up to {weights.max():.0%} per patch", fontsize=8)
    color_key(figure, key, list(grid), OF_LARGEST)
    return figure


def overlays(images, maps, titles):  # [B, height, width, C], {name: [B, h, w]}, [B] -> Figure
    """One image per row: as it is, then under each of the maps, to compare ways to look inside."""
    columns = 1 + len(maps)
    figure = Figure(figsize=(2.1 * columns + 0.8, 2.2 * len(images) + 0.3), layout="constrained")
    grid = figure.subplots(len(images), columns, squeeze=False)
    for row, image, title, *each in zip(grid, images, titles, *maps.values(), strict=True):
        show(row[0], image)
        row[0].set_ylabel(plain(title, 30), fontsize=9)
        for axes, weights in zip(row[1:], each, strict=True):
            key = overlay(axes, image, weights)
    for axes, name in zip(grid[0], ("image", *maps), strict=True):
        axes.set_title(plain(name), fontsize=9)
    color_key(figure, key, grid, OF_LARGEST)
    return figure


def tiled(maps):  # [R, S, h, w] -> one picture, [R*(h+1) - 1, S*(w+1) - 1]
    """Maps side by side, a gap of one cell between; one picture is drawn faster than R*S."""
    rows, columns, h, w = maps.shape
    framed = np.full((rows, columns, h + 1, w + 1), np.nan)
    framed[:, :, :h, :w] = maps
    return framed.swapaxes(1, 2).reshape(rows * (h + 1), columns * (w + 1))[:-1, :-1]


def centres(count, side):
    """Where the tiles' middles are."""
    return [i * (side + 1) + (side - 1) / 2 for i in range(count)]


def heads(maps, image=None):  # [L, H, h, w], [height, width, C] -> Figure
    """Where each head of each block looks; every map is scaled by its own largest weight."""
    blocks, count, h, w = maps.shape
    cell = min(1.4, 12 / max(count * max(1, w / h), blocks))
    wide, high = cell * count * w / h + 1.2, cell * blocks + 0.8
    beside = 0 if image is None else min(3, max(1.5, high / 2))
    figure = Figure(figsize=(wide + beside + 0.8, high), layout="constrained")
    if beside:
        picture, axes = figure.subplots(1, 2, width_ratios=(beside, wide))
        show(picture, image)
    else:
        axes = figure.subplots()
    largest = np.maximum(maps.max((2, 3), keepdims=True), np.finfo(float).tiny)
    key = axes.imshow(tiled(maps / largest), cmap="inferno", vmin=0, vmax=1)
    color_key(figure, key, axes, OF_LARGEST)
    axes.set_xticks(centres(count, w), range(1, count + 1))
    axes.set_yticks(centres(blocks, h), range(1, blocks + 1))
    axes.set(xlabel="head", ylabel="block")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def filters(kernels, columns=8, title=""):  # [count, P, P, C] -> Figure
    """Small kernels as pictures: 0 is mid-grey, each one's own largest entry black or white."""
    count, channels = len(kernels), kernels.shape[-1]
    if channels not in (1, 3):
        raise ValueError(f"filters of {channels} channels are no pictures; 1 or 3 are")
    columns = min(columns, count)
    rows = -(-count // columns)
    width, height = 1.1 * columns, 1.1 * rows
    if title:
        width, height = max(width, 4.4), height + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=9)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.axis("off")
    for axes, kernel in zip(grid, kernels, strict=False):
        largest = np.abs(kernel).max() or 1
        show(axes, 127.5 + 127.5 * (kernel / largest))
    return figure


def positions(likenesses, titles, places=None):  # list of [r, s, h, w] -> Figure
    """How alike the position embeddings are: a small map for the patch at each place (Fig. 7).

    For a large grid there are maps of some places only: `places` are their rows and columns.
    """
    # Of a fine grid every cell must still have a pixel.
    side = min(9, max(4.4, 0.0125 * max(tiled(each).shape[0] for each in likenesses)))
    figure = Figure(figsize=(side * len(likenesses) + 0.6, side), layout="constrained")
    row = figure.subplots(1, len(likenesses), squeeze=False)[0]
    places = places or [[range(n) for n in likeness.shape[:2]] for likeness in likenesses]
    for axes, likeness, title, (rows, columns) in zip(row, likenesses, titles, places, strict=True):
        h, w = likeness.shape[2:]
        image = axes.imshow(tiled(likeness), cmap="viridis", vmin=-1, vmax=1)
        for ticks, shown, side in ((axes.set_xticks, columns, w), (axes.set_yticks, rows, h)):
            some = slice(None, None, max(1, len(shown) // 7))
            ticks(centres(len(shown), side)[some], [n + 1 for n in shown[some]])
        axes.set(title=plain(title), xlabel="column of the patch", ylabel="row of the patch")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    color_key(figure, image, list(row), "cosine similarity")
    return figure


def distances(distance, uniform=None):  # pixels [L, H], or [B, L, H] -> Figure
    """How far each head looks, by depth (Fig. 7, right); dotted: all patches weigh the same."""
    distance = np.asarray(distance)
    distance = distance.mean(0) if distance.ndim == 3 else distance
    blocks, count = distance.shape
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    depth = np.arange(1, blocks + 1)
    for head in range(count):
        axes.plot(depth, distance[:, head], "o", ms=6, alpha=0.8)
    axes.plot(depth, distance.mean(1), color="black", lw=1, label="mean of the heads")
    if uniform is not None:
        axes.axhline(uniform, color="black", lw=0.8, ls=":", label="all patches alike")
    top = 1.1 * max(distance.max(), uniform or 0) or 1
    axes.set(xlabel="block", ylabel="mean attention distance (pixels)", ylim=(0, top))
    axes.set_xticks(depth[:: -(-blocks // 16)])
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure
