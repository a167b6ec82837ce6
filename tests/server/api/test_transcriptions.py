"""Transcriptions over HTTP: OpenAI's client, formats, streams, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from speech_models import RATE, sound

from aiakq import LLM
from aiakq.server.background import RunningServer, start_in_background

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: pip install 'aiakq[audio]'")
PATH = "/v1/audio/transcriptions"


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


LONG, SHORT = sound(3.3, 1), sound(0.8, 2)


@pytest.fixture(scope="module")
def server(tiny_whisper) -> Iterator[RunningServer]:
    arguments = {"model": str(tiny_whisper), "served_model_name": ["whisper"], "device": "cpu", "dtype": "float32"}
    with start_in_background({**arguments, "port": 0, "task": "transcription"}, timeout=240) as running:
        yield running


@pytest.fixture
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as made:
        yield made


@pytest.fixture(scope="module")
def expected(tiny_whisper) -> Any:
    """What ``LLM`` transcribes with times: short in one window, and long."""
    llm = LLM(str(tiny_whisper), device="cpu", dtype="float32")
    [short], [long] = llm.transcribe(SHORT), llm.transcribe(LONG, language="de", timestamps=True)
    return short, long


def test_openai_client_gets_the_text(client, expected):
    created = client.audio.transcriptions.create(model="whisper", file=("speech.wav", wav(SHORT)))
    assert created.text == expected[0].text
    assert (created.usage.type, created.usage.seconds) == ("duration", 1)


def test_openai_client_gets_segments(client, expected):
    created = client.audio.transcriptions.create(
        model="whisper",
        file=("speech.wav", wav(LONG)),
        language="de",
        response_format="verbose_json",
        temperature=0,
        timestamp_granularities=["segment"],
    )
    output = expected[1]
    assert (created.text, created.language, round(float(created.duration), 3)) == (output.text, "de", 3.3)
    assert [each.text for each in created.segments if each.text.strip()] == [each.text for each in output.segments]
    for segment in created.segments:
        assert 0 <= segment.start <= segment.end <= 3.3 and segment.avg_logprob < 0
        assert 0 <= segment.no_speech_prob <= 1 and segment.compression_ratio > 0 and segment.temperature == 0


def test_openai_client_streams(client, expected):
    stream = client.audio.transcriptions.create(
        model="whisper", file=("speech.wav", wav(LONG)), language="de", stream=True
    )
    events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1 and events[-1].type == "transcript.text.done"
    assert "".join(deltas) == events[-1].text and events[-1].text.strip() == expected[1].text


def test_translations(client, tiny_whisper):
    created = client.audio.translations.create(model="whisper", file=("speech.wav", wav(SHORT)), prompt="Ann")
    llm = LLM(str(tiny_whisper), device="cpu", dtype="float32")
    assert created.text == llm.transcribe(SHORT, task="translate", prompt="Ann")[0].text


def test_subtitles_and_texts(http, expected):
    form = {"model": "whisper", "language": "de"}
    answers = {
        format: http.post(PATH, data={**form, "response_format": format}, files={"file": wav(LONG)}).text
        for format in ("text", "srt", "vtt")
    }
    first = next(each for each in expected[1].segments)
    seconds = f"00:00:0{int(first.start)},{round(first.start % 1 * 1000):03}"
    assert answers["text"] == f"{expected[1].text}\n"
    assert answers["srt"].startswith(f"1\n{seconds} --> ")
    assert answers["vtt"].startswith(f"WEBVTT\n\n{seconds.replace(',', '.')} --> ")


def test_segments_end_with_the_audio(http):
    """A random model finds something behind a single sample."""
    for count in (1, 40, 800):
        form = {"response_format": "verbose_json"}
        answer = http.post(PATH, data=form, files={"file": wav(SHORT[:count])}).json()
        assert all(0 <= each["start"] <= each["end"] <= count / RATE + 1e-3 for each in answer["segments"])


def test_several_requests_get_what_each_gets_alone(http):
    import concurrent.futures

    files = [wav(sound(0.4 + 0.3 * seed, seed)) for seed in range(6)]

    def post(file: bytes) -> str:
        return http.post(PATH, files={"file": file}).json()["text"]

    alone = [post(file) for file in files]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(post, files)) == alone


def test_the_model_says_what_it_reads(http):
    [card] = http.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["audio"]


@pytest.mark.parametrize(
    ("fields", "file", "param", "code"),
    [
        ({}, None, "file", "missing_field"),
        ({}, b"", "file", "media_refused"),
        ({}, b"RIFF" + bytes(100), "file", "media_refused"),
        ({"language": "xx"}, wav(SHORT), "language", "unsupported_parameter"),
        ({"model": "other"}, wav(SHORT), "model", "unknown_model"),
        ({"temperature": "hot"}, wav(SHORT), "temperature", "invalid_type"),
        ({"temperature": "-1"}, wav(SHORT), "temperature", "value_out_of_range"),
        ({"stream": "perhaps"}, wav(SHORT), "stream", "invalid_type"),
        ({"response_format": "xml"}, wav(SHORT), "response_format", None),
        ({"stream": "true", "response_format": "srt"}, wav(SHORT), "response_format", "unsupported_parameter"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            wav(SHORT),
            "timestamp_granularities",
            "unsupported_parameter",
        ),
        ({"include[]": "logprobs"}, wav(SHORT), "include", "unsupported_parameter"),
        ({"to_language": "fr"}, wav(SHORT), "to_language", "unsupported_parameter"),
        ({"prompt": "a <|de|>"}, wav(SHORT), "prompt", "unsupported_parameter"),
        ({"timestamp_granularities[]": "segment"}, wav(SHORT), "timestamp_granularities", "unsupported_parameter"),
    ],
)
def test_what_cannot_be_meant_is_refused(http, fields, file, param, code):
    # A form with a file only has this media type.
    files = {"other": ("", b"")} if file is None else {"file": ("a.wav", file)}
    answer = http.post(PATH, data=fields, files=files)
    refusal = answer.json()["error"]
    assert answer.status_code in (400, 404), refusal
    assert refusal["param"] == param and code in (None, refusal["code"])


@pytest.mark.parametrize(
    ("body", "media_type", "status", "code"),
    [
        (b"{}", "application/json", 415, "form_expected"),
        (b"", "multipart/form-data", 400, "form_malformed"),
        (b"abc", "multipart/form-data; boundary=x", 400, "form_malformed"),
        (b"--x\r\n", "multipart/form-data; boundary=x", 400, "form_malformed"),
        (b"--x\r\n\r\nabc\r\n--x--\r\n", "multipart/form-data; boundary=x", 400, "form_malformed"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            400,
            "form_malformed",
        ),
        (
            100 * b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' + b"--x--\r\n",
            "multipart/form-data; boundary=x",
            400,
            "form_malformed",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="' + 5000 * b"a" + b'"\r\n\r\n1\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            400,
            "form_malformed",
        ),
    ],
)
def test_bodies_that_are_no_forms_are_refused(http, body, media_type, status, code):
    answer = http.post(PATH, content=body, headers={"content-type": media_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_fields_are_named_once(http):
    files = [("file", wav(SHORT)), ("file", wav(SHORT))]
    assert http.post(PATH, files=files).json()["error"]["code"] == "duplicate_key"


def test_other_routes_refuse_the_model(client, http):
    for call in (
        lambda: client.completions.create(model="whisper", prompt="a"),
        lambda: client.chat.completions.create(model="whisper", messages=[{"role": "user", "content": "a"}]),
        lambda: client.embeddings.create(model="whisper", input="a"),
    ):
        with pytest.raises(openai.BadRequestError, match="--task transcription"):
            call()
    assert http.get("/health").status_code == 200
