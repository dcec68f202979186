"""A thousand damaged checkpoints and a thousand damaged pictures: a message each, never a crash."""

import contextlib
import io
import re
import signal

import numpy as np
import pytest
from PIL import Image

from minivit import checkpoint, params, predict, variants

SMALL = variants.Variant("small", patch=4, width=8, mlp=8, heads=2, blocks=1)
STRANGERS = [b"", b"\0", b"<html><body>404</body></html>", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n"]
STRANGERS += [b"\x80\x04\x95\x05" + bytes(7) + b"\x8c\x01x\x94.", b"\xff\xd8\xff\xe0", b"GIF89a"]


def model(channels):
    """A small model with a head that is not zero."""
    p = params.initialise(SMALL, 0, image_size=8, channels=channels, classes=3)
    p["head"]["kernel"] = np.eye(8, 3, dtype="float32")
    return p


def damaged(content, rng):  # -> bytes
    """Cut off, bits flipped, a stretch of zeros or of noise, a piece missing, or another file."""
    kind, size = rng.integers(6), len(content)
    begin = int(rng.integers(size))
    end = min(size, begin + int(rng.integers(1, 200)))
    if kind == 0:
        return content[:begin]
    if kind == 1:
        flipped = np.frombuffer(content, np.uint8).copy()
        places = rng.integers(size, size=int(rng.integers(1, 9)))
        flipped[places] ^= (1 << rng.integers(8, size=len(places))).astype(np.uint8)
        return flipped.tobytes()
    if kind == 2:
        return content[:begin] + bytes(end - begin) + content[end:]
    if kind == 3:
        return content[:begin] + rng.bytes(end - begin) + content[end:]
    if kind == 4:
        return content[:begin] + content[end:]
    return STRANGERS[rng.integers(len(STRANGERS))] + content[: int(rng.integers(2)) * begin]


class Hang(BaseException):
    """No `except Exception` catches it."""


@contextlib.contextmanager
def within(seconds):
    """A hang becomes an error that nothing takes for a damaged file."""

    def late(*_):
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(*arguments):  # -> status, standard output, standard error
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), within(20):
        status = predict.main([str(a) for a in arguments])
    return status, out.getvalue(), error.getvalue()


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)
    return path


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # huge weights
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_checkpoints(suffix, tmp_path, picture):
    """500 of either kind. A ZIP has checksums; safetensors has none, so values may differ."""
    dialect = {".npz": "official", ".safetensors": "timm"}[suffix]
    good = checkpoint.save(tmp_path / f"good{suffix}", model(1), dialect)
    status, expected, _ = command(picture, "--checkpoint", good)
    assert status == 0
    content, rng = good.read_bytes(), np.random.default_rng(1)
    refused = 0
    for number in range(500):
        bad = tmp_path / f"bad-{number}{suffix}"
        bad.write_bytes(damaged(content, rng))
        status, out, error = command(picture, "--checkpoint", bad)
        if status == 0:
            assert suffix == ".safetensors" or out == expected
            assert "nan" not in out
            continue
        refused += 1
        assert status == 2
        assert bad.name in error
        assert re.match(r"(warning: .*\n)*minivit\.predict: error: .*\n\Z", error), error
        bad.unlink()
    assert refused > 400 if suffix == ".npz" else refused > 250


FORMATS = {
    "a.png": {},
    "b.jpg": {"quality": 90},
    "c.jpg": {"progressive": True},
    "d.gif": {},
    "e.bmp": {},
    "f.tif": {"compression": "tiff_lzw"},
    "g.tif": {"compression": "tiff_adobe_deflate"},
    "h.webp": {"lossless": True},
    "i.webp": {},
    "j.ppm": {},
}


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_pictures(name, tmp_path):
    """100 of each format: a class, or one line with the file's name; the others are still read."""
    weights = checkpoint.save(tmp_path / "model.npz", model(3))
    y, x = np.mgrid[:24, :40]
    pixels = np.stack([x * 6, y * 10, (x * y) % 256], -1).astype(np.uint8)
    good, rng = tmp_path / name, np.random.default_rng(2)
    Image.fromarray(pixels).save(good, **FORMATS[name])
    content, bad = good.read_bytes(), []
    for number in range(100):
        bad.append(tmp_path / f"bad-{number}-{name}")
        bad[-1].write_bytes(damaged(content, rng))
    status, out, error = command(*bad, good, "--checkpoint", weights)
    told = {re.search(r"bad-\d+-\S+?\.\w+", line)[0] for line in error.splitlines()}
    read = set(re.findall(r"bad-\d+-\S+", out))
    assert status == 1
    assert told | read == {path.name for path in bad}
    assert not told & read
    assert len(told) > 20
    assert str(good) in out
    assert "Traceback" not in error
