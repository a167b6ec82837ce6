"""What vLLM's own server tests ask of images, videos and audio in chats, in as far as tiny random models can show it.

What differs is in docs/images.md.
"""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
import pytest
import soundfile
from audio_models import RATE, save_audio_model, sound
from PIL import Image
from vision_models import random_image, random_video, save_vision_model

from aiakq.server.background import start_in_background

KINDS = ("image", "video", "audio")
MAXIMUM = 2


def files() -> dict[str, bytes]:
    """A file of each kind."""
    image, video, audio = io.BytesIO(), io.BytesIO(), io.BytesIO()
    random_image(1, 40, 28).save(image, "PNG")
    frames = [Image.fromarray(frame) for frame in random_video(1, 4, 16, 16)]
    frames[0].save(video, "GIF", save_all=True, append_images=frames[1:], duration=100)
    soundfile.write(audio, sound(0.6, 1), RATE, format="WAV")
    return {"image": image.getvalue(), "video": video.getvalue(), "audio": audio.getvalue()}


FILES = files()


def data_url(kind: str) -> str:
    return f"data:{kind}/any;base64,{base64.b64encode(FILES[kind]).decode()}"


def part(kind: str, url: object, **fields: Any) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}, **fields}


def messages(*parts: Any, text: str = "What is this?") -> Any:
    return [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": [*parts, {"type": "text", "text": text}]},
    ]


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """A host of the files."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = FILES.get(self.path.strip("/"))
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def url_of(tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """Start the server of a kind."""
    with contextlib.ExitStack() as stack:
        running: dict[bool, str] = {}

        def start(kind: str) -> str:
            hears = kind == "audio"
            if hears not in running:
                folder = tmp_path_factory.mktemp("model")
                model = save_audio_model("qwen2_audio", folder) if hears else save_vision_model("qwen3_vl", folder)
                kinds = ["audio"] if hears else ["image", "video"]
                arguments: dict[str, Any] = {"model": str(model), "dtype": "float32", "served_model_name": ["m"]}
                arguments |= {"max_model_len": 320, "num_gpu_blocks_override": 100}
                arguments |= {"limit_mm_per_prompt": dict.fromkeys(kinds, MAXIMUM)}
                arguments |= {"allowed_media_domains": ["127.0.0.1"]}
                running[hears] = stack.enter_context(start_in_background(arguments, timeout=240)).url
            return running[hears]

        yield start


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def client(kind, url_of) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url_of(kind)}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, sent: Any, max_tokens: int = 10, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="m",
        messages=sent,
        max_completion_tokens=max_tokens,
        temperature=0.0,
        extra_body={"ignore_eos": True, **fields.pop("extra_body", {})},
        **fields,
    )


def test_a_single_item_by_url_and_as_data_and_the_turn_after_it(client, kind, web):
    sent = messages(part(kind, f"{web}/{kind}"))
    answer = complete(client, sent, logprobs=True, top_logprobs=5)
    [choice] = answer.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.message.content
    assert [len(step.top_logprobs) for step in choice.logprobs.content] == [5] * 10
    assert answer.usage.completion_tokens == 10 and answer.usage.total_tokens == answer.usage.prompt_tokens + 10
    as_data = complete(client, messages(part(kind, data_url(kind))), logprobs=True, top_logprobs=5)
    assert as_data.choices[0].logprobs == choice.logprobs and as_data.usage.prompt_tokens == answer.usage.prompt_tokens
    turn = [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "and as JSON?"}]
    assert complete(client, sent + turn).usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_url_may_be_a_string(client, kind):
    """vLLM refuses it."""
    plain = {"type": f"{kind}_url", f"{kind}_url": data_url(kind)}
    expected = complete(client, messages(part(kind, data_url(kind))))
    assert complete(client, messages(plain)).choices[0].message.content == expected.choices[0].message.content


def test_a_stream_has_the_answer_in_pieces_and_one_reason(client, kind):
    sent = messages(part(kind, data_url(kind)))
    expected = complete(client, sent).choices[0]
    chunks = list(complete(client, sent, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_items_and_too_many(client, kind, url_of):
    item = part(kind, data_url(kind))
    assert complete(client, messages(*[item] * MAXIMUM)).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match=f"allows {MAXIMUM} in a prompt"):
        complete(client, messages(*[item] * (MAXIMUM + 1)))
    after = client.completions.create(model="m", prompt=[0, 0, 0, 0, 0], max_tokens=5, temperature=0.0)
    assert after.choices[0].text is not None


def test_the_name_of_an_item_is_no_reference_to_it(client, kind):
    """vLLM keeps items by ``uuid``, and takes a part without one as a reference."""
    named = part(kind, data_url(kind), uuid="a")
    expected = complete(client, messages(part(kind, data_url(kind)))).choices[0].message.content
    assert complete(client, messages(named)).choices[0].message.content == expected
    for empty in ({}, None):
        with pytest.raises(openai.BadRequestError, match="is missing"):
            complete(client, messages({"type": f"{kind}_url", f"{kind}_url": empty, "uuid": "a"}))


def test_other_fields_of_parts_are_ignored_by_name(kind, url_of):
    odd = part(kind, data_url(kind), other_key="a")
    odd[f"{kind}_url"]["another_key"] = "b"
    body = {"model": "m", "messages": messages(odd), "max_tokens": 2}
    answer = httpx.post(f"{url_of(kind)}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    for name in ("other_key", f"{kind}_url.another_key"):
        assert f"messages[].content[].{name}" in answer.headers["x-ignored-fields"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/a", "http://127.0.0.1/\0", "https://", "a.png", "", "data:,", None, 3, [], {}]
)
def test_urls_that_lead_nowhere(client, kind, url):
    with pytest.raises(openai.BadRequestError):
        complete(client, messages(part(kind, url)))


def test_an_item_that_is_not_there(client, kind, web):
    with pytest.raises(openai.BadRequestError, match="status 404"):
        complete(client, messages(part(kind, f"{web}/nothing")))


def test_what_is_not_built_is_refused_by_name(client, kind):
    item = part(kind, data_url(kind))
    with pytest.raises(openai.BadRequestError, match="use_beam_search is not supported"):
        complete(client, messages(item), n=2, extra_body={"use_beam_search": True})
    with pytest.raises(openai.BadRequestError, match=f"{kind}_embeds"):
        complete(client, messages({"type": f"{kind}_embeds", f"{kind}_embeds": "AAAA"}))


def test_an_image_has_fewer_tokens_with_fewer_pixels(url_of):
    def tokens(**fields: Any) -> int:
        body = {"model": "m", "messages": messages(part("image", data_url("image"))), "max_tokens": 1, **fields}
        answer = httpx.post(f"{url_of('image')}/v1/chat/completions", json=body, timeout=60).json()
        return int(answer["usage"]["prompt_tokens"])

    assert tokens(mm_processor_kwargs={"max_pixels": 256}) < tokens() == tokens(mm_processor_kwargs={})
