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
#: The tag of Exif with the orientation, and its values -> those of Pillow's ``Transpose``; 1 is upright.
_ORIENTATION = 0x0112
_TRANSPOSED = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


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
    """Return an image in RGB and as its Exif orientation says, as transformers' ``load_image`` does: transparent pixels
    have the color that the file has there. Of 16-bit gray, which Pillow would clip at 255, the upper 8 bits are taken.

    Raises ``media_refused`` for one that is too large, before it is decoded, and one whose values have no known range.
    """
    width, height = image.size
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        reason = f"it has {width} x {height} pixels, of at most {MAX_SIDE} a side and {MAX_PIXELS >> 20} million in all"
        raise refused(param, reason)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        import numpy as np

        gray, info = (np.asarray(image) >> 8).astype(np.uint8), image.info
        image = _pillow().fromarray(gray)
        image.info = info
    elif image.mode in ("I", "F"):
        raise refused(param, f"its pixels are numbers without a range (mode {image.mode}); convert it to RGB")
    return _upright(image)


def _upright(image: Image) -> Image:
    """Return an image in RGB, and as its Exif orientation says; Exif data that cannot be read say nothing."""
    rgb = image.convert("RGB")
    try:
        method = _TRANSPOSED.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises anything for damaged data, which no viewer minds
        method = None
    return rgb if method is None else rgb.transpose(_pillow().Transpose(method))


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
