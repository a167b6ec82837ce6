"""Channels: records arrive as they were sent; a peer that exited, stopped or sends garbage is detected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aiakq.errors import AiakqError, error
from aiakq.system.async_channel import AsyncChannel
from aiakq.system.channel import (
    LENGTH,
    MAX_FRAME,
    Channel,
    Disconnected,
    Failure,
    Heartbeat,
    InvalidMessage,
    RecordDecoder,
    framed,
    split,
)

BIG = 24 << 20


class Text(msgspec.Struct, tag="text"):
    text: str


class Data(msgspec.Struct, tag="data"):
    data: bytes
    facts: dict[str, Any] = {}


Ends = tuple[Channel[Text | Data, Text | Data], Channel[Text | Data, Text | Data]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends of a channel."""
    first, second = socket.socketpair()
    channels = (
        Channel[Text | Data, Text | Data](first, Text | Data),
        Channel[Text | Data, Text | Data](second, Text | Data),
    )
    yield channels
    for channel in channels:
        channel.close()


def in_thread(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_records_of_any_size_arrive_in_order(ends):
    one, other = ends
    sent = [Text(""), Data(os.urandom(BIG)), Text("x" * 70_000), Data(b"", {"a": [1, None, 2.5]})]
    sender = in_thread(lambda: [one.send(record) for record in sent])
    assert [other.receive() for _ in sent] == sent
    sender.join()


def test_integers_of_any_length_arrive():
    class Seed(msgspec.Struct, tag="seed"):
        seed: int
        facts: dict[str, Any] = {}

    for record in (
        Seed(2**64 - 1, {"x": [2**64, -(2**63) - 1, 10**40]}),
        Seed(-(2**63), {"x": 2**64 - 1}),
        Seed(2**64, {}),
    ):
        (body,) = split(bytearray(framed(record)))
        assert RecordDecoder(Seed).decode(body) == record


def test_paths_arrive_as_paths_where_the_type_says_so(ends):
    one, other = ends

    class File(msgspec.Struct, tag="file"):
        path: Path | None
        others: list[Any] = []

    one.send(File(Path("/a/b"), [Path("c")]))
    assert Channel(other.socket, File).receive() == File(Path("/a/b"), ["c"])


def test_bytes_that_follow_a_frame_are_received_apart(ends):
    """Also if they arrived together with the frame before."""
    one, other = ends
    one.send(Text("a"))
    one.send(Text("b"), memoryview(b"12345"), memoryview(b""))
    one.send(Text("c"))
    view = memoryview(bytearray(5))
    assert [other.receive(), other.receive()] == [Text("a"), Text("b")]
    other.receive_into(view)
    assert bytes(view) == b"12345" and other.receive() == Text("c")


def test_frames_are_split_however_the_stream_is_cut():
    records = [Text("x" * size) for size in (0, 1, 300, 70000)]
    stream = b"".join(map(framed, records))
    for step in (1, 3, 1000, len(stream)):
        buffer, bodies = bytearray(), []
        for at in range(0, len(stream), step):
            buffer += stream[at : at + step]
            bodies += split(buffer)
        assert [RecordDecoder(Text).decode(body) for body in bodies] == records and not buffer


def test_all_complete_records_are_received_at_once_and_only_waited_for_on_request(ends):
    one, other = ends
    assert other.receive_all(wait=False) == []
    frame = framed(Text("a"))
    one.send_bytes(frame + frame + frame[:3])
    assert other.receive_all(wait=True) == [Text("a"), Text("a")]
    assert other.receive_all(wait=False) == []
    threading.Timer(0.05, one.send_bytes, [frame[3:] + frame[:5]]).start()
    assert other.receive_all(wait=True) == [Text("a")]
    one.send_bytes(frame[5:])
    assert other.receive_all(wait=True) == [Text("a")]
    one.close()
    assert other.receive_all(wait=True) is None


def test_threads_that_send_at_once_do_not_mix_their_frames(ends):
    one, other = ends
    sent = [Data(bytes([number]) * 300_000) for number in range(4)]
    threads = [in_thread(lambda record=record: [one.send(record) for _ in range(5)]) for record in sent]
    received = [other.receive() for _ in range(20)]
    assert all(received.count(record) == 5 for record in sent)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("cut", [0, 2, LENGTH.size, LENGTH.size + 3])
def test_an_end_that_is_gone_is_noticed_at_any_byte_of_a_frame(ends, cut):
    one, other = ends
    one.send(Text("whole"))
    one.send_bytes(framed(Text("in part"))[:cut])
    one.close()
    assert other.receive() == Text("whole")
    assert other.receive() is None
    with pytest.raises(Disconnected):
        for _ in range(3):  # the first may still fit into a buffer
            other.send(Text("to nobody"))


def test_bytes_that_never_come_are_noticed(ends):
    one, other = ends
    one.send(Text("a"), memoryview(b"12"))
    one.close()
    other.receive()
    with pytest.raises(Disconnected):
        other.receive_into(memoryview(bytearray(5)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"type": "unknown", "text": "a"}),
        msgspec.msgpack.encode({"type": "text"}),
        msgspec.msgpack.encode({"type": "text", "text": 5}),
        b'{"type": "text"',
        b"\x91" * 3000,
    ],
)
def test_a_frame_that_holds_no_record_is_refused(ends, body):
    one, other = ends
    one.send_bytes(LENGTH.pack(len(body)) + body)
    with pytest.raises(InvalidMessage):
        other.receive(5.0)


@pytest.mark.parametrize("receive", [lambda end: end.receive(5.0), lambda end: end.receive_all(wait=True)])
@pytest.mark.parametrize("sent", [LENGTH.pack(MAX_FRAME + 1), b"Traceback (most recent call last):\n"])
def test_what_cannot_be_a_frame_is_refused_before_more_arrives(ends, sent, receive):
    one, other = ends
    one.send_bytes(sent)
    with pytest.raises(InvalidMessage):
        receive(other)


def test_the_error_of_the_other_end_is_raised_as_it_was(ends):
    one, other = ends
    failure = error("no_memory", available="1 GiB", needed="2 GiB", max_model_len=9, fits=4, also=["not plain"])
    one.send_failure(failure)
    with pytest.raises(AiakqError) as caught:
        other.receive()
    found = caught.value
    assert (found.id, str(found), found.exit_code) == (failure.id, str(failure), failure.exit_code)
    other.close()
    one.send_failure(failure)  # to nobody


@pytest.mark.parametrize(
    "failure", [Failure("of the future", {}), Failure("no_memory", {"id": 1}), Failure("usage", {})]
)
def test_an_error_that_the_registry_does_not_know_is_garbage(ends, failure):
    one, other = ends
    one.send(failure)
    with pytest.raises(InvalidMessage):
        other.receive()


def test_heartbeats_are_received_and_not_returned(ends):
    one, other = ends
    before = other.heard
    one.send_heartbeats(0.01)
    with pytest.raises(TimeoutError):
        other.receive(0.1)
    assert other.heard > before
    one.busy.clear()
    time.sleep(0.05)
    with pytest.raises(TimeoutError):
        other.receive(0)
    silent = other.heard
    with pytest.raises(TimeoutError):
        other.receive(0.1)
    assert other.heard == silent
    one.send(Heartbeat())
    one.send(Text("a"))
    assert other.receive() == Text("a") and other.heard > silent


def test_the_sender_of_heartbeats_notices_that_the_other_end_is_gone(ends):
    one, other = ends
    gone = threading.Event()
    one.send_heartbeats(0.01, gone.set)
    other.close()
    assert gone.wait(5)


def test_a_time_limit_covers_the_whole_record(ends):
    """An end that sends a byte now and then does not keep the other waiting."""
    one, other = ends
    frame, began = framed(Text("x" * 100)), time.monotonic()
    sender = in_thread(lambda: [one.send_bytes(frame[at : at + 1]) or time.sleep(0.05) for at in range(20)])
    with pytest.raises(TimeoutError):
        other.receive(0.2)
    assert time.monotonic() - began < 0.8
    sender.join()


def test_an_end_that_reads_nothing_does_not_block_the_sender_forever(ends):
    one, _ = ends

    def give_up() -> None:
        raise error("rank_late", rank=1, limit=0.05, operation="")

    one.limit_sending(0.05, give_up)
    with pytest.raises(AiakqError):
        one.send(Data(bytes(BIG)))


def test_a_sender_that_stalls_may_wait_longer_or_give_up(ends):
    one, other = ends
    stalls: list[int] = []

    def on_stall() -> None:
        stalls.append(1)
        if len(stalls) == 2:
            in_thread(lambda: received.append(other.receive()))

    received: list[Any] = []
    one.limit_sending(0.05, on_stall)
    one.send(Data(bytes(BIG)))
    assert len(stalls) >= 2
    while not received:
        time.sleep(0.01)
    assert received == [Data(bytes(BIG))]


def test_a_stopped_process_is_noticed_by_its_heartbeat_and_a_killed_one_at_once():
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys, time; from aiakq.system.channel import *;"
        "Channel(socket.socket(fileno=int(sys.argv[1])), Heartbeat).send_heartbeats(0.02); time.sleep(60)"
    )
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    channel: Channel[Text, Text] = Channel(ours, Text)
    ended: list[Any] = []
    reader = in_thread(lambda: ended.append(channel.receive()))
    try:
        began = channel.heard
        while channel.heard < began + 0.1:
            assert time.monotonic() < began + 30
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        assert time.monotonic() - channel.heard > 0.2 and not ended
    finally:
        process.kill()
        process.wait()
    reader.join(5)
    assert ended == [None]


def test_hanging_up_wakes_a_thread_that_receives_and_calls_back(ends):
    one, other = ends
    found: list[Any] = []
    reader, gone = in_thread(lambda: found.append(one.receive())), threading.Event()
    other.on_hangup(gone.set)
    assert not gone.wait(0.05)
    one.hang_up()
    reader.join(5)
    assert found == [None] and gone.wait(5)


def test_an_event_loop_exchanges_the_same_records():
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        other: Channel[Text | Data, Text | Data] = Channel(theirs, Text | Data)
        channel: AsyncChannel[Text | Data, Text | Data] = await AsyncChannel.open(ours, Text | Data)
        big = Data(os.urandom(BIG))
        channel.send(big)
        channel.send(Text("b"))
        assert await asyncio.to_thread(other.receive) == big
        assert other.receive() == Text("b")
        sender = in_thread(lambda: [other.send(record) for record in (Text("c"), Heartbeat(), big, Text("d"))])
        found = [await channel.receive() for _ in range(3)]
        sender.join()
        assert found == [Text("c"), big, Text("d")]
        other.send_failure(error("worker_lost"))
        with pytest.raises(AiakqError):
            await channel.receive()
        other.send_bytes(framed(Text("in part"))[:7])
        other.close()
        assert await channel.receive() is None
        for _ in range(3):
            channel.send(Text("to nobody"))
            await asyncio.sleep(0.01)
        channel.close()

    asyncio.run(whole())


def test_a_program_may_answer_in_json():
    ours, theirs = socket.socketpair()
    code = (
        "import json, socket, struct, sys; s = socket.socket(fileno=int(sys.argv[1]));"
        "body = json.dumps({'type': 'text', 'text': 'cba'}).encode();"
        "s.sendall(struct.pack('>I', len(body)) + body)"
    )
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    channel: Channel[Text, Text] = Channel(ours, Text)
    assert channel.receive(30) == Text("cba") and channel.receive() is None
    assert process.wait(10) == 0
    channel.close()
