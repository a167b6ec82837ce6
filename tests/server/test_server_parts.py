"""The pieces of the server that need no server: frames, addresses, templates, names of models."""

from __future__ import annotations

import logging
import math
import socket
import threading

import msgspec
import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.messages import EngineStats, ModelLimits, RequestSpec, RequestTimes, StepOutput, TokenLogprobs
from aiakq.runtime.engine.messages import TokenOutput as News
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import Logprob
from aiakq.runtime.text.tokenizer import TokenizerSource
from aiakq.server.api.request_stream import merged
from aiakq.server.api.responses import LOWEST_LOGPROB, by_rank, finite
from aiakq.server.api.service import fingerprint
from aiakq.server.http.listener import bind, url_of
from aiakq.server.launch import _EventHandler, read_chat_template
from aiakq.server.process import ipc as wire

SPEC = RequestSpec("r/0", [1, 2], SamplingParams(logit_bias={7: -1.5}, stop_token_ids=[3]), 5, 2**63 - 1)
NEWS = News(
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
        wire.Start({"model": "m", "seed": 0, "names": ["a"]}),
        wire.Submit([SPEC]),
        wire.Cancel(["r/0", "r/1"]),
        wire.Reset(),
    ],
    ids=lambda record: type(record).__name__,
)
def test_frames_to_the_engine_come_back_equal(record):
    (body,) = wire.split(bytearray(wire.frame(record)))
    assert wire.decode_to_engine(body) == record


@pytest.mark.parametrize(
    "record",
    [
        wire.Loading("weights", 0.5, "x"),
        wire.Configured("m", TokenizerSource("folder", mode="slow"), "float32", {"top_k": 5}),
        wire.Ready(ModelLimits(10, 20, 30, eos_token_ids=(1, 2)), {"a": "b"}, {}, 128),
        wire.Failed("model_missing", {"path": "x"}),
        wire.Stepped(StepOutput([NEWS], EngineStats(num_running=1))),
    ],
    ids=lambda record: type(record).__name__,
)
def test_frames_from_the_engine_come_back_equal(record):
    (body,) = wire.split(bytearray(wire.frame(record)))
    assert wire.decode_from_engine(body) == record


def test_frames_survive_any_cutting():
    records = [wire.Cancel(["x" * size]) for size in (0, 1, 300, 70000)]
    stream = b"".join(map(wire.frame, records))
    for step in (1, 3, 1000, len(stream)):
        buffer, bodies = bytearray(), []
        for at in range(0, len(stream), step):
            buffer += stream[at : at + step]
            bodies += wire.split(buffer)
        assert [wire.decode_to_engine(body) for body in bodies] == records and not buffer


def test_only_known_records_are_read():
    for foreign in ({"type": "exec", "code": "x"}, {"type": "submit", "requests": [{"request_id": 5}]}, [1]):
        with pytest.raises(msgspec.ValidationError):
            wire.decode_to_engine(msgspec.msgpack.encode(foreign))


def test_link_waits_only_when_told_to():
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    with ours, theirs:
        link = wire.EngineLink(theirs)
        assert link.receive(wait=False) == []
        whole = wire.frame(wire.Cancel(["a"]))
        ours.sendall(whole + whole[:3])
        assert link.receive(wait=True) == [wire.Cancel(["a"])]
        assert link.receive(wait=False) == []
        threading.Timer(0.05, ours.sendall, [whole[3:]]).start()
        assert link.receive(wait=True) == [wire.Cancel(["a"])]
        wire.on_hangup(theirs, gone.set)
        assert not gone.wait(0.05)
        ours.close()
        assert link.receive(wait=True) is None
        assert gone.wait(5)


def test_errors_cross_the_wire():
    failure = error("no_memory", available="1 GiB", needed="2 GiB", max_model_len=9, fits=4)
    again = wire.rebuilt(wire.failed(failure))
    assert (again.id, str(again), again.exit_code) == (failure.id, str(failure), failure.exit_code)


def test_news_are_merged_in_order():
    first = Delta("r", 0, "a", [1], [{1: Logprob(-1.0, 1)}], -1.0, num_cached_tokens=16, prompt_logprobs=[None])
    second = Delta("r", 0, "b", [2], [{2: Logprob(-2.0, 1)}], -3.0, "stop", "x", num_cached_tokens=16)
    both = merged(first, second)
    assert (both.text, both.token_ids, both.cumulative_logprob) == ("ab", [1, 2], -3.0)
    assert both.logprobs == [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 1)}]
    assert (both.finish_reason, both.stop_reason, both.prompt_logprobs) == ("stop", "x", [None])


def test_impossible_tokens_stay_json():
    assert finite(-math.inf) == finite(math.nan) == LOWEST_LOGPROB and finite(-3.0) == -3.0
    position = {9: Logprob(-5.0, 30), 1: Logprob(-0.5, 1), 2: Logprob(-0.7, 2)}
    assert [token for token, _ in by_rank(position, 2)] == [1, 2]
    assert by_rank(position, 0) == []


def test_binding():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(listener, "localhost") == f"http://localhost:{port}"
        with pytest.raises(AiakqError) as caught:
            bind("127.0.0.1", port)
        assert caught.value.id == "port_in_use"
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener, "0.0.0.0").startswith("http://127.0.0.1:")
    with pytest.raises(AiakqError) as caught:
        bind("203.0.113.1", 0)
    assert caught.value.id == "bad_option"


def test_binding_version_six():
    try:
        listener = bind("::", 0)
    except AiakqError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener, "::").startswith("http://[::1]:")


def test_chat_template_is_a_file_or_the_text(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template(str(file)) == "{{ messages }}"
    assert read_chat_template("{% if x %}y{% endif %}") == "{% if x %}y{% endif %}"
    with pytest.raises(AiakqError, match="readable file"):
        read_chat_template(str(tmp_path))


def test_fingerprints_tell_models_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    same = fingerprint("a", tmp_path, "float32")
    assert same == fingerprint("a", tmp_path, "float32")
    others = [fingerprint("b", tmp_path, "float32"), fingerprint("a", tmp_path, "bfloat16")]
    (tmp_path / "config.json").write_text("{ }")
    others.append(fingerprint("a", tmp_path, "float32"))
    assert len({same, *others}) == 4


def test_a_flood_of_failures_is_few_lines():
    events = []
    handler = _EventHandler(events.append)
    logger = logging.Logger("flood")
    logger.addHandler(handler)
    for number in range(1000):
        logger.warning("request %d failed", number)
        logger.error("another kind")
    assert len(events) == 10
    handler._since -= 100
    logger.error("later")
    assert "1990 more lines" in events[-2].message and events[-1].message == "later"
