"""Image data: shipped sets, and the order in which training sees them."""

import gzip
import os
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

FASHION_CLASSES = "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot".split()
# Each use of a seed draws from a stream of its own: [seed, purpose, ...].
WEIGHTS, ORDER, DROPOUT = 1, 2, 3
REMEDY = (
    "clone the repository, whose data/ folder holds it, or set MINIVIT_DATA to a folder that "
    "contains fashion-mnist/ with the four .gz files (Debian package dataset-fashion-mnist)"
)


@dataclass(frozen=True)
class Dataset:
    """Images uint8 [B, height, width, C] and integer labels [B], split for training and test."""

    name: str
    classes: tuple[str, ...]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(name):  # -> Dataset
    """A data set by name: "fashion-mnist", 60,000 training and 10,000 test images, 28x28 grey."""
    if name != "fashion-mnist":
        raise ValueError(f"unknown data set {name!r}; choose fashion-mnist")
    folder = find("fashion-mnist")
    arrays = []
    for part, examples in (("train", 60_000), ("t10k", 10_000)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", (examples, 28, 28))
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", (examples,)).astype(np.int32)
        arrays += [images[..., None], labels]
    dataset = Dataset(name, tuple(FASHION_CLASSES), *arrays)
    check(dataset)
    return dataset


def find(name):  # -> folder
    """The folder of a shipped set: in MINIVIT_DATA if that is set, else in the clone's data/."""
    if root := os.environ.get("MINIVIT_DATA"):
        places = [Path(root) / name]
    else:
        places = [Path(__file__).resolve().parent.parent / "data" / name, Path("data") / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"data set {name} is not in {places[0]}; {REMEDY}")


def read_idx(path, shape):  # -> uint8 array of that shape
    """Read a gzipped IDX file (the MNIST format) and check all that it says of itself."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {REMEDY}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from None
    # Two zero bytes, type 8 (unsigned byte), the number of axes; then each axis, big-endian.
    header = 4 * (1 + len(shape))
    magic = bytes([0, 0, 8, len(shape)])
    if content[:4] != magic:
        raise ValueError(f"{path} starts with {content[:4].hex()}, not {magic.hex()}; {REMEDY}")
    found = tuple(np.frombuffer(content[4:header], ">u4").tolist())
    if found != shape:
        raise ValueError(f"{path} says that it holds {found}, not {shape}; {REMEDY}")
    body = np.frombuffer(content, np.uint8, offset=header)
    if body.size != np.prod(shape):
        raise ValueError(f"{path} holds {body.size} bytes of data, not {np.prod(shape)}; {REMEDY}")
    return body.reshape(shape)


def check(dataset):
    """Refuse empty data, and labels that are not classes, before any work starts."""
    classes = len(dataset.classes)
    if classes < 2:
        raise ValueError(f"{dataset.name} has {classes} class; a classifier needs two or more")
    for part in ("train", "test"):
        images = getattr(dataset, f"{part}_images")
        labels = getattr(dataset, f"{part}_labels")
        if not len(images):
            raise ValueError(f"{dataset.name} has no {part} images")
        if len(images) != len(labels):
            raise ValueError(f"{dataset.name}: {len(images)} {part} images, {len(labels)} labels")
        if labels.min() < 0 or labels.max() >= classes:
            wrong = labels[(labels < 0) | (labels >= classes)][0]
            raise ValueError(f"{dataset.name}: {part} label {wrong} is outside 0 to {classes - 1}")


def normalise(images):  # uint8 [...] -> float32 [...] in [-1, 1]
    """What the official models see; works on NumPy and JAX arrays."""
    if images.dtype != "uint8":
        raise ValueError(f"pixels are {images.dtype}, not uint8; they are normalised already?")
    return images.astype("float32") / 127.5 - 1


def with_channels(images, channels):  # uint8 [..., C] -> uint8 [..., channels]
    """Grey images for a model of colour ones: the same value three times."""
    if images.shape[-1] == channels:
        return images
    if images.shape[-1] != 1:
        raise ValueError(f"images have {images.shape[-1]} channels, the model expects {channels}")
    return np.repeat(images, channels, axis=-1)


def resize(images, height, width):  # uint8 [B, h, w, C] -> uint8 [B, height, width, C]
    """Bilinear resize by Pillow, smoothed when shrinking; the same size comes back as it is."""
    if images.shape[1:3] == (height, width):
        return images
    resized = np.empty((len(images), height, width, images.shape[-1]), np.uint8)
    for source, target in zip(images, resized, strict=True):
        for channel in range(images.shape[-1]):
            picture = Image.fromarray(np.ascontiguousarray(source[..., channel]))
            target[..., channel] = picture.resize((width, height), Image.Resampling.BILINEAR)
    return resized


@lru_cache(maxsize=2)
def epoch_order(examples, seed, epoch):  # -> permutation of 0 ... examples - 1
    """The order of one epoch: another for every epoch, the same whenever it is asked for."""
    order = np.random.default_rng([seed, ORDER, epoch]).permutation(examples)
    order.setflags(write=False)  # it is shared by all who ask
    return order


def batch_indices(examples, batch_size, seed, step):  # -> [batch_size]
    """Which examples step `step` trains on.

    The epochs' orders are laid end to end and cut into batches: no example is left out at an
    epoch's end, and the step's number alone decides.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    indices = np.empty(batch_size, np.int64)
    for epoch in np.unique(positions // examples):
        inside = positions // examples == epoch
        indices[inside] = epoch_order(examples, seed, int(epoch))[positions[inside] % examples]
    return indices
