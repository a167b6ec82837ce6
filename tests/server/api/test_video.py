"""Videos in requests of the server, through the client of OpenAI."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image
from vision_models import random_image, random_video, save_vision_model

from aiakq import LLM, SamplingParams
from aiakq.server.background import RunningServer, start_in_background

ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 100,
    "limit_mm_per_prompt": {"image": 2, "video": 2},
    "media_io_kwargs": {"video": {"num_frames": 4}},
}
FRAMES = random_video(1, 6, 16, 16)


def encoded(image: Image.Image, kind: str = "PNG", **fields: Any) -> str:
    out = io.BytesIO()
    image.save(out, kind, **fields)
    return base64.b64encode(out.getvalue()).decode()


def video_url(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def frames_url(frames: Any = FRAMES) -> str:
    return "data:video/jpeg;base64," + ",".join(encoded(Image.fromarray(frame)) for frame in frames)


def animation(frames: Any) -> str:
    images = [Image.fromarray(frame) for frame in frames]
    fields = {"save_all": True, "append_images": images[1:], "duration": 100, "lossless": True}
    return "data:video/webp;base64," + encoded(images[0], "WEBP", **fields)


def message(*parts: Any) -> list[dict[str, Any]]:
    listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": listed}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_vision_model("qwen3_vl", tmp_path_factory.mktemp("watching")))


@pytest.fixture(scope="module")
def watching(folder) -> Iterator[RunningServer]:
    with start_in_background({"model": folder, **ARGUMENTS, "served_model_name": ["m"]}, timeout=240) as running:
        yield running


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, **ARGUMENTS)


@pytest.fixture(scope="module")
def ask(watching) -> Any:
    client = OpenAI(base_url=f"{watching.url}/v1", api_key="none", max_retries=0)

    def complete(*parts: Any) -> Any:
        return client.chat.completions.create(
            model="m", messages=message(*parts), max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
        )

    return complete


def tokens(answer: Any) -> list[int]:
    return answer.prompt_token_ids + answer.choices[0].token_ids


def chatted(llm: LLM, *parts: Any) -> list[int]:
    [output] = llm.chat(message(*parts), SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    return output.prompt_token_ids + output.outputs[0].token_ids


def test_videos_in_chat_give_what_the_library_gives(ask, llm):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(random_image(1, 16, 16))}"}}
    for parts in (
        (video_url(frames_url()), "what?"),
        (image, "and", video_url(frames_url()), image, "?"),
        (video_url(frames_url(FRAMES[:2])), video_url(animation(FRAMES)), "compare"),
        ({"type": "video", "video": animation(FRAMES)}, "?"),
    ):
        assert tokens(ask(*parts)) == chatted(llm, *parts)


def test_frames_are_those_of_the_library_and_files_are_read_as_the_arguments_say(ask, llm):
    def generated(value: Any) -> list[int]:
        prompt = llm.tokenizer.chat_prompt(message({"type": "video"}, "?"), placeholders={"video": "<|video_pad|>"})
        [output] = llm.generate(
            [{"prompt": prompt, "multi_modal_data": {"video": value}}],
            SamplingParams(temperature=0.0, max_tokens=5),
            use_tqdm=False,
        )
        return output.prompt_token_ids + output.outputs[0].token_ids

    sent = {"fps": 1.0, "do_sample_frames": False}
    assert tokens(ask(video_url(frames_url()), "?")) == generated((FRAMES, sent))
    chosen = [0, 1, 3, 5]
    read = {"fps": 10.0, "total_num_frames": 6, "frames_indices": chosen, "do_sample_frames": False}
    assert tokens(ask(video_url(animation(FRAMES)), "?")) == generated((FRAMES[chosen], read))


def asked(watching: RunningServer, parts: list[Any], **fields: Any) -> Any:
    body = {"model": "m", "messages": message(*parts), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{watching.url}/v1/chat/completions", json=body | fields, timeout=60)


def test_a_request_has_settings_of_its_own(watching, folder, ask):
    """As in vLLM: they are added to those of the server, for one request."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(random_image(1, 40, 40))}"}}
    parts = [image, video_url(animation(FRAMES)), "?"]
    usual = tokens(ask(*parts))
    for fields, arguments in (
        ({"mm_processor_kwargs": {"size": {"shortest_edge": 64, "longest_edge": 400}}}, None),
        ({"media_io_kwargs": {"video": {"num_frames": 2}}}, {"media_io_kwargs": {"video": {"num_frames": 2}}}),
        ({"media_io_kwargs": {"video": {"fps": 4}}}, {"media_io_kwargs": {"video": {"num_frames": 4, "fps": 4}}}),
    ):
        llm = LLM(folder, **{**ARGUMENTS, **(arguments or fields)})
        answer = asked(watching, parts, **fields).json()
        found = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
        assert found == chatted(llm, *parts) and len(found) < len(usual)
        counted = {"model": "m", "messages": message(*parts), **fields}
        counted = httpx.post(f"{watching.url}/tokenize", json=counted, timeout=60).json()
        assert counted["tokens"] == answer["prompt_token_ids"]
    assert tokens(ask(*parts)) == usual
    assert asked(watching, ["no media"], mm_processor_kwargs={"size": {}}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"media_io_kwargs": {"video": {"num_frames": "invalid"}}}, 'allowed is {"video": {"num_frames": up to 2048'),
        ({"media_io_kwargs": {"image": {}}}, 'allowed is {"video"'),
        ({"mm_processor_kwargs": {"colour": 1}}, "'colour' is no argument of"),
        ({"mm_processor_kwargs": {"patch_size": 8}}, "mm_processor_kwargs is"),
        ({"mm_processor_kwargs": {"image_std": [0.0] * 3}}, "its values for the encoder are not within 100000 of 0"),
        ({"mm_processor_kwargs": {"rescale_factor": 1e30}}, "its values for the encoder are not within 100000 of 0"),
        ({"mm_processor_kwargs": {"fps": "2"}}, "a number above 0 for fps"),
        ({"mm_processor_kwargs": 3}, "mm_processor_kwargs has the wrong type"),
    ],
)
def test_settings_that_are_not_understood_are_refused(watching, fields, reason):
    answer = asked(watching, [video_url(frames_url()), "?"], **fields)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert asked(watching, [video_url(frames_url()), "?"]).status_code == 200


def test_the_list_of_models_says_what_is_read(watching):
    assert httpx.get(f"{watching.url}/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]


MANY = np.zeros((9, 8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([video_url(frames_url())] * 3, "the number of videos is 3, and --limit-mm-per-prompt allows 2"),
        ([video_url("data:video/jpeg;base64," + ",".join(["AAAA"] * 10_000))], "it has 10000 frames"),
        ([video_url(frames_url(FRAMES[:2]) + ",AAAA")], r"\(frame 2\) cannot be read: it is no image"),
        ([video_url(frames_url(FRAMES[:2]) + ",!")], "it is not valid base64"),
        ([video_url(f"{frames_url(FRAMES[:2])},{encoded(random_image(1))}")], "its frames have different sizes"),
        ([video_url("data:video/mp4;base64,AAAAGGZ0eXBtcDQyAAAAAA==")], "containers such as MP4 are not read"),
        ([video_url(animation(FRAMES)[:-400])], "it is damaged|it is no video"),
        ([video_url("data:video/jpeg,abc")], "FRAME,FRAME"),
        ([video_url("file:///etc/hostname")], "file URLs need --allowed-local-media-path"),
        ([video_url("http://127.0.0.1/a.gif")], "an address that is not public"),
        ([{"type": "video_url"}], "video_url is missing"),
        ([video_url(frames_url(FRAMES[:1]))], "it has 1 frames, fewer than the 2 that are encoded together"),
        (["<|video_pad|>", video_url(frames_url())], "there are 1 videos for its 2 placeholders"),
        ([video_url(frames_url(random_video(1, 2, 1, 300)))], "one side is 300 times as long as the other"),
    ],
)
def test_refused_videos(ask, parts, reason):
    with pytest.raises(Exception, match=reason) as raised:
        ask(*parts)
    assert raised.value.status_code == 400 and "\n" not in raised.value.body["message"]


def test_a_bomb_is_refused_and_the_next_video_is_read(ask):
    """Every frame says that it has 60,000 pixels a side."""
    frame = random_image(1, 1, 1)
    data = bytearray(base64.b64decode(encoded(frame, "GIF")))
    data[6:10] = (60_000).to_bytes(2, "little") * 2
    url = "data:video/gif;base64," + base64.b64encode(bytes(data)).decode()
    with pytest.raises(Exception, match="too much memory|60000 x 60000|more than 64 million pixels") as raised:
        ask(video_url(url))
    assert raised.value.status_code == 400
    assert tokens(ask(video_url(frames_url()), "what?"))
