"""From the number of a step to the arrays that it trains on."""

from dataclasses import dataclass

import numpy as np

from . import datasets, masking
from .augmentation import Augmentation, augment, mixup, mixup_shares, uniform
from .in_numpy import smooth_labels
from .processes import ALONE, Processes
from .progress import progress
from .shapes import patch_grid

NOTHING = Augmentation()


def fit(images, size, channels):  # uint8 [B, ...] -> uint8 [B, height, width, C]
    """Images as the model was made for: its size, and its number of channels."""
    return datasets.resize(datasets.with_channels(images, channels), *size)


def portion(image_size, multiple=1, pixels=50_000, most=500):  # -> images
    """How many images to score at once: so many pixels, and no more than `most` images."""
    size = min(most, pixels // (image_size[0] * image_size[1]))
    return max(1, size // multiple) * multiple


def scores(engine, images, size, channels, what=None):  # uint8 [B, ...] -> [B, classes]
    """Class scores of images of any size, a thousand resized at a time to bound the memory.

    `what` begins the bar on the terminal; without it there is none.
    """
    found = []
    with progress(total=len(images), what=what, disable=None if what else True) as bar:
        for part in np.array_split(images, max(1, len(images) // 1000)):
            found.append(engine.logits(fit(part, size, channels), done=bar.update))
    return np.concatenate(found)


@dataclass(frozen=True)
class Batches:
    """`batches(step)` is {name: array [B, ...]}, decided by the seed and the step alone.

    Nothing is remembered from one step to the next, so any step can be asked for again.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: int
    batch_size: int
    image_size: tuple[int, int]
    patch: tuple[int, int] | None
    channels: int
    seed: int = 0
    objective: str = "classes"
    smoothing: float = 0.0
    corrupt: float = 0.5  # share of the patches, for the masked objectives
    augmentation: Augmentation = NOTHING
    processes: Processes = ALONE

    def __call__(self, step):
        """The arrays of one step; of several processes, each makes its own rows."""
        how, rows = self.augmentation, self.rows()
        chosen = datasets.batch_indices(len(self.images), self.batch_size, self.seed, step)[rows]
        images = self.images[chosen]
        if how != NOTHING:
            images = augment(images, self.drawn(uniform, chosen, rows, step), how)
        images = fit(images, self.image_size, self.channels)
        if self.objective != "classes":
            drawn = self.corruption(self.image_size, self.batch_size, step, datasets.CORRUPTION)
            return masking.masked_batch(images, drawn.rows(rows), self.objective, self.patch)
        targets = smooth_labels(self.labels[chosen], self.classes, self.smoothing)
        if how.mixup:
            mixed = mixup(images, targets, self.drawn(mixup_shares, chosen, rows, step, how.mixup))
            images, targets = (array[1:] for array in mixed)
        return {"images": images, "targets": targets}

    def rows(self):  # -> places in the batch
        """This process's; mixup also needs the image before the first."""
        mine = self.processes.share(self.batch_size)
        before = bool(self.augmentation.mixup and self.objective == "classes")
        return np.arange(mine.start - before, mine.stop) % self.batch_size

    def drawn(self, draw, chosen, rows, step, *parameters):  # -> [rows, ...]
        """The rows of the batch's examples in what was drawn for their epochs."""
        examples = len(self.images)
        epochs, _ = datasets.batch_positions(examples, self.batch_size, step)
        epochs = epochs[rows].tolist()
        tables = {e: draw(examples, self.seed, e, *parameters) for e in set(epochs)}
        return np.array([tables[e][i] for e, i in zip(epochs, chosen, strict=True)])

    def corruption(self, image_size, count, number, purpose):  # -> Corruption [count, N]
        """What is hidden of so many images, drawn from the seed, the purpose and a number."""
        rng = np.random.default_rng([self.seed, purpose, number])
        rows, columns = patch_grid(*image_size, self.patch)
        return masking.draw_corruption(rng, count, rows * columns, share=self.corrupt)
