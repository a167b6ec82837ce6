"""Decoding of images, which clients may have made to exhaust memory. Pillow is imported with the first one."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

#: Formats that are read: those of the web. Others have decoders that hardly anyone needs or has tested.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
#: Largest width and height, and number of pixels: what no model reads in full.
MAX_SIDE, MAX_PIXELS = 1 << 14, 1 << 26


def decode_image(data: bytes, param: str) -> Image:
    """Return the first frame of an image file in RGB. Raises ``media_refused``, and ``no_pillow`` without Pillow."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                return as_rgb(image, param)
    except AiakqError:
        raise
    except MemoryError:
        raise refused(param, "it takes too much memory") from None
    except pillow.DecompressionBombError:
        raise refused(param, f"it has more than {MAX_PIXELS >> 20} million pixels") from None
    except pillow.UnidentifiedImageError:
        raise refused(param, f"it is no image in one of the formats {', '.join(FORMATS)}") from None
    except Exception as failure:  # decoders raise anything for damaged files
        raise refused(param, f"it is damaged ({first_line(failure).rstrip('.')[:120]})") from None


def as_rgb(image: Image, param: str) -> Image:
    """Return an image in RGB, as transformers converts it: transparent pixels have the color that the file has there.

    Raises ``media_refused`` for one that is too large, before it is decoded.
    """
    width, height = image.size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        reason = f"it has {width} x {height} pixels, of at most {MAX_SIDE} a side and {MAX_PIXELS >> 20} million in all"
        raise refused(param, reason)
    return image.convert("RGB")


def is_image(value: object) -> bool:
    """Whether ``value`` is an image of Pillow."""
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "convert")


def refused(param: str, reason: str) -> AiakqError:
    """Return the error for an image that cannot be read."""
    return error("media_refused", param=param, reason=reason)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise error("no_pillow") from None
    return Image
