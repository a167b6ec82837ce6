"""Connections: pipelining, request smuggling, clients that disconnect or are slow, random changes of bytes."""

from __future__ import annotations

import json
from dataclasses import replace

from hostile_cases.requests import (
    ANY,
    CHAT,
    COMPLETIONS,
    GOOD,
    INVALID_HTTP,
    OK,
    TOKENIZE,
    Case,
    Draw,
    Expected,
    cut,
    head,
    junk,
    post,
    post_json,
)


def pipelined(draw: Draw) -> Case:
    """Several requests at once; the first invalid one ends the connection."""
    version = head("GET", "/version")
    choices = [
        (version, OK),
        (head("GET", "/nowhere"), Expected(404, "not_found")),
        (post_json(COMPLETIONS, GOOD[COMPLETIONS]), OK),
        (post_json(COMPLETIONS, {"prompt": 5}), Expected(400, "invalid_type", "prompt")),
        (post(TOKENIZE, b"{"), Expected(400, "invalid_json")),
        (head("GET", "/version", b"content-length: 3") + b"abc", OK),
    ]
    chosen = [draw.choice(choices) for _ in range(draw.randint(2, 12))]
    # A response before an unexpected body has arrived ends the connection.
    parted = (lambda draw, sent: (sent,)) if choices[-1] in chosen else cut
    sent, answers = b"".join(one for one, _ in chosen), tuple(one for _, one in chosen)
    if draw.random() < 0.5:
        bad = draw.choice([b"GET / HTTP/1.1\nhost: a\n\n", b"\0\r\n\r\n", head("GET", "/", host=None), b"G T\r\n\r\n"])
        return Case("with an end", parted(draw, sent + bad), (*answers, INVALID_HTTP), closed=True)
    if draw.random() < 0.3:
        last = head("GET", "/version", b"connection: close") + version * 3
        # In one piece: bytes that arrive after the close may lose the client its unread responses.
        return Case("closed", (sent + last,), (*answers, OK), closed=True)
    return Case("good ones", parted(draw, sent), answers, closed=False)


def smuggled(draw: Draw) -> Case:
    """Request smuggling: a request inside another one is part of its body or ends the connection: no response."""
    inner = head("GET", "/v1/models")
    fields = GOOD[TOKENIZE] | {"prompt": inner.decode()}
    body = json.dumps(fields).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    start = head("POST", TOKENIZE, b"content-type: application/json", b"transfer-encoding: chunked")
    noise = b'{"prompt": "a"}' + b" " * 5
    kinds = {
        "in a body": Case("", (post(TOKENIZE, body),), (OK,), closed=False),
        "in a chunk": Case("", (start + chunks,), (OK,), closed=False),
        "in an extension": Case(
            "", (start + b"%x;a=%b\r\n%b\r\n0\r\n\r\n" % (len(noise), b"GET", noise),), (OK,), closed=False
        ),
        "in a trailer": Case(
            "", (start + b"%x\r\n%b\r\n0\r\nx: GET /v1/models\r\n\r\n" % (len(noise), noise),), (OK,), closed=False
        ),
        "behind a length": Case(
            "",
            (
                head("POST", TOKENIZE, b"content-length: 4", b"transfer-encoding: chunked")
                + b"5c\r\n"
                + inner
                + b"0\r\n\r\n",
            ),
            (INVALID_HTTP,),
            closed=True,
        ),
        "with a coding in disguise": Case(
            "",
            (
                head(
                    "POST",
                    TOKENIZE,
                    draw.choice(
                        [
                            b"transfer-encoding : chunked",
                            b"transfer-encoding: xchunked",
                            b"transfer-encoding: chunked\r\ntransfer-encoding: cow",
                            b"transfer-encoding:\x0bchunked",
                            b" transfer-encoding: chunked",
                        ]
                    ),
                )
                + b"0\r\n\r\n"
                + inner,
            ),
            (INVALID_HTTP,),
            closed=True,
        ),
    }
    kind = draw.choice(list(kinds))
    return replace(kinds[kind], kind=kind, pieces=cut(draw, b"".join(kinds[kind].pieces)))  # type: ignore[arg-type]


def leaving(draw: Draw) -> Case:
    """A client that disconnects during a request or a response."""
    path = draw.choice((COMPLETIONS, CHAT))
    long = GOOD[path] | {
        "max_tokens": draw.choice([1, 40, 800]),
        "stream": draw.random() < 0.5,
        "n": draw.choice([1, 4]),
    }
    sent = post_json(path, long)
    how = draw.choice(["closes", "resets", "half-closes"])
    kind = draw.choice(["in the request", "after it", "soon after it", "in the answer"])
    if kind == "in the request":
        return Case(f"{how} {kind}", (sent[: draw.randrange(len(sent))],), leave=how)
    pause = {"after it": 0.0, "soon after it": draw.random() * 0.05, "in the answer": 0.05 + draw.random() * 0.3}[kind]
    return Case(f"{how} {kind}", (sent, pause), leave=how)


def slow_senders(draw: Draw) -> Case:
    """Half a request and then nothing, or single bytes with pauses."""
    body = json.dumps(GOOD[COMPLETIONS]).encode()
    whole = post(COMPLETIONS, body)
    late = Expected(408, "read_timeout")
    end_of_head = whole.index(b"\r\n\r\n") + 4
    kinds = ["half a head", "half a body", "half a chunk", "huge chunk", "trickling head", "trickling body", "nothing"]
    kind = draw.choice(kinds)
    if kind == "nothing":
        return Case(kind, (), (), closed=True, slow=True)
    if kind.startswith("trickling"):
        sent = whole if kind.endswith("head") else whole[end_of_head:]
        first = b"" if kind.endswith("head") else whole[:end_of_head]
        trickle = [piece for byte in sent for piece in (bytes([byte]), 0.4)]
        return Case(kind, (first, *trickle[:24], 3.0), (late,), closed=True, slow=True)
    if kind.endswith("chunk"):
        size = b"f" * draw.randint(5, 20)
        start = head("POST", COMPLETIONS, b"content-type: application/json", b"transfer-encoding: chunked")
        rest = draw.choice([b"", b"5\r\n", b"5\r\nab"]) if kind == "half a chunk" else size + b"\r\nabc\r\n"
        return Case(kind, (start + rest,), (late,), closed=True, slow=True)
    at = draw.randrange(1, end_of_head - 1) if kind == "half a head" else draw.randrange(end_of_head, len(whole) - 1)
    return Case(kind, (whole[:at],), (late,), closed=True, slow=True)


def mutated(draw: Draw) -> Case:
    """A good request with bytes changed, left out, doubled or added: no promise but that it is the client's fault."""
    path = draw.choice(list(GOOD))
    sent = bytearray(post_json(path, GOOD[path]))
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(sent))
        end = min(len(sent), at + draw.randint(1, 8))
        change = draw.randrange(5)
        if change == 0:
            sent[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            sent[at:at] = junk(draw, 1, 8)
        elif change == 2 and len(sent) > 20:
            del sent[at:end]
        elif change == 3:
            sent[at:at] = sent[at:end] * draw.randint(1, 50)
        else:
            sent[at:end] = draw.choice(
                [b"\r\n", b"\n", b"\0", b"\xff" * 4, b"%00", b"9" * 30, b'"', b"{", b"[" * 99, b":"]
            )
    return Case(path, (bytes(sent),), (Expected(ANY),), leave="reads some")
