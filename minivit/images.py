"""Picture files to arrays."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


class ImageError(ValueError):
    """A picture that cannot be read: its path, and the fault."""


def read(path, channels=3):  # -> uint8 [height, width, channels]
    """Decode a picture as it is meant to be seen.

    Its EXIF orientation is applied. Transparency is laid on white. Grey, palette, CMYK and 1-bit
    pictures become RGB, or grey (ITU-R 601 luma) for one channel. 16-bit grey loses its lower
    byte; pictures of 32-bit numbers have no known range and are refused.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns of very large pictures, and refuses those twice as large.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                picture.load()
                picture = ImageOps.exif_transpose(picture)
                return to_array(picture, channels)
    except UnidentifiedImageError:
        raise ImageError(f"{path} is not a picture that Pillow knows") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{path} is too large to be decoded safely: {error}") from None
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist") from None
    # Damaged pictures make Pillow's decoders raise nearly anything.
    except Exception as error:
        raise ImageError(f"{path} cannot be read: {error}") from None


def read_at(path, size, channels=3, crop=7 / 8):  # -> uint8 [height, width, channels]
    """A picture as it is meant to be seen, its centre at the size (height, width).

    Every fault is an `ImageError`, so one picture never stops those after it.
    """
    image = read(path, channels)
    try:
        return resize_and_crop(image, *size, crop)
    except ValueError as error:
        raise ImageError(f"{path} cannot be resized: {error}") from None


def to_array(picture, channels):  # Pillow image -> uint8 [height, width, channels]
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
    array = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
    return array.reshape(*array.shape[:2], channels)


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


def find(paths):  # files and folders -> files, sorted within a folder
    """Pictures by name: a folder stands for all pictures below it, hidden ones left out."""
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(
            p
            for p in path.rglob("*")
            if p.suffix.lower() in EXTENSIONS
            and p.is_file()
            and not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        if not inside:
            raise ImageError(f"{path} holds no picture; known are {' '.join(sorted(EXTENSIONS))}")
        yield from inside
