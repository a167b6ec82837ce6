"""Hostile images in requests: as data, as URLs of a hostile host (``media_host``), and as anything but images."""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from hostile_cases.requests import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, Case, Draw, Expected, cut, junk, post

#: The address of ``media_host``, which a run sets.
host = ["127.0.0.1:1"]
#: Codes of refused media.
REFUSED = frozenset({"media_refused", "context_length_exceeded", "invalid_request_error"})
HARMLESS = Expected(frozenset({200, 400}))


def media_request(draw: Draw, url: str, path: str | None = None) -> tuple[str, bytes]:
    """A request with an image between texts, through one of the APIs."""
    path = path or draw.choice([CHAT, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS])
    if path == RESPONSES:
        content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
        fields: dict[str, Any] = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1}
    else:
        source: dict[str, Any] = {"type": "url", "url": url}
        if url.startswith("data:") and ";base64," in url:
            kind, _, data = url.removeprefix("data:").partition(";base64,")
            source = {"type": "base64", "media_type": kind, "data": data}
        image = part_of(url) if path == CHAT else {"type": "image", "source": source}
        fields = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]}
        fields |= {} if path == COUNT_TOKENS else {"max_tokens": 1}
    return path, json.dumps(fields).encode()


def part_of(url: object, **fields: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def asked(draw: Draw, url: str, kind: str, expected: Expected, slow: bool = False) -> Case:
    path, body = media_request(draw, url)
    return Case(f"{kind} {path}", cut(draw, post(path, body)), (expected,), closed=False, slow=slow)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@functools.cache
def picture(format: str, mode: str = "RGB", size: tuple[int, int] = (20, 16)) -> bytes:
    """The file of an image of noise."""
    from PIL import Image

    width, height = size
    noise = bytes((at * 7919 >> 3) & 255 for at in range(width * height * 4))
    made = Image.frombytes("RGBA", size, noise[: width * height * 4]).convert("RGB").convert(mode)
    buffer = io.BytesIO()
    made.save(buffer, format)
    return buffer.getvalue()


def good_chat() -> dict[str, Any]:
    """A well-behaved request with an image."""
    content = [part_of(data_url(picture("PNG")))]
    fields = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}]} | fields


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, pixels: bytes, *more: bytes, interlaced: int = 0) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@functools.cache
def zeros(count: int) -> bytes:
    """Zeros, compressed."""
    return zlib.compress(bytes(count), 1)


@functools.cache
def white() -> bytes:
    """An image of as many pixels as are read at most."""
    return png(8000, 8000, 1, 0, bytes(8_008_000))


# --- families ---------------------------------------------------------------------------------------------------------


def broken_data(draw: Draw) -> Case:
    """Data URLs that are none."""
    good = base64.b64encode(picture("PNG")).decode()
    at = draw.randrange(len(good))
    urls = {
        "cut": f"data:image/png;base64,{good[: at - at % 4 + 1]}",
        "other letters": f"data:image/png;base64,{good[:at]}{draw.choice('é-_*! ' + chr(0) + chr(0x1F600))}{good[at:]}",
        "padding inside": f"data:image/png;base64,{good[:8]}====={good[8:]}",
        "not base64": f"data:image/png,{good}",
        "no comma": f"data:image/png;base64{good}",
        "nothing": draw.choice(["data:", "data:,", "data:;base64,", "data:image/png;base64,", ""]),
        "escapes": "data:image/png;base64," + "".join(f"%{ord(letter):02x}" for letter in good[:-1]),
        "broken escapes": f"data:image/png;base64,{good[:at]}%{draw.choice(['', 'x', '%', '0', 'ff'])}{good[at:]}",
        "in upper case": f"DATA:IMAGE/PNG;BASE64,{good}",
        "twice": f"data:image/png;base64,data:image/png;base64,{good}",
    }
    kind = draw.choice(list(urls))
    return asked(draw, urls[kind], kind, Expected(400))


def wrong_media_fields(draw: Draw) -> Case:
    """Parts with images of wrong types, at wrong places, or too many."""
    url = data_url(picture("PNG"))
    value = draw.choice([None, 1, 1.5, True, [], {}, [url], {"url": None}, {"url": 3}, {"url": [url]}, {"url": {}}])
    image, odd = part_of(url), draw.choice(["video_url", "input_audio", "file", "images"])
    user: dict[str, Any] = {"role": "user", "content": [image]}
    kinds: dict[str, list[dict[str, Any]]] = {
        "a wrong value": [{"role": "user", "content": [{"type": "image_url", "image_url": value}]}],
        "wrong detail": [{"role": "user", "content": [part_of(url, detail=draw.choice([1, "x", []]))]}],
        "wrong source": [{"role": "user", "content": [{"type": "image", "source": value}]}],
        "a file": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}],
        "other media": [{"role": "user", "content": [{"type": odd}]}],
        "Pillow": [{"role": "user", "content": [{"type": "image_pil", "image_pil": draw.choice([url, {}, None, 1])}]}],
        "of the system": [{"role": "system", "content": [image]}, user],
        "of the assistant": [user, {"role": "assistant", "content": [image]}, user],
        "too many": [{"role": "user", "content": [image] * draw.randint(5, 40)}],
        "its placeholder": [{"role": "user", "content": [{"type": "text", "text": "a <image> b"}, image]}],
    }
    kind = draw.choice(list(kinds))
    body = json.dumps({"messages": kinds[kind], "max_tokens": 1}).encode()
    return Case(f"{kind} {CHAT}", cut(draw, post(CHAT, body)), (Expected(400),), closed=False)


def odd_file(draw: Draw) -> tuple[str, bytes]:
    """Return a file that decoders read in an unusual way."""
    from PIL import Image

    buffer = io.BytesIO()
    small = Image.frombytes("RGB", (9, 7), picture("BMP", size=(9, 7))[-189:])
    size = draw.choice([(1, 1), (1, draw.randint(2, 600)), (draw.randint(2, 600), 1), (3, 5), (64, 64)])
    kind = draw.choice(["mode", "size", "frames", "Exif", "profile", "raw PNG", "progressive", "palette"])
    if kind == "mode":
        modes = {"PNG": ("1", "L", "LA", "P", "RGBA", "I;16"), "JPEG": ("L", "CMYK"), "WEBP": ("RGBA",)}
        modes |= {"GIF": ("1", "P"), "BMP": ("1", "L", "P", "RGBA"), "TIFF": ("F", "CMYK", "LAB")}
        format = draw.choice(list(modes))
        mode = draw.choice(modes[format])
        Image.new(mode, size).save(buffer, format)
        kind += f" {mode} of {format}"
    elif kind == "size":
        small.resize(size).save(buffer, draw.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))
    elif kind == "frames":
        frames = [small.rotate(angle) for angle in range(draw.randint(1, 60))]
        format = draw.choice(["GIF", "WEBP", "PNG"])
        frames[0].save(buffer, format, save_all=True, append_images=frames, duration=draw.choice([0, 1, 65535]))
    elif kind == "Exif":
        exif = Image.Exif()
        exif[0x0112] = draw.choice([0, 1, 3, 6, 8, 9, 65535])
        raw = draw.choice([exif.tobytes(), exif.tobytes()[:9], b"Exif\0\0" + junk(draw, 0, 300)])
        small.save(buffer, draw.choice(["JPEG", "PNG", "WEBP"]), exif=raw)
    elif kind == "profile":
        small.save(buffer, draw.choice(["JPEG", "PNG"]), icc_profile=junk(draw, 0, 5000))
    elif kind == "raw PNG":
        depth, colour = draw.choice([1, 2, 4, 8, 16, 3]), draw.choice([0, 2, 3, 4, 6, 7])
        buffer.write(png(8, 8, depth, colour, junk(draw, 0, 700), interlaced=draw.choice([0, 1, 2])))
    elif kind == "progressive":
        small.save(buffer, "JPEG", progressive=True, quality=draw.randint(1, 100), subsampling=draw.randint(0, 2))
    else:
        small.quantize(draw.randint(2, 256)).save(buffer, "PNG", transparency=draw.randint(0, 3))
    return kind, buffer.getvalue()


def odd_images(draw: Draw) -> Case:
    """Files that decoders read in unusual ways; some are refused."""
    kind, data = odd_file(draw)
    return asked(draw, data_url(data, draw.choice(["image/png", "", "text/html"])), kind, HARMLESS)


def damaged_images(draw: Draw) -> Case:
    """Files that are cut, longer, or changed at some places."""
    format = draw.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP"])
    data = bytearray(picture(format))
    kind = draw.choice(["cut", "changed", "header", "longer", "joined"])
    if kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "changed":
        for _ in range(draw.randint(1, 20)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == "header":
        at = draw.randrange(4, min(60, len(data) - 4))
        data[at : at + 4] = draw.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", junk(draw, 4, 4)])
    elif kind == "longer":
        data += junk(draw, 1, 5000)
    else:
        data += picture(draw.choice(["PNG", "JPEG", "GIF"]))
    return asked(draw, data_url(bytes(data)), f"{kind} {format}", HARMLESS)


def image_bombs(draw: Draw) -> Case:
    """Small files of images that take much memory or time."""
    side = draw.choice([16_385, 40_000, 65_500, 2**31 - 1, 2**32 - 1])
    other = draw.choice([1, side, 16_385])
    jpeg = bytearray(picture("JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", min(side, 65_535), min(other, 65_535))
    gif = bytearray(picture("GIF"))
    gif[6:10] = struct.pack("<HH", min(side, 65_535), min(other, 65_535))
    bmp = bytearray(picture("BMP"))
    bmp[18:26] = struct.pack("<ii", min(side, 2**31 - 1), draw.choice([1, -1]) * min(other, 2**31 - 1))
    text = zeros(100_000_000)
    kinds: dict[str, Callable[[], bytes]] = {
        "PNG": lambda: png(side, other, 8, 2, bytes(1000)),
        "JPEG": lambda: bytes(jpeg),
        "GIF": lambda: bytes(gif),
        "BMP": lambda: bytes(bmp),
        "text": lambda: png(4, 4, 8, 2, bytes(52), chunk(b"zTXt", b"a\0\0" + text)),
        "profile": lambda: png(4, 4, 8, 2, bytes(52), chunk(b"iCCP", b"a\0\0" + text)),
        "pixels": white,
        "frames": lambda: png(4, 4, 8, 2, bytes(52), chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
    }
    kind = draw.choice(list(kinds))
    return asked(draw, data_url(kinds[kind]()), kind, HARMLESS if kind not in ("PNG", "JPEG") else Expected(400))


def no_images(draw: Draw) -> Case:
    """Files of other kinds, whatever they say they are."""
    files = {
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://169.254.169.254/"/></svg>',
        "HTML": b"<!doctype html><script>alert(1)</script>",
        "XML": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
        "PDF": b"%PDF-1.7\n1 0 obj\n<< /Type /Catalog >>\n",
        "PPM": b"P6 %d 9 255\n" % draw.choice([9, 10**9]) + bytes(243),
        "XBM": b"#define a_width 99999\n#define a_height 99999\nstatic char a_bits[] = {",
        "TIFF": picture("TIFF"),
        "ICO": picture("ICO"),
        "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + junk(draw, 0, 200),
        "ZIP": b"PK\x03\x04" + junk(draw, 0, 200),
        "pickle": b"\x80\x04cos\nsystem\n(S'id'\ntR.",
        "noise": junk(draw, 0, 3000),
        "text": b"aGVsbG8=",
    }
    kind = draw.choice(list(files))
    return asked(draw, data_url(files[kind], draw.choice(["image/png", "image/svg+xml"])), kind, Expected(400))


def odd_urls(draw: Draw) -> Case:
    """URLs of other schemes, of this machine and its network, and such as no program reads alike."""
    own = host[0]
    urls = [
        *("http://169.254.169.254/latest/meta-data/", "http://127.0.0.2/", "http://[::1]:80/", "http://2130706433/"),
        *("http://0x7f.1/", "http://localhost:1/", "http://[::ffff:127.0.0.1]/", "https://10.0.0.1/", "http://0/"),
        *("file:///etc/passwd", "file://localhost/etc/passwd", "FILE:/etc/passwd", "file:etc", "//127.0.0.1/a"),
        *("ftp://127.0.0.1/", "gopher://127.0.0.1:1/", "javascript:alert(1)", "blob:null/1", "/etc/passwd"),
        *("a.png", "http://", "http:///", "http://[", "http://]:1/", "http://a b/", "http://\0/", "http://xn--/"),
        *("https://x:99999/", "http://127.0.0.1:0/", f"http://{own}@10.0.0.1/", f"http://10.0.0.1#@{own}/"),
        *("http://" + "a" * 9000, f"http://10.0.0.1\\@{own}/", "http://%31%32%37.0.0.1/", "http://127.0.0.1%00.com/"),
    ]
    url = draw.choice([*urls, "\u2028http://a/"])
    return asked(draw, url, "URL", Expected(400))


#: Paths of ``media_host`` that end within a second, with what comes of them.
QUICK = {
    **dict.fromkeys(("good.png", "moved", "text-type", "chunked", "long-headers"), HARMLESS),
    **dict.fromkeys(("metadata", "loopback", "loop", "to-file", "to-data", "bad-location"), Expected(400)),
    **dict.fromkeys(("to-nothing", "many-lines"), Expected(400)),
    **dict.fromkeys(("html", "missing", "failing", "empty", "cut", "closed", "no-http", "gzip"), Expected(400)),
    **dict.fromkeys(("endless", "huge", "negative", "many-headers", "continue"), Expected(400)),
}
#: Those that take as long as the server lets them.
SLOW = ("dripping", "silent", "slow-headers")


def hostile_hosts(draw: Draw) -> Case:
    path = draw.choice(list(QUICK))
    return asked(draw, f"http://{host[0]}/{path}", f"/{path}", QUICK[path])


def slow_hosts(draw: Draw) -> Case:
    path = draw.choice(SLOW)
    return asked(draw, f"http://{host[0]}/{path}", f"/{path}", Expected(400), slow=True)


MEDIA: dict[Callable[[Draw], Case], float] = {
    broken_data: 12,
    wrong_media_fields: 12,
    odd_images: 18,
    damaged_images: 22,
    image_bombs: 4,
    no_images: 10,
    odd_urls: 10,
    hostile_hosts: 12,
    slow_hosts: 0.2,
}
