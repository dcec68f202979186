"""Every command against what users get wrong: numbers out of range, and files that are none.

Two tables: each numeric option of each command, and each kind of bad file with each command that
reads one. The answer is always one line, status 2, before any work.
"""

import argparse
import importlib
import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, params, variants

COMMANDS = ("train", "evaluate", "finetune", "predict", "figures.__main__", "checkpoint", "bench")
SMALL = variants.Variant("small", patch=4, width=8, mlp=8, heads=2, blocks=1)
# What a command needs besides the option that is tried; {file} is a checkpoint.
NEEDED = {
    "train": ["--tiny"],
    "evaluate": ["--checkpoint", "{file}"],
    "finetune": ["{file}", "--image-size", "8"],
    "predict": ["{picture}", "--checkpoint", "{file}"],
    "figures.__main__": ["--checkpoint", "{file}"],
    "checkpoint": ["show", "{file}"],
    "bench": [],
}
NEVER = ("nan", "inf", "-inf", "word", "", "9" * 60, "1e999", "0x10", "1,5")


def parsers(parser):
    """A parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def numeric_options():  # -> (command, option), each that takes a number or a size
    for command in COMMANDS:
        found = {}
        for parser in parsers(importlib.import_module(f"minivit.{command}").parser()):
            for action in parser._actions:
                if action.type is not None and action.option_strings:
                    found[action.option_strings[-1]] = action
        yield from ((command, name) for name, action in found.items() if takes_numbers(action))


def takes_numbers(action):
    """Whether an option's type reads "1", and reads no word."""
    try:
        action.type("1")
        action.type("word")
    except (argparse.ArgumentTypeError, ValueError):
        return True
    return False


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A small model with a head, and a picture."""
    folder = tmp_path_factory.mktemp("files")
    p = params.initialise(SMALL, 0, image_size=8, channels=1, classes=10)
    p["head"]["kernel"] = np.eye(8, 10, dtype="float32")
    checkpoint.save(folder / "model.npz", p)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "a.png")
    return {"file": folder / "model.npz", "picture": folder / "a.png"}


def mistake(command, arguments, capsys):  # -> the one line that was said
    """Run a command in this process; it must end with status 2, one line and nothing else."""
    main = importlib.import_module(f"minivit.{command}").main
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    out, error = capsys.readouterr()
    assert (status, out) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith(f"minivit.{command.split('.')[0]}: error: ")
    assert len(line) < 1100
    return line


@pytest.mark.parametrize(("command", "option"), list(numeric_options()))
def test_numbers_out_of_range(command, option, files, tmp_path, monkeypatch, capsys):
    """What no option means is refused by every option, with its name and the value."""
    monkeypatch.chdir(tmp_path)
    needed = [part.format(**files) for part in NEEDED[command]]
    for value in NEVER:
        line = mistake(command, [*needed, f"{option}={value}"], capsys)
        assert option in line
        assert value[:20] in line
    assert not list(tmp_path.iterdir())


def test_every_number_has_limits():
    """No option takes any `int` or `float`: NaN and twenty nines are numbers too."""
    for command in COMMANDS:
        for parser in parsers(importlib.import_module(f"minivit.{command}").parser()):
            raw = [a.option_strings for a in parser._actions if a.type in (int, float)]
            assert not raw, command
            silent = [a.option_strings for a in parser._actions if not a.help]
            assert not [s for s in silent if s], f"{command}: options without help"


# --- Files ------------------------------------------------------------------------------------


def zipped(**members):
    """A zip archive of bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npz(**arrays):
    """An .npz file of arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def safetensors(header, body=b""):
    """A .safetensors file whose header is any bytes."""
    return len(header).to_bytes(8, "little") + header + body


def npy(array, pickle=False):
    """One array in NumPy's own format."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=pickle)
    return buffer.getvalue()


def huge_zeros(shape):
    """The .npy file of an array of zeros which says that it is large, and is not."""
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape})
    header = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
SWIN = {"layers.0.blocks.0.attn.qkv.weight": np.zeros((9, 3), "f4")}
SWIN |= {"patch_embed.proj.weight": np.zeros((3, 3, 4, 4), "f4")}


def bad_files(good):  # bytes of a whole .npz -> {name: bytes}, and words that the answer has
    """Damaged, foreign, empty and too large ones."""
    shard = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    return {
        "empty.npz": (b"", "empty"),
        "text.npz": (b"hello\n", ""),
        "page.npz": (b"<!DOCTYPE html><html></html>", "web page"),
        "pickle.pth": (b"\x80\x04\x95\x05", "pickle"),
        "torch.pt": (zipped(**{"archive/data.pkl": b"\x80"}), "pickle"),
        "picture.npz": (b"\x89PNG\r\n\x1a\n" + bytes(99), ""),
        "pointer.safetensors": (POINTER, "LFS"),
        "wrapped.zip": (zipped(**{"model/tiny.npz": good}), "npz"),
        "no-arrays.npz": (zipped(), ""),
        "cut.npz": (good[: len(good) // 2], ""),
        "cut.safetensors": (safetensors(json.dumps(shard).encode()), ""),
        "header.safetensors": ((2**62).to_bytes(8, "little") + b"{", ""),
        "noise.safetensors": (safetensors(b"{" + bytes(99)), ""),
        "model-00001-of-00002.safetensors": (
            safetensors(json.dumps(shard).encode(), bytes(4)),
            "shard",
        ),
        "swin.npz": (npz(**SWIN), ""),
        "array.npy": (npy(np.zeros(3)), "array"),
        "objects.npz": (zipped(**{"cls.npy": npy(np.array([{}]), pickle=True)}), ""),
        "huge.npz": (zipped(**{"cls.npy": huge_zeros((10**6, 10**6))}), ""),
        "words.npz": (npy_in(good, "cls", np.array(["a"])), ""),
        "nan.npz": (npy_in(good, "cls", np.full((1, 1, 8), np.nan, "f4")), "finite"),
        "escape.npz": (npy_in(good, "\x1b[31mred", np.zeros(3, "f4")), ""),
        "none.npz": (None, ""),
        "folder": ("folder", ""),
    }


def npy_in(good, name, array):
    """A good file in which one array is another."""
    with np.load(io.BytesIO(good)) as archive:
        return npz(**{**archive, name: array})


READERS = {
    "train": ["--init", "{bad}"],
    "evaluate": ["--checkpoint", "{bad}"],
    "finetune": ["{bad}", "--image-size", "8"],
    "predict": ["{picture}", "--checkpoint", "{bad}"],
    "figures.__main__": ["--checkpoint", "{bad}"],
}
OWN = {
    "show": ["show", "{bad}"],
    "convert": ["convert", "{bad}", "{new}", "--to", "timm"],
    "diff": ["diff", "{file}", "{bad}"],
}
ALL = [(name, arguments) for name, arguments in READERS.items()]
ALL += [("checkpoint", arguments) for arguments in OWN.values()]


@pytest.mark.parametrize(
    ("command", "arguments"), ALL, ids=lambda x: x[0] if type(x) is list else x
)
def test_files_that_are_no_checkpoints(command, arguments, files, tmp_path, monkeypatch, capsys):
    """Each command names the file and says in one line what is wrong with it; nothing is left."""
    monkeypatch.chdir(tmp_path)
    for name, (content, word) in bad_files(files["file"].read_bytes()).items():
        bad = tmp_path / name
        if content == "folder":
            bad.mkdir()
        elif content is not None:
            bad.write_bytes(content)
        places = {**files, "bad": bad, "new": tmp_path / "new.safetensors"}
        line = mistake(command, [part.format(**places) for part in arguments], capsys)
        assert name in line
        assert word in line
        assert "\x1b" not in line
    assert {p.name for p in tmp_path.iterdir()} <= set(bad_files(b""[:0] or npz(cls=np.zeros(1))))
