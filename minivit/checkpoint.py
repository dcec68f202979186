"""Read, write, inspect and convert checkpoints: `python -m minivit.checkpoint show FILE`.

The native format is the official one: an `.npz` file whose keys are the '/'-joined names of the
parameters. `dialects.py` knows how timm, Hugging Face and big_vision write the same weights, and
`archives.py` how arrays lie in files.
"""

import argparse
import json
import math
import os
import re
import warnings
from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.checkpoint: interrupted")

import numpy as np

from . import command, dialects, machine
from .architecture import check, check_finite, describe, token_grid
from .archives import (  # noqa: F401 - part of this module for those who read and write files
    SETTINGS,
    CheckpointError,
    blamed,
    opened,
    read_arrays,
    replacing,
    write,
    write_npz,
    write_safetensors,
)
from .foreign import check_numbers, listed
from .params import flatten, natural_order, unflatten
from .shapes import LONGEST_SIDE

# Endings that promise a format, and the dialects that are written in it.
ENDINGS = {".npz": "npz", ".safetensors": "safetensors"}
ENDINGS |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".h5", ".onnx", ".npy"), "another format")


# --- Parameters -------------------------------------------------------------------------------


def save(path, params, dialect="official", settings=None):  # -> Path
    """Write a tree of parameters; timm and Hugging Face dialects as `.safetensors`.

    The name is used as it is. The path is returned. `settings` are what names and shapes cannot
    tell: those of `VALID`. Those that the dialect does not expect anyhow are kept in one more
    entry, which other readers pass over. What cannot be read back is refused before anything is
    written.
    """
    flat = checked_leaves(params)
    torch = dialect in dialects.TABLES
    check_ending(path, "safetensors" if torch else "npz", dialect)
    arrays = dialects.from_official(flat, dialect)
    expected = dialects.EXPECTS.get(base(dialect), {})
    settings = {n: v for n, v in (settings or {}).items() if v is not None and v != expected.get(n)}
    settings |= {"heads": describe(flat)["heads"]} if torch else {}  # which its shapes cannot tell
    note = json.dumps(settings, sort_keys=True)
    if strange := settings.keys() - VALID.keys():
        raise ValueError(f"no setting of a checkpoint: {listed(sorted(strange))}")
    checked_settings(json.loads(note))
    if torch:
        return write_safetensors(path, arrays, note)
    return write_npz(path, arrays | ({SETTINGS: np.array(note)} if settings else {}))


def base(dialect):
    """The dialect by which its variants are read: of `big_vision-scan` `big_vision`."""
    return dialect.split("-")[0]


def checked_leaves(params):  # tree -> {name: array}
    """The leaves of a tree, if a file can hold them all and give them back."""

    def walk(tree):
        for name, branch in tree.items():
            if not isinstance(name, str) or "/" in name:
                raise ValueError(f"{name!r} cannot be a name in a checkpoint: text without a '/'")
            if isinstance(branch, dict):
                walk(branch)

    walk(params)
    flat = {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
    if SETTINGS in flat:
        raise ValueError(f"{SETTINGS} is minivit's own name; choose another")
    for name, array in flat.items():
        check_numbers(name, array.dtype)
    check_finite(flat)
    return flat


def check_ending(path, written, dialect):
    """Refuse a name that says another format than the dialect is written in."""
    ending = Path(path).suffix.lower()
    if ENDINGS.get(ending, written) != written:
        right = Path(path).with_suffix(f".{written}").name
        raise ValueError(f"{path}: {dialect} is written as .{written}, not {ending}; say {right}")


def load(path, *, heads=None, extra="error"):  # -> nested dictionaries of arrays
    """Parameters from a file of any dialect, under the official names.

    `heads` is needed only for a state dict of unusual width. Names that do not belong to a ViT are
    an error, or with `extra="warn"` a warning. A head of zeros is warned of: the original
    ImageNet-21k files have one, and predict every class alike.
    """
    return inspect(path, heads=heads, extra=extra)[0]


def inspect(path, *, heads=None, extra="error", head=True):  # -> parameters, description
    """Like `load`, and what the file is; `head` False says that its head will not be used.

    Names and shapes are checked before any array is read.
    """
    with opened(path) as (kinds, settings, read):
        with blamed(path, ": "):
            heads, hint = heads_of(settings, heads), settings.get("hint")
            ghosts = {name: np.broadcast_to(np.zeros((), k), s) for name, (s, k) in kinds.items()}
            official(ghosts, heads, extra, hint)
        arrays = {name: read(name) for name in kinds}
    with blamed(path, ": "):
        flat, dialect, surplus = official(arrays, heads, extra, hint)
        check_finite(flat)
        description = {"dialect": dialect} | describe(flat) | dialects.EXPECTS[dialect]
        description["pixels"] = dialects.pixels(arrays, dialect)
        told = checked_settings(settings)
        if "heads" in told and told["heads"] != description.get("heads"):
            raise ValueError(f"heads is {told['heads']} in its entry {SETTINGS}, not by its shapes")
        description |= told
        params = unflatten(flat)
        check_fit(params, description)
    if surplus:
        warnings.warn(command.literal(f"{path}: ignored: {listed(surplus, '; ')}"), stacklevel=3)
    if description["zero_head"] and head:
        warnings.warn(
            f"{path}: the head is all zero, so every class is equally likely; the original "
            "ImageNet-21k files are so, and are for fine-tuning",
            stacklevel=3,
        )
    return params, description


def heads_of(settings, heads):  # -> number, or None
    """What the user says, unless the file says otherwise."""
    checked_settings({n: v for n, v in settings.items() if n == "heads"})
    told = settings.get("heads")
    if heads is not None and heads < 1:
        raise ValueError(f"--heads is {heads}; it must be at least 1")
    if heads and told and heads != told:
        raise ValueError(f"--heads {heads}: it says {told} itself; leave --heads out")
    return heads or told


def official(arrays, heads, extra, hint):  # -> {official name: array}, dialect, names dropped
    """The arrays of a model, or an error that says what is not one."""
    dialect = dialects.recognise(arrays)
    flat = dialects.to_official(arrays, dialect, heads, extra, hint)
    flat = {name: squeeze(name, array) for name, array in flat.items()}
    return flat, dialect, check(flat, extra)


def pair_of_numbers(value):
    """A grid or an image size, with the limits of the command line."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(n) is int and 0 < n <= LONGEST_SIDE for n in value)
    )


def names(value):
    """A list of text."""
    return isinstance(value, list) and all(isinstance(n, str) for n in value)


# What the settings entry may hold, and what must be true of it.
VALID = {
    "grid": pair_of_numbers,
    "image_size": pair_of_numbers,
    "gelu_form": lambda v: v in ("tanh", "erf"),
    "epsilon": lambda v: type(v) in (int, float) and 0 < v < 1,
    "class_names": names,
    "data": lambda v: isinstance(v, dict) and names(v.get("classes", [])),
    "heads": lambda v: type(v) is int and v > 0,
    "pixels": lambda v: v == dialects.FOLDED,
}


def checked_settings(settings):  # -> those that minivit knows
    """The settings of a file; one that makes no sense is a fault of the file."""
    for name, valid in VALID.items():
        if name in settings and not valid(settings[name]):
            raise ValueError(f"{name} is {settings[name]!r:.80} in its entry {SETTINGS}")
    return {name: settings[name] for name in VALID if name in settings}


def check_fit(params, description):
    """What the settings say of positions and classes is what the arrays say."""
    rows, size, grid = (description.get(n) for n in ("positions", "image_size", "grid"))
    for name, given in {"grid": grid, "image_size": size and token_grid(params, size)}.items():
        if rows and given and math.prod(given) != rows - description["prefix_tokens"]:
            raise ValueError(
                f"{name} {description[name]} is of {math.prod(given)} patches, the position table "
                f"of {rows - description['prefix_tokens']}"
            )
    classes, known = description["classes"], description.get("class_names")
    if None not in (classes, known) and len(known) != classes:
        raise ValueError(f"class_names are {len(known)}, the classes of its head {classes}")


def squeeze(name, array):
    """Group norms of old hybrids and of BiT are stored as [1, 1, 1, C]."""
    norm = r"(^|/)(gn\w*/(scale|bias)|group_norm/(gamma|beta))$"
    if re.search(norm, name) and array.shape[:-1] == (1, 1, 1):
        return array.reshape(-1)
    return array


# --- Command line -----------------------------------------------------------------------------


def read(path, args):  # -> parameters, description
    """As every command reads a file."""
    from . import opening  # which reads through this module

    return opening.read(path, **opening.chosen(args))


def show(args):
    """What a file is, and a table of its arrays."""
    params, description = read(args.file, args)
    for name, value in description.items():
        print(command.literal(f"{name:<16}{value}"))
    flat = flatten(params)
    wide = max(map(len, flat)) + 2
    print(f"\n{'name':<{wide}}{'shape':<18}{'type':<10}norm")
    for name, array in flat.items():
        norm = np.linalg.norm(array.astype("float64"))
        shape = "x".join(map(str, array.shape))
        print(f"{name:<{wide}}{shape:<18}{array.dtype.name:<10}{norm:.6g}")


def convert(args):
    """Another dialect of the same weights."""
    target = os.path.expanduser(args.target)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; choose another name")
    if not Path(target).parent.is_dir():
        raise FileNotFoundError(f"{target}: there is no folder {Path(target).parent}")
    torch = args.to in dialects.TABLES
    check_ending(target, "safetensors" if torch else "npz", args.to)
    params, description = read(args.source, args)
    settings = {name: description.get(name) for name in VALID}
    settings["heads"] = None  # of the shapes, or of the dialect
    if settings["pixels"] != dialects.FOLDED:
        settings["pixels"] = None
    if settings["grid"] and len({*settings["grid"]}) == 1:
        settings["grid"] = None  # a square is what everybody expects
    save(target, params, args.to, settings)
    print(command.literal(f"{args.source} ({description['dialect']}) -> {target} ({args.to})"))
    if settings["pixels"] and torch:
        print(
            "ImageNet's mean and deviation are part of the patch embedding now: another library "
            "must scale pixels by mean 0.5 and deviation 0.5, not by its ImageNet defaults"
        )


def join_class_position(flat):
    """The class token and its position only ever act as a sum; big_vision stores that alone."""
    table, cls = "Transformer/posembed_input/pos_embedding", flat.get("cls")
    if cls is None or table not in flat:
        return flat
    prefix, positions = cls.shape[1], flat[table].copy()
    cls = cls + positions[:, :prefix]
    positions[:, :prefix] = 0
    return flat | {"cls": cls, table: positions}


def difference(args):  # -> exit status
    """Names and shapes that differ, and the largest difference of each array."""
    a, b = args.first, args.second
    first, second = (join_class_position(flatten(read(path, args)[0])) for path in (a, b))
    same = True
    for name in sorted({*first, *second}, key=natural_order):
        if name not in first or name not in second:
            text = f"only in {a if name in first else b}"
        elif first[name].shape != second[name].shape:
            text = f"{list(first[name].shape)} against {list(second[name].shape)}"
        else:
            gap = np.abs(first[name].astype("float64") - second[name].astype("float64")).max()
            text = f"differs by up to {gap:.3g}" if gap else ""
        if text:
            same = False
            print(f"{name}: {text}")
    print("the same weights" if same else "not the same weights")
    return 0 if same else 1


def parser():
    """The three commands."""
    from . import opening

    p = command.Parser(prog="python -m minivit.checkpoint", description=__doc__)
    reading = argparse.ArgumentParser(add_help=False)
    opening.add_reading_options(reading)
    options = {"parents": [reading]}
    commands = p.add_subparsers(dest="command", required=True)
    one = commands.add_parser("show", help="what a file is, array by array", **options)
    one.set_defaults(work=show)
    one.add_argument("file")
    one = commands.add_parser("convert", help="write another dialect", **options)
    one.set_defaults(work=convert)
    one.add_argument("source")
    one.add_argument("target")
    one.add_argument("--to", choices=dialects.WRITABLE, required=True, help="whose names to write")
    one = commands.add_parser("diff", help="compare the weights of two files", **options)
    one.set_defaults(work=difference)
    one.add_argument("first")
    one.add_argument("second")
    return p


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, lambda args: args.work(args), argv)


if __name__ == "__main__":
    machine.leave(main())
