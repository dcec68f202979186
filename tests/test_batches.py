"""From the number of a step to its arrays."""

import numpy as np
import pytest

from minivit import masking
from minivit.augmentation import Augmentation
from minivit.batches import Batches
from minivit.datasets import batch_indices

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 8, 8, 1), np.uint8)
LABELS = RNG.integers(0, 4, 50).astype(np.int32)


def batches(**options):
    sizes = {"batch_size": 16, "image_size": (8, 8), "patch": (4, 4), "channels": 1}
    return Batches(IMAGES, LABELS, 4, **(sizes | options))


def test_plain():
    """Images as they are, targets that sum to one."""
    for step in (0, 3, 7):  # step 3 crosses the end of the first epoch
        batch = batches(smoothing=0.1)(step)
        chosen = batch_indices(50, 16, 0, step)
        np.testing.assert_array_equal(batch["images"], IMAGES[chosen])
        np.testing.assert_array_equal(batch["targets"].argmax(1), LABELS[chosen])
        np.testing.assert_allclose(batch["targets"].sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"augmentation": Augmentation(0.3, 2, True, 0.2)},
        {"objective": "mean-color"},
        {"objective": "downsampled", "augmentation": Augmentation(flip=True)},
        {"objective": "pixels", "corrupt": 0.25},
        {"image_size": (16, 24), "channels": 3},
    ],
)
def test_a_step_can_be_asked_for_again(options):
    """In any order, by anybody: the seed and the step decide, to the bit."""
    one, other, another = batches(**options), batches(**options), batches(seed=1, **options)
    first = {step: one(step) for step in (0, 3, 5)}
    for step in (5, 3, 0):
        again = other(step)
        assert again.keys() == first[step].keys()
        for name, array in again.items():
            np.testing.assert_array_equal(array, first[step][name])
            assert len(array) == 16
    assert any((another(0)[n] != a).any() for n, a in first[0].items() if n != "labels")


def test_an_image_is_augmented_anew_in_every_epoch():
    """The same image of two epochs: two pictures; at two batch sizes in one epoch: the same."""
    how = {"augmentation": Augmentation(crop_area=0.3, shift=2)}
    seen = {}
    for size in (16, 10):
        make = batches(batch_size=size, **how)
        for step in range(100 // size):
            positions = np.arange(step * size, (step + 1) * size)
            chosen = batch_indices(50, size, 0, step)
            for place, i, image in zip(positions, chosen, make(step)["images"], strict=True):
                seen.setdefault((place // 50, i), []).append(image)
    assert all((a == b).all() for a, b in (v for v in seen.values() if len(v) == 2))
    assert any((seen[0, i][0] != seen[1, i][0]).any() for i in range(20) if (1, i) in seen)


def test_masked():
    """Half of the four patches of every image; labels of the image that the model sees."""
    batch = batches(objective="mean-color", augmentation=Augmentation(flip=True))(2)
    assert batch["corrupted"].sum(1).tolist() == 16 * [2]
    np.testing.assert_array_equal(batch["labels"], masking.color_labels(batch["images"], 4))
    assert "labels" not in batches(objective="pixels")(0)
