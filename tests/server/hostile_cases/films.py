"""Hostile videos in chats: frames and animated files that are broken, odd or huge, and bodies of wrong shapes."""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
from collections.abc import Callable
from typing import Any

from hostile_cases.media import HARMLESS, QUICK, chunk, damaged_images, host, odd_file, part_of, picture
from hostile_cases.media_bodies import changed
from hostile_cases.requests import (
    CHAT,
    COUNT_TOKENS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Case,
    Draw,
    Expected,
    cut,
    junk,
    post,
)

_KINDS = ("GIF", "PNG", "WEBP")


@functools.cache
def animation(format: str, count: int = 5, size: tuple[int, int] = (16, 16), duration: int = 100) -> bytes:
    """An animated file of noise."""
    from PIL import Image

    width, height = size
    noise = bytes((at * 7919 >> 3) & 255 for at in range(width * height * 3 + count))
    frames = [Image.frombytes("RGB", size, noise[at : at + width * height * 3]) for at in range(count)]
    buffer = io.BytesIO()
    frames[0].save(buffer, format, save_all=True, append_images=frames[1:], duration=duration)
    return buffer.getvalue()


def video_url(url: object) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def data_of(*files: bytes, kind: str = "video/jpeg") -> str:
    return f"data:{kind};base64," + ",".join(base64.b64encode(file).decode() for file in files)


def good_watching() -> dict[str, Any]:
    """A well-behaved request with a video and an image."""
    content = [video_url(data_of(animation("GIF"))), part_of(data_of(picture("PNG"), kind="image/png"))]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30, "ignore_eos": True}


def asked(draw: Draw, parts: list[Any], kind: str, expected: Expected) -> Case:
    """A request with ``parts`` behind a text, through one of the APIs."""
    path = draw.choice([CHAT, CHAT, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS])
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "a\n"}
    messages = [{"role": "user", "content": [text, *parts]}]
    fields: dict[str, Any] = (
        {"input": messages, "max_output_tokens": 1} if path == RESPONSES else {"messages": messages}
    )
    if path in (CHAT, MESSAGES):
        fields["max_tokens"] = 1
    sent = cut(draw, post(path, json.dumps(fields).encode()))
    return Case(f"{kind} {path}", sent, (expected,), closed=False)


# --- families ---------------------------------------------------------------------------------------------------------


def odd_animations(draw: Draw) -> Case:
    """Files of any number of frames, size and speed."""
    count, duration = draw.choice([1, 2, 3, 5, 33, 60]), draw.choice([0, 1, 7, 100, 65_535])
    size = draw.choice([(1, 1), (1, 40), (40, 1), (3, 5), (16, 16), (64, 48), (1, 300)])
    format = draw.choice(_KINDS)
    part = video_url(
        data_of(animation(format, count, size, duration), kind=draw.choice(["video/gif", "", "image/png"]))
    )
    return asked(draw, [part], f"{format} of {count} {size} {duration} ms", HARMLESS)


def damaged_animations(draw: Draw) -> Case:
    """Good files, changed at any place."""
    format = draw.choice(_KINDS)
    data = animation(format, draw.choice([2, 5]))
    for _ in range(draw.choice([1, 1, 4])):
        how, data = changed(draw, data)
    return asked(draw, [video_url(data_of(data))], f"{how} {format}", HARMLESS)


def odd_frames(draw: Draw) -> Case:
    """Frames as files, of different kinds and sizes, damaged, missing, or of none."""
    good = picture("JPEG", size=(16, 16))
    count = draw.choice([1, 2, 3, 8])
    kinds: dict[str, Callable[[], list[bytes]]] = {
        "good": lambda: [good] * count,
        "odd files": lambda: [odd_file(draw)[1]] * count,
        "different": lambda: [good, odd_file(draw)[1]],
        "damaged": lambda: [*[good] * count, changed(draw, good)[1]],
        "empty": lambda: [good, b"", good],
        "animations": lambda: [animation("GIF")] * count,
        "many": lambda: [picture("GIF", size=(4, 4))] * draw.choice([300, 2048]),
    }
    kind = draw.choice(list(kinds))
    return asked(draw, [video_url(data_of(*kinds[kind]()))], f"{kind} {count}", HARMLESS)


def film_bombs(draw: Draw) -> Case:
    """Small files that declare or decode to many pixels, frames or seconds."""
    gif = bytearray(animation("GIF"))
    gif[6:10] = struct.pack("<HH", draw.choice([0, 16_384, 65_535]), draw.choice([0, 1, 16_384, 65_535]))
    png = animation("PNG")
    at = png.index(b"acTL") - 4
    count = draw.choice([0, 1, 2048, 2049, 2**31 - 1, 2**32 - 1])
    delays = bytearray(png)
    place = png.index(b"fcTL") + 4 + 20
    delays[place : place + 4] = struct.pack(">HH", draw.choice([0, 1, 65_535]), draw.choice([0, 1, 65_535]))
    kinds: dict[str, Callable[[], bytes]] = {
        "size": lambda: bytes(gif),
        "count": lambda: png[:at] + chunk(b"acTL", struct.pack(">II", count, 0)) + png[at + 20 :],
        "delays": lambda: bytes(delays),
        "frames": lambda: animation("GIF", draw.choice([2048, 2060]), (1, 1)),
        "pixels": lambda: animation("GIF", 40, (700, 700)),
        "comments": lambda: bytes(gif[:-1]) + b"\x21\xfe" + (b"\xff" + bytes(255)) * 4000 + b"\0;",
    }
    kind = draw.choice(list(kinds))
    return asked(draw, [video_url(data_of(kinds[kind]()))], kind, HARMLESS)


def no_films(draw: Draw) -> Case:
    """Containers, and files of other kinds."""
    files = {
        "MP4": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + junk(draw, 0, 500),
        "AVI": b"RIFF\x24\0\0\0AVI LIST" + junk(draw, 0, 500),
        "WebM": b"\x1a\x45\xdf\xa3" + junk(draw, 0, 500),
        "MPEG": b"\0\0\1\xba" + junk(draw, 0, 500),
        "playlist": b"#EXTM3U\nfile:///etc/passwd\n",
        "TIFF": picture("TIFF"),
        "noise": junk(draw, 0, 3000),
    }
    kind = draw.choice(list(files))
    return asked(draw, [video_url(data_of(files[kind], kind="video/mp4"))], kind, Expected(400))


def wrong_film_bodies(draw: Draw) -> Case:
    """Parts and URLs of other shapes than the API has, too many videos, and texts with the placeholder."""
    good = video_url(data_of(animation("GIF")))
    odd = draw.choice([None, 1, True, [], {}, [good], {"url": None}, {"url": [1]}, {"url": 1}, "x", "data:,"])
    frame = base64.b64encode(picture("JPEG", size=(16, 16))).decode()
    urls = [
        "data:",
        "data:,",
        "data:video/jpeg;base64,",
        f"data:video/jpeg,{frame}",
        f"data:video/jpeg;base64,{frame},",
    ]
    urls += [f"data:video/jpeg;base64,{frame},,{frame}", "data:video/jpeg;base64," + "," * 5000, "cat.mp4", "\0", ""]
    urls += [f"data:video/jpeg;base64,{frame},{frame}é", "data:video/jpeg;base64," + ",".join(["AAAA"] * 3000)]
    kinds: dict[str, list[Any]] = {
        "a wrong value": [{"type": draw.choice(["video_url", "video"]), "video_url": odd, "video": odd}],
        "a wrong URL": [video_url(draw.choice(urls))],
        "frames as list": [{"type": "video", "video": [data_of(picture("PNG"))] * 2}],
        "too many": [good] * draw.randint(5, 100),
        "the placeholder": [{"type": "text", "text": "<|video_pad|>\n"}, good],
        "the image's": [{"type": "text", "text": "<|image_pad|>\n"}, good],
        "an audio": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        "arguments": [{**good, "type": "video_urls"}],
    }
    kind = draw.choice(list(kinds))
    return asked(draw, kinds[kind], kind, Expected(400))


def several_films(draw: Draw) -> Case:
    """Videos and images in a prompt, of which some are damaged or the same."""
    parts: list[Any] = []
    for _ in range(draw.randint(2, 4)):
        data = animation(draw.choice(_KINDS), draw.choice([2, 3])) if draw.random() < 0.6 else picture("PNG")
        damaged = changed(draw, data)[1] if draw.random() < 0.2 else data
        part = part_of(data_of(damaged, kind="image/png")) if data == picture("PNG") else video_url(data_of(damaged))
        parts.append(part)
    if draw.random() < 0.3:
        parts.append(parts[0])
    if draw.random() < 0.3:
        parts.insert(1, {"type": "text", "text": draw.choice(["", "\0", "<|vision_start|>", "<s>", "\n" * 99])})
    return asked(draw, parts, "several", HARMLESS)


def film_hosts(draw: Draw) -> Case:
    """The hostile host of images, and URLs of this machine and its network."""
    path = draw.choice(list(QUICK))
    other = draw.choice(
        ["file:///etc/passwd", "http://169.254.169.254/a.gif", "rtsp://127.0.0.1/", "pipe:0", "/dev/zero"]
    )
    if draw.random() < 0.3:
        return asked(draw, [video_url(other)], "URL", Expected(400))
    return asked(draw, [video_url(f"http://{host[0]}/{path}")], f"/{path}", QUICK[path])


def hostile_settings(draw: Draw) -> Case:
    """Arguments of the processors, and of reading, of wrong types, names, and sizes."""
    number = draw.choice(
        [0, -1, 1, 2, 64, 1e-300, 1e300, 2**31, 10**18, 10**400, True, None, "2", [], {}, [1], "\0", 0.5]
    )
    size = {
        "shortest_edge": draw.choice([0, -5, 1, 64, 10**12]),
        "longest_edge": draw.choice([0, 1, 1024, 10**9, 10**18]),
    }
    names = [
        "size",
        "fps",
        "num_frames",
        "min_frames",
        "max_frames",
        "min_pixels",
        "max_pixels",
        "resample",
        "image_std",
    ]
    names += [
        "do_resize",
        "do_rescale",
        "rescale_factor",
        "do_normalize",
        "image_mean",
        "max_video_tokens",
        "crop_size",
    ]
    names += ["patch_size", "return_tensors", "device", "images", "__class__", "do_sample_frames", "disable_grouping"]
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "one": lambda: {"mm_processor_kwargs": {draw.choice(names): number}},
        "several": lambda: {"mm_processor_kwargs": {draw.choice(names): number for _ in range(4)}},
        "size": lambda: {"mm_processor_kwargs": {"size": size}},
        "pixels": lambda: {"mm_processor_kwargs": {"min_pixels": draw.choice([1, 10**6, 10**9, 10**15])}},
        "colors": lambda: {"mm_processor_kwargs": {"image_std": [draw.choice([0.0, 1e-40, 1e-300, 1e38, -1.0])] * 3}},
        "scale": lambda: {"mm_processor_kwargs": {"rescale_factor": draw.choice([1e-300, 1e30, 1e300, 5])}},
        "reading": lambda: {"media_io_kwargs": {"video": {draw.choice(["num_frames", "fps", "codec"]): number}}},
        "wrong": lambda: {draw.choice(["mm_processor_kwargs", "media_io_kwargs"]): number},
        "another kind": lambda: {"media_io_kwargs": {draw.choice(["image", "audio", "", "\0"]): {"fps": 1}}},
        "long": lambda: {"mm_processor_kwargs": {"x" * draw.choice([100, 100_000]): 1}},
        "many": lambda: {"mm_processor_kwargs": {str(number): number for number in range(3000)}},
    }
    kind = draw.choice(list(kinds))
    medium = draw.choice([video_url(data_of(animation("GIF"))), part_of(data_of(picture("PNG"), kind="image/png"))])
    messages = [{"role": "user", "content": [{"type": "text", "text": "a\n"}, medium]}]
    path = draw.choice([CHAT, CHAT, CHAT, TOKENIZE, RESPONSES, MESSAGES])
    fields: dict[str, Any] = {"input": messages} if path == RESPONSES else {"messages": messages}
    fields |= {"max_tokens": 1} if path in (CHAT, MESSAGES) else {}
    body = json.dumps(fields | kinds[kind]()).encode()
    return Case(f"{kind} {path}", cut(draw, post(path, body)), (HARMLESS,), closed=False)


FILMS: dict[Callable[[Draw], Case], float] = {
    odd_animations: 14,
    damaged_animations: 28,
    odd_frames: 14,
    film_bombs: 6,
    no_films: 6,
    wrong_film_bodies: 12,
    several_films: 8,
    film_hosts: 6,
    hostile_settings: 10,
    damaged_images: 6,
}
