"""Arrays in files, `.npz` and `.safetensors`: read in two steps, written whole or not at all.

A file's table of contents (names, shapes, types) is read first, so that what does not belong can be
refused before any array is. Nothing is ever unpickled.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import zipfile
from pathlib import Path

import numpy as np

from . import foreign
from .command import literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Where a file departs from what its dialect expects, one more entry says so.
SETTINGS = foreign.OWN + "settings"
# Weights hardly compress (fresh zeros do, but are few): more than this fills a memory on purpose.
MOST_UNPACKED, FREE = 20, 2**26
MOST_HEADER = 10**7  # bytes of a .safetensors header; 10,000 arrays need about one million
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TYPES |= {"I64": "int64", "I32": "int32"}


class CheckpointError(ValueError):
    """A file that cannot be used: its path and the fault, in one line fit for a terminal."""

    def __init__(self, text):
        super().__init__(literal(text))


@contextlib.contextmanager
def blamed(path, says=" is damaged or incomplete: "):
    """Whatever goes wrong inside is the file's fault; a `Foreign` error says itself what it is.

    Damaged bytes make zipfile, zlib, numpy and json raise some ten kinds of error.
    """
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except foreign.Foreign as error:
        raise CheckpointError(f"{path} {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{path}: missing {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path}{says}{error}") from None


# --- Writing ----------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path):  # -> a binary file
    """Write a file so that at any moment the old one or the new one is there, whole.

    What is written goes to a temporary file beside it, is flushed to the disk, and is then renamed.
    Temporary files that killed saves have left in the folder are removed first.
    """
    target = Path(path).expanduser().resolve()  # through a link, not in its place
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} does not exist")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"{path} is no file that could be replaced")
    sweep(target.parent)
    file = new_temporary(target.parent)
    temporary = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
            if fcntl:  # while the lock is held, so that nobody takes it for a killed save's
                os.replace(temporary, target)
        if not fcntl:  # Windows renames closed files alone
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, remedy(error), str(path)) from None
        raise


def new_temporary(folder):  # -> file
    """A new file, locked for as long as its writer lives."""
    while True:
        file = open(folder / f".saving-{secrets.token_hex(4)}.tmp", "xb")  # noqa: SIM115
        with contextlib.suppress(AttributeError, OSError):  # Windows and some drives have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.exists(file.name):
            return file
        file.close()  # a sweep came between opening and locking


def sweep(folder):
    """Remove what killed saves have left: temporary files whose lock can be had.

    Where there are no such locks they stay.
    """
    for path in folder.glob(".saving-????????.tmp"):
        # Its writer lives, it is somebody else's, or it has just gone.
        with contextlib.suppress(AttributeError, OSError):
            if path.is_file() and not path.is_symlink():
                with open(path, "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def remedy(error):  # OSError -> text
    """What the system says, and of a full disk what to do."""
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return (
            "not saved, the disk is full; free some space and repeat (`--resume` continues a run); "
            "a file that was there before is untouched"
        )
    return error.strerror


def write(path, content):  # -> Path
    """Put bytes into a file, as `replacing` does."""
    with replacing(path) as file:
        file.write(content)
    return Path(path)


def write_npz(path, arrays):  # {name: array} -> Path
    """NumPy's own format, the bytes that `np.savez` would write, array by array.

    Any name is read back as it is, also those that are arguments of `np.savez`.
    """
    for name, array in arrays.items():
        check_name(name)
        foreign.check_numbers(name, array.dtype)
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return Path(path)


def check_name(name):
    """Refuse a name that a zip would not give back."""
    member = f"{name}.npy"
    try:
        fits = len(member.encode()) < 2**16 and zipfile.ZipInfo(member).filename == member
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ValueError(f"{name[:100]!r} cannot be the name of an array in a file; rename it")


def write_safetensors(path, arrays, settings):  # {name: array}, dictionary -> Path
    """Length of a header, the header in JSON, and the arrays' bytes, the widest types first.

    The library builds the whole file in memory, and orders its metadata by chance.
    """
    words = {kind: word for word, kind in TYPES.items()}
    arrays = dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    if strange := [n for n, a in arrays.items() if a.dtype.name not in words]:
        raise ValueError(f"{strange[0]} is of {arrays[strange[0]].dtype}, which .safetensors lacks")
    # "pt": the layout is PyTorch's.
    header, end = {"__metadata__": {"format": "pt", SETTINGS: settings}}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        kind = {"dtype": words[array.dtype.name], "shape": list(array.shape)}
        header[name] = kind | {"data_offsets": [begin, end]}
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # arrays start at a multiple of eight
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(np.ascontiguousarray(little).reshape(-1).view("u1"))
    return Path(path)


# --- Reading ----------------------------------------------------------------------------------


def read_arrays(path):  # -> {name: array}, settings
    """All arrays of a file, read at once, and what minivit itself has noted there."""
    with opened(path) as (kinds, settings, read):
        return {name: read(name) for name in kinds}, settings


@contextlib.contextmanager
def opened(path):  # -> {name: (shape, type)}, settings, function: name -> array
    """An archive whose table of contents has been read and makes sense, before its arrays are."""
    path = os.path.expanduser(path)
    with blamed(path):
        foreign.check_file(path)
    with open(path, "rb") as file:
        start = file.read(512)
        file.seek(0)
        with blamed(path):
            kinds, settings, read = reader_of(start)(file)
            check_sizes(kinds, os.fstat(file.fileno()).st_size)

        def read_one(name):
            with blamed(path):
                array = read(name)
                return array.astype(array.dtype.newbyteorder("="), copy=False)

        yield kinds, settings, read_one


def reader_of(start):  # first bytes of a file -> function
    """What reads a zip, or a length and then JSON."""
    if start[:4] in (b"PK\3\4", b"PK\5\6"):  # the length may begin with PK too
        return read_npz
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**40:
        return read_safetensors
    raise foreign.Foreign(foreign.kind_of(start))


def nbytes(shape, kind):
    """Size of an array in memory."""
    return math.prod(shape) * kind.itemsize


def check_sizes(kinds, size):
    """Refuse a small file that would unpack into a large memory."""
    if sum(nbytes(*kind) for kind in kinds.values()) > MOST_UNPACKED * size + FREE:
        name = max(kinds, key=lambda name: nbytes(*kinds[name]))
        raise foreign.Foreign(
            f"has {size / 1e6:.3g} MB, and {name} {list(kinds[name][0])} in it would unpack to "
            f"{nbytes(*kinds[name]) / 1e6:,.0f} MB; weights do not compress so far"
        )


def read_npz(file):  # -> kinds, settings, function
    """NumPy's own format, a zip of arrays; PyTorch's pickles are zips too."""
    archive = zipfile.ZipFile(file)
    members = [member for member in archive.infolist() if not member.is_dir()]
    foreign.check_members([member.filename for member in members])
    members = {member.filename.removesuffix(".npy"): member for member in members}
    kinds = {name: read_header(archive, name, member) for name, member in members.items()}

    def read(name):
        with archive.open(members[name]) as content:
            array = np.lib.format.read_array(content, allow_pickle=False)
        return array.view(kinds[name][1]) if array.dtype.kind == "V" else array

    settings = {}
    if SETTINGS in kinds:
        kinds.pop(SETTINGS)
        settings = dict(json.loads(str(read(SETTINGS))))
    return kinds, settings, read


def read_header(archive, name, member):  # -> shape, type
    """What an array is, by its first bytes; NumPy writes version 1.0 of all plain types."""
    with archive.open(member) as content:
        if np.lib.format.read_magic(content) != (1, 0):
            raise ValueError(f"{name} is of another version of NumPy's format")
        shape, _, kind = np.lib.format.read_array_header_1_0(content)
        start = content.tell()
    # NumPy stores bfloat16 as two bytes without a meaning; they get their meaning back.
    kind = bfloat16() if kind.str == "|V2" and kind.names is None else kind
    foreign.check_numbers(name, kind)
    if min(shape, default=0) < 0 or start + nbytes(shape, kind) != member.file_size:
        raise ValueError(
            f"{name} {list(shape)} of {kind} does not fit its {member.file_size} bytes"
        )
    return shape, kind


def bfloat16():
    """The type, whose package is imported only where it is met."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def unique(pairs):  # of JSON
    """A dictionary, where no name may come twice."""
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return result


def read_safetensors(file):  # -> kinds, settings, function
    """Offsets are checked here: the arrays lie end to end and fill the file."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MOST_HEADER):
        raise ValueError(f"its header would have {length:,} bytes")
    header = json.loads(file.read(length), object_pairs_hook=unique)
    metadata = header.pop("__metadata__", None) or {}
    kinds, begins, last = {}, {}, 8 + length
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in TYPES:
            raise foreign.Foreign(f"holds {name} of type {entry['dtype']}, not numbers it can use")
        kind = bfloat16() if entry["dtype"] == "BF16" else np.dtype(TYPES[entry["dtype"]])
        kinds[name] = tuple(entry["shape"]), kind.newbyteorder("<")
        if not all(type(n) is int and n >= 0 for n in (*entry["shape"], *entry["data_offsets"])):
            raise ValueError(f"{name} has shape {entry['shape']}")
        begins[name], last = last, last + nbytes(*kinds[name])
        if [begins[name], last] != [8 + length + n for n in entry["data_offsets"]]:
            raise ValueError(f"the bytes of {name} are not where they should be")
    if last != size:
        raise ValueError(f"it has {size:,} bytes, its header speaks of {last:,}")

    def read(name):
        shape, kind = kinds[name]
        file.seek(begins[name])
        return np.fromfile(file, "u1", nbytes(shape, kind)).view(kind).reshape(shape)

    settings = dict(json.loads(metadata.get(SETTINGS, "{}")))
    if re.fullmatch(r"\d{1,4}", str(metadata.get("heads"))):  # where minivit's older files have it
        settings = {"hint": int(metadata["heads"])} | settings
    return kinds, settings, read
