"""Bodies of invalid or deeply nested JSON, and unusual texts that are accepted."""

from __future__ import annotations

import json
from typing import Any

from hostile_cases.requests import (
    BOMBS,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GOOD,
    TOKENIZE,
    Case,
    Draw,
    Expected,
    cut,
    junk,
    post,
    some_text,
)


def bad_json(draw: Draw) -> Case:
    path = draw.choice(list(GOOD))
    good = json.dumps(GOOD[path]).encode()
    first = next(iter(GOOD[path]))
    deep, digits = draw.randint(65, 16_000), draw.randint(4301, 20_000)
    name = some_text(draw).replace('"', "").replace("\\", "")
    twice = json.dumps(name, ensure_ascii=False).encode()
    invalid = Expected(400, "invalid_json")
    kinds: dict[str, tuple[bytes, Expected]] = {
        "cut": (good[: draw.randint(0, len(good) - 1)], invalid),
        "more behind it": (good + draw.choice([b"x", b"{}", b",", b"]", b"\0", good]), invalid),
        "single quotes": (good.replace(b'"', b"'"), invalid),
        "comma at the end": (good[:-1] + b",}", invalid),
        "comment": (good[:-1] + b"/* */}", invalid),
        "two byte order marks": (b"\xef\xbb\xbf" * 2 + good, invalid),
        "other coding": (json.dumps(GOOD[path]).encode(draw.choice(["utf-32", "utf-16-le", "utf-16-be"])), invalid),
        "no object": (
            draw.choice([b"[]", b"null", b"1", b'"text"', b"true", b"[{}]", b"0.5", good.join((b"[", b"]"))]),
            invalid,
        ),
        "nothing": (draw.choice([b"", b" ", b"\r\n"]), invalid),
        "deep list": (b'{"%b": ' % first.encode() + b"[" * deep, invalid),
        "deep closed list": (b'{"%b": ' % first.encode() + b"[" * deep + b"]" * deep + b"}", invalid),
        "deep object": (b'{"a":' * deep + b"1" + b"}" * deep, invalid),
        "brackets": (b"[" * deep, invalid),
        "key twice": (good[:-1] + b", " + twice + b": 1, " + twice + b": 2}", Expected(400, "duplicate_key")),
        "first field twice": (b'{"%b": 1, ' % first.encode() + good[1:], Expected(400, "duplicate_key", first)),
        "many lists": (good[:-1] + b',"a":[' + b"[]," * 30_001 + b"1]}", invalid),
        "not UTF-8": (
            good[:-1] + b', "user": "' + draw.choice([b"\xff", b"\xc3", b"\xe4\xb8", b"\xc0\xaf"]) + b'"}',
            invalid,
        ),
        "lone surrogate in a key": (
            good[:-1] + b', "\\u%s": 1}' % draw.choice([b"d800", b"dfff", b"dc00"]),
            Expected(400, "invalid_type"),
        ),
        "bad escape": (good[:-1] + b', "user": "' + draw.choice([b"\\x41", b"\\u12", b"\\", b"\\a"]) + b'"}', invalid),
        "control in a string": (good[:-1] + b', "user": "' + bytes([draw.randrange(0, 32)]) + b'"}', invalid),
        "a number of many digits": (good[:-1] + b', "seed": ' + b"1" * digits + b"}", Expected(400)),
        "bad number": (
            good[:-1] + b', "seed": ' + draw.choice([b"01", b"1.", b".5", b"+1", b"0x1", b"1e", b"--1"]) + b"}",
            invalid,
        ),
        "unquoted": (b"{prompt: 1}", invalid),
        "noise": (junk(draw, 1, 2000), invalid),
    }
    kind = draw.choice(list(kinds))
    body, expected = kinds[kind]
    if path == DETOKENIZE and kind == "a number of many digits":
        expected = Expected(400)
    return Case(f"{kind} {path}", cut(draw, post(path, body)), (expected,), closed=False)


def strange_text(draw: Draw) -> Case:
    """Unusual but valid text, and text that only looks dangerous."""
    text = draw.choice(
        [
            "\u0301" * draw.randint(1, 400),
            "\u0000" * draw.randint(1, 100),
            "\U0001f468\u200d\U0001f469\u200d\U0001f467" * draw.randint(1, 20),
            "\u202eabc\u202c" * draw.randint(1, 20),
            "\ufeff\ufffe\uffff",
            "<|endoftext|>" * draw.randint(1, 50),
            "<|im_start|>system\n<|im_end|>",
            "\r\n\r\ndata: [DONE]\r\n\r\n",
            "a" * draw.randint(1, 800),
            " " * draw.randint(1, 800),
            draw.choice(BOMBS),
            "'; DROP TABLE users; --",
            "$(reboot) `id` ${jndi:ldap://127.0.0.1/a}",
            some_text(draw, 100),
        ]
    )
    path = draw.choice((COMPLETIONS, CHAT, TOKENIZE))
    change: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        role = draw.choice(["user", "system", some_text(draw)])
        change = {"messages": [{"role": role, "content": text}]}
    elif path == COMPLETIONS:
        change |= draw.choice(
            [
                {},
                {"stop": text[:16]},
                {"bad_words": ["x" + text[:16]]},
                {"echo": True},
                {"stream": True},
                {"logprobs": draw.randint(0, 20), "echo": True},
                {"temperature": draw.choice([1e-40, 1e4, 5e-324]), "seed": draw.randrange(-(2**63), 2**63)},
                {"top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1},
                {"logit_bias": {"5": 1e300, "6": -1e300}},
                {"repetition_penalty": 1e-300, "presence_penalty": 2, "frequency_penalty": -2},
                {"truncate_prompt_tokens": draw.choice([-1, 1, 1024])},
                {"user": text, "metadata": {"a": [text]}},
            ]
        )
    answers = (Expected(frozenset({200, 400}), frozenset({"context_length_exceeded"})),)
    fields = GOOD[path] | change
    sent = post(path, json.dumps(fields, ensure_ascii=draw.random() < 0.5).encode())
    return Case(f"{path} {sorted(change)}", cut(draw, sent), answers, closed=None if "stream" in change else False)
