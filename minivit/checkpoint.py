"""Read, write, inspect and convert checkpoints: `python -m minivit.checkpoint show FILE`.

The native format is the official one: an `.npz` file whose keys are the '/'-joined names of the
parameters. `dialects.py` knows how timm, Hugging Face and big_vision write the same weights.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from . import command, dialects, variants
from .params import (
    attention_shapes,
    count,
    flatten,
    mlp_shapes,
    named_shapes,
    natural_order,
    under,
    unflatten,
)

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
    tell: grid (of positions that form no square), gelu_form, epsilon. Those that the dialect does
    not expect anyhow are kept in one more entry, which other readers pass over.
    """
    flat, expected = flatten(params), dialects.EXPECTS.get(dialect.removesuffix("-scan"), {})
    settings = {n: v for n, v in (settings or {}).items() if v is not None and v != expected.get(n)}
    note = json.dumps(settings, sort_keys=True)
    if dialect not in dialects.TABLES:
        buffer, arrays = io.BytesIO(), dialects.from_official(flat, dialect)
        np.savez(buffer, **arrays, **({SETTINGS: np.array(note)} if settings else {}))
        return write(path, buffer.getbuffer())
    from safetensors.numpy import save as serialise

    heads = str(describe(flat)["heads"])  # a state dict's shapes cannot tell
    arrays = dialects.from_official(flat, dialect)
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
        description = {"dialect": dialect} | describe(flat) | dialects.EXPECTS[dialect]
        names = ("grid", "gelu_form", "epsilon")
        description |= {name: metadata[name] for name in names if name in metadata}
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


def squeeze(name, array):
    """Group norms of old hybrid files are stored as [1, 1, 1, C]."""
    if re.search(r"(^|/)gn\w*/(scale|bias)$", name) and array.shape[:-1] == (1, 1, 1):
        return array.reshape(-1)
    return array


# The arrays that tell the sizes of a model, and how many axes they have.
AXES = {"embedding/kernel": 4, "cls": 3, "Transformer/posembed_input/pos_embedding": 3}
AXES |= {"pre_logits/bias": 1, "head/kernel": 2}


def describe(flat):  # {official name: array} -> dictionary
    """The sizes that the shapes tell."""
    blocks = {int(m[1]) for n in flat if (m := re.match(r"Transformer/encoderblock_(\d+)/", n))}
    first = f"Transformer/encoderblock_{min(blocks, default=0)}"
    shape = {name: np.shape(array) for name, array in flat.items()}
    if strange := [n for n, a in flat.items() if a.dtype.kind not in "fV"]:
        raise ValueError(f"not arrays of floating-point numbers: {', '.join(strange[:5])}")
    for name, axes in AXES.items():
        if name in shape and len(shape[name]) != axes:
            raise ValueError(f"{name} has shape {list(shape[name])}; it needs {axes} axes")
    try:
        patch, columns, channels, width = shape["embedding/kernel"]
        _, heads, _ = shape[f"{first}/{dialects.ATTENTION}/query/kernel"]
        mlp = shape[f"{first}/MlpBlock_3/Dense_0/kernel"][-1]
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a whole Vision Transformer ({error})") from None
    table = shape.get("Transformer/posembed_input/pos_embedding", (1, None))[1]
    prefix = shape.get("cls", (1, 0))[1]
    head = flat.get("head/kernel")
    side = table and math.isqrt(max(table - prefix, 0))
    return {
        "variant": name_of(width, mlp, heads, max(blocks) + 1, patch),
        "patch": patch if patch == columns else (patch, columns),
        "channels": channels,
        "width": width,
        "mlp": mlp,
        "heads": heads,
        "blocks": max(blocks) + 1,
        "prefix_tokens": prefix,
        "positions": table,
        "grid": [side, side] if side and side * side == table - prefix else None,
        "representation": shape.get("pre_logits/bias", (None,))[0],
        "classes": None if head is None else head.shape[-1],
        "predictions": flat["prediction/bias"].size if "prediction/bias" in flat else None,
        "zero_head": head is not None and not np.asarray(head).any(),
        "parameters": count(flat),
    }


def name_of(width, mlp, heads, blocks, patch):
    """A variant's name by its sizes, or the sizes."""
    for size in variants.SIZES.values():
        if (size.width, size.mlp, size.heads, size.blocks) == (width, mlp, heads, blocks):
            return f"{size.name}/{patch}"
    return f"{blocks} blocks, D {width}, M {mlp}, {heads} heads, P {patch}"


def check(flat, extra="error"):
    """Every array that belongs to the model is there with its shape, and no other."""
    d = describe(flat)
    variant = variants.Variant("file", d["patch"], d["width"], d["mlp"], d["heads"], d["blocks"])
    expected = named_shapes(
        variant,
        d["positions"],
        channels=d["channels"],
        classes=d["classes"],
        class_token=bool(d["prefix_tokens"]),
        positions=d["positions"] is not None,
        representation=d["representation"],
    )
    expected |= {"cls": (1, d["prefix_tokens"], d["width"])} if d["prefix_tokens"] else {}
    if d["predictions"]:
        expected |= {"mask": (1, 1, d["width"]), "prediction/bias": (d["predictions"],)}
        expected["prediction/kernel"] = (d["width"], d["predictions"])
    if any(name.startswith("MAPHead_0/") for name in flat):
        expected |= attention_pool_shapes(d["width"], d["heads"], d["mlp"])
    stem = r"(conv_root|gn_root|block\d+)/"  # of a hybrid: its names are known, its model is not
    found = {n: a.shape for n, a in flat.items() if not re.match(stem, n)}
    faults = [f"missing {n} {list(s)}" for n, s in expected.items() if n not in found]
    faults += [
        f"{name} has shape {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if d["positions"] is not None and d["positions"] <= d["prefix_tokens"]:
        faults.append(f"{d['prefix_tokens']} prefix tokens, but {d['positions']} positions")
    surplus = [f"extra {n} {list(s)}" for n, s in found.items() if n not in expected]
    if surplus and extra == "warn":
        warnings.warn("ignored: " + "; ".join(surplus), stacklevel=4)
        for name in [n for n in found if n not in expected]:
            del flat[name]
    elif surplus:
        faults += surplus
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError("; ".join(faults[:20]) + more)


def attention_pool_shapes(d, h, m):
    """Name and shape of the arrays of big_vision's MAP head."""
    layers = {"probe": (1, 1, d), "LayerNorm_0/scale": (d,), "LayerNorm_0/bias": (d,)}
    layers |= under("MultiHeadDotProductAttention_0", attention_shapes(d, h))
    return under("MAPHead_0", layers | under("MlpBlock_0", mlp_shapes(d, m)))


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
    settings = {name: description[name] for name in ("gelu_form", "epsilon")}
    square = description["grid"] is None or len({*description["grid"]}) == 1
    save(target, params, dialect, settings | ({} if square else {"grid": description["grid"]}))
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
