"""Picture files to arrays."""

import contextlib
import io
import os
import struct
import threading
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, JpegImagePlugin

from . import salvage
from .command import counted, literal
from .machine import check_memory

# Formats known by their first bytes that need no other program (EPS would start Ghostscript).
FORMATS = "JPEG PNG WEBP GIF BMP TIFF PPM AVIF JPEG2000 QOI HEIF DIB ICO PCX PSD SGI DDS".split()
# A file of such a name is meant to be a picture: if it cannot be read, that is reported.
EXTENSIONS = set(
    ".jpg .jpeg .jfif .png .bmp .gif .tif .tiff .webp .ppm .pgm .pbm .avif .jp2".split()
)
HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
ROTATIONS = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
AT_ONCE = 100_000_000  # pixels decoded at the same time, about 1 GB
REMEDY_HEIC = "pip install pillow-heif, or convert HEIC to JPEG"


class ImageError(ValueError):
    """A picture that cannot be read: its path, and the fault."""


class TooLarge(ValueError):
    """More pixels than are decoded without asking."""


def read(path, channels=3):  # -> uint8 [height, width, channels]
    """Decode a picture as it is meant to be seen.

    Its EXIF orientation is applied. Transparency is laid on white. Grey, palette, CMYK and 1-bit
    pictures become RGB, or grey (ITU-R 601 luma) for one channel. 16-bit grey loses its lower
    byte; pictures of 32-bit numbers have no known range and are refused.
    """
    return read_at(path, None, channels)


def read_at(path, size, channels=3, crop=7 / 8):  # -> uint8 [height, width, channels]
    """`read`, then `resize_and_crop` to the size (height, width), with less memory.

    Every fault is an `ImageError`, so that one picture never stops those after it, except that
    too little memory is a MemoryError. Damage beside the pixels (EXIF, profiles, texts) is ignored.
    """
    if size:  # one that is too large is not the picture's fault
        check_memory(size[0] * size[1] * channels, f"an image of {size[0]}x{size[1]} pixels")
    with named(path), open(path, "rb") as file:
        try:
            return decode(file, size, channels, crop)
        except (MemoryError, TooLarge):
            raise
        except Exception as error:
            if os.fstat(file.fileno()).st_size > 2**30:
                raise
            file.seek(0)
            with MENDING:
                image = mended(file.read(), channels)
            if image is None:
                raise error
            return resize_and_crop(image, *size, crop) if size else image


def mended(content, channels):  # bytes of a file -> uint8 [height, width, channels], or None
    """The pixels of a damaged file if all of them are whole."""
    pixels, exif = salvage.bare(content) or (b"", b"")
    try:
        first, *others = (
            decode(io.BytesIO(pixels + tail), None, channels, 1, exif) for tail in salvage.TAILS
        )
    except MemoryError:
        raise
    except Exception:
        return None
    return first if all(np.array_equal(first, other) for other in others) else None


@contextlib.contextmanager
def named(path):
    """Turn whatever Pillow's decoders raise for a damaged picture into an ImageError."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError:
        fault = "is a link to nothing" if os.path.islink(path) else "does not exist"
        raise ImageError(f"{literal(path)} {fault}") from None
    except Exception as error:
        if "out of memory" in str(error):  # as some of Pillow's decoders say it
            raise MemoryError(str(error)) from None
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ImageError(f"{literal(path)} cannot be read: {literal(reason)}") from None


def decode(file, size, channels, crop, exif=None):  # binary file -> uint8 [height, width, channels]
    """The pixels of one file; `exif` replaces the file's own."""
    with opened(file) as picture:
        check_pixels(*picture.size)
        if size:
            shrink(picture, size, crop)
        with ROOM.take(picture.width * picture.height):
            picture.load()
            whole = flat(upright(picture, exif), channels)
            if size:
                box = crop_box(whole.height, whole.width, *size, crop)
                whole = whole.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
            array = np.asarray(whole)
    return array.reshape(*array.shape[:2], channels)


@cache
def openers():  # -> [(function of first bytes, function of file)]
    """How Pillow recognises and opens each format, and HEIC if pillow-heif is installed."""
    Image.init()
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    # Only the first of several pictures is wanted, so a JPEG is never opened as an MPO.
    plain = {"JPEG": JpegImagePlugin.JpegImageFile}
    known = [(name, *Image.OPEN[name]) for name in FORMATS if name in Image.OPEN]
    return [(accepts, plain.get(name, factory)) for name, factory, accepts in known]


def opened(file):  # binary file -> Pillow image whose pixels are not decoded yet
    """`Image.open` for FORMATS, without its limit of pixels.

    That limit is a warning, and threads share the filters of warnings: see `check_pixels`.
    """
    start = file.read(16)
    for accepts, factory in openers():
        with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):
            if accepts(start) is True:  # a string says what Pillow lacks
                file.seek(0)
                return factory(file, None)
    if start[4:8] == b"ftyp" and start[8:12] in HEIC:
        raise ValueError(f"it is HEIC, which Pillow alone cannot read: {REMEDY_HEIC}")
    raise ValueError("it is empty" if not start else "it is not a picture that Pillow knows")


def check_pixels(width, height):
    """Refuse what would fill the memory: a file of a few bytes can claim any number of pixels."""
    setting = os.environ.get("MINIVIT_MAX_PIXELS", "")
    if setting and not setting.isdecimal():
        raise TooLarge(f"MINIVIT_MAX_PIXELS is {setting}, not a whole number")
    most = int(setting) if setting else Image.MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise TooLarge(
            f"{width}x{height} pixels are too large to be decoded safely, the limit is {most:,}; "
            f"make it smaller, or set MINIVIT_MAX_PIXELS={width * height} if you trust it"
        )


def shrink(picture, size, crop):
    """Decode a JPEG at a half, quarter or eighth, but at least at twice the size that is needed."""
    h, w = picture.height, picture.width
    factor = int(min(h / size[0], w / size[1], h / size[1], w / size[0]) * crop / 2)
    if factor > 1:
        picture.draft(None, (w // factor, h // factor))


def upright(picture, exif=None):  # Pillow image -> Pillow image
    """Turned as EXIF says; EXIF that cannot be read is ignored.

    `ImageOps.exif_transpose` would also write the other tags anew, and fail at a broken one.
    """
    try:
        told = picture.getexif() if exif is None else Image.Exif()
        if exif:
            told.load(exif)
        rotation = ROTATIONS.get(told.get(0x0112))
    except MemoryError:
        raise
    except Exception:
        return picture
    return picture if rotation is None else picture.transpose(rotation)


def flat(picture, channels):  # Pillow image -> Pillow image of mode L or RGB
    """One channel or three, whatever the mode."""
    mode = picture.mode
    if mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    elif mode in ("I", "F"):
        raise ValueError(f"mode {mode} holds 32-bit numbers whose range is not known")
    elif picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    wanted = "L" if channels == 1 else "RGB"
    return picture if picture.mode == wanted else picture.convert(wanted)


def resize_and_crop(image, height, width, crop=7 / 8):  # uint8 [h, w, C] -> [height, width, C]
    """The centre of a picture, in the target's proportions, at the target's size.

    `crop` is the share of the shorter side that is kept: 7/8 is the 256 to 224 of big_vision's
    evaluation. Bilinear, smoothed when shrinking.
    """
    channels = image.shape[-1]
    box = crop_box(*image.shape[:2], height, width, crop)
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    picture = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return np.asarray(picture).reshape(height, width, channels)


def crop_box(h, w, height, width, crop):  # -> left, top, right, bottom in pixels of the source
    """What `resize_and_crop` keeps of h x w pixels, never outside of them."""
    scale = min(h / height, w / width) * crop  # source pixels for each new one
    # 224 * (450 / 224) is above 450 by rounding, and Pillow refuses a box that begins below 0.
    rows, columns = min(h, height * scale), min(w, width * scale)
    return (w - columns) / 2, (h - rows) / 2, (w + columns) / 2, (h + rows) / 2


class Room:
    """Lets threads decode `most` pixels at once, or one picture that is larger."""

    def __init__(self, most):
        self.most, self.used, self.changed = most, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, pixels):
        """Wait until there is room for one more picture."""
        with self.changed:
            self.changed.wait_for(lambda: not self.used or self.used + pixels <= self.most)
            self.used += pixels
        try:
            yield
        finally:
            with self.changed:
                self.used -= pixels
                self.changed.notify_all()


ROOM = Room(AT_ONCE)
MENDING = threading.Lock()  # one at a time: it takes several times the memory


def is_picture(path):  # -> bool
    """By its ending, or by its content."""
    if path.suffix.lower() in EXTENSIONS:
        return True
    try:
        with open(path, "rb") as file, opened(file):
            return True
    except MemoryError:
        raise
    except Exception:
        return False


def hidden(name):  # -> bool
    """Whether a name is hidden, or is what macOS leaves in archives."""
    return name.startswith((".", "__MACOSX"))


def identity(path):  # -> hashable
    """The same for all names of one file or folder, by links of any kind."""
    state = os.stat(path)
    return (state.st_dev, state.st_ino) if state.st_ino else os.path.realpath(path)


def walk(folder):  # -> paths of files, those of links to nothing
    """All files below a folder, hidden ones left out; links are followed, each folder once."""
    files, broken, seen = [], [], set()

    def fail(error):
        raise error

    for where, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        if (key := identity(where)) in seen:
            folders.clear()
            continue
        seen.add(key)
        folders[:] = sorted(name for name in folders if not hidden(name))
        for path in (Path(where, name) for name in names if not hidden(name)):
            (files if path.exists() else broken).append(path)
    return files, broken


def inside(folder):  # -> pictures sorted by name, other files, links to nothing
    """What is below a folder."""
    files, broken = walk(folder)
    files.sort(key=lambda path: path.relative_to(folder).as_posix())
    chosen = {path: path.is_file() and is_picture(path) for path in files}
    return [p for p in files if chosen[p]], [p for p in files if not chosen[p]], broken


def endings(paths):  # -> "3 .heic, 1 .txt", and what helps
    """What was passed over, counted by ending."""
    counts = Counter(path.suffix.lower() or "without ending" for path in paths)
    text = ", ".join(f"{n} {literal(ending)}" for ending, n in counts.most_common(8))
    return text + (f" ({REMEDY_HEIC})" if counts.keys() & {".heic", ".heif"} else "")


def find(paths):  # files and folders -> files, sorted within a folder
    """Pictures by name: a folder stands for all pictures below it, hidden ones left out."""
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        chosen, others, broken = inside(path)
        if not chosen and not broken:
            rest = f", only {counted(len(others), 'other file')}: {endings(others)}"
            raise ImageError(f"{literal(path)} holds no picture{rest if others else ''}")
        yield from [*chosen, *broken]  # a broken link is reported when it is read
