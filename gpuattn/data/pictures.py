"""Image files as arrays, by Pillow, in bounded memory."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np

from gpuattn.errors import DataError, UnsupportedError
from gpuattn.typing import StrPath

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MOST_PIXELS = 1 << 26  # of an image: 256 MB with four channels, while it is made smaller
LARGE_PIXELS = 1 << 22  # of larger images one at a time is decoded
MODES = {1: "L", 3: "RGB"}  # by channels
_one_large = threading.Lock()


def is_picture(path: Path) -> bool:
    """Return whether the name of a file is that of an image."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def read_picture(path: StrPath, side: int, channels: int, *, whole: bool = False) -> np.ndarray:
    """Return an image file as uint8 (side, side, channels), its middle square made to fit.

    ``channels``: 1, gray, or 3; images of any kind are converted, transparent ones are laid on
    white. ``whole``: squeeze the whole image, not its middle, as ViT of transformers does.
    Raises DataError that names a file that is damaged, no image, or above MOST_PIXELS;
    UnsupportedError without Pillow.
    """
    library = _library()
    try:
        with library.open(path) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise DataError(_too_large(path, f"{width:,} x {height:,}"))
            alone = width * height > LARGE_PIXELS
            with _one_large if alone else contextlib.nullcontext():
                return _made_to_fit(library, image, side, channels, whole)
    except (DataError, MemoryError):
        raise
    except library.DecompressionBombError as error:  # of a size that Pillow does not even tell
        raise DataError(_too_large(path, "too many")) from error
    except library.UnidentifiedImageError as error:
        raise DataError(f"{path} is no image that Pillow knows") from error
    except Exception as error:  # noqa: BLE001 decoders of Pillow raise any class
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read as an image: {reason}") from error


def _too_large(path, count):
    return f"{path} has {count} pixels; accepted: up to {MOST_PIXELS:,} in all. Make it smaller"


def _made_to_fit(library, image, side, channels, whole):
    if image.mode.startswith("I;16"):  # 16-bit gray, of which conversion keeps no high bits
        image = library.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{image.filename} has 32 bits a pixel; accepted: 8 or 16")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = library.alpha_composite(library.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    (width, height), short = image.size, min(image.size)
    left, top = (width - short) / 2, (height - short) / 2
    box = (0, 0, width, height) if whole else (left, top, left + short, top + short)
    fitted = image.resize((side, side), library.Resampling.BILINEAR, box=box)
    return np.asarray(fitted, np.uint8).reshape(side, side, channels)


def _library() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError(
            "image files are read by Pillow, which is not installed. Run: pip install "
            "'gpuattn[images]'"
        ) from error
    return Image
