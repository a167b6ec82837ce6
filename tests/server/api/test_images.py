"""Images in requests of the server, through the clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from openai import OpenAI
from vision_models import random_image, save_vision_model

from aiakq import LLM, SamplingParams
from aiakq.runtime.multimodal.urls import MediaUrls
from aiakq.runtime.protocol.media import MediaItem, MediaLimits, TensorRecord
from aiakq.runtime.text.media_parts import MediaPart
from aiakq.server.api.request_media import MAX_FETCHES, RequestMedia, hold_media
from aiakq.server.background import RunningServer, start_in_background
from aiakq.server.http.body_budget import BodyBudget, ImageBytes, image_bytes
from aiakq.server.process.text_client import client_of_request


def data_url(seed: int, format: str = "PNG") -> str:
    buffer = io.BytesIO()
    random_image(seed).save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def message(*parts: Any) -> list[dict[str, Any]]:
    listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": listed}]


def image_url(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_vision_model("idefics3", tmp_path_factory.mktemp("seeing")))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = tmp_path_factory.mktemp("pictures")
    random_image(1).save(found / "one.png")
    (found / "link.png").symlink_to("/etc/hostname")
    (found / "long.png").write_bytes(base64.b64decode(data_url(1).partition(",")[2]) + bytes(MAX_TOTAL_BYTES // 2))
    return found


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """A host with an image, redirects, and something that is no image."""
    image = base64.b64decode(data_url(1).partition(",")[2])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/one.png")
            elif self.path == "/loop":
                self.send_response(302)
                self.send_header("Location", "/loop")
            elif self.path == "/away":
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.2:1/one.png")
            else:
                self.send_response(200 if self.path == "/one.png" else 404)
            self.end_headers()
            if self.path == "/one.png":
                self.wfile.write(image)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


#: Of bodies and images.
MAX_TOTAL_BYTES = 4 << 20

ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 100,
    "limit_mm_per_prompt": {"image": 2},
}


@pytest.fixture(scope="module")
def seeing(folder, pictures) -> Iterator[RunningServer]:
    arguments = {"model": folder, **ARGUMENTS, "allowed_local_media_path": str(pictures)}
    arguments |= {"allowed_media_domains": ["127.0.0.1"], "served_model_name": ["m"]}
    arguments |= {"max_total_body_bytes": MAX_TOTAL_BYTES}
    with start_in_background(arguments, timeout=240) as running:
        yield running


@pytest.fixture(scope="module")
def ask(seeing) -> Any:
    client = OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0)

    def complete(*parts: Any, max_tokens: int = 5) -> Any:
        return client.chat.completions.create(
            model="m",
            messages=message(*parts),
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True},
        )

    return complete


@pytest.fixture(scope="module")
def expected(folder) -> list[int]:
    """The prompt's tokens, and those that LLM.chat generates."""
    llm = LLM(folder, **ARGUMENTS)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    [output] = llm.chat(message("see ", image_url(data_url(1)), "?"), params, use_tqdm=False)
    return output.prompt_token_ids + output.outputs[0].token_ids


def tokens(answer: Any) -> list[int]:
    return answer.prompt_token_ids + answer.choices[0].token_ids


def test_images_in_chat_give_what_the_library_gives(ask, expected):
    assert tokens(ask("see ", image_url(data_url(1)), "?")) == expected
    assert tokens(ask("see ", image_url(data_url(1, "WEBP"), detail="low"), "?"))[:-5] == expected[:-5]
    two = ask("see ", image_url(data_url(1)), image_url(data_url(2)))
    assert two.usage.prompt_tokens > len(expected)


def test_an_image_from_the_command_line(aiakq, seeing, pictures, expected):
    words = ("chat", "--url", seeing.url, "--image", str(pictures / "one.png"), "--prompt", "see ", "--json")
    ended = aiakq(*words, "-p", "temperature=0", "-p", "max_tokens=5")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["answers"][0]["usage"]["prompt_tokens"] == len(expected) - 5 - len("?")
    assert httpx.get(f"{seeing.url}/v1/models").json()["data"][0]["input_modalities"] == ["text", "image"]


def test_responses_and_messages_read_images(seeing, expected):
    text = {"type": "input_text", "text": "see "}
    content = [text, {"type": "input_image", "image_url": data_url(1), "detail": "auto"}, {**text, "text": "?"}]
    body = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{seeing.url}/v1/responses", json=body, timeout=60).json()
    assert "usage" in answer, answer
    assert answer["usage"]["input_tokens"] == len(expected) - 5
    data = data_url(1).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "text", "text": "see "}, {"type": "image", "source": source}, {"type": "text", "text": "?"}]
    body = {"model": "m", "messages": [{"role": "user", "content": blocks}]}
    answer = httpx.post(f"{seeing.url}/v1/messages", json={**body, "max_tokens": 5}, timeout=60).json()
    assert answer["usage"]["input_tokens"] + (answer["usage"].get("cache_read_input_tokens") or 0) == len(expected) - 5
    counted = httpx.post(f"{seeing.url}/v1/messages/count_tokens", json=body, timeout=60).json()
    assert counted["input_tokens"] == len(expected) - 5


def test_images_are_fetched_from_allowed_hosts_only(ask, expected, web):
    for path in ("one.png", "moved"):
        assert tokens(ask("see ", image_url(f"{web}/{path}"), "?")) == expected
    for url, reason in (
        (f"{web}/none", "status 404"),
        (f"{web}/loop", "redirected too often"),
        (f"{web}/away", "not one of --allowed-media-domains"),
        ("http://127.0.0.2:1/", "not one of --allowed-media-domains"),
        ("http://127.0.0.1:1/", "cannot be fetched"),
        ("gopher://127.0.0.1/", "a URL that begins with"),
    ):
        with pytest.raises(Exception, match=reason):
            ask(image_url(url))


def test_files_are_read_in_the_allowed_folder_only(ask, expected, pictures):
    assert tokens(ask("see ", image_url(f"file://{pictures}/one.png"), "?")) == expected
    for name in ("../one.png", "link.png", "/etc/hostname"):
        with pytest.raises(Exception, match="not in the folder"):
            ask(image_url(f"file://{pictures}/{name}" if name[0] != "/" else f"file://{name}"))
    with pytest.raises(Exception, match="no such file"):
        ask(image_url(f"file://{pictures}/none.png"))


def bomb(width: int, height: int) -> bytes:
    """A PNG that says that it is large, of a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no image", "no image in one of the formats"),
        (b"", "no image in one of the formats"),
        (bomb(60_000, 60_000), "more than 64 million pixels"),
        (bomb(8_000, 8_000), "damaged"),
        (base64.b64decode(data_url(1, "JPEG").partition(",")[2])[:200], "damaged"),
    ],
    ids=["text", "empty", "bomb", "large", "cut"],
)
def test_hostile_images_are_refused_in_one_line(ask, expected, data, reason):
    with pytest.raises(Exception, match=reason) as raised:
        ask(image_url(f"data:image/png;base64,{base64.b64encode(data).decode()}"))
    assert raised.value.status_code == 400 and "\n" not in raised.value.body["message"]
    assert tokens(ask("see ", image_url(data_url(1)), "?")) == expected


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([image_url(data_url(1))] * 3, "allows 2 in a prompt"),
        ([image_url(data_url(1), detail="huge")], "detail"),
        ([image_url("data:image/png,abc")], "base64"),
        ([{"type": "image_url"}], "image_url is missing"),
        ([{"type": "input_audio", "input_audio": {}}], "only text is read|input_audio"),
        ([{"type": "image", "url": "data:,", "image": "data:,"}], "image is not supported: the part has url, too"),
        (["<image>", image_url(data_url(1))], "1 images for its 2 placeholders"),
    ],
)
def test_refused_parts(ask, parts, reason):
    with pytest.raises(Exception, match=reason) as raised:
        ask(*parts)
    assert raised.value.status_code == 400


def test_files_and_pixels_count_as_memory_of_the_request(ask, pictures):
    with pytest.raises(Exception, match="2 MiB of memory, more than the 2 MiB of a client; see --max-total-body-bytes"):
        ask(image_url(f"file://{pictures}/long.png"))


def test_pixels_take_the_place_of_files_in_the_memory_of_a_request():
    budget = BodyBudget(None, 4 << 20)  # type: ignore[arg-type]
    image_bytes.set(held := ImageBytes(budget, "a"))
    held.hold(5000, "messages")
    hold_media([MediaItem("image", "k", [(0, 1)], {"pixel_values": TensorRecord("float32", [25], bytes(100))})] * 2)
    assert held.num_bytes == budget.num_bytes == 200
    image_bytes.set(None)


def test_a_client_has_a_limited_number_of_fetches(monkeypatch):
    """Another client's are not delayed by hosts that do not answer."""
    running: list[str] = []
    free = asyncio.Event()

    async def fetch(self: object, url: str, param: str) -> bytes:
        running.append(url)
        await free.wait()
        return b""

    async def ask(client: str) -> None:
        client_of_request.set(client)
        await images.read([MediaPart({"image": f"http://{client}/"}, "image", "p")], MediaLimits("", {"image": 9}, 9))

    async def run() -> None:
        tasks = [asyncio.create_task(ask("slow")) for _ in range(MAX_FETCHES + 3)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("other")))
        await asyncio.sleep(0.01)
        assert running == ["http://slow/"] * MAX_FETCHES + ["http://other/"]
        free.set()
        await asyncio.gather(*tasks)
        assert len(running) == MAX_FETCHES + 4

    monkeypatch.setattr(MediaUrls, "fetch", fetch)
    images = RequestMedia(None, ())
    asyncio.run(run())


def test_too_long_a_prompt_with_images_says_what_to_do(ask):
    with pytest.raises(Exception, match="or send fewer or smaller images"):
        ask(image_url(data_url(1)), max_tokens=10**6)
    with pytest.raises(Exception, match="or set truncate_prompt_tokens"):
        ask("only text", max_tokens=10**6)


def test_text_goes_on_without_images(ask):
    assert ask("only text").choices[0].finish_reason == "length"
