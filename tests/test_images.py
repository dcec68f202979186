"""Picture files (cases IMG-01 to IMG-18), prediction, and the pictures that minivit draws."""

import argparse
import io
import os
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from minivit import checkpoint, datasets, figures, finetune, images, params, predict, variants
from minivit.params import flatten
from minivit.shapes import image_shape

R, G, B, K = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)
LETTERS = {"R": R, "G": G, "B": B, ".": K}
UPRIGHT = [
    "R.G/B..",
    "G.R/..B",
    "..B/G.R",
    "B../R.G",
    "RB/../G.",
    "BR/../.G",
    ".G/../BR",
    "G./../RB",
]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", ["png", "jpg"])
def test_exif_orientation(tmp_path, orientation, extension):
    """IMG-01: pictures stand upright."""
    pixels = np.array([[R, K, G], [B, K, K]], np.uint8).repeat(16, 0).repeat(16, 1)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{extension}"
    options = {"quality": 100, "subsampling": 0} if extension == "jpg" else {}
    Image.fromarray(pixels).save(path, exif=exif, **options)
    rows = UPRIGHT[orientation - 1].split("/")
    expected = np.array([[LETTERS[c] for c in row] for row in rows])
    centres = images.read(path)[8::16, 8::16].astype(int)
    assert np.abs(centres - expected).max() <= (8 if extension == "jpg" else 0)


def test_sixteen_bits(tmp_path):
    """IMG-02: the lower byte is dropped; clipping would make it white."""
    values = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "x.png")
    assert images.read(tmp_path / "x.png", 1)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert images.read(tmp_path / "x.png")[0, 3].tolist() == [128, 128, 128]


@pytest.mark.parametrize(
    ("mode", "pixel", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 128), (255, 127, 127)),
        ("LA", (100, 255), (100, 100, 100)),
        ("LA", (100, 0), (255, 255, 255)),
        ("L", 100, (100, 100, 100)),
        ("1", 1, (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("RGB", (1, 2, 3), (1, 2, 3)),
    ],
)
def test_modes(tmp_path, mode, pixel, expected):
    """IMG-04, IMG-05: always three channels of bytes; transparency is laid on white."""
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    Image.new(mode, (2, 1), pixel).save(path)
    array = images.read(path)
    assert array.dtype == np.uint8
    assert array.shape == (1, 2, 3)
    assert array[0, 0].tolist() == list(expected)
    assert images.read(path, 1).shape == (1, 2, 1)


def test_palette_with_transparency(tmp_path):
    picture = Image.new("P", (2, 1), 1)
    picture.putpalette([9, 9, 9, 255, 0, 0])
    picture.putpixel((1, 0), 0)
    picture.save(tmp_path / "x.png", transparency=0)
    assert images.read(tmp_path / "x.png")[0].tolist() == [[255, 0, 0], [255, 255, 255]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range(tmp_path, mode):
    Image.new(mode, (1, 1), 100).save(tmp_path / "x.tif")
    with pytest.raises(images.ImageError, match=r"x\.tif cannot be read: mode"):
        images.read(tmp_path / "x.tif")


def broken(folder):
    """IMG-09, IMG-10: half a JPEG, nothing, text, a folder that is called a picture, nothing."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG")
    (folder / "half.jpg").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("not a picture")
    (folder / "folder.png").mkdir()
    return ["half.jpg", "empty.png", "text.jpg", "folder.png", "absent.png"]


def test_what_cannot_be_read(tmp_path):
    """One type of error with the path; Pillow's global switch is left alone."""
    for name in broken(tmp_path):
        with pytest.raises(images.ImageError, match=name):
            images.read(tmp_path / name)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_decompression_bombs(tmp_path, monkeypatch):
    """Pillow's limit, without its filters of warnings, and a way to raise it beyond its double."""
    Image.new("1", (200, 200)).save(tmp_path / "x.png")
    for limit in (30_000, 10_000):  # Pillow warns above the limit, and refuses above its double
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(images.ImageError, match="too large to be decoded safely") as error:
            images.read(tmp_path / "x.png")
        assert f"200x200 pixels are too large to be decoded safely, the limit is {limit:,}" in str(
            error.value
        )
        assert "MINIVIT_MAX_PIXELS=40000 " in str(error.value)
        assert "attack" not in str(error.value)
    monkeypatch.setenv("MINIVIT_MAX_PIXELS", "40000")
    assert images.read(tmp_path / "x.png").shape == (200, 200, 3)
    monkeypatch.setenv("MINIVIT_MAX_PIXELS", "1e9")
    with pytest.raises(images.ImageError, match="MINIVIT_MAX_PIXELS is 1e9, not a whole number"):
        images.read(tmp_path / "x.png")


def chunk(kind, data, checksum=None):
    """One of a PNG; its checksum is right unless another is given."""
    checksum = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def segment(marker, data):
    """One of a JPEG."""
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


PIXELS = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)


def encoded(kind, **options):
    """PIXELS as a file of some format."""
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, kind, **options)
    return buffer.getvalue()


def damaged():
    """Files whose pixels are whole, and something beside them is not."""
    png, jpg, webp = encoded("PNG"), encoded("JPEG"), encoded("WEBP", lossless=True)
    head, rest, body, end = png[:33], png[33:], png[:-12], png[-12:]
    bomb = zlib.compress(bytes(5_000_000))
    for name, inner in {
        "text": chunk(b"tEXt", b"a\0b", 1),
        "large_text": chunk(b"zTXt", b"a\0\0" + bomb),
        "profile": chunk(b"iCCP", b"a\0\0" + bomb),
        "exif": chunk(b"eXIf", b"II*\0\xff\xff\xff\xff"),
        "no_exif": chunk(b"eXIf", b"garbage"),
        "gamma": chunk(b"gAMA", b""),
        "unknown": chunk(b"\0\0\0\0", b""),
        "animation": chunk(b"acTL", b"ab"),
    }.items():
        yield f"png_{name}", png, head + inner + rest
    yield "png_late_exif", png, body + chunk(b"eXIf", b"garbage") + end
    yield "png_late_cut", png, body + chunk(b"tEXt", b"a\0" + bytes(50))[:30]
    yield "png_no_end", png, body
    for name, inner in {
        "exif": segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
        "no_exif": segment(0xE1, b"Exif\0\0garbage"),
        "profile": segment(0xE2, b"ICC_PROFILE\0\1"),
        "more_pictures": segment(0xE2, b"MPF\0garbage"),
        "jfif": segment(0xE0, b"JFIF\0"),
        "adobe": segment(0xEE, b"Adobe"),
        "nothing": bytes(3),
    }.items():
        yield f"jpg_{name}", jpg, jpg[:2] + inner + jpg[2:]
    yield "jpg_no_end", jpg, jpg[:-2]
    yield "webp_cut", webp, encoded("WEBP", lossless=True, exif=b"Exif\0\0" + bytes(90))[:-40]
    yield "webp_exif", webp, encoded("WEBP", lossless=True, exif=b"Exif\0\0garbage")


DAMAGED = [pytest.param(*files, id=name) for name, *files in damaged()]


@pytest.mark.parametrize(("whole", "content"), DAMAGED)
def test_damage_beside_the_pixels(whole, content, tmp_path):
    """No picture is lost for it, and its pixels are those of the undamaged file."""
    (tmp_path / "x").write_bytes(content)
    with Image.open(io.BytesIO(whole)) as picture:
        expected = np.asarray(picture.convert("RGB"))
    np.testing.assert_array_equal(images.read(tmp_path / "x"), expected)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_lost_pixels(kind, tmp_path):
    """Wherever a file is cut within its pixels, it is refused and not filled with grey."""
    content = encoded(kind)
    for end in (*range(len(content) // 2, len(content) - 40, 37), len(content) - 40):
        (tmp_path / "x").write_bytes(content[:end])
        with pytest.raises(images.ImageError, match="x cannot be read: "):
            images.read(tmp_path / "x")


def test_a_damaged_picture_still_stands_upright(tmp_path):
    """What mending leaves out is not the orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6
    png = encoded("PNG", exif=exif)
    (tmp_path / "x").write_bytes(png[:33] + chunk(b"gAMA", b"") + png[33:])
    np.testing.assert_array_equal(images.read(tmp_path / "x"), np.rot90(PIXELS, -1))
    jpg = encoded("JPEG", exif=exif)
    (tmp_path / "x").write_bytes(jpg[:2] + segment(0xEE, b"Adobe") + jpg[2:])
    assert images.read(tmp_path / "x").shape == (32, 24, 3)


def test_no_other_program_is_started(tmp_path, monkeypatch):
    """An EPS that is called a PNG would be given to Ghostscript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "x.png").write_bytes(encoded("EPS"))
    with pytest.raises(images.ImageError, match="it is not a picture that Pillow knows"):
        images.read(tmp_path / "x.png")


def test_what_is_said_of_a_fault(tmp_path, monkeypatch):
    """Never an empty reason; HEIC with its remedy; memory is no fault of the picture."""
    Image.new("L", (2, 2)).save(tmp_path / "x.png")
    (tmp_path / "phone.jpg").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    with pytest.raises(images.ImageError, match=r"phone\.jpg .* HEIC.* pip install pillow-heif"):
        images.read(tmp_path / "phone.jpg")
    (tmp_path / "\33[31m\n.png").write_bytes(b"")
    with pytest.raises(images.ImageError, match="empty") as error:
        images.read(tmp_path / "\33[31m\n.png")
    assert r"\x1b[31m\n.png cannot" in str(error.value)
    (tmp_path / "link.png").symlink_to(tmp_path / "gone")
    with pytest.raises(images.ImageError, match=r"link\.png is a link to nothing"):
        images.read(tmp_path / "link.png")

    def fail(error):
        def flat(*_):
            raise error

        monkeypatch.setattr(images, "flat", flat)

    fail(RuntimeError())
    with pytest.raises(images.ImageError, match=r"x\.png cannot be read: RuntimeError"):
        images.read(tmp_path / "x.png")
    for error in (MemoryError(), OSError("out of memory error when reading image file")):
        fail(error)
        with pytest.raises(MemoryError):
            images.read(tmp_path / "x.png")


def test_large_jpegs_are_decoded_smaller(tmp_path):
    """An eighth of the pixels gives the same picture, but for rounding within its blocks."""
    smooth = Image.fromarray(PIXELS).resize((1600, 1200), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    for orientation in (1, 6):
        exif[0x0112] = orientation
        smooth.save(tmp_path / "x.jpg", quality=95, exif=exif)
        whole = images.resize_and_crop(images.read(tmp_path / "x.jpg"), 32, 48).astype(int)
        assert np.abs(images.read_at(tmp_path / "x.jpg", (32, 48)) - whole).max() <= 4
    drafts = []

    class Picture:
        width, height = 1600, 1200

        def draft(self, mode, size):
            drafts.append(size)

    for size in ((32, 48), (224, 224), (600, 600), (1200, 1600)):
        images.shrink(Picture(), size, 1)
    assert drafts == [(133, 100), (800, 600)]  # by 12 and by 2; never below twice what is needed


def test_room_for_pixels():
    """Threads together never hold more than allowed, and a larger picture is decoded alone."""
    room, held, most, lock = images.Room(100), [], [], threading.Lock()

    def work(pixels):
        with room.take(pixels):
            with lock:
                held.append(pixels)
                most.append(sum(held))
            time.sleep(0.002)
            with lock:
                held.remove(pixels)

    sizes = [30, 70, 250, 10, 60, 100, 90, 20] * 3
    threads = [threading.Thread(target=work, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == len(sizes)
    assert max(n for n in most if n != 250) <= 100
    assert room.used == 0


def test_sizes_beyond_all_memory(tmp_path):
    """Before any pixel is decoded, with both numbers."""
    Image.new("L", (2, 2)).save(tmp_path / "x.png")
    for size in ((10**9, 10**6), (int("9" * 60), 7)):
        with pytest.raises(ValueError, match=r"of memory, and .* are free"):
            images.read_at(tmp_path / "x.png", size)
        with pytest.raises(ValueError, match=r"2 images of .* of memory, and .* are free"):
            datasets.resize(np.zeros((2, 4, 4, 1), np.uint8), *size)


def test_content_decides_what_is_a_picture(tmp_path):
    """Whatever its ending; what is nothing else than called a picture is told when it is read."""
    for name in ("a.dat", "b", "c.txt"):
        Image.new("L", (2, 2)).save(tmp_path / name, "PNG")
    for name in ("d.txt", "P5 is a road.md", "e.heic"):
        (tmp_path / name).write_bytes(b"P5 is a road")
    (tmp_path / "f.jpg").write_bytes(b"")
    assert [p.name for p in images.find([tmp_path])] == ["a.dat", "b", "c.txt", "f.jpg"]
    for name in ("a.dat", "b", "c.txt", "f.jpg"):
        (tmp_path / name).unlink()
    with pytest.raises(images.ImageError, match=r"no picture, only 3 other files: .*1 \.heic"):
        list(images.find([tmp_path]))


def test_folders_that_lead_back(tmp_path):
    """Links to folders are followed, each folder once."""
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    (tmp_path / "back").symlink_to(tmp_path)
    assert [p.name for p in images.find([tmp_path])] == ["a.png"]


def test_crop_is_height_then_width():
    """IMG-06: and a picture that is not square is not squeezed."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, :4] = R
    wide = images.resize_and_crop(image, 32, 64, crop=1)
    assert wide.shape == (32, 64, 3)
    assert (wide[:, :28] == R).all()
    assert (wide[:, 36:] == 0).all()
    ramp = np.arange(100, dtype=np.uint8)[None, :, None].repeat(50, 0)
    cropped = images.resize_and_crop(ramp, 50, 50, crop=1)[0, :, 0]
    assert cropped.tolist() == list(range(25, 75))
    thin = images.resize_and_crop(np.zeros((1, 3000, 3), np.uint8), 224, 224)  # no 672,000 columns
    assert thin.shape == (224, 224, 3)
    official = images.resize_and_crop(ramp.repeat(3, 2), 224, 224)
    assert official.shape == (224, 224, 3)


SIDES = (28, 56, 112, 224, 384, 392, 448, 512)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("crop", [1, 7 / 8])
def test_a_box_lies_within_its_picture(side, crop):
    """Every short side to 5,000, upright, lying and square: rounding takes the box nowhere else."""
    for short in range(1, 5001):
        for h, w in ((short, short), (short, 4 * short // 3), (4 * short // 3, short)):
            left, top, right, bottom = images.crop_box(h, w, side, side, crop)
            assert 0 <= left < right <= w
            assert 0 <= top < bottom <= h
            # A few roundings of numbers as large as the picture.
            assert abs(right - left - crop * min(h, w)) <= 1e-15 * 4 * w
            assert abs(left + right - w) <= 1e-15 * w


@pytest.mark.parametrize("short", [29, 58, 116, 232, 450, 464, 900, 928])
def test_sides_that_round_up(short):
    """224 * (450 / 224) is above 450: ordinary pictures of 600x450 were refused."""
    image = np.full((short, 4 * short // 3, 1), 7, np.uint8)
    for each in (image, image.transpose(1, 0, 2)):
        for side in (28, 56, 112, 224, 448):
            assert (images.resize_and_crop(each, side, side, crop=1) == 7).all()


def test_a_picture_that_cannot_be_resized_is_named(tmp_path, monkeypatch):
    """Whatever goes wrong is of this picture, so that those after it are still looked at."""
    Image.new("L", (3, 2)).save(tmp_path / "x.png")

    def fail(*_):
        raise ValueError("no box")

    monkeypatch.setattr(images, "crop_box", fail)
    with pytest.raises(images.ImageError, match=r"x\.png cannot be .*no box"):
        images.read_at(tmp_path / "x.png", (2, 2))


def test_finding_pictures(tmp_path):
    """IMG-14, IMG-17, IMG-18: sorted, capitals, hidden ones left out, any alphabet."""
    for name in ["b.JPG", "a.png", "ångström 猫/é 🐱.PnG", ".hidden/c.png", ".d.png", "e.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = [str(p.relative_to(tmp_path)) for p in images.find([tmp_path])]
    assert found == ["a.png", "b.JPG", "ångström 猫/é 🐱.PnG"]
    (tmp_path / "none").mkdir()
    with pytest.raises(images.ImageError, match="none holds no picture"):
        list(images.find([tmp_path / "none"]))


# --- predict ----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """A checkpoint that tells dark from bright, pictures, and labels."""
    variant = variants.Variant("x", 4, 8, 16, 2, 1)
    p = params.initialise(variant, 0, image_size=(8, 12), channels=3, classes=2, class_token=False)
    rng = np.random.default_rng(0)
    p["head"]["kernel"] = rng.standard_normal((8, 2)).astype("float32")
    Image.new("RGB", (30, 20), "white").save(tmp_path / "å b.png")
    Image.new("L", (30, 20), 0).save(tmp_path / "dark.png")
    (tmp_path / "labels.txt").write_text("cat\ndög\n\n", encoding="utf-8-sig")
    return checkpoint.save(tmp_path / "x.npz", p), tmp_path


def test_predict(files, capsys):
    path, folder = files
    options = ["--checkpoint", str(path), "--labels", str(folder / "labels.txt")]
    options += ["--old-grid", "2x3", "--attention", str(folder / "attention.png")]
    assert predict.main([str(folder / "å b.png"), str(folder / "dark.png"), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("å b.png")
    shares = {line.split()[1]: float(line.split()[0].rstrip("%")) for line in lines[1:3]}
    assert shares.keys() == {"cat", "dög"}
    assert sum(shares.values()) == pytest.approx(100, abs=0.02)
    with Image.open(folder / "attention.png") as picture:
        assert picture.size[0] > 600


def test_predict_from_standard_input(files, capsys, monkeypatch):
    path, folder = files
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"{folder / 'dark.png'}\n\n{folder / 'no.png'}\n")
    )
    given = ["--checkpoint", str(path), "--old-grid", "2x3"]
    assert predict.main(given) == 1
    captured = capsys.readouterr()
    assert "class 0" in captured.out
    assert "no.png does not exist" in captured.err
    assert "Ctrl-D" not in captured.err
    terminal = io.StringIO(f"{folder / 'dark.png'}\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert predict.main(given) == 0
    assert capsys.readouterr().err == "paths of pictures, one per line; Ctrl-D ends\n"
    monkeypatch.setattr(sys, "stdin", None)  # as in `predict <&-`
    assert predict.main(given) == 2


def test_predict_errors(files, refusal):
    """CKP-08 (c) and other mistakes: one line each, status 2."""
    path, folder = files
    (folder / "three.txt").write_text("a\nb\nc\n")
    good = str(folder / "dark.png")
    size = ["--image-size", "8x12", "--old-grid", "2x3"]
    grid = size[2:]
    for arguments, message in (
        ([*size, "--labels", folder / "three.txt"], "3 classes"),
        (["--checkpoint", folder / "no.npz"], "no.npz"),
        (["--checkpoint", good], "dark.png"),
        ([], "6 positions, which is no square"),
        (["--image-size", "9x12", *grid], "not divisible"),
        ([*size, "--attention", "x.doc"], "must end in .png"),
        ([*size, "--attention", folder / "new" / "x.png"], "there is no folder"),
        ([*size, "--attention", "/proc/x.png"], "--attention /proc/x.png cannot be written"),
        ([*size, "--crop", "0"], "--crop is 0; it must be above 0 and at most 1"),
        ([*size, "--top", "0"], "--top is 0"),
        (["--image-size", "9996", *grid], "attention among 6,245,001 tokens of 1 image would take"),
    ):
        assert message in refusal(predict.main, [good, "--checkpoint", path, *arguments])
    error = ["--checkpoint", str(path), *size]
    assert predict.main([str(folder / "no.png"), *error]) == 2


def test_predict_scores_that_are_no_numbers(files, refusal):
    """Finite weights are no promise; the file is named."""
    path, folder = files
    p = checkpoint.load(path)
    p["Transformer"]["encoder_norm"]["bias"][:] = 3e38
    p["head"]["kernel"][:] = 3e38
    checkpoint.save(path, p)
    given = [folder / "dark.png", "--checkpoint", path, "--old-grid", "2x3"]
    assert "x.npz gives scores that are not finite for 1 of 1" in refusal(predict.main, given)


@pytest.mark.parametrize("attention", [False, True])
def test_predict_keeps_what_is_asked_for(attention):
    """Memory does not grow with the number of blocks: none keeps its N x N weights."""
    most = []
    for blocks in (2, 12):
        p = params.initialise(
            variants.Variant("x", 2, 8, 8, 1, blocks), 0, image_size=64, classes=2
        )
        description = {"blocks": blocks, "prefix_tokens": 1}
        tracemalloc.start()
        scores, found = predict.look(p, description, np.zeros((64, 64, 3), np.uint8), attention)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert np.shape(found) == ((32, 32) if attention else ())
        assert scores.shape == (2,)
    weights = 4 * 1025**2  # bytes of one block's
    assert most[1] - most[0] < weights / 4


@pytest.mark.parametrize("name", [b"caf\xc3\xa9 $x^2$.png", b"caf\xe9.png", b"a\x1b[31m\n.png"])
def test_predict_names_in_any_code_page(files, name):
    """A C locale without UTF-8: names are shown as they can be, in the picture too."""
    path, folder = files
    picture = os.fsencode(folder) + b"/" + name
    with open(picture, "wb") as file:
        file.write((folder / "dark.png").read_bytes())
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "minivit.predict", picture, "--checkpoint", str(path)]
    command += ["--old-grid", "2x3", "--labels", str(folder / "labels.txt")]
    command += ["--attention", str(folder / "attention.png")]
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()
    assert b"\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 3
    assert rb"d\xf6g" in result.stdout
    assert (folder / "attention.png").stat().st_size > 1000


def test_predict_at_another_size(files, capsys):
    """Positions are resized, from a grid that is no square."""
    path, folder = files
    command = [str(folder / "dark.png"), "--checkpoint", str(path), "--old-grid", "2x3"]
    assert predict.main([*command, "--image-size", "16"]) == 0
    assert predict.main([*command, "--pixels", "imagenet"]) == 0


def test_fixed_positions_are_put_in():
    """big_vision's files do not hold them; the class token joins after them."""
    variant = variants.Variant("x", 4, 8, 16, 2, 1)
    p = params.initialise(variant, 0, image_size=8, positions=False)
    assert finetune.at_size(p, (8, 12)) is p
    new = finetune.at_size(p, (8, 12), "big_vision")["Transformer"]["posembed_input"]
    assert new["pos_embedding"].shape == (1, 7, 8)
    assert not new["pos_embedding"][:, 0].any()


def test_class_attention():
    """The class token's row over the patches; without one the mean over all queries."""
    weights = np.random.default_rng(0).dirichlet(np.ones(7), (2, 3, 7))
    with_token = predict.class_attention(weights, 1, (2, 3))
    np.testing.assert_allclose(with_token[1, 1, 2], weights[1, :, 0, 6].mean())
    without = predict.class_attention(weights[:, :, 1:, 1:], 0, (2, 3))
    np.testing.assert_allclose(without[0, 0, 1], weights[0, :, 1:, 2].mean())


# --- fine-tuning and figures --------------------------------------------------------------------


def test_adapt():
    """CKP-08 (a), CKP-09: a head of zeros, no pre_logits, positions resized, the rest untouched."""
    variant = variants.Variant("x", 4, 8, 16, 2, 1)
    p = params.initialise(variant, 0, image_size=8, channels=1, classes=10, representation=6)
    p["head"]["kernel"] += 1
    new = finetune.adapt(p, image_size=(8, 12), classes=3)
    assert new["head"]["kernel"].shape == (8, 3)
    assert not new["head"]["kernel"].any()
    assert "pre_logits" not in new
    assert new["Transformer"]["posembed_input"]["pos_embedding"].shape == (1, 7, 8)
    for name, leaf in flatten(new).items():
        if not name.startswith("head") and "posembed" not in name:
            assert leaf is flatten(p)[name]
    told = {"grid": None}
    assert finetune.image_size(p, told) == (8, 8)
    assert finetune.image_size(new, told, (2, 3)) == (8, 12)
    assert finetune.image_size(new, {"grid": [2, 3]}) == (8, 12)
    assert finetune.image_size(new, {"grid": [2, 3], "image_size": [7, 11]}) == (7, 11)
    blind = params.initialise(variant, 0, image_size=8, positions=False)
    assert "posembed_input" not in finetune.adapt(blind, image_size=16, classes=3)["Transformer"]
    with pytest.raises(ValueError, match="no positions"):
        finetune.image_size(blind, told)


@pytest.mark.parametrize("text", ["", "0", "x", "28x", "-3", "28x0", "1.5"])
def test_sizes_on_the_command_line(text):
    assert image_shape("28x56") == (28, 56)
    assert image_shape("7") == (7, 7)
    with pytest.raises(argparse.ArgumentTypeError, match="neither a side nor HEIGHTxWIDTH"):
        image_shape(text)


def test_random_positions_keep_the_prefix():
    """The comparison with learning positions anew: the class token's row stays."""
    variant = variants.Variant("x", 4, 8, 16, 2, 1)
    p = params.initialise(variant, 0, image_size=8, channels=1)
    old = p["Transformer"]["posembed_input"]["pos_embedding"]
    new = finetune.resize_positions(p, 16, method="random")
    assert new.shape == (1, 17, 8)
    np.testing.assert_array_equal(new[:, :1], old[:, :1])
    assert new[:, 1:].std() == pytest.approx(old[:, 1:].std(), rel=0.3)
    np.testing.assert_array_equal(new, finetune.resize_positions(p, 16, method="random"))


@pytest.fixture
def few(monkeypatch):
    """300 pictures to train and to test on."""
    whole = datasets.load("fashion-mnist")
    arrays = whole.train_images, whole.train_labels, whole.test_images, whole.test_labels
    few = datasets.Dataset("few", whole.classes, *(a[:300] for a in arrays))
    monkeypatch.setattr(datasets, "load", lambda name, **_: few)


def test_probe_on_the_command_line(tmp_path, capsys, few, refusal, monkeypatch):
    """A line for every size and method; features of a random model beat chance."""
    p = params.initialise(variants.parse("tiny"), 0, image_size=28, channels=1, classes=10)
    path = str(checkpoint.save(tmp_path / "x.npz", p))
    assert finetune.main([path, "--image-size", "28", "14x28"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 5
    assert "as it is" in lines[0]
    assert all(float(line.split()[-1].rstrip("%")) > 30 for line in lines)
    monkeypatch.setattr(datasets, "load", None)  # mistakes come before any data
    assert "not divisible" in refusal(finetune.main, [path, "--image-size", "28", "30"])
    error = refusal(finetune.main, [path, "--image-size", "28", "9996"])
    assert "attention among 2,039,184 tokens" in error
    assert "--strict needs" in refusal(finetune.main, [path, "--image-size", "28", "--strict"])


def test_probe_without_positions(tmp_path, capsys, few):
    """Nothing is resized then, so there is one way, whatever the size."""
    p = params.initialise(variants.parse("tiny"), 0, image_size=28, channels=1, positions=False)
    path = str(checkpoint.save(tmp_path / "x.npz", p))
    assert finetune.main([path, "--image-size", "28", "14x28"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:-1] for line in lines] == [
        ["28x28", "as", "it", "is"],
        ["14x28", "as", "it", "is"],
    ]


def test_probe_of_broken_scores(tmp_path, few, refusal):
    """The file is named, and nothing is printed of it."""
    p = params.initialise(variants.parse("tiny"), 0, image_size=28, channels=1)
    p["embedding"]["kernel"][:] = p["embedding"]["bias"][:] = 3e38
    path = checkpoint.save(tmp_path / "x.npz", p)
    error = refusal(finetune.main, [path, "--image-size", "28"])
    assert "x.npz gives scores that are not finite for" in error


def test_finetune_says_that_it_trains_nothing():
    text = " ".join(finetune.parser().format_help().split())
    assert "trains nothing" in text
    assert "To fine-tune, `python -m minivit.train --init FILE`" in text


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def test_figures_say_what_they_show():
    """Titles, colours of errors, legends; drawn without a window and without warnings."""
    rows = [{"step": s, "loss": 2.0 / s, "accuracy": 0.5, "learning_rate": 0.1} for s in (1, 2)]
    rows.append({"step": 2, "test_loss": 1.5, "test_accuracy": 0.25})
    figure = figures.curves(rows)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss (nats)", "accuracy", "learning rate"]
    assert figure.axes[1].get_legend().get_texts()[1].get_text() == "test 0.250"
    pictures = np.zeros((3, 4, 4, 1), np.uint8)
    shown = figures.examples(pictures, [0, 1, 1], [0, 0, 1], ["a", "b"], columns=2)
    assert titles(shown) == ["a", "a\nnot b", "b", ""]
    assert shown.axes[1].title.get_color() == "crimson"
    colour = np.zeros((2, 4, 6, 3), np.uint8)
    maps = np.full((2, 2, 3), 0.125)
    drawn = figures.attention(colour, maps, ["x", "y"])
    assert titles(drawn)[:2] == ["x", "up to 12% per patch"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (figure, shown, drawn):
            each.savefig(io.BytesIO())
