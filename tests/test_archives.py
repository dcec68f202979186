"""Files written whole or not at all, and read only as far as they make sense."""

import errno
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save as safetensors_bytes

from minivit import archives, checkpoint, params, variants
from minivit.params import flatten, unflatten

SMALL = variants.Variant("small", patch=4, width=12, mlp=20, heads=3, blocks=2)
HARMLESS = [".saving-mine.tmp", ".saving-abcdefgh.tmp.txt", "x.saving-abcdefgh.tmp"]


def model(**options):
    """A small model with a head that is not zero."""
    p = params.initialise(SMALL, 0, **({"image_size": 8, "classes": 5} | options))
    p["head"]["kernel"] = np.eye(12, 5, dtype="float32")
    return p


def peak(work):  # -> bytes
    """The most memory that `work` has at a time, beyond what was there before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- Writing ----------------------------------------------------------------------------------


def test_a_save_streams(tmp_path):
    """The file is never built in memory: at most a copy of the arrays in the other layout."""
    wide = variants.Variant("wide", patch=4, width=256, mlp=1024, heads=4, blocks=8)
    tree = params.initialise(wide, 0, image_size=8, classes=5)
    size = params.count(tree) * 4
    assert peak(lambda: checkpoint.save(tmp_path / "x.npz", tree)) < 0.2 * size
    assert peak(lambda: checkpoint.save(tmp_path / "x.safetensors", tree, "timm")) < 1.2 * size
    assert peak(lambda: checkpoint.read_arrays(tmp_path / "x.safetensors")) < 1.2 * size


def test_the_bytes_are_those_of_numpy(tmp_path):
    """And the same again for the same arrays."""
    arrays = flatten(model()) | {"scalar": np.float64(3), "empty": np.zeros((0, 2))}
    np.savez(tmp_path / "numpy.npz", **arrays)
    assert (
        archives.write_npz(tmp_path / "ours.npz", arrays).read_bytes()
        == (tmp_path / "numpy.npz").read_bytes()
    )


HOLD = """
import sys
from minivit.archives import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_temporary_files_of_killed_saves(tmp_path):
    """The next save removes them, but not one whose writer lives, nor what is somebody else's."""
    for name in HARMLESS:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".saving-afolder1.tmp").mkdir()
    (tmp_path / ".saving-alink_12.tmp").symlink_to(HARMLESS[0])
    before = {*os.listdir(tmp_path)}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "other.npz")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as writer:
        writer.stdout.readline()
        (temporary,) = {*os.listdir(tmp_path)} - before
        checkpoint.save(tmp_path / "x.npz", model())
        assert (tmp_path / temporary).read_bytes() == b"half"
        writer.kill()
        writer.communicate()
    assert (tmp_path / temporary).exists()
    checkpoint.save(tmp_path / "x.npz", model())
    assert {*os.listdir(tmp_path)} == before | {"x.npz"}


def test_writers_side_by_side(tmp_path):
    """None takes another's temporary file for a dead one."""
    faults = []

    def work(number):
        try:
            for i in range(100):
                checkpoint.write(tmp_path / f"{number}.bin", bytes([i]))
        except OSError as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert sorted(os.listdir(tmp_path)) == [f"{n}.bin" for n in range(4)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_errors_of_the_disk_name_the_file(tmp_path, monkeypatch, code):
    """A full disk also says what to do; the old file stays."""
    path = checkpoint.write(tmp_path / "x.npz", b"old")

    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"x\.npz") as error:
        checkpoint.save(path, model())
    assert error.value.errno == code
    assert ("free some space" in str(error.value)) == (code == errno.ENOSPC)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.npz"]


def test_what_no_file_replaces(tmp_path):
    """A folder or a device of that name stays what it is."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", os.devnull):
        with pytest.raises(FileExistsError, match="no file that could be replaced"):
            checkpoint.write(path, b"")


NAMES = ["file", "allow_pickle", "args", "a", "a.npy", "", "x y", "å 猫", "line\nbreak", "..", "\\"]


def test_any_name_of_a_leaf(tmp_path):
    """Saved and read back, alone, all together and inside a folder of any name."""
    leaves = {name: np.full(2, i, "float32") for i, name in enumerate(NAMES)}
    for tree in (*({n: a} for n, a in leaves.items()), leaves, {n: leaves for n in NAMES[4:7]}):
        path = checkpoint.save(tmp_path / "x.npz", tree)
        again = unflatten(checkpoint.read_arrays(path)[0])
        assert flatten(again).keys() == flatten(tree).keys()
        for name, leaf in flatten(tree).items():
            np.testing.assert_array_equal(flatten(again)[name], leaf)


@pytest.mark.parametrize(
    "name", [3, None, "a/b", "nul\0", "\ud800", "n" * 70_000, checkpoint.SETTINGS, "bad"]
)
def test_leaves_that_no_file_gives_back(tmp_path, name):
    """Refused before anything is written."""
    path = checkpoint.write(tmp_path / "x.npz", b"old")
    leaf = np.array(["text"]) if name == "bad" else np.ones(2)
    with pytest.raises(ValueError, match=r"cannot be|minivit's own|not of numbers"):
        checkpoint.save(path, {name: leaf})
    with pytest.raises(ValueError, match=r"cannot be|not of numbers"):
        checkpoint.save(path, {"folder": {name: leaf}})
    assert path.read_bytes() == b"old"


def test_what_is_not_finite_is_not_saved(tmp_path):
    """`load` would refuse it: a run that diverged keeps its last good file."""
    tree = model()
    tree["head"]["bias"][1] = np.nan
    path = checkpoint.write(tmp_path / "x.npz", b"old")
    with pytest.raises(ValueError, match="head/bias holds values that are not finite"):
        checkpoint.save(path, tree)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("name", "dialect", "right"),
    [
        ("x.npz", "timm", "x.safetensors"),
        ("x.safetensors", "official", "x.npz"),
        ("x.pth", "huggingface", "x.safetensors"),
        ("X.NPZ", "huggingface-5.9", "X.safetensors"),
    ],
)
def test_names_that_contradict_the_format(tmp_path, capsys, name, dialect, right):
    """Told with the name that would do, before the source is even read."""
    with pytest.raises(ValueError, match=f"say {right}"):
        checkpoint.save(tmp_path / name, model(), dialect)
    assert checkpoint.main(["convert", "absent", str(tmp_path / name), "--to", dialect]) == 2
    assert f"say {right}" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


# --- Reading ----------------------------------------------------------------------------------


def npz(compression=zipfile.ZIP_STORED, **members):  # name: array or bytes -> bytes
    """A zip made by hand."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            if isinstance(content, np.ndarray | np.generic):
                inner = io.BytesIO()
                np.save(inner, content)
                content, name = inner.getvalue(), f"{name}.npy"
            archive.writestr(name, content)
    return buffer.getvalue()


def tar():
    """Bytes of a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("checkpoint.npz")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


def swin():
    """Some names of a Swin Transformer of timm."""
    layers = [f"layers.{i}.blocks.{j}.attn.qkv" for i in range(4) for j in range(6)]
    arrays = {"patch_embed.proj.weight": np.ones((96, 3, 4, 4), "float32")}
    arrays |= {f"{n}.weight": np.ones((9, 3), "float32") for n in layers}
    return safetensors_bytes(
        arrays
        | {"layers.0.blocks.0.attn.relative_position_bias_table": arrays["patch_embed.proj.weight"]}
    )


def tensors(header, data=b""):
    """A .safetensors file with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, end, kind="F32", begin=0):
    """What a header says of an array."""
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


ONE = np.ones(1, "float32")
RECORDS = np.zeros(3, [("a", "f4"), ("b", "f4")])
EMPTY = {"head/kernel": np.ones((12, 0), "f4"), "head/bias": np.ones(0, "f4")}
BIG = {"blocks.0.attn.q": entry([10**6, 10**6], 4 * 10**12)}
# What a file is -> its bytes, and a word that its error needs; also what it must not say.
FOREIGN = {
    "empty": (b"", "is empty"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
    "annex": (b"/annex/objects/SHA256E-s3--0.npz\n", "pointer"),
    "zip in zip": (npz(**{"run/checkpoint.npz": npz(a=ONE)}), "unpack it first"),
    "index": (json.dumps({"metadata": {}, "weight_map": {}}).encode(), "several parts"),
    "JSON": (b'{"a": 1, "hidden_size": 768}', "JSON"),
    "JSON of nine": (b'{"a": [[{"b": 1}]]}', "JSON"),
    "text": (b"conv weights follow below", "is text"),
    "web page": (b"  \n<!DOCTYPE html><html>", "web page"),
    "pickle": (pickle.dumps({"a": 1}), "never read"),
    "torch": (npz(**{"archive/data.pkl": b"x", "archive/data/0": b"y"}), "never read"),
    "picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a picture"),
    "JPEG": (b"\xff\xd8\xff\xe0\0\x10JFIF\0", "a picture"),
    "BMP": (b"BM\x36\0\0\0\0\0\0\0", "a picture"),
    "HDF5": (b"\x89HDF\r\n\x1a\n\0\0", "HDF5"),
    "GGUF": (b"GGUF\3\0\0\0\0\0", "GGUF"),
    "ONNX": (b"\x08\x07\x12\x07pytorch\x1a\x052.0.0", "ONNX"),
    "tar": (tar(), "tar archive"),
    "gzip": (gzip.compress(b"x"), "gzip"),
    "npy": (npz(a=ONE)[35:200], "single .npy array"),
    "noise": (bytes(range(160, 190)), "neither"),
    "empty zip": (npz(), "without arrays"),
    "zip of text": (npz(**{"a.txt": b"hello"}), "without arrays"),
    "npz and text": (npz(a=ONE, **{"readme.txt": b"hello"}), "readme.txt"),
    "objects": (npz(a=ONE, b=np.array([{}])), "b, an array of Python objects"),
    "records": (npz(a=ONE, b=RECORDS), "b, an array of records"),
    "bytes": (npz(a=ONE, b=np.array(b"abc")), "b, an array of bytes"),
    "words": (npz(a=ONE, b=np.array(["abc"])), "b, an array of text"),
    "complex": (npz(a=ONE, b=np.ones(2, "c8")), "b, an array of complex"),
    "dates": (npz(a=ONE, b=np.zeros(2, "M8[s]")), "b, an array of dates"),
    "Swin": (swin(), "Swin Transformer"),
    "language model": (
        safetensors_bytes({"bert.encoder.layer.0.attention.self.query.weight": ONE,
                           "bert.embeddings.word_embeddings.weight": ONE}),
        "language model",
    ),
    "many names": (safetensors_bytes({f"x.{i}.w": ONE for i in range(500)}), "no Vision"),
    "escapes": (npz(**{"\x1b[31mred\n": ONE}), r"\\x1b\[31mred\\n"),
    "no classes": (npz(**flatten(model()) | EMPTY), r"head/kernel has shape \[12, 0\]"),
    "block of a billion": (
        npz(**flatten(model()), **{"Transformer/encoderblock_1000000000/x": ONE}), "no model has",
    ),
    "stage of a billion": (
        npz(**{"resnet/root_block/standardized_conv2d/kernel": np.ones((7, 7, 3, 8), "f4"),
               "resnet/block999999999/unit01/a": ONE}), "no model has",
    ),
    "array and folder": (npz(**flatten(model()), **{"params/cls/a": ONE, "cls/a/b": ONE}), "cls"),
    "header of a terabyte": ((2**40 - 8).to_bytes(8, "little") + b'{"a": 1}', "header"),
    "longer than the file": (tensors(BIG), "header speaks of"),
    "negative": (tensors({"a": entry([-1], -4)}), "where|shape"),
    "negative twice": (tensors({"a": entry([-1, -1], 4)}, bytes(4)), "shape"),
    "overlapping": (tensors({"a": entry([1], 4), "b": entry([1], 4)}, bytes(8)), "where"),
    "a gap": (tensors({"a": entry([1], 4)}, bytes(8)), "header speaks of"),
    "twice in JSON": (tensors(b'{"a":1,"a":2}'), "twice"),
    "deep JSON": (tensors(b'{"a":' + b"[" * 10**5), "damaged"),
    "a list": (tensors(b'{"a":[]}'), "damaged"),
    "bytes in JSON": (tensors({"a": entry([1], 1, "U8")}, b"x"), "U8"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint(tmp_path, capsys, kind):
    """Said in one short line that names the file, through the library and the command."""
    content, says = FOREIGN[kind]
    path = tmp_path / "odd.npz"
    path.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=says) as error:
        checkpoint.load(path)
    text = str(error.value)
    assert text.startswith(f"{path}")
    assert text.isprintable()
    assert len(text) <= 1000
    assert "how many heads" not in text
    assert checkpoint.main(["show", str(path)]) == 2
    assert capsys.readouterr().err == f"minivit.checkpoint: error: {text}\n"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_comes_twice(tmp_path):
    """Which of the two was meant, nobody knows."""
    buffer = io.BytesIO(npz(**flatten(model())))
    with zipfile.ZipFile(buffer, "a") as archive, archive.open("cls.npy", "w") as member:
        np.save(member, np.zeros((1, 1, 12), "float32"))
    (tmp_path / "x.npz").write_bytes(buffer.getvalue())
    with pytest.raises(checkpoint.CheckpointError, match="more than one array of the name cls"):
        checkpoint.load(tmp_path / "x.npz")


def test_places_that_are_no_files(tmp_path, monkeypatch):
    """A folder says which file in it was meant; ~ is the home; devices and parts are refused."""
    run = tmp_path / "run"
    run.mkdir()
    cases = {run: "is a folder; a checkpoint is", os.devnull: "no file on a disk"}
    cases[tmp_path / "model-00002-of-00003.safetensors"] = "part 2 of 3"
    for path, says in cases.items():
        with pytest.raises(checkpoint.CheckpointError, match=says):
            checkpoint.load(path)
    (run / "run.json").touch()
    with pytest.raises(checkpoint.CheckpointError, match="train --resume"):
        checkpoint.load(run)
    checkpoint.save(run / "checkpoint.npz", model())
    with pytest.raises(checkpoint.CheckpointError, match=r"do you mean .*run.checkpoint\.npz\?"):
        checkpoint.load(run)
    monkeypatch.setenv("HOME", str(run))
    monkeypatch.setenv("USERPROFILE", str(run))
    assert checkpoint.load("~/checkpoint.npz").keys() == model().keys()
    whole = checkpoint.save(tmp_path / "model-00001-of-00001.safetensors", model(), "timm")
    assert checkpoint.inspect(whole)[1]["heads"] == 3


def test_a_small_file_cannot_fill_the_memory(tmp_path):
    """200 MB of zeros in 0.3 MB are refused by the zip's table of contents alone."""
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (flatten(model()) | {"zeros": np.zeros((50, 10**6), "f4")}).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array)

    def work():
        with pytest.raises(checkpoint.CheckpointError, match=r"zeros \[50, 1000000\].*200 MB"):
            checkpoint.load(path)

    assert peak(work) < 2e6


@pytest.mark.parametrize(("name", "dialect"), [("x.npz", "official"), ("x.safetensors", "timm")])
def test_names_and_shapes_come_first(tmp_path, monkeypatch, name, dialect):
    """Of a file that does not fit no array is read, however large."""
    arrays, _ = checkpoint.read_arrays(checkpoint.save(tmp_path / name, model(), dialect))
    arrays["odd"] = np.zeros(4, "float32")
    if dialect == "timm":
        archives.write_safetensors(tmp_path / name, arrays, json.dumps({"heads": 3}))
    else:
        archives.write_npz(tmp_path / name, arrays)

    def fail(*_, **__):
        raise SystemExit("an array was read")

    monkeypatch.setattr(np.lib.format, "read_array", fail)
    monkeypatch.setattr(np, "fromfile", fail)
    with pytest.raises(checkpoint.CheckpointError, match=r"extra.* odd"):
        checkpoint.load(tmp_path / name)


def test_headers_that_begin_like_a_zip(tmp_path):
    """A header of 19,280 bytes makes a .safetensors file begin with the letters PK."""
    path = checkpoint.save(tmp_path / "x.safetensors", model(), "timm")
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].ljust(0x4B50)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    assert path.read_bytes()[:2] == b"PK"
    assert flatten(checkpoint.load(path)).keys() == flatten(model()).keys()


def test_other_byte_orders(tmp_path):
    """Read as numbers that JAX and NumPy compute with."""
    arrays = {n: a.astype(">f4") for n, a in flatten(model()).items()}
    np.savez(tmp_path / "x.npz", **arrays)
    for name, array in flatten(checkpoint.load(tmp_path / "x.npz")).items():
        assert array.dtype.isnative
        np.testing.assert_array_equal(array, flatten(model())[name])
