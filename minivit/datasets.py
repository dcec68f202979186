"""Image data: shipped sets, and the order in which training sees them."""

import hashlib
import os
import tarfile
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from PIL import Image

from . import folders, synthetic
from .command import counted, literal
from .machine import check_memory

FASHION_CLASSES = "T-shirt Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Boot".split()
# Each use of a seed draws from a stream of its own: [seed, purpose, ...].
WEIGHTS, ORDER, DROPOUT, AUGMENTATION, CORRUPTION, SPLIT, LOOK, TEST = range(1, 9)
DRAWN = synthetic.DRAWN  # the ninth
PARTS = folders.PARTS  # "train", "test"
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
    """Images uint8 [B, height, width, C] and integer labels [B], split for training and test.

    `parts` says what "train" and "test" are, wherever the data lies: digests, numbers of pictures.
    """

    name: str
    classes: tuple[str, ...]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    parts: dict = field(default_factory=dict)

    def identity(self):  # -> dict for JSON
        """What makes it this data set: its kind, its classes, its parts, but not where it lies."""
        kind = self.name.partition(":")[0]
        return {"kind": kind, "classes": list(self.classes), "parts": self.parts}


def check_identity(then, dataset, what):
    """Refuse a data set other than that of `what` (a run, a file), whose identity was `then`.

    Contents are compared where both have been read.
    """
    try:
        differs = difference(then, dataset.identity())
    except (TypeError, KeyError, AttributeError):  # it comes from a file that people can edit
        differs = "its record of the data cannot be read"
    if differs:
        raise ValueError(f"{literal(dataset.name)} is not the data set of {what}: {differs}")


def difference(then, now):  # two identities -> text, or None
    """The first thing in which two data sets differ."""
    if then["kind"] != now["kind"]:
        return f"{literal(now['kind'])} now, {literal(then['kind'])} then"
    if then["classes"] != now["classes"]:
        count, before = len(now["classes"]), len(then["classes"])
        told = compare_classes(now["classes"], then["classes"], "now", "then")
        return f"{counted(count, 'class', 'classes')} now, {before} then; {told}"
    for part in sorted(then["parts"].keys() & now["parts"].keys(), reverse=True):
        old, new = then["parts"][part], now["parts"][part]
        for name, number in new.get("pictures", {}).items():
            if number != (before := old.get("pictures", {}).get(name)):
                return f"{literal(name)} has {number} {part} images now, {before} then"
        if old.get("names") != new.get("names"):
            return f"other names of {part} images"
        if all(p.get("contents") for p in (old, new)) and old["contents"] != new["contents"]:
            return f"the {part} images have the same names and other contents"
    return None


def compare_classes(ours, theirs, us, them):  # -> text
    """The names that only one of two lists of classes has, or else that their order differs."""
    told = []
    for names, others, who in ((ours, theirs, us), (theirs, ours, them)):
        if only := list((Counter(names) - Counter(others)).keys()):
            told.append(f"only {who}: {folders.shorten(only)}")
    return "; ".join(told) or "in another order"


def aligned(dataset, class_names, source):  # -> Dataset
    """The same images, labelled by the order of classes that `source` (a checkpoint) has.

    Classes are matched by name; the names on both sides must be the same.
    """
    names = [folders.normal(name) for name in class_names]
    ours = [folders.normal(name) for name in dataset.classes]
    if names == ours:
        return dataset
    if sorted(names) != sorted(ours) or len({*names}) < len(names):
        told = compare_classes(ours, names, dataset.name, source)
        counts = [counted(len(n), "class", "classes") for n in (names, ours)]
        raise ValueError(
            f"{source} knows {counts[0]}, {literal(dataset.name)} has {counts[1]}; {told}"
        )
    order = np.array([names.index(name) for name in ours], np.int32)
    labels = {f"{part}_labels": order[getattr(dataset, f"{part}_labels")] for part in PARTS}
    return replace(dataset, classes=tuple(class_names), **labels)


def load(name, *, parts=PARTS, **options):  # -> Dataset
    """A data set by name; a part that is not asked for is left empty where that saves time.

    - fashion-mnist: 60,000 training and 10,000 test images, 28x28, grey, 10 classes
    - shapes, or shapes:color and so on: 20,000 and 4,000, drawn here, 32x32, in colour; `labels`,
      `size` and others are options of `synthetic.shapes`
    - folder:PATH: the user's own pictures (`folders.load`), whose options are `size` (height,
      width), `channels` and `strict`
    - cifar-10, cifar-100: 50,000 and 10,000, 32x32, in colour, from the user's own archive
    """
    kind, colon, labels = name.partition(":")
    if kind == "folder" and colon:
        dataset = Dataset(name, *folders.load(labels, parts=parts, **options))
    elif kind not in LOADERS or (colon and (kind != "shapes" or not labels)):
        names = ", ".join(LOADERS)
        raise ValueError(
            f"unknown data set {literal(name)!r}; choose one of {names}, or folder:PATH"
        )
    else:
        dataset = LOADERS[kind](**({"labels": labels} if labels else {}), parts=parts, **options)
    check(dataset, parts)
    return dataset


def load_at(name, size, *, parts=PARTS, channels=3, strict=False, **options):  # -> Dataset
    """A data set for a model: a folder's pictures are decoded at its size, all others have theirs.

    `channels` and `strict` are for folders too; other options are those of the data set.
    """
    if name.startswith("folder:"):
        options |= {"size": size, "channels": channels, "strict": strict}
    return load(name, parts=parts, **options)


def fashion_mnist(parts=PARTS):
    """Zalando's 70,000 pictures of clothes (arXiv 1708.07747)."""
    folder, arrays, records = find("fashion-mnist"), [], {}
    for part, stem, examples in (("train", "train", 60_000), ("test", "t10k", 10_000)):
        files = [folder / f"{stem}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
        if part not in parts:
            arrays += [np.empty((0, 28, 28, 1), np.uint8), np.empty(0, np.int32)]
            continue
        images, labels = read_idx(files[0], (examples, 28, 28)), read_idx(files[1], (examples,))
        arrays += [images[..., None], labels.astype(np.int32)]
        records[part] = {"contents": " ".join(map(stored_crc, files))}
    return Dataset("fashion-mnist", tuple(FASHION_CLASSES), *arrays, records)


def stored_crc(path):  # -> text
    """The CRC-32 of what a gzip file holds, with which it ends; compressing it anew keeps it."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        return file.read(4).hex()


def cifar(classes, parts=PARTS):  # 10 or 100 -> Dataset
    """CIFAR from its binary archive, which can hold no pickle; the checksum is the official one.

    A record is one label (for 100 classes two, coarse and fine), then 3 planes of 32x32 bytes.
    """
    name, checksum, train, test, names = CIFAR[classes]
    members, arrays = read_archive(name, checksum, [*train, test, names]), []
    for files in (train, [test]):
        records = np.frombuffer(b"".join(members[file] for file in files), np.uint8)
        length = (2 if classes == 100 else 1) + 3072
        if records.size % length:
            raise ValueError(f"{name}: {files[0]} is not a whole number of images; get it again")
        records = records.reshape(-1, length)
        pixels = records[:, -3072:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays += [np.ascontiguousarray(pixels), records[:, -3073].astype(np.int32)]
    labels = tuple(members[names].decode(errors="replace").split())
    record = {"contents": checksum}
    return Dataset(f"cifar-{classes}", labels, *arrays, {"train": record, "test": record})


def read_archive(name, checksum, members):  # -> {member: bytes}
    """Members of a .tar.gz in MINIVIT_DATA or data/; nothing is unpacked onto the disk."""
    path = next((place for place in places(name) if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{name} is not in {places(name)[0].parent}; get it from "
            "https://www.cs.toronto.edu/~kriz/cifar.html, as it is, or point MINIVIT_DATA to it"
        )
    with open(path, "rb") as file:
        kind = partial(hashlib.md5, usedforsecurity=False)
        found = hashlib.file_digest(file, kind).hexdigest()
        if found != checksum:
            raise ValueError(f"{path} has MD5 {found}, not {checksum}; get it again")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file) as archive:
                return {m: archive.extractfile(m).read() for m in members}
        except (tarfile.TarError, KeyError, AttributeError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); get it again") from None


def shapes(parts=PARTS, **options):
    """The drawn set; options: `labels`, `size`, `train`, `test`, `seed` of `synthetic.shapes`."""
    return Dataset("shapes", *synthetic.shapes(parts=parts, **options))


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
    # No more than twice what it should hold is unpacked: a foreign file may hold anything.
    most = 2 * int(np.prod(shape)) + 1024
    try:
        if path.stat().st_size > most:
            raise ValueError(f"{path} holds {path.stat().st_size:,} bytes, too many; {REMEDY}")
        unpack = zlib.decompressobj(wbits=31)  # gzip with its header and checksum
        content = unpack.decompress(path.read_bytes(), most)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {REMEDY}") from None
    except zlib.error as error:
        raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from None
    if not unpack.eof and len(content) < most:
        raise ValueError(f"{path} is damaged (it ends too early); {REMEDY}")
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


def check(dataset, parts=PARTS):
    """Refuse empty data, and labels that are not classes, before any work starts."""
    classes = len(dataset.classes)
    if classes < 2:
        what = counted(classes, "class", "classes")
        raise ValueError(f"{dataset.name} has {what}; a classifier needs two or more")
    for part in parts:
        images = getattr(dataset, f"{part}_images")
        labels = getattr(dataset, f"{part}_labels")
        if not len(images):
            raise ValueError(f"{dataset.name} has no {part} images")
        if len(images) != len(labels):
            raise ValueError(
                f"{dataset.name}: {counted(len(images), f'{part} image')}, "
                f"{counted(len(labels), 'label')}"
            )
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
    what = f"{counted(len(images), 'image')} of {height}x{width} pixels"
    check_memory(len(images) * height * width * images.shape[-1], what)
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
    chosen = draw_shots(dataset.train_labels, dataset.classes, per_class, seed)
    return replace(
        dataset,
        train_images=dataset.train_images[chosen],
        train_labels=dataset.train_labels[chosen],
    )


def draw_shots(labels, classes, per_class, seed):  # -> [classes * per_class] distinct indices
    """`per_class` examples of every class, in the order of the classes, never fewer.

    `classes` are their names, or how many there are.
    """
    if per_class < 1:
        raise ValueError(f"{per_class} images per class are asked for; ask for at least one")
    rng = np.random.default_rng([seed, SPLIT])
    chosen = []
    for label, name in enumerate(range(classes) if isinstance(classes, int) else classes):
        places = np.flatnonzero(labels == label)
        if len(places) < per_class:
            raise ValueError(
                f"class {literal(name)} has {counted(len(places), 'training image')}, {per_class} "
                "per class are asked for; ask for fewer"
            )
        chosen.append(rng.permutation(places)[:per_class])
    return np.concatenate(chosen)


def hold_out(dataset, share, seed):  # -> Dataset without them, held-out images, held-out labels
    """Set a share of the training images aside for validation, drawn at random, at least one."""
    if not 0 < share < 1:
        raise ValueError(f"a validation share of {share} must be above 0 and below 1")
    order = np.random.default_rng([seed, SPLIT, 1]).permutation(len(dataset.train_images))
    count = max(1, round(share * len(order)))
    if count >= len(order):
        what = counted(len(order), "image")
        raise ValueError(f"a validation share of {share} leaves nothing of {what}")
    held, rest = np.sort(order[:count]), np.sort(order[count:])
    images, labels = dataset.train_images, dataset.train_labels
    if lost := sorted({*labels.tolist()} - {*labels[rest].tolist()}):
        names = folders.shorten(dataset.classes[label] for label in lost)
        raise ValueError(
            f"a validation share of {share} leaves no training image of {names}; choose a smaller "
            "share, or have more images"
        )
    smaller = replace(dataset, train_images=images[rest], train_labels=labels[rest])
    return smaller, images[held], labels[held]
