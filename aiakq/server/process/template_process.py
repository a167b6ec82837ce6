"""Chat templates in processes that can be killed: a template is a program from somebody else's model folder.

transformers runs templates in a sandbox that reaches no files, but one can still run for ever or fill the memory, and
which messages make it do so is up to the client. So this process imports transformers once and forks a worker per
socket it was given. A worker sets itself an alarm before each conversation; the kernel ends it when the alarm rings,
whatever it is doing, and a fresh one, forked in a millisecond, takes its place.

Started by ``templates`` with the numbers of inherited sockets as arguments; the first frame on the first socket says
what to render with. A frame is four bytes of length, then MessagePack. Orders are numbered and answers say which they
belong to; the order a worker is at is also in memory that it shares with the process that has to answer for its end.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct("=Q")
#: Processor time a conversation may take; bytes a worker may take beyond what it has when it begins.
SECONDS = 1.0
MEMORY = 512 << 20


class Setup(msgspec.Struct):
    """What every conversation is rendered with: the template, the special tokens, the longest text."""

    template: str
    special_tokens: dict[str, Any]
    max_chars: int


class Order(msgspec.Struct):
    """One conversation; numbers begin at 1."""

    number: int
    messages: list[dict[str, Any]]
    arguments: dict[str, Any]


class Rendered(msgspec.Struct):
    """Its text, or the reason why there is none."""

    number: int
    text: str = ""
    problem: str = ""


def main() -> None:
    """Entry point of the process: fork a worker per socket, and another whenever one ends badly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    sent = receive(sockets[0])
    if sent is None:  # the server has ended already
        return
    setup = msgspec.msgpack.decode(sent, type=Setup)
    from transformers.utils import chat_template_utils  # noqa: F401  imported once, for all that are forked

    current = mmap.mmap(-1, _NUMBER.size * len(sockets))
    workers = {_fork(slot, sockets, setup, current): slot for slot in range(len(sockets))}
    while workers:
        pid, status = os.wait()
        slot = workers.pop(pid)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            rang = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            problem = f"it took longer than {SECONDS:g} s" if rang else "it ended its process; is it too large?"
            (number,) = _NUMBER.unpack_from(current, slot * _NUMBER.size)
            try:
                if number:
                    send(sockets[slot], Rendered(number, problem=problem))
            except OSError:  # the server is gone
                continue
            workers[_fork(slot, sockets, setup, current)] = slot
    os._exit(0)


def _fork(slot: int, sockets: list[socket.socket], setup: Setup, current: mmap.mmap) -> int:
    _NUMBER.pack_into(current, slot * _NUMBER.size, 0)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _work(sockets[slot], setup, lambda number: _NUMBER.pack_into(current, slot * _NUMBER.size, number))
    finally:
        os._exit(code)


def _work(sock: socket.socket, setup: Setup, note: Callable[[int], None]) -> int:
    """Render until the socket closes. ``note`` writes down the order it is at, or 0."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with open("/proc/self/statm") as stream:
        size = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    # Processor time, not time by the clock: a busy machine is not the template's fault, and it cannot sleep.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (body := receive(sock)) is not None:
        order = msgspec.msgpack.decode(body, type=Order)
        # What OpenAI clients send as null, templates expect to be absent.
        messages = [{name: value for name, value in one.items() if value is not None} for one in order.messages]
        note(order.number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            given = {**setup.special_tokens, **order.arguments}
            rendered = render_jinja_template(conversations=[messages], chat_template=setup.template, **given)
            answer = Rendered(order.number, rendered[0][0])
            if len(answer.text) > setup.max_chars:
                answer = Rendered(order.number, problem=f"its text is longer than {setup.max_chars} characters")
        except MemoryError:
            answer = Rendered(order.number, problem="it takes too much memory")
        except Exception as failure:  # a template raises whatever it likes
            first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            answer = Rendered(order.number, problem=first.rstrip(".")[:200])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, answer)
        note(0)
    return 0


def send(sock: socket.socket, record: msgspec.Struct) -> None:
    """Send one frame."""
    body = msgspec.msgpack.encode(record)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """One frame's body; None when the other side is gone."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = sock.recv(min(1 << 20, count - len(received)))
        if not piece:
            return None
        received += piece
    return bytes(received)
