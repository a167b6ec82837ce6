"""Bodies at every limit of the server: what is sent, where, and the status of the response."""

from __future__ import annotations

import json

MIB = 1 << 20
TEXT = "It was the best of times, it was the worst of times, "


def text_of(num_bytes: int) -> str:
    return TEXT * (num_bytes // len(TEXT))


def request(**fields: object) -> bytes:
    return json.dumps({"max_tokens": 1, **fields}).encode()


def with_metadata(value: bytes) -> bytes:
    return b'{"prompt":[5],"max_tokens":1,"metadata":' + value + b"}"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
#: What is sent, where, and the status of the response.
BODIES = {
    "token strings": (
        "/tokenize",
        json.dumps({"prompt": text_of(4 * MIB - 500), "return_token_strs": True}).encode(),
        200,
    ),
    "token ids": ("/detokenize", b'{"tokens":[' + b"500," * 199_000 + b"5]}", 200),
    "too many token ids": ("/detokenize", b'{"tokens":[' + b"5," * (2 * MIB - 50) + b"5]}", 400),
    "messages": (CHAT, request(messages=[{"role": "user", "content": "a"}] * 4990), 400),
    "metadata integers": (COMPLETIONS, with_metadata(b"[" + b"1234567890," * 199_000 + b"1]"), 200),
    "metadata numbers": (COMPLETIONS, with_metadata(b"[" + b"0.12345678901," * 199_000 + b"1]"), 200),
    "metadata long numbers": (COMPLETIONS, with_metadata(b"[" + (b"1" * 4299 + b",") * 970 + b"1]"), 200),
    "metadata texts": (COMPLETIONS, with_metadata(b"[" + b'"abcdefghijk",' * 199_000 + b'""]'), 200),
    "metadata empty texts": (COMPLETIONS, with_metadata(b"[" + b'"",' * (4 * MIB // 3 - 50) + b'""]'), 400),
    "metadata escapes": (COMPLETIONS, with_metadata(b'"' + b'\\"' * (2 * MIB - 50) + b'"'), 200),
    "a long prompt": (COMPLETIONS, request(prompt=text_of(4 * MIB - 500)), 400),
    "an escaped prompt": (COMPLETIONS, b'{"prompt":"' + b"\\u00e9" * (4 * MIB // 6 - 20) + b'"}', 400),
    "allowed ids": (
        COMPLETIONS,
        request(prompt=[5], n=16, max_tokens=8, allowed_token_ids=[number % 4096 for number in range(199_000)]),
        200,
    ),
    "bad words": (
        COMPLETIONS,
        request(prompt=[5], bad_words=[f"{number:03}" + "x y" * 80 for number in range(128)]),
        200,
    ),
    "echo": (COMPLETIONS, request(prompt=[[7] * 1000] * 32, echo=True), 200),
    "prompt logprobs": (COMPLETIONS, request(prompt=[[id] * 1000 for id in range(5, 37)], prompt_logprobs=20), 200),
    "echoed logprobs": (
        COMPLETIONS,
        request(prompt=[[id] * 1000 for id in range(50, 82)], echo=True, logprobs=20),
        200,
    ),
}
