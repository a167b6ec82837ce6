"""Renders chat templates in worker processes that can be killed: a template is a program from an untrusted folder.

transformers runs templates in a sandbox without access to files, but a template can still loop forever or fill the
memory, and clients choose the messages that make it do so. So this process imports transformers once and forks a worker
per socket. A worker sets a timer before each conversation; when it expires, the kernel kills the worker, whatever it is
doing, and a new one, forked in a millisecond, replaces it.

Started by ``template_client`` with the numbers of inherited sockets as arguments. The first frame on the first socket
is a ``Setup``. A frame is a 4-byte big-endian length followed by MessagePack. Requests and replies are numbered. The
number of the request a worker is rendering is also in shared memory, so that its parent can reply if it dies.
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
#: Processor time per conversation; bytes a worker may allocate beyond those it starts with.
MAX_SECONDS = 1.0
MAX_BYTES = 512 << 20


class Setup(msgspec.Struct):
    """What all conversations are rendered with: the template, the special tokens, the maximum length of the text."""

    template: str
    special_tokens: dict[str, Any]
    max_chars: int


class RenderRequest(msgspec.Struct):
    """One conversation. Numbers start at 1."""

    number: int
    messages: list[dict[str, Any]]
    arguments: dict[str, Any]


class RenderReply(msgspec.Struct):
    """Its text, or the reason why there is none."""

    number: int
    text: str = ""
    failure: str = ""


def main() -> None:
    """Entry point of the process: fork a worker per socket, and replace workers that die."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = [socket.socket(fileno=int(word)) for word in sys.argv[1:]]
    body = receive(sockets[0])
    if body is None:  # the server has already ended
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    from transformers.utils import chat_template_utils  # noqa: F401  imported once, for all workers

    current = mmap.mmap(-1, _NUMBER.size * len(sockets))
    workers = {_fork(slot, sockets, setup, current): slot for slot in range(len(sockets))}
    while workers:
        pid, status = os.wait()
        slot = workers.pop(pid)
        if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
            timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            failure = (
                f"it took longer than {MAX_SECONDS:g} s" if timed_out else "it ended its process; is it too large?"
            )
            (number,) = _NUMBER.unpack_from(current, slot * _NUMBER.size)
            try:
                if number:
                    send(sockets[slot], RenderReply(number, failure=failure))
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


def _work(sock: socket.socket, setup: Setup, set_current: Callable[[int], None]) -> int:
    """Render until the socket closes. ``set_current`` publishes the number of the current request, or 0."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with open("/proc/self/statm") as stream:
        size = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, size + MAX_BYTES))
    # Processor time, not wall-clock time: the machine may be busy, and a template cannot sleep.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (body := receive(sock)) is not None:
        request = msgspec.msgpack.decode(body, type=RenderRequest)
        # OpenAI clients send null for absent fields; templates test whether they are defined.
        messages = [{name: value for name, value in one.items() if value is not None} for one in request.messages]
        set_current(request.number)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            given = {**setup.special_tokens, **request.arguments}
            rendered = render_jinja_template(conversations=[messages], chat_template=setup.template, **given)
            reply = RenderReply(request.number, rendered[0][0])
            if len(reply.text) > setup.max_chars:
                reply = RenderReply(request.number, failure=f"its text is longer than {setup.max_chars} characters")
        except MemoryError:
            reply = RenderReply(request.number, failure="it takes too much memory")
        except Exception as exception:  # templates can raise anything
            first = (str(exception).strip().splitlines() or [type(exception).__name__])[0]
            reply = RenderReply(request.number, failure=first.rstrip(".")[:200])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        send(sock, reply)
        set_current(0)
    return 0


def send(sock: socket.socket, record: msgspec.Struct) -> None:
    """Send one frame."""
    body = msgspec.msgpack.encode(record)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """Receive the body of one frame; None if the peer is gone."""
    head = _receive_exactly(sock, LENGTH.size)
    return None if head is None else _receive_exactly(sock, LENGTH.unpack(head)[0])


def _receive_exactly(sock: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = sock.recv(min(1 << 20, count - len(received)))
        if not piece:
            return None
        received += piece
    return bytes(received)
