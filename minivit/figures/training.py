"""How training went, and what came of it."""

import numpy as np

from .basic import color_key, plain, show
from .canvas import Figure, MaxNLocator

NAMED = 30  # classes in a matrix that are named, at most


def curves(rows, unit="nats"):  # the rows of numbers that train.py collects -> Figure
    """Training loss, accuracy and learning rate against the step; validation, and the test."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 3),
        ("loss", "accuracy", "learning_rate"),
        (f"loss ({unit})", "accuracy", "learning rate"),
        strict=True,
    ):
        points = [row for row in rows if row.get(name) is not None]
        axes.plot([r["step"] for r in points], [r[name] for r in points], label="training")
        for part, marker in (("validation", ".-"), ("test", "o")):
            held = [row for row in rows if row.get(f"{part}_{name}") is not None]
            if held:
                values = [row[f"{part}_{name}"] for row in held]
                name_and_last = f"{part} {values[-1]:.3f}"
                axes.plot([row["step"] for row in held], values, marker, label=name_and_last)
                axes.legend(frameon=False)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
    return figure


def examples(images, labels, predictions, classes, columns=10):
    # [B, height, width, C], [B], [B] -> Figure
    """Images under their predicted class; a wrong answer is red and names the true class."""
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.25 * columns, 1.55 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, image, label, guess in zip(grid, images, labels, predictions, strict=False):
        grey = image.shape[-1] == 1
        axes.imshow(image[..., 0] if grey else image, cmap="gray" if grey else None)
        said, true = plain(classes[guess], 18), plain(classes[label], 14)
        if label == guess:
            axes.set_title(said, fontsize=8)
        else:
            axes.set_title(f"{said}\nnot {true}", fontsize=8, color="crimson")
    return figure


def mosaic(views, titles=("input", "corrupted", "predicted", "target")):
    # 4 x [B, height, width, C] -> Figure
    """One image a column, the views of `masking.mosaic` below each other."""
    count = len(views[0])
    figure = Figure(figsize=(1.3 * count + 0.3, 1.3 * len(views)), layout="constrained")
    grid = figure.subplots(len(views), count, squeeze=False)
    for row, (view, title) in enumerate(zip(views, titles, strict=True)):
        for axes, image in zip(grid[row], view, strict=True):
            show(axes, image)
        grid[row, 0].set_ylabel(title, fontsize=9)
    return figure


def confusion(counts, classes, confused=()):
    # [true, predicted], names, [(true class, predicted class, count)] -> Figure
    """How often each class is taken for each other, in per cent of its images.

    With more than `NAMED` classes no cell could be named: then `confused`, the most frequent
    mistakes, stand beside the matrix, of which a cell may stand for several classes that follow
    each other. So the picture has the same size for any number of classes.
    """
    share = 100 * counts / counts.sum(1, keepdims=True).clip(1)
    if few := len(classes) <= NAMED:
        side = max(4, 0.55 * len(classes) + 1.5)
        figure = Figure(figsize=(side + 0.8, side), layout="constrained")
        axes = figure.subplots()
    else:
        figure = Figure(figsize=(12, 6), layout="constrained")
        axes, beside = figure.subplots(1, 2, width_ratios=(3, 2))
        mistakes(beside, confused, classes)
    edge = len(classes) - 0.5
    frame = (-0.5, edge, edge, -0.5)
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100, extent=frame)
    number = "" if few else " (number of the class)"
    axes.set(xlabel=f"predicted{number}", ylabel=f"true{number}")
    color_key(figure, image, axes, "% of the true class")
    if few:
        ticks, names = range(len(classes)), [plain(name, 30) for name in classes]
        axes.set_xticks(ticks, names, rotation=90)
        axes.set_yticks(ticks, names)
        for (i, j), value in np.ndenumerate(share) if len(classes) <= 20 else ():
            if value >= 0.5:
                color = "white" if value > 50 else "black"
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    return figure


def mistakes(axes, confused, classes):
    """The most frequent ones as bars, each under its name: the true class, and what was said."""
    axes.barh(range(len(confused)), [count for *_, count in confused], color="tab:blue")
    named = [
        f"{plain(classes[i], 20)} \N{RIGHTWARDS ARROW} {plain(classes[j], 20)}"
        for i, j, _ in confused
    ]
    axes.set_yticks(range(len(confused)), named, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("most frequent mistakes")
    axes.set_xlabel("images")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def data_sizes(results, sizes):  # {family: {images: accuracies of the seeds}} -> Figure
    """Test accuracy against the number of training images: the mean, and its deviation as a bar."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for family, by_size in results.items():
        values = [100 * np.asarray(by_size[size]) for size in sizes]
        means, deviations = [v.mean() for v in values], [v.std() for v in values]
        axes.errorbar(sizes, means, deviations, marker="o", capsize=3, label=plain(family))
    axes.set(xscale="log", xlabel="training images", ylabel="% of test images right")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def ratios(rows):  # the rows of `minivit.bench` -> Figure
    """How many times as fast as the reference, with the least and the most of the rounds."""
    groups = {}
    for row in rows:
        groups.setdefault((row["config"], row["what"]), []).append(row)
    figure = Figure(figsize=(3.2 * min(4, len(groups)) + 0.8, 2.8 * -(-len(groups) // 4)))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(-(-len(groups) // 4), min(4, len(groups)), squeeze=False).ravel()
    for axes in grid[len(groups) :]:
        axes.axis("off")
    for axes, ((config, what), found) in zip(grid, groups.items(), strict=False):
        found = sorted(found, key=lambda row: row["ratio"])
        names, values = [plain(r["contestant"]) for r in found], [r["ratio"] for r in found]
        spread = [[r["ratio"] - r["least"] for r in found], [r["most"] - r["ratio"] for r in found]]
        colors = ["tab:blue" if name.startswith("minivit") else "silver" for name in names]
        axes.barh(names, values, xerr=spread, color=colors, error_kw={"lw": 1, "capsize": 2})
        axes.axvline(1, color="black", lw=0.8, ls=":")
        axes.set_title(f"{config}, {'training step' if what == 'train' else 'forward pass'}")
        axes.set_xlabel("times the reference's speed")
    return figure
