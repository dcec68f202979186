"""A folder of pictures as a data set: one sub-folder per class, its name the class's name."""

import hashlib
import itertools
import json
import os
import unicodedata
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .command import counted, literal
from .images import EXTENSIONS, ImageError, endings, hidden, identity, inside, read_at
from .machine import check_memory, cores
from .progress import progress

# Usual names of the parts, in any case; where there are both test and val, test is used.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation"), "val")
TEST_SHARE = 0.1  # of each class, where there is no such folder
PARTS = ("train", "test")


class Example(NamedTuple):
    """A picture: its path, its class, and CLASS/FILE, its name wherever the folder is."""

    path: Path
    label: int
    name: str = ""


def normal(name):
    """A name in one Unicode form: macOS writes letters with accents as two characters."""
    return unicodedata.normalize("NFC", name)


def text(path):
    """A name as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace").replace(os.sep, "/")


def visible(folder):  # -> sorted folders
    """The folders in a folder, without hidden ones."""
    inner = (p for p in folder.iterdir() if not hidden(p.name) and p.is_dir())
    return sorted(inner, key=lambda p: (normal(text(p.name)), p.name))


def shorten(names, most=8):
    """Some names of many, in one line."""
    names = [literal(name) for name in names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" * (len(names) > most))


def sketch(root):
    """What a folder holds, to compare with what was expected."""
    return shorten(
        f"{folder.name}/{{{shorten((p.name for p in visible(folder)), 4)}}}"
        for folder in visible(root)
    )


def class_folders(root):  # -> folders, sorted as text
    """One folder per class. Every error names the folder and what was expected there."""
    expected = f"expected {literal(root)}/CLASS/PICTURE, at least two classes"
    if not root.exists():
        raise FileNotFoundError(f"{literal(root)} does not exist; {expected}")
    if not root.is_dir():
        raise NotADirectoryError(f"{literal(root)} is a file; {expected}")
    folders = visible(root)
    if not folders:
        loose = any(p.suffix.lower() in EXTENSIONS for p in root.iterdir())
        what = "pictures but no folders of classes" if loose else "no folders of classes"
        raise ValueError(f"{literal(root)} holds {what}; {expected}")
    return folders


def layout(root):  # -> folder of training classes, of test classes or None
    """A folder is divided into parts if train/, by any of its usual names, holds folders."""
    folders = class_folders(root)
    parts = defaultdict(list)
    for folder in folders:
        parts[SPLITS.get(folder.name.casefold())].append(folder)
    others = parts.pop(None, [])
    if not any(visible(folder) for folder in parts["train"]):  # or else it is a class of that name
        if others:
            return root, None
        raise ValueError(
            f"{literal(root)} has no folder train with folders of classes in it: {sketch(root)}; "
            "expected train/CLASS/PICTURE beside test/CLASS/PICTURE, or CLASS/PICTURE alone"
        )
    for same in parts.values():
        if len(same) > 1:
            raise ValueError(
                f"{literal(root)} holds {shorten(p.name for p in same)}, which mean the same part; "
                "put them together, or move one away"
            )
    if parts["test"] and parts["val"]:
        others += parts.pop("val")
    if others:
        warnings.warn(
            f"{literal(root)}: {shorten(p.name for p in others)} beside the parts "
            f"{shorten(p.name for p in folders if p not in others)} is not read",
            stacklevel=4,
        )
    test = parts["test"] or parts.get("val")
    return parts["train"][0], test[0] if test else None


def class_names(folders):  # -> names
    """Names that survive copying to another system; a warning for those that look alike."""
    names = [text(folder.name) for folder in folders]
    if len({normal(name) for name in names}) == len(names):
        names = [normal(name) for name in names]
    alike = defaultdict(list)
    for name in names:
        alike[normal(name).casefold()].append(name)
    for same in alike.values():
        if len(same) > 1:
            warnings.warn(
                f"{literal(folders[0].parent)}: the classes {shorten(map(ascii, same))} differ "
                "only in case or in their Unicode form; they are taken to be different",
                stacklevel=5,
            )
    return tuple(names)


def one_each(paths):  # -> paths without links to others of them
    """Each file once, under its own name rather than a link's."""
    links_first = sorted(paths, key=Path.is_symlink)[::-1]
    return list({identity(path): path for path in links_first}.values())


def check_class(root, folder, chosen, others):
    """Refuse a class folder that holds no picture itself."""
    if not chosen:
        rest = f" ({endings(others)})" if others else ""
        raise ValueError(
            f"class folder {literal(folder)} holds no picture that Pillow reads{rest}; "
            "fill it or remove it"
        )
    if all(path.parent != folder for path in chosen):
        raise ValueError(
            f"class folder {literal(folder)} holds folders and no picture itself; {literal(root)} "
            f"holds {sketch(root)}; expected CLASS/PICTURE, or train/CLASS/PICTURE beside "
            "test/CLASS/PICTURE"
        )


def listing(root, strict=False):  # -> class names, [Example]
    """All pictures below the folders of classes, sorted by name."""
    folders, examples, others = class_folders(root), [], []
    names = class_names(folders)
    broken = [p for p in root.iterdir() if not (hidden(p.name) or p.exists())]
    look = progress(zip(names, folders, strict=True), "looking", total=len(names), unit="class")
    for label, (name, folder) in enumerate(look):
        chosen, skipped, lost = inside(folder)
        check_class(root, folder, chosen, skipped)
        of_class = [
            Example(path, label, f"{name}/{normal(text(path.relative_to(folder)))}")
            for path in one_each(chosen)
        ]
        examples += sorted(of_class, key=lambda example: example.name)
        others += skipped
        broken += lost
    if others:
        what = counted(len(others), "file that is no picture is", "files that are no pictures are")
        warnings.warn(f"{literal(root)}: {what} passed over: {endings(others)}", stacklevel=4)
    if broken:
        told = f"{counted(len(broken), 'link')} to nothing: {shorten(broken, 5)}"
        if strict:
            raise ValueError(f"{told}; mend or remove them")
        warnings.warn(f"{told}; passed over", stacklevel=4)
    return names, examples


def split(examples):  # -> training examples, test examples
    """A tenth of each class to test on, but at least one picture and never all of them.

    They are those whose names have the smallest hashes. So the split is the same in every run,
    place and system, and one more picture replaces at most one of them. Examples of a class must
    follow each other.
    """
    train, test = [], []
    for _, of_class in itertools.groupby(examples, lambda example: example.label):
        of_class = list(of_class)
        if len(of_class) < 2:
            raise ValueError(
                f"class folder {literal(of_class[0].path.parent)} holds one picture; with no "
                "folder test or val each class needs two, one of them to test on"
            )
        count = max(1, round(TEST_SHARE * len(of_class)))
        by_hash = sorted(of_class, key=lambda e: hashlib.sha256(e.name.encode()).digest())
        held = set(by_hash[:count])
        test += [example for example in of_class if example in held]
        train += [example for example in of_class if example not in held]
    return train, test


def match(train_root, names, test_root, test_names, test):  # -> test examples
    """The test part under the labels of the training part; a class may be absent in it."""
    if extra := [name for name in test_names if name not in names]:
        raise ValueError(
            f"{literal(train_root)} and {literal(test_root)} have different classes; only one of "
            f"them has {shorten(extra)}: the folder to test on"
        )
    if absent := [name for name in names if name not in test_names]:
        warnings.warn(
            f"{literal(test_root)} has no {shorten(absent)}: those classes are not tested",
            stacklevel=4,
        )
    labels = [names.index(name) for name in test_names]
    return [example._replace(label=labels[example.label]) for example in test]


def tell_shared(parts, names):
    """Warn of files that are in two classes, or in training and test."""
    places = defaultdict(list)
    for part, examples in parts.items():
        for example in examples:
            places[identity(example.path)].append((part, example))
    shared = [where for where in places.values() if len(where) > 1]
    if shared:
        told = shorten((" = ".join(f"{part} {e.name}" for part, e in w) for w in shared), 3)
        what = counted(len(shared), "file is", "files are")
        warnings.warn(f"{what} in two classes, or in training and test: {told}", stacklevel=3)


def decode(examples, names, size, channels, strict):
    # -> uint8 [B, height, width, C], labels [B], SHA-256 of all files
    """The centre of each picture at one size; `names` are those of the classes.

    Broken pictures are left out with one warning, or are an error with `strict`. A class of which
    none is left is always an error.
    """
    count = len(examples)
    images = np.empty((count, *size, channels), np.uint8)

    def attempt(i):  # -> digest, or the fault
        try:
            images[i] = read_at(examples[i].path, size, channels, crop=1)
            with open(examples[i].path, "rb") as file:
                return hashlib.file_digest(file, "sha256").digest()
        except (ImageError, OSError) as error:
            return str(error)

    with ThreadPoolExecutor(cores()) as pool, warnings.catch_warnings():
        # Pillow warns of damage beside the pixels; filtered here, since threads share the filters.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        results = list(progress(pool.map(attempt, range(count)), "decoding", total=count))
    whole = [i for i, result in enumerate(results) if isinstance(result, bytes)]
    if len(whole) < count:
        leave_out([r for r in results if isinstance(r, str)], count, strict)
        for i, j in enumerate(whole):
            images[i] = images[j]
    labels = np.array([examples[i].label for i in whole], np.int32)
    if lost := sorted({e.label for e in examples} - set(labels.tolist())):
        raise ValueError(
            f"no picture of {shorten(names[label] for label in lost)} can be read; "
            "mend one of each, or remove the class"
        )
    contents = hashlib.sha256(b"".join(results[i] for i in whole)).hexdigest()
    return images[: len(whole)], labels, contents


def leave_out(faults, count, strict):
    """Warn of broken pictures, or refuse to go on without them."""
    told = f"{len(faults)} of {counted(count, 'picture')}: {'; '.join(faults[:5])}"
    told += f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
    if strict or len(faults) == count:
        raise ValueError(told)
    warnings.warn(f"left out {told}", stacklevel=5)


def record(examples, names, contents):  # -> {"pictures", "names", "contents"}
    """What identifies a part: pictures per class, digests of names and of files."""
    counts = Counter(example.label for example in examples)
    lines = json.dumps([example.name for example in examples])
    return {
        "pictures": {name: counts[label] for label, name in enumerate(names)},
        "names": hashlib.sha256(lines.encode()).hexdigest(),
        "contents": contents,
    }


def load(path, *, size, channels=3, strict=False, parts=PARTS):
    # -> class names, training images and labels, test images and labels, {part: record}
    """Pictures in PATH/train/CLASS and PATH/test/CLASS (or val), or in PATH/CLASS alone.

    Parts that are not asked for are empty, and not decoded.
    """
    if not str(path).strip():
        raise ValueError("folder: is without a path; write folder:PATH")
    root = Path(os.path.expanduser(path))
    train_root, test_root = layout(root)
    names, train = listing(train_root, strict)
    if test_root:
        test_names, test = listing(test_root, strict)
        test = match(train_root, names, test_root, test_names, test)
    else:
        train, test = split(train)
    examples = {"train": train, "test": test}
    tell_shared(examples, names)
    count, (height, width) = sum(len(examples[part]) for part in parts), size
    what = f"{counted(count, 'picture')} of {height}x{width} pixels"
    check_memory(count * height * width * channels, what)
    arrays, records = [], {}
    for part in PARTS:
        decoded = (np.empty((0, *size, channels), np.uint8), np.empty(0, np.int32), "")
        if part in parts:
            decoded = decode(examples[part], names, size, channels, strict)
        arrays += decoded[:2]
        records[part] = record(examples[part], names, decoded[2])
    return names, *arrays, records
