"""One function a figure: arrays in, a matplotlib Figure out. No window, no global state."""

from matplotlib.figure import Figure


def curves(rows):  # the rows of numbers that train.py collects -> Figure
    """Training loss, accuracy and learning rate against the step, the test result as a dot."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 3),
        ("loss", "accuracy", "learning_rate"),
        ("loss (nats)", "accuracy", "learning rate"),
        strict=True,
    ):
        points = [row for row in rows if row.get(name) is not None]
        axes.plot([r["step"] for r in points], [r[name] for r in points], label="training")
        test = [row for row in rows if row.get(f"test_{name}") is not None]
        if test:
            values = [row[f"test_{name}"] for row in test]
            axes.plot([row["step"] for row in test], values, "o", label=f"test {values[-1]:.3f}")
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
        if label == guess:
            axes.set_title(classes[guess], fontsize=8)
        else:
            axes.set_title(f"{classes[guess]}\nnot {classes[label]}", fontsize=8, color="crimson")
    return figure


def attention(images, maps, titles, columns=4):  # [B, height, width, C], [B, h, w] -> Figure
    """Each image beside itself under its attention; bright is where the model looks."""
    images, maps, titles = images[:32], maps[:32], titles[:32]
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(4 * columns, 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for i, (image, weights, title) in enumerate(zip(images, maps, titles, strict=True)):
        height, width = image.shape[:2]
        shown = image[..., 0] if image.shape[-1] == 1 else image
        for axes in (left := grid[2 * i], right := grid[2 * i + 1]):
            axes.imshow(shown, cmap="gray", vmin=0, vmax=255)
        left.set_title(title, fontsize=8)
        right.imshow(
            weights, cmap="inferno", alpha=0.65, extent=(-0.5, width - 0.5, height - 0.5, -0.5)
        )
        right.set_title(f"up to {weights.max():.0%} a patch", fontsize=8)
    return figure
