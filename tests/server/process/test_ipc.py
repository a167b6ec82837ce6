"""Frames between the HTTP process and the engine process."""

from __future__ import annotations

import math
import socket
import threading

import msgspec
import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error
from aiakq.runtime.protocol.admission import repeat
from aiakq.runtime.protocol.command import Abort, ResetPrefixCache
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import EngineStats, RequestTimes, StepOutput, TokenOutput
from aiakq.runtime.protocol.pooling_params import Pooled, Pooling
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import TokenLogprobs
from aiakq.runtime.protocol.thought_budget import ThoughtBudget
from aiakq.runtime.text.tokenizer import TokenizerSource
from aiakq.server.process import ipc

SPEC = RequestSpec("r/0", [1, 2], SamplingParams(logit_bias={7: -1.5}, stop_token_ids=[3]), 5, 2**63 - 1)
OUTPUT = TokenOutput(
    "r/0",
    [4],
    [-0.5],
    logprobs=[TokenLogprobs([4, 5], [-0.5, -math.inf], 1)],
    prompt_logprobs=[None, TokenLogprobs([2], [-1.0], 3)],
    finish_reason="stop",
    times=RequestTimes(1.0, 2.0),
)


@pytest.mark.parametrize(
    "record",
    [
        ipc.Start(
            EngineArguments(model="m", pp_layer_partition=(2, 1), compilation_config={"mode": 0}, max_model_len="auto")
        ),
        ipc.Submit.of([SPEC]),
        Abort(["r/0", "r/1"]),
        ResetPrefixCache(),
    ],
    ids=lambda record: type(record).__name__,
)
def test_frames_to_the_engine_come_back_equal(record):
    (body,) = ipc.split(bytearray(ipc.frame(record)))
    assert ipc.decode_to_engine(body) == record


@pytest.mark.parametrize(
    "record",
    [
        ipc.Loading("weights", 0.5, "x"),
        ipc.Configured(
            "m", TokenizerSource("folder", mode="slow"), "float32", {"top_k": 5}, {"config.json": (1, 2, 3, 4)}
        ),
        ipc.Ready(ModelLimits(10, 20, 30, eos_token_ids=(1, 2)), {"a": "b"}, {}, 128),
        ipc.Failed("model_missing", {"path": "x"}),
        ipc.Started(["r/0", "r/1"]),
        ipc.Stepped(StepOutput([OUTPUT], EngineStats(num_running=1))),
    ],
    ids=lambda record: type(record).__name__,
)
def test_frames_from_the_engine_come_back_equal(record):
    (body,) = ipc.split(bytearray(ipc.frame(record)))
    assert ipc.decode_from_engine(body) == record


def test_sequences_of_a_request_share_their_lists_in_a_frame():
    """Sixteen sequences with the whole vocabulary allowed: neither the frame nor the engine has sixteen lists."""
    params = SamplingParams(n=16, allowed_token_ids=[*range(50_000), *range(50_000)])
    assert len(params.allowed_token_ids) == 50_000
    first = RequestSpec(
        "r/0", list(range(5000)), params, 5, 7, bad_word_ids=[[1, 2]], options=RequestOptions(cache_salt="s")
    )
    specs = [first, *(repeat(first, f"r/{index}", index) for index in range(1, 16))]
    (body,) = ipc.split(bytearray(ipc.frame(ipc.Submit.of(specs))))
    assert len(body) < 300_000
    received = ipc.decode_to_engine(body).specs()
    assert received == specs
    assert len({id(spec.sampling) for spec in received}) == len({id(spec.prompt_token_ids) for spec in received}) == 1


def test_sequences_are_sent_with_all_their_fields():
    thought = ThoughtBudget(3, ["<a>"], ["</a>"], [5, 6], is_open=True, anywhere=False, repeats=True)
    spec = msgspec.structs.replace(SPEC, thought=thought)
    (body,) = ipc.split(bytearray(ipc.frame(ipc.Submit.of([spec, SPEC]))))
    assert ipc.decode_to_engine(body).specs() == [spec, SPEC]


def test_what_is_pooled_crosses_both_ways():
    pooling = Pooling("STEP", normalize=True, activation="softmax", dimensions=3, step_tag_id=9)
    spec = RequestSpec("r/0", [1, 2], SamplingParams(max_tokens=0), 0, 1, options=RequestOptions(pooling=pooling))
    (body,) = ipc.split(bytearray(ipc.frame(ipc.Submit.of([spec, SPEC]))))
    assert ipc.decode_to_engine(body).specs() == [spec, SPEC]
    stepped = ipc.Stepped(StepOutput([TokenOutput("r/0", finish_reason="stop", pooled=Pooled(b"\0\1\2\3", 1))]))
    (body,) = ipc.split(bytearray(ipc.frame(stepped)))
    assert ipc.decode_from_engine(body) == stepped


def test_frames_are_split_however_the_stream_is_cut():
    records = [Abort(["x" * size]) for size in (0, 1, 300, 70000)]
    stream = b"".join(map(ipc.frame, records))
    for step in (1, 3, 1000, len(stream)):
        buffer, bodies = bytearray(), []
        for at in range(0, len(stream), step):
            buffer += stream[at : at + step]
            bodies += ipc.split(buffer)
        assert [ipc.decode_to_engine(body) for body in bodies] == records and not buffer


def test_unknown_records_are_refused():
    for unknown in (
        {"type": "exec", "code": "x"},
        {"type": "submit", "prompts": [["a"]], "samplings": [], "sequences": []},
        [1],
    ):
        with pytest.raises(msgspec.ValidationError):
            ipc.decode_to_engine(msgspec.msgpack.encode(unknown))


def test_receive_blocks_only_with_wait():
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    with ours, theirs:
        link = ipc.EngineLink(theirs)
        assert link.receive(wait=False) == []
        frame = ipc.frame(Abort(["a"]))
        ours.sendall(frame + frame[:3])
        assert link.receive(wait=True) == [Abort(["a"])]
        assert link.receive(wait=False) == []
        threading.Timer(0.05, ours.sendall, [frame[3:]]).start()
        assert link.receive(wait=True) == [Abort(["a"])]
        ipc.call_on_hangup(theirs, gone.set)
        assert not gone.wait(0.05)
        ours.close()
        assert link.receive(wait=True) is None
        assert gone.wait(5)


def test_errors_keep_id_text_and_exit_code():
    failure = error("no_memory", available="1 GiB", needed="2 GiB", max_model_len=9, fits=4, also="")
    decoded = ipc.decode_error(ipc.encode_error(failure))
    assert (decoded.id, str(decoded), decoded.exit_code) == (failure.id, str(failure), failure.exit_code)
