"""Image data: shipped sets, and the order in which training sees them."""

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from . import folders, synthetic

FASHION_CLASSES = "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot".split()
# Each use of a seed draws from a stream of its own: [seed, purpose, ...].
WEIGHTS, ORDER, DROPOUT, AUGMENTATION, CORRUPTION, SPLIT, LOOK, TEST = range(1, 9)
REMEDY = (
    "clone the repository, whose data/ folder holds it, or set MINIVIT_DATA to a folder that "
    "contains fashion-mnist/ with the four .gz files (Debian package dataset-fashion-mnist)"
)


# Number of classes: archive, its MD5, and in it the training files, the test file, the names.
CIFAR = {
    10: (
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)],
        "cifar-10-batches-bin/test_batch.bin",
        "cifar-10-batches-bin/batches.meta.txt",
    ),
    100: (
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        ["cifar-100-binary/train.bin"],
        "cifar-100-binary/test.bin",
        "cifar-100-binary/fine_label_names.txt",
    ),
}


@dataclass(frozen=True)
class Dataset:
    """Images uint8 [B, height, width, C] and integer labels [B], split for training and test."""

    name: str
    classes: tuple[str, ...]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(name, **options):  # -> Dataset
    """A data set by name; labels and size of "shapes" are options of `synthetic.shapes`.

    - fashion-mnist: 60,000 training and 10,000 test images, 28x28, grey, 10 classes
    - shapes, or shapes:color and so on: 20,000 and 4,000, drawn here, 32x32, in colour
    - folder:PATH: the user's own pictures (`folders.load`), whose options are `size` (height,
      width), `channels`, `seed` and `strict`
    - cifar-10, cifar-100: 50,000 and 10,000, 32x32, in colour, from the user's own archive
    """
    kind, _, labels = name.partition(":")
    if kind == "folder" and labels:
        dataset = Dataset(name, *folders.load(labels, **options))
        check(dataset)
        return dataset
    if kind not in LOADERS or (labels and kind != "shapes"):
        names = ", ".join(LOADERS)
        raise ValueError(f"unknown data set {name!r}; choose one of {names}, or folder:PATH")
    dataset = LOADERS[kind](**({"labels": labels} if labels else {}), **options)
    check(dataset)
    return dataset


def load_at(name, size, **options):  # -> Dataset
    """A data set for a model: a folder's pictures are decoded at its size, all others have theirs.

    `options` are those of `folders.load`.
    """
    return load(name, size=size, **options) if name.startswith("folder:") else load(name)


def fashion_mnist():
    """Zalando's 70,000 pictures of clothes (arXiv 1708.07747)."""
    folder = find("fashion-mnist")
    arrays = []
    for part, examples in (("train", 60_000), ("t10k", 10_000)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", (examples, 28, 28))
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", (examples,)).astype(np.int32)
        arrays += [images[..., None], labels]
    return Dataset("fashion-mnist", tuple(FASHION_CLASSES), *arrays)


def cifar(classes):  # 10 or 100 -> Dataset
    """CIFAR from its binary archive, which no pickle can hide in; the checksum is the official one.

    A record is one label (for 100 classes two, coarse and fine), then 3 planes of 32x32 bytes.
    """
    name, checksum, train, test, names = CIFAR[classes]
    members = read_archive(name, checksum, [*train, test, names])
    parts = []
    for files in (train, [test]):
        records = np.frombuffer(b"".join(members[file] for file in files), np.uint8)
        records = records.reshape(-1, (2 if classes == 100 else 1) + 3072)
        pixels = records[:, -3072:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts += [np.ascontiguousarray(pixels), records[:, -3073].astype(np.int32)]
    return Dataset(f"cifar-{classes}", tuple(members[names].decode().split()), *parts)


def read_archive(name, checksum, members):  # -> {member: bytes}
    """Members of a .tar.gz in MINIVIT_DATA or data/; nothing is unpacked onto the disk."""
    path = next((place for place in places(name) if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{name} is not in {places(name)[0].parent}; get it from "
            "https://www.cs.toronto.edu/~kriz/cifar.html, as it is, or point MINIVIT_DATA to it"
        )
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != checksum:
        raise ValueError(f"{path} has MD5 {found}, not {checksum}; get it again")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {m: archive.extractfile(m).read() for m in members}


def shapes(**options):
    """The drawn set; options: `labels`, `size`, `train`, `test`, `seed` of `synthetic.shapes`."""
    return Dataset("shapes", *synthetic.shapes(**options))


LOADERS = {
    "fashion-mnist": fashion_mnist,
    "shapes": shapes,
    "cifar-10": partial(cifar, 10),
    "cifar-100": partial(cifar, 100),
}


def places(name):  # -> where a file or folder of that name may be
    """In MINIVIT_DATA if that is set, else in the clone's data/ or in ./data/."""
    if root := os.environ.get("MINIVIT_DATA"):
        return [Path(root) / name]
    return [Path(__file__).resolve().parent.parent / "data" / name, Path("data") / name]


def find(name):  # -> folder
    """The folder of a shipped set."""
    for place in places(name):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"data set {name} is not in {places(name)[0]}; {REMEDY}")


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


def batch_positions(examples, batch_size, step):  # -> epoch [batch_size], place in it [batch_size]
    """The epochs are laid end to end and cut into batches; the step's number alone decides."""
    return np.divmod(np.arange(step * batch_size, (step + 1) * batch_size), examples)


def batch_indices(examples, batch_size, seed, step):  # -> [batch_size]
    """Which examples step `step` trains on; none is left out at an epoch's end."""
    epochs, places = batch_positions(examples, batch_size, step)
    indices = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        indices[inside] = epoch_order(examples, seed, int(epoch))[places[inside]]
    return indices


def few(dataset, per_class, seed):  # -> Dataset
    """The same, but for training only `per_class` examples of every class, drawn at random."""
    chosen = draw_shots(dataset.train_labels, len(dataset.classes), per_class, seed)
    return replace(
        dataset,
        train_images=dataset.train_images[chosen],
        train_labels=dataset.train_labels[chosen],
    )


def draw_shots(labels, classes, per_class, seed):  # -> [classes * per_class] distinct indices
    """So many examples of every class, in the order of the classes; FEW-05: never fewer."""
    rng = np.random.default_rng([seed, SPLIT])
    chosen = []
    for label in range(classes):
        places = np.flatnonzero(labels == label)
        if len(places) < per_class:
            raise ValueError(
                f"class {label} has {len(places)} training images, {per_class} a class are asked "
                "for; ask for fewer"
            )
        chosen.append(rng.permutation(places)[:per_class])
    return np.concatenate(chosen)


def hold_out(dataset, share, seed):  # -> Dataset without them, held-out images, held-out labels
    """Set a share of the training images aside for validation, drawn at random, at least one."""
    order = np.random.default_rng([seed, SPLIT, 1]).permutation(len(dataset.train_images))
    count = max(1, round(share * len(order)))
    if count >= len(order):
        raise ValueError(f"a validation share of {share} leaves nothing of {len(order)} images")
    held, rest = np.sort(order[:count]), np.sort(order[count:])
    images, labels = dataset.train_images, dataset.train_labels
    smaller = replace(dataset, train_images=images[rest], train_labels=labels[rest])
    return smaller, images[held], labels[held]
