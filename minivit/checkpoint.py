"""Read, write, inspect and convert checkpoints: `python -m minivit.checkpoint show FILE`.

The native format is the official one: an `.npz` file whose keys are the '/'-joined names of the
parameters. `dialects.py` knows how timm, Hugging Face and big_vision write the same weights.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from . import command, dialects
from .architecture import check, check_finite, describe
from .params import flatten, natural_order, unflatten

# The permissions that new files lack: a temporary file is private, a checkpoint is not.
UMASK = os.umask(0)
os.umask(UMASK)
# Where a file departs from what its dialect expects, one more entry says so.
SETTINGS = "minivit/settings"


class CheckpointError(ValueError):
    """A file that cannot be used: its path, and the fault."""


# --- Bytes ------------------------------------------------------------------------------------


def write(path, content):  # -> Path
    """Put bytes into a file so that at any moment the old file or the new one is there, whole.

    They go to a temporary file beside it, are flushed to the disk, and are then renamed.
    """
    path = Path(path)
    target = path.resolve()  # through a link, not in its place
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist")
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".saving-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~UMASK
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def read_arrays(path):  # -> {name: array}, metadata
    """All arrays of an `.npz` or `.safetensors` file, read at once and never unpickled."""
    with open(path, "rb") as file:
        start = file.read(9)
    try:
        if start[:4] == b"PK\x03\x04":
            return read_npz(path)
        if start[8:9] == b"{":
            return read_safetensors(path)
    # Damaged bytes make zipfile, zlib, numpy and safetensors raise some ten kinds of error.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}") from None
    kinds = {
        b"": "is empty",
        b"\x93": "is a single .npy array",
        b"\x80": "is a pickle, which can run code and is never read",
        b"<": "is a web page, not the file behind it",
    }
    fault = kinds.get(start[:1], "is neither an .npz nor a .safetensors file")
    raise CheckpointError(f"{path} {fault}; a checkpoint is one of these two")


def read_npz(path):  # -> {name: array}, metadata
    """NumPy's own format, a zip of arrays; PyTorch's pickles are zips too."""
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
        if any(name.endswith("data.pkl") for name in archive.files):
            raise ValueError("a PyTorch pickle can run code and is never read; use .safetensors")
        arrays = {name: half(archive[name]) for name in archive.files}
    settings = arrays.pop(SETTINGS, None)
    return arrays, {} if settings is None else dict(json.loads(str(settings)))


def read_safetensors(path):  # -> {name: array}, metadata
    """The library's NumPy reader knows no bfloat16, so its parser is asked."""
    from ml_dtypes import bfloat16
    from safetensors import deserialize, safe_open

    types = {"BF16": bfloat16, "F16": "f2", "F32": "f4", "F64": "f8", "I64": "i8", "I32": "i4"}
    views = deserialize(Path(path).read_bytes())
    if strange := [
        f"{name} ({view['dtype']})" for name, view in views if view["dtype"] not in types
    ]:
        raise ValueError(f"not numbers of a known type: {', '.join(strange)}")
    arrays = {
        name: np.frombuffer(view["data"], types[view["dtype"]]).reshape(view["shape"])
        for name, view in views
    }
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    return arrays, metadata | json.loads(metadata.get(SETTINGS, "{}"))


def half(array):
    """NumPy stores bfloat16 as two bytes without a meaning; give them their meaning back."""
    if array.dtype == np.dtype("V2"):
        from ml_dtypes import bfloat16

        return array.view(bfloat16)
    return array


# --- Parameters -------------------------------------------------------------------------------


def save(path, params, dialect="official", settings=None):  # -> Path
    """Write a tree of parameters; timm and Hugging Face dialects as `.safetensors`.

    The name is used as it is. The path is returned. `settings` are what names and shapes cannot
    tell: grid (of positions that form no square), image_size, gelu_form, epsilon, class_names.
    Those that the dialect does not expect anyhow are kept in one more entry, which other readers
    pass over.
    """
    flat, expected = flatten(params), dialects.EXPECTS.get(dialect.removesuffix("-scan"), {})
    settings = {n: v for n, v in (settings or {}).items() if v is not None and v != expected.get(n)}
    note = json.dumps(settings, sort_keys=True)
    if dialect not in dialects.TABLES:
        buffer, arrays = io.BytesIO(), dialects.from_official(flat, dialect)
        np.savez(buffer, **arrays, **({SETTINGS: np.array(note)} if settings else {}))
        return write(path, buffer.getbuffer())
    from safetensors.numpy import save as serialise

    arrays = dialects.from_official(flat, dialect)
    heads = str(describe(flat)["heads"])  # a state dict's shapes cannot tell
    metadata = {"format": "pt", "heads": heads}  # "pt": the layout is PyTorch's
    metadata |= {SETTINGS: note} if settings else {}
    return write(path, in_order(serialise(arrays, metadata=metadata)))


def in_order(content):  # bytes of a .safetensors file -> the same, header sorted
    """The library writes metadata in a random order; the same weights shall be the same bytes."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True).encode()
    header += b" " * (-len(header) % 8)  # arrays start at a multiple of eight
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def load(path, *, heads=None, extra="error"):  # -> nested dictionaries of arrays
    """Parameters from a file of any dialect, under the official names.

    `heads` is needed only for a state dict of unusual width. Names that do not belong to a ViT are
    an error, or with `extra="warn"` a warning. A head of zeros is warned of: the original
    ImageNet-21k files have one, and predict every class alike.
    """
    return inspect(path, heads=heads, extra=extra)[0]


def inspect(path, *, heads=None, extra="error", head=True):  # -> parameters, description
    """Like `load`, and what the file is; `head` False says that its head will not be used."""
    arrays, metadata = read_arrays(path)
    try:
        dialect = dialects.recognise(arrays)
        heads = heads or int(metadata.get("heads", 0)) or None
        flat = dialects.to_official(arrays, dialect, heads)
        flat = {name: squeeze(name, array) for name, array in flat.items()}
        check(flat, extra)
        check_finite(flat)
        description = {"dialect": dialect} | describe(flat) | dialects.EXPECTS[dialect]
        description |= checked_settings(metadata)
    except KeyError as error:
        raise CheckpointError(f"{path}: missing {error}") from None
    except (ValueError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if description["zero_head"] and head:
        warnings.warn(
            f"{path}: the head is all zero, so every class is equally likely; the original "
            "ImageNet-21k files are so, and are for fine-tuning",
            stacklevel=3,
        )
    return unflatten(flat), description


def pair_of_numbers(value):
    """A grid or an image size."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(n, int) and n > 0 for n in value)
    )


# What the settings entry may hold, and what must be true of it.
VALID = {
    "grid": pair_of_numbers,
    "image_size": pair_of_numbers,
    "gelu_form": lambda v: v in ("tanh", "erf"),
    "epsilon": lambda v: isinstance(v, float | int) and 0 < v < 1,
    "class_names": lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
}


def checked_settings(metadata):  # -> those that minivit knows
    """The settings of a file; one that makes no sense is a fault of the file."""
    for name, valid in VALID.items():
        if name in metadata and not valid(metadata[name]):
            raise ValueError(f"{name} is {metadata[name]!r:.80} in its entry {SETTINGS}")
    return {name: metadata[name] for name in VALID if name in metadata}


def squeeze(name, array):
    """Group norms of old hybrids and of BiT are stored as [1, 1, 1, C]."""
    norm = r"(^|/)(gn\w*/(scale|bias)|group_norm/(gamma|beta))$"
    if re.search(norm, name) and array.shape[:-1] == (1, 1, 1):
        return array.reshape(-1)
    return array


# --- Command line -----------------------------------------------------------------------------


def show(path, heads):
    """What a file is, and a table of its arrays."""
    params, description = inspect(path, heads=heads)
    for name, value in description.items():
        print(f"{name:<16}{value}")
    flat = flatten(params)
    wide = max(map(len, flat)) + 2
    print(f"\n{'name':<{wide}}{'shape':<18}{'type':<10}norm")
    for name, array in flat.items():
        norm = np.linalg.norm(array.astype("float64"))
        shape = "x".join(map(str, array.shape))
        print(f"{name:<{wide}}{shape:<18}{array.dtype.name:<10}{norm:.6g}")


def convert(source, target, dialect, heads):
    """Another dialect of the same weights."""
    if Path(target).exists():
        raise FileExistsError(f"{target} exists; choose another name")
    params, description = inspect(source, heads=heads)
    settings = {
        n: description.get(n) for n in ("gelu_form", "epsilon", "image_size", "class_names", "grid")
    }
    if settings["grid"] and len({*settings["grid"]}) == 1:
        settings["grid"] = None  # a square is what everybody expects
    save(target, params, dialect, settings)
    print(f"{source} ({description['dialect']}) -> {target} ({dialect})")


def join_class_position(flat):
    """The class token and its position only ever act as a sum; big_vision stores that alone."""
    table, cls = "Transformer/posembed_input/pos_embedding", flat.get("cls")
    if cls is None or table not in flat:
        return flat
    prefix, positions = cls.shape[1], flat[table].copy()
    cls = cls + positions[:, :prefix]
    positions[:, :prefix] = 0
    return flat | {"cls": cls, table: positions}


def difference(a, b, heads):  # -> exit status
    """Names and shapes that differ, and the largest difference of each array."""
    first, second = (join_class_position(flatten(load(path, heads=heads))) for path in (a, b))
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
    p = argparse.ArgumentParser(prog="python -m minivit.checkpoint", description=__doc__)
    heads = argparse.ArgumentParser(add_help=False)
    heads.add_argument("--heads", type=int, help="of a state dict whose width is unusual")
    commands = p.add_subparsers(dest="command", required=True)
    command = commands.add_parser("show", parents=[heads], help="what a file is, array by array")
    command.add_argument("file")
    command = commands.add_parser("convert", parents=[heads], help="write another dialect")
    command.add_argument("source")
    command.add_argument("target")
    command.add_argument("--to", choices=dialects.WRITABLE, required=True)
    command = commands.add_parser("diff", parents=[heads], help="compare the weights of two files")
    command.add_argument("first")
    command.add_argument("second")
    return p


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    return command.run("checkpoint", lambda: run(args))


def run(args):  # -> exit status
    """One of the three commands."""
    if args.command == "show":
        return show(args.file, args.heads)
    if args.command == "convert":
        return convert(args.source, args.target, args.to, args.heads)
    return difference(args.first, args.second, args.heads)


if __name__ == "__main__":
    sys.exit(main())
