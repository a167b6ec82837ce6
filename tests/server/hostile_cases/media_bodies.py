"""Hostile bodies around images: of wrong shapes, of other media, nested, huge in number; and files changed anywhere."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any

from hostile_cases.media import HARMLESS, asked, chunk, data_url, odd_file, part_of, picture, png
from hostile_cases.requests import CHAT, MESSAGES, RESPONSES, Case, Draw, Expected, cut, junk, post, some_text


def _chat(draw: Draw, messages: Any, kind: str, expected: Expected, **fields: Any) -> Case:
    body = json.dumps({"messages": messages, "max_tokens": 1} | fields).encode()
    return Case(f"{kind} {CHAT}", cut(draw, post(CHAT, body)), (expected,), closed=False)


def _user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def _nested(draw: Draw, inner: Any) -> Any:
    for _ in range(draw.choice([1, 2, 10, 200])):
        inner = [inner] if draw.random() < 0.5 else {draw.choice(["image_url", "url", "content", "type"]): inner}
    return inner


def wrong_bodies(draw: Draw) -> Case:
    """Bodies whose lists and objects around an image are others than the API has."""
    url = data_url(picture("PNG"))
    image, text = part_of(url), {"type": "text", "text": "a"}
    other = draw.choice([None, 0, -1, 1e308, True, "", "x", [], {}, [[]], [None], [image, [image]], {"0": image}])
    kinds: dict[str, Callable[[], list[Any]]] = {
        "content": lambda: [{"role": "user", "content": other if other not in ("", "x") else image}],
        "nested content": lambda: [{"role": "user", "content": _nested(draw, [image])}],
        "nested part": lambda: _user(_nested(draw, image)),
        "nested URL": lambda: _user({"type": "image_url", "image_url": {"url": _nested(draw, url)}}),
        "no URL": lambda: _user({"type": "image_url", "image_url": {"detail": "low"}}),
        "no image": lambda: _user({"type": "image_url"}, text),
        "no type": lambda: _user({"image_url": {"url": draw.choice([1, [], None])}}),
        "a wrong type": lambda: _user(
            {**image, "type": draw.choice([None, 1, [], "IMAGE_URL", "image_url\0", "x" * 9999])}
        ),
        "a wrong role": lambda: [{"role": draw.choice(["", "users", "user\0", None, 1]), "content": [image]}],
        "of a tool": lambda: [*_user(image), {"role": "tool", "tool_call_id": "a", "content": [image]}],
        "messages": lambda: [other, *_user(image)],
    }
    kind = draw.choice(list(kinds))
    # Templates decide what roles there are, and a message may have no content, or a single part.
    expected = HARMLESS if kind in ("a wrong role", "content") else Expected(400)
    return _chat(draw, kinds[kind](), kind, expected)


def other_media(draw: Draw) -> Case:
    """Data of other media than images, under names and types of any."""
    kinds = ["video/mp4", "audio/wav", "text/plain", "application/json", "application/octet-stream", "multipart/mixed"]
    kinds += ["image/jpeg;charset=utf-8", "image/" + "x" * 5000, "image/png\r\nx: y", "", "\0", "image/svg+xml"]
    data = draw.choice(
        [b"RIFF\x24\0\0\0WAVEfmt ", b"\0\0\0\x18ftypmp42" + junk(draw, 0, 99), b"{}", b"OggS" + bytes(99)]
    )
    url = f"data:{draw.choice(kinds)};base64,{base64.b64encode(data).decode()}"
    name = draw.choice(["image_url", "video_url", "audio_url", "input_audio", "input_video", "document", "file"])
    part: dict[str, Any] = {"type": name, name: draw.choice([url, {"url": url}, {"data": url, "format": "wav"}])}
    return _chat(draw, _user({"type": "text", "text": "a"}, part), f"{name} of other media", Expected(400))


def many_parts(draw: Draw) -> Case:
    """As many images, texts or messages as make a body of a megabyte, with good images, bad ones or none."""
    count = draw.choice([5, 100, 3000])
    good = part_of(data_url(picture("GIF", size=(4, 4))))
    part = draw.choice([good, part_of("data:,"), part_of(""), {}, [], {"type": "image_url", "image_url": {}}])
    kinds: dict[str, list[dict[str, Any]]] = {
        "images": _user(*[part] * count),
        "images between texts": _user(*[{"type": "text", "text": "a"}, part] * count),
        "messages with images": _user(part) * count,
    }
    kind = draw.choice(list(kinds))
    return _chat(draw, kinds[kind], kind, Expected(400))


def strange_texts(draw: Draw) -> Case:
    """Good images beside texts with control characters, other placeholders and marks of the template."""
    marks = [
        "<image>",
        "<|image_pad|>",
        "<fake_token_around_image>",
        "<row_1_col_1>",
        "<global-img>",
        "<s>",
        "\n" * 999,
    ]
    text = "".join(draw.choice([*marks, *"\0\x01\x1b\x7f\x85\u2028\u200e\ufeff", some_text(draw)]) for _ in range(9))
    part = part_of(data_url(picture("PNG", size=(8, 8))), detail=draw.choice(["auto", "low", "high"]))
    parts = [{"type": "text", "text": text}, part]
    draw.shuffle(parts)
    path, role = draw.choice([CHAT, MESSAGES]), "user"
    if path == MESSAGES:
        source = {"type": "base64", "media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]}
        parts[parts.index(part)] = {"type": "image", "source": source}
    body = json.dumps({"messages": [{"role": role, "content": parts}], "max_tokens": 1}).encode()
    return Case(f"text {path}", cut(draw, post(path, body)), (HARMLESS,), closed=False)


def several_images(draw: Draw) -> Case:
    """Up to four images in a prompt, of which some are damaged."""
    urls = []
    for _ in range(draw.randint(2, 4)):
        _, data = odd_file(draw)
        damaged = draw.random() < 0.3
        urls.append(data_url(changed(draw, data)[1] if damaged else data, draw.choice(["image/png", "image/webp"])))
    if draw.random() < 0.3:
        urls[-1] = urls[0]
    if draw.random() < 0.5:
        return _chat(draw, _user(*map(part_of, urls)), "several", HARMLESS)
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    body = json.dumps({"input": [{"role": "user", "content": parts}], "max_output_tokens": 1}).encode()
    return Case(f"several {RESPONSES}", cut(draw, post(RESPONSES, body)), (HARMLESS,), closed=False)


def changed(draw: Draw, data: bytes) -> tuple[str, bytes]:
    """Return a file with one kind of change, at any place of it."""
    data = data or b"\0"
    at, other = draw.randrange(len(data)), draw.randrange(len(data))
    at, other = min(at, other), max(at, other)
    word = struct.pack(
        draw.choice(["<I", ">I"]), draw.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65_535, 16_384])
    )
    size = draw.choice([2, 4])
    kinds: dict[str, bytes] = {
        "cut": data[:at],
        "without a part": data[:at] + data[other:],
        "a part twice": data[:other] + data[at:],
        "inserted": data[:at] + junk(draw, 1, 40) + data[at:],
        "zeros": data[:at] + bytes(other - at) + data[other:],
        "a bit": data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
        "a number": data[:at] + word[:size] + data[at + size :],
    }
    kind = draw.choice(list(kinds))
    return kind, kinds[kind]


def changed_files(draw: Draw) -> Case:
    """Files of unusual kinds, changed."""
    kind, data = odd_file(draw)
    how, data = changed(draw, data)
    return asked(draw, data_url(data), f"{how}, {kind}", HARMLESS)


def declared_sizes(draw: Draw) -> Case:
    """Small files that declare no pixels, or as many as are read or a few more; and the longest and the widest ones."""
    most = 1 << 14
    width, height = draw.choice(
        [(0, 0), (0, 9), (9, 0), (most, 1), (1, most), (most, 4096), (most + 1, 1), (8192, 8193)]
    )
    gif = bytearray(picture("GIF"))
    gif[6:10] = gif[-4:-2] if draw.random() < 0.1 else struct.pack("<HH", width, height)
    bmp = bytearray(picture("BMP"))
    bmp[18:26] = struct.pack("<ii", width, draw.choice([1, -1]) * height)
    bmp[28:34] = struct.pack("<HI", *draw.choice([(24, 0), (8, 1), (4, 2), (32, 3), (1, 0), (0, 0), (24, 6)]))
    webp = bytearray(picture("WEBP"))
    webp[26:30] = struct.pack("<HH", width & 0x3FFF, height & 0x3FFF)
    rows = (width * 3 + 1) * height if width * height < 1 << 18 else 1000
    kinds: dict[str, Callable[[], bytes]] = {
        "PNG": lambda: png(width, height, 8, 2, bytes(rows)),
        "PNG in parts": lambda: png(width, height, 16, 6, bytes(1000), chunk(b"IDAT", b""), interlaced=1),
        "GIF": lambda: bytes(gif),
        "BMP": lambda: bytes(bmp),
        "WEBP": lambda: bytes(webp),
    }
    kind = draw.choice(list(kinds))
    return asked(draw, data_url(kinds[kind]()), f"{width} x {height} {kind}", HARMLESS)


BODIES: dict[Callable[[Draw], Case], float] = {
    wrong_bodies: 10,
    other_media: 5,
    many_parts: 3,
    strange_texts: 4,
    several_images: 8,
    changed_files: 22,
    declared_sizes: 5,
}
