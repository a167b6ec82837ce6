"""Audio in chats of the server, through the client of OpenAI."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import soundfile
from audio_models import RATE, save_audio_model, save_with_tekken, sound
from openai import OpenAI

from aiakq import LLM, SamplingParams
from aiakq.server.background import RunningServer, start_in_background

ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 100,
    "limit_mm_per_prompt": {"audio": 2},
}


def file_of(seed: int, format: str = "WAV", seconds: float = 0.6) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, sound(seconds, seed), RATE, format=format)
    return buffer.getvalue()


def input_audio(data: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}


def audio_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_audio_model("qwen2_audio", tmp_path_factory.mktemp("hearing")))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = tmp_path_factory.mktemp("sounds")
    (found / "one.wav").write_bytes(file_of(1))
    return found


@pytest.fixture(scope="module")
def hearing(folder, sounds) -> Iterator[RunningServer]:
    arguments = {"model": folder, **ARGUMENTS, "served_model_name": ["m"], "allowed_local_media_path": str(sounds)}
    with start_in_background(arguments, timeout=240) as running:
        yield running


@pytest.fixture(scope="module")
def ask(hearing) -> Any:
    client = OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0)

    def complete(*parts: Any) -> list[int]:
        answer: Any = client.chat.completions.create(
            model="m",
            messages=message(*parts),
            max_tokens=5,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return answer.prompt_token_ids + answer.choices[0].token_ids

    return complete


@pytest.fixture(scope="module")
def expected(folder) -> list[int]:
    """The prompt's tokens, and those that LLM.chat generates."""
    llm, params = LLM(folder, **ARGUMENTS), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    [output] = llm.chat(message("hear ", input_audio(file_of(1)), "?"), params, use_tqdm=False)
    return output.prompt_token_ids + output.outputs[0].token_ids


def test_audio_in_chat_gives_what_the_library_gives(ask, expected):
    assert ask("hear ", input_audio(file_of(1)), "?") == expected
    data = base64.b64encode(file_of(1)).decode()
    assert ask("hear ", audio_url(f"data:audio/wav;base64,{data}"), "?") == expected
    assert ask("hear ", input_audio(file_of(1, "FLAC"), "flac"), "?") == expected
    assert ask("hear ", {"type": "input_audio", "input_audio": {"data": data, "format": None}}, "?") == expected
    assert ask("hear ", input_audio(file_of(1, "MP3"), "mp3"), "?")[:-5] == expected[:-5]
    assert len(ask("hear ", input_audio(file_of(1)), input_audio(file_of(2)))) > len(expected)
    assert ask("no audio")


def test_responses_read_audio(hearing, expected):
    text = {"type": "input_text", "text": "hear "}
    content = [text, input_audio(file_of(1)), {**text, "text": "?"}]
    body = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{hearing.url}/v1/responses", json=body, timeout=60).json()
    assert answer["usage"]["input_tokens"] == len(expected) - 5, answer


def test_the_model_says_that_it_reads_audio(hearing):
    assert httpx.get(f"{hearing.url}/v1/models").json()["data"][0]["input_modalities"] == ["text", "audio"]


def test_files_are_read_in_the_allowed_folder_only(ask, expected, sounds):
    assert ask("hear ", audio_url(f"file://{sounds}/one.wav"), "?") == expected
    with pytest.raises(Exception, match="not in the folder"):
        ask(audio_url("file:///etc/hostname"))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (input_audio(b"no audio"), "no audio that can be read"),
        (input_audio(b""), "no audio that can be read"),
        (input_audio(file_of(1)[:43]), "no audio that can be read|is empty"),
        (input_audio(file_of(1, seconds=1.2)), "1.2 s long, and the model reads 1 s"),
        (input_audio(file_of(1), "pcm16"), "one of wav, mp3, flac, ogg, opus, aiff|pcm16"),
        ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "not valid base64"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        ({"type": "input_audio"}, "input_audio"),
        (audio_url("http://127.0.0.1:1/a.wav"), "not public"),
        (audio_url("gopher://a"), "a URL that begins with"),
        ({"type": "audio", "audio": [0.5, 0.5]}, "an array of samples"),
        ({"type": "audio", "audio": "data:,", "url": "data:,"}, "audio is not supported: the part has url, too"),
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "the model reads text and audios only"),
    ],
)
def test_hostile_audio_is_refused_in_one_line(ask, expected, part, reason):
    with pytest.raises(Exception, match=reason) as raised:
        ask(part)
    assert raised.value.status_code == 400 and "\n" not in raised.value.body["message"]
    assert ask("hear ", input_audio(file_of(1)), "?") == expected


def test_too_many_and_placeholders_in_a_text_are_refused(ask):
    part = input_audio(file_of(1))
    with pytest.raises(Exception, match="--limit-mm-per-prompt allows 2"):
        ask(part, part, part)
    with pytest.raises(Exception, match="there are 1 audios for its 2 placeholders"):
        ask(part, "<|AUDIO|>")


@pytest.mark.parametrize("fields", [{"mm_processor_kwargs": {"fps": 1}}, {"media_io_kwargs": {"video": {}}}])
def test_settings_of_other_media_are_refused(hearing, fields):
    body = {"model": "m", "messages": message(input_audio(file_of(1))), **fields}
    answer = httpx.post(f"{hearing.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "is not supported: the model reads text and audios only" in answer.text


def test_only_users_have_audio(hearing):
    messages = [{"role": "system", "content": [input_audio(file_of(1))]}, {"role": "user", "content": "a"}]
    answer = httpx.post(f"{hearing.url}/v1/chat/completions", json={"model": "m", "messages": messages}, timeout=60)
    assert answer.status_code == 400 and "audios are in messages of users" in answer.json()["error"]["message"]


def test_conversations_that_mistral_common_encodes_have_audio(tmp_path):
    pytest.importorskip("mistral_common")
    folder = str(save_with_tekken(tmp_path))
    messages = message("hello", input_audio(file_of(1, seconds=1.2)), input_audio(file_of(2)))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    [output] = LLM(folder, **ARGUMENTS).chat(messages, params, use_tqdm=False)
    body = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    with start_in_background({"model": folder, **ARGUMENTS, "served_model_name": ["m"]}, timeout=240) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
