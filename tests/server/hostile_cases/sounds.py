"""Hostile audios in chats: files that are broken, odd or huge, bodies of wrong shapes around them, and wrong URLs."""

from __future__ import annotations

import base64
import functools
import io
import json
import struct
from collections.abc import Callable
from typing import Any

from hostile_cases.media import HARMLESS, QUICK, host
from hostile_cases.media_bodies import changed
from hostile_cases.requests import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, Case, Draw, Expected, cut, junk, post

#: Formats of libsndfile, with subtypes; the last ones are not read.
_KINDS = (
    *(("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "DOUBLE"), ("WAV", "ULAW")),
    *(("WAV", "IMA_ADPCM"), ("WAV", "GSM610"), ("WAVEX", "PCM_32"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")),
    *(("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("AIFF", "FLOAT")),
)
_UNREAD = (("AU", "PCM_16"), ("CAF", "PCM_16"), ("W64", "PCM_16"), ("RF64", "PCM_16"), ("VOC", "PCM_16"))


@functools.cache
def audio_file(format: str = "WAV", subtype: str = "PCM_16", rate: int = 16_000, seconds: float = 0.3) -> bytes:
    """The file of a tone."""
    import numpy as np
    import soundfile

    buffer = io.BytesIO()
    tone = np.sin(np.arange(int(rate * seconds)) * 0.05).astype(np.float32)
    soundfile.write(buffer, tone, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def written(samples: Any, rate: int = 16_000, subtype: str = "FLOAT") -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype=subtype)
    return buffer.getvalue()


def input_audio(data: bytes | str, format: object = "wav") -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": format}}


def audio_url(url: object) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def good_hearing() -> dict[str, Any]:
    """A well-behaved request with an audio."""
    content = [input_audio(audio_file())]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 30, "ignore_eos": True}


def asked(draw: Draw, parts: list[Any], kind: str, expected: Expected, slow: bool = False) -> Case:
    """A request with ``parts`` behind a text, through one of the APIs."""
    path = draw.choice([CHAT, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS])
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "a"}
    messages = [{"role": "user", "content": [text, *parts]}]
    fields: dict[str, Any] = (
        {"input": messages, "max_output_tokens": 1} if path == RESPONSES else {"messages": messages}
    )
    if path in (CHAT, MESSAGES):
        fields["max_tokens"] = 1
    sent = cut(draw, post(path, json.dumps(fields).encode()))
    return Case(f"{kind} {path}", sent, (expected,), closed=False, slow=slow)


def of_file(draw: Draw, data: bytes, kind: str, expected: Expected) -> Case:
    url = f"data:audio/{draw.choice(['wav', 'mpeg', '', 'x' * 300])};base64,{base64.b64encode(data).decode()}"
    part = draw.choice([input_audio(data, draw.choice(["wav", "mp3", "flac", None])), audio_url(url)])
    return asked(draw, [part], kind, expected)


# --- families ---------------------------------------------------------------------------------------------------------


def odd_audios(draw: Draw) -> Case:
    """Files of all kinds, rates and lengths; some are refused."""
    format, subtype = draw.choice(_KINDS)
    rates = (
        [8000, 16_000, 48_000] if format in ("OGG", "MP3") else [1, 999, 1000, 8000, 11_025, 44_100, 96_000, 192_000]
    )
    rate = 8000 if subtype == "GSM610" else draw.choice(rates)
    seconds = draw.choice([0.0, 0.0001, 0.02, 0.3, 0.99, 1.0, 1.01, 3.0])
    return of_file(draw, audio_file(format, subtype, rate, seconds), f"{format} {subtype} {rate} Hz", HARMLESS)


def unread_audios(draw: Draw) -> Case:
    """Formats that are not read, and files that are no audio."""
    format, subtype = draw.choice(_UNREAD)
    files = {
        format: lambda: audio_file(format, subtype),
        "MP4": lambda: b"\0\0\0\x20ftypM4A \0\0\0\0" + junk(draw, 0, 500),
        "WebM": lambda: b"\x1a\x45\xdf\xa3" + junk(draw, 0, 500),
        "ADTS": lambda: b"\xff\xf1\x50\x80" + junk(draw, 20, 500),
        "MIDI": lambda: b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk" + junk(draw, 0, 99),
        "playlist": lambda: b"#EXTM3U\nhttp://169.254.169.254/latest\n/etc/passwd\n",
        "SDP": lambda: b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
        "noise": lambda: junk(draw, 0, 4000),
        "text": lambda: b"RIFF but only text",
        "PNG": lambda: b"\x89PNG\r\n\x1a\n" + junk(draw, 0, 99),
    }
    kind = draw.choice(list(files))
    return of_file(draw, files[kind](), kind, Expected(400))


def damaged_audios(draw: Draw) -> Case:
    """Good files, changed at any place."""
    format, subtype = draw.choice(_KINDS)
    data = audio_file(format, subtype, 8000 if subtype == "GSM610" else 16_000)
    for _ in range(draw.choice([1, 1, 3])):
        how, data = changed(draw, data)
    return of_file(draw, data, f"{how} {format} {subtype}", HARMLESS)


def odd_samples(draw: Draw) -> Case:
    """Samples that are no sound: NaN, infinity, the largest numbers, a constant, many channels."""
    import numpy as np

    value = draw.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e300, 1e-300, 1e-45, 0.0, 1.0, 1e10])
    channels = draw.choice([1, 2, 16, 17, 200])
    samples = np.zeros((draw.choice([1, 400, 481, 3000]), channels))
    samples[draw.randrange(len(samples)) :, draw.randrange(channels)] = value
    subtype, rate = draw.choice(["FLOAT", "DOUBLE"]), draw.choice([16_000, 44_100])
    with np.errstate(over="ignore"):
        return of_file(draw, written(samples, rate, subtype), f"{value} {channels} channels", HARMLESS)


def declared_lengths(draw: Draw) -> Case:
    """Small files that declare other lengths, rates, channels and widths than they have, and chunks in chunks."""
    wav = bytearray(audio_file())
    number = draw.choice([0, 1, 7, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000])
    places = {"RIFF": (4, "<I"), "format": (20, "<H"), "channels": (22, "<H"), "rate": (24, "<I"), "bytes": (28, "<I")}
    places |= {"block": (32, "<H"), "bits": (34, "<H"), "data": (40, "<I"), "fmt": (16, "<I")}
    kind = draw.choice([*places, "chunks", "FLAC", "long"])
    if kind in places:
        at, form = places[kind]
        struct.pack_into(form, wav, at, number & (0xFFFF if form == "<H" else 0xFFFFFFFF))
        data = bytes(wav)
    elif kind == "chunks":
        chunk = draw.choice([b"LIST", b"bext", b"cue ", b"smpl", b"fact", b"JUNK", b"id3 ", b"data", b"fmt "])
        data = bytes(wav[:12]) + (chunk + struct.pack("<I", number) + junk(draw, 0, 60)) * 5 + bytes(wav[12:])
    elif kind == "FLAC":
        flac = bytearray(audio_file("FLAC"))
        flac[18:26] = draw.randbytes(8)  # rate, channels, bits and number of samples
        data = bytes(flac)
    else:
        data = bytes(wav[:40]) + struct.pack("<I", 2 << 20) + bytes(2 << 20)
    return of_file(draw, data, f"{kind} {number:x}", HARMLESS)


def wrong_audio_bodies(draw: Draw) -> Case:
    """Parts and messages of other shapes than the APIs have, too many audios, and texts with the placeholder."""
    good = input_audio(audio_file())
    odd = draw.choice([1, 1.5, True, [], {}, [good], {"data": None}, {"data": [1]}, {"url": 1}, "x", "data:,"])
    kinds: dict[str, list[Any]] = {
        "a wrong value": [{"type": "input_audio", "input_audio": odd}],
        "a wrong URL": [{"type": "audio_url", "audio_url": odd}],
        "samples": [{"type": "audio", "audio": draw.choice([[0.5] * 9, {"array": [0.5]}, 1, "a.wav"])}],
        "a wrong format": [input_audio(audio_file(), draw.choice(["pcm16", "", 1, [], {}, "wav\0", "x" * 9999]))],
        "not base64": [input_audio(draw.choice(["?", "AAA", "data:audio/wav;base64,AAAA", "\0", "é", "A" * 4001]))],
        "too many": [good] * draw.randint(5, 300),
        "the placeholder": [{"type": "text", "text": draw.choice(["<|AUDIO|>", "a<|AUDIO|><|AUDIO|>"])}, good],
        "two sources": [{"type": "audio", "audio": "data:,", "url": "data:,"}],
        "nothing": [{"type": draw.choice(["input_audio", "audio_url", "audio"])}],
        "an image": [{"type": "image_url", "image_url": {"url": "data:,"}}],
        "a video": [{"type": "video_url", "video_url": {"url": "data:,"}}],
        "a damaged one beside": [good, input_audio(changed(draw, audio_file())[1][:20])],
    }
    kind = draw.choice(list(kinds))
    return asked(draw, kinds[kind], kind, Expected(400))


def other_roles(draw: Draw) -> Case:
    """Audios in messages of others than users."""
    role = draw.choice(["system", "assistant", "developer", "tool"])
    held = {"role": role, "content": [input_audio(audio_file())]} | ({"tool_call_id": "a"} if role == "tool" else {})
    messages = [held, {"role": "user", "content": "a"}]
    body = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    return Case(f"{role} {CHAT}", cut(draw, post(CHAT, body)), (Expected(400),), closed=False)


def several_audios(draw: Draw) -> Case:
    """Up to four audios in a prompt, of which some are damaged, the same, or beside odd texts."""
    parts: list[Any] = []
    for _ in range(draw.randint(2, 4)):
        data = audio_file(*draw.choice(_KINDS[:5]), 16_000, draw.choice([0.1, 0.3]))
        parts.append(input_audio(changed(draw, data)[1] if draw.random() < 0.2 else data))
        if draw.random() < 0.3:
            parts.append({"type": "text", "text": draw.choice(["", "\0", "<|audio_bos|>", "<s>", "\n" * 99, "a" * 99])})
    if draw.random() < 0.3:
        parts.append(parts[0])
    return asked(draw, parts, "several", HARMLESS)


def audio_hosts(draw: Draw) -> Case:
    """The hostile host of images, whose good files are no audio; and URLs of this machine and its network."""
    paths = [path for path, expected in QUICK.items() if expected.status == 400]
    urls = [f"http://{host[0]}/{draw.choice([*paths, 'good.png', 'moved'])}", "http://169.254.169.254/a.wav"]
    urls += ["file:///etc/passwd", "/etc/passwd", "http://[", "ftp://a/b.wav", "pipe:0", "concat:/etc/passwd|a", ""]
    urls += ["data:audio/wav;base64", "data:audio/wav,RIFF", "rtsp://127.0.0.1/a", "http://127.0.0.2/a.wav", "\0"]
    return asked(draw, [audio_url(draw.choice(urls))], "URL", Expected(400))


SOUNDS: dict[Callable[[Draw], Case], float] = {
    odd_audios: 14,
    unread_audios: 8,
    damaged_audios: 30,
    odd_samples: 8,
    declared_lengths: 12,
    wrong_audio_bodies: 12,
    other_roles: 2,
    several_audios: 8,
    audio_hosts: 6,
}
