"""Decoding of image files: what their pixels are, and which are refused."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from vision_models import random_image

from aiakq.errors import AiakqError
from aiakq.runtime.multimodal.images import as_rgb, decode_image

FORMATS = {
    "PNG": {},
    "APNG": {"format": "PNG", "save_all": True, "append_images": [random_image(2)]},
    "JPEG": {},
    "progressive": {"format": "JPEG", "progressive": True},
    "GIF": {},
    "animated GIF": {"format": "GIF", "save_all": True, "append_images": [random_image(2)]},
    "WEBP": {"lossless": True},
    "animated WEBP": {"format": "WEBP", "lossless": True, "save_all": True, "append_images": [random_image(2)]},
    "BMP": {},
}


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def file_in(name: str) -> bytes:
    return file_of(random_image(1), **{"format": name, **FORMATS[name]})


@pytest.mark.parametrize("name", FORMATS)
def test_the_first_frame_is_read(name):
    found = np.asarray(decode_image(file_in(name), "image"), np.int32)
    expected = np.asarray(random_image(1), np.int32)
    assert found.shape == expected.shape
    lossless = "PNG" in name or "WEBP" in name or name == "BMP"
    assert np.array_equal(found, expected) if lossless else np.abs(found - expected).mean() < 60


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_modes_are_converted_as_pillow_converts_them(mode):
    image = random_image(1).convert(mode)
    assert np.array_equal(np.asarray(decode_image(file_of(image), "image")), np.asarray(image.convert("RGB")))


def test_inks_are_converted_and_transparent_entries_of_a_palette_keep_their_color():
    inks = decode_image(file_of(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG"), "image")
    assert np.abs(np.asarray(inks, np.int32) - [0, 255, 255]).max() < 4
    palette = random_image(1).convert("P")
    found = decode_image(file_of(palette, transparency=palette.getpixel((0, 0))), "image")
    assert np.array_equal(np.asarray(found), np.asarray(palette.convert("RGB")))


def test_gray_of_16_bits_keeps_its_upper_bits():
    values = (np.arange(600).reshape(20, 30) * 100).astype(np.uint16)
    found = np.asarray(decode_image(file_of(Image.fromarray(values)), "image"))
    assert np.array_equal(found, np.repeat((values >> 8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused(mode):
    with pytest.raises(AiakqError, match=rf"numbers without a range \(mode {mode}\); convert it to RGB"):
        as_rgb(Image.new(mode, (2, 2)), "image")


@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_its_exif_data_say(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(random_image(1), exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))  # as transformers' load_image does
    assert np.array_equal(np.asarray(decode_image(data, "image")), np.asarray(expected))


def test_damaged_exif_data_change_nothing():
    data = file_of(random_image(1), exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert np.array_equal(np.asarray(decode_image(data, "image")), np.asarray(random_image(1)))


@pytest.mark.parametrize(
    "data",
    [b"<svg xmlns='http://www.w3.org/2000/svg'/>", file_of(random_image(1), "TIFF"), b"%PDF-1.4", b"\0" * 64],
    ids=["svg", "tiff", "pdf", "zeros"],
)
def test_other_formats_are_refused(data):
    with pytest.raises(AiakqError, match="no image in one of the formats"):
        decode_image(data, "image")


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_bytes_are_changed_or_lost_the_answer_is_an_image_or_one_line(name):
    chosen, original = random.Random(name), file_in(name)
    for _ in range(40):
        data = bytearray(original[: chosen.randrange(len(original))] if chosen.random() < 0.2 else original)
        for _ in range(chosen.randrange(1, 5)):
            if data:
                data[chosen.randrange(min(len(data), chosen.choice((60, len(data)))))] = chosen.randrange(256)
        try:
            assert decode_image(bytes(data), "image").mode == "RGB"
        except AiakqError as failure:
            assert failure.id == "media_refused" and "\n" not in str(failure)
