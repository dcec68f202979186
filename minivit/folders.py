"""A folder of pictures as a data set: one sub-folder a class, its name the class's name."""

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .images import EXTENSIONS, ImageError, read_at

THREADS = 4  # Pillow lets go of Python's lock while it decodes
TEST_FOLDERS = ("test", "val", "validation")
TEST_SHARE = 0.1  # of each class, where there is no such folder


def visible(folder, wanted):  # -> sorted paths
    """What is in a folder, without hidden things and what macOS leaves in archives."""
    names = (p for p in folder.iterdir() if not p.name.startswith((".", "__MACOSX")))
    return sorted((p for p in names if wanted(p)), key=lambda p: p.name)


def class_folders(root):  # -> folders, sorted as text
    """One folder a class. Every fault names the folder and what was expected there."""
    expected = f"expected {root}/CLASS/PICTURE, at least two classes"
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; {expected}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; {expected}")
    folders = visible(root, Path.is_dir)
    if not folders:
        loose = any(p.suffix.lower() in EXTENSIONS for p in root.iterdir())
        what = "pictures but no folders of classes" if loose else "no folders of classes"
        raise ValueError(f"{root} holds {what}; {expected}")
    return folders


def pictures(folder):  # -> paths of one class, how many other files there are
    """Pictures by their names, also in folders below."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    inside = [p for p in files if not any(n.startswith(".") for n in p.relative_to(folder).parts)]
    chosen = [p for p in inside if p.suffix.lower() in EXTENSIONS]
    if not chosen:
        known = " ".join(sorted(EXTENSIONS))
        raise ValueError(f"class folder {folder} holds no picture ({known}); fill it or remove it")
    return chosen, len(inside) - len(chosen)


def listing(root):  # -> class names, [(path, label)]
    """All pictures below the folders of classes."""
    names, examples, others = [], [], 0
    for label, folder in enumerate(class_folders(root)):
        chosen, skipped = pictures(folder)
        # In a plain locale the bytes of other letters arrive as placeholders.
        names.append(os.fsencode(folder.name).decode("utf-8", errors="replace"))
        examples += [(path, label) for path in chosen]
        others += skipped
    if others:
        warnings.warn(f"{root}: {others} files that are no pictures are passed over", stacklevel=4)
    return tuple(names), examples


def split(examples, seed):  # -> training examples, test examples
    """A seeded tenth of each class to test on, at least one picture, and never its last."""
    rng, train, test = np.random.default_rng(seed), [], []
    for label in sorted({label for _, label in examples}):
        of_class = [example for example in examples if example[1] == label]
        if len(of_class) < 2:
            raise ValueError(
                f"class folder {of_class[0][0].parent} holds one picture; with no folder "
                f"{' or '.join(TEST_FOLDERS)} each class needs two, one of them to test on"
            )
        count = max(1, round(TEST_SHARE * len(of_class)))
        held = set(rng.permutation(len(of_class))[:count].tolist())
        for i, example in enumerate(of_class):
            (test if i in held else train).append(example)
    return train, test


def decode(examples, size, channels, strict):  # -> uint8 [B, height, width, C], labels [B]
    """All pictures at one size, the middle of each in the target's proportions.

    Broken ones are left out, and named in one warning; with `strict` they are an error.
    """

    def attempt(example):
        try:
            return read_at(example[0], size, channels, crop=1), example[1]
        except ImageError as error:
            return str(error), None

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(attempt, examples))
    broken = [image for image, label in results if label is None]
    if broken:
        text = f"{len(broken)} of {len(examples)} pictures: {'; '.join(broken[:5])}"
        text += f"; and {len(broken) - 5} more" if len(broken) > 5 else ""
        if strict or len(broken) == len(examples):
            raise ValueError(text)
        warnings.warn(f"left out {text}", stacklevel=4)
    whole = [result for result in results if result[1] is not None]
    labels = np.array([label for _, label in whole], np.int32)
    return np.stack([image for image, _ in whole]), labels


def load(path, *, size, channels=3, seed=0, strict=False):
    # -> class names, training images and labels, test images and labels
    """Pictures in PATH/train/CLASS and PATH/test/CLASS (or val), or in PATH/CLASS alone."""
    root = Path(path)
    train_root = root / "train"
    if train_root.is_dir():
        names, train = listing(train_root)
        tests = [root / name for name in TEST_FOLDERS if (root / name).is_dir()]
        if tests:
            test_names, test = listing(tests[0])
            if test_names != names:
                odd = sorted(set(names) ^ set(test_names))
                raise ValueError(
                    f"{train_root} and {tests[0]} have different classes; only one of them has "
                    f"{', '.join(odd[:10])}"
                )
        else:
            train, test = split(train, seed)
    else:
        names, train = listing(root)
        train, test = split(train, seed)
    options = {"size": size, "channels": channels, "strict": strict}
    return names, *decode(train, **options), *decode(test, **options)
