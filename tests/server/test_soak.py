"""Many streaming clients for a while: every response is complete and equals the request run alone; all pages are freed.

Ten seconds by default, AIAKQ_SOAK_SECONDS for longer. Also short runs of load_generator.py and hostile_inputs.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from aiakq import LLM, SamplingParams
from aiakq.server.background import start_in_background

CLIENTS = 64
SECONDS = float(os.environ.get("AIAKQ_SOAK_SECONDS", "10"))


def _requests(text: str) -> list[dict]:
    """Return 48 different requests: greedy and seeded, short and long, some with stop strings or shared prefixes."""
    rng = random.Random(3)
    words = text.split()
    shared = " ".join(words[:120])
    requests = []
    for index in range(48):
        at = rng.randrange(len(words) - 300)
        prompt = " ".join(words[at : at + rng.choice([1, 5, 40, 200])])
        request = {
            "prompt": shared + " " + prompt if index % 3 == 0 else prompt,
            "max_tokens": rng.choice([1, 8, 33, 64]),
        }
        if index % 2:
            request.update(temperature=0.9, top_p=0.95, seed=index)
        else:
            request["temperature"] = 0
        if index % 5 == 0:
            request["stop"] = [" the", "."]
        requests.append(request)
    return requests


def _expected(folder, requests: list[dict]) -> list[tuple[str, str]]:
    """Return (text, finish_reason) of every request, run one at a time in this process."""
    llm = LLM(model=str(folder), dtype="float32", max_num_seqs=1, enable_prefix_caching=False)
    answers = []
    for request in requests:
        params = SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})
        output = llm.generate(request["prompt"], params, use_tqdm=False)[0].outputs[0]
        answers.append((output.text, output.finish_reason))
    return answers


async def _stream(client: httpx.AsyncClient, request: dict) -> tuple[str, str | None, bool]:
    """Return text, finish reason and whether the stream was complete."""
    text, reason, done = "", None, False
    async with client.stream("POST", "/v1/completions", json={"model": "tiny", "stream": True, **request}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    return text, reason, done


async def _soak(url: str, requests: list[dict], expected: list[tuple[str, str]]) -> int:
    stop_at = time.monotonic() + SECONDS
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while time.monotonic() < stop_at:
                which = rng.randrange(len(requests))
                text, reason, done = await _stream(http, requests[which])
                assert done and (text, reason) == expected[which], requests[which]
                answered += 1

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return answered


def _gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pages", [None, 160], ids=["many_pages", "few_pages"])
def test_outputs_of_64_streaming_clients_equal_requests_run_alone(example_model, heldout_text, pages):
    requests = _requests(heldout_text)
    expected = _expected(example_model, requests)
    arguments = {"model": str(example_model), "served_model_name": ["tiny"], "dtype": "float32"}
    if pages:
        # About eight prompts fill the pages; the others wait, with more tokens than the default limit of the queue.
        arguments |= {"num_gpu_blocks_override": pages, "max_num_queued_tokens": 1 << 20}
    with start_in_background(arguments) as server:
        answered = asyncio.run(_soak(server.url, requests, expected))
        assert answered >= CLIENTS
        for _ in range(100):
            if _gauge(server.url, "vllm:kv_cache_usage_perc") == 0:
                break
            time.sleep(0.05)
        assert _gauge(server.url, "vllm:kv_cache_usage_perc") == 0, "a page is not free"
        assert _gauge(server.url, "vllm:num_requests_running") == 0
        if pages:
            assert _gauge(server.url, "vllm:num_preemptions_total") > 0, "few pages must cause preemptions"


def _run(script: str, *args: str) -> dict:
    """Run a script of this folder, which must succeed, and return the results that it prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_inputs_get_the_expected_responses_and_do_not_affect_others():
    found = _run("hostile_inputs.py", "--count", "2000", "--seed", "5")
    assert found["cases"] == 2000 and found["good_streams"] > 0
    assert len(found["kinds"]) >= 19, "a family has no case"
    assert set(found["statuses"]) >= {"200", "400", "403", "404", "405", "413", "415", "421", "431"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "families"), [("image", 14), ("audio", 9), ("video", 10)])
def test_hostile_media_are_refused_or_harmless_and_do_not_affect_others(kind, families):
    found = _run("hostile_inputs.py", "--media", kind, "--count", "150", "--clients", "4")
    assert found["cases"] == 150 and len(found["kinds"]) >= families and set(found["statuses"]) >= {"200", "400"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_is_lost_when_clients_misbehave_and_an_engine_is_killed():
    found = _run("load_generator.py", "--requests", "400", "--kills", "1")
    assert found["requests"] == 400 and found["kills"] == 1
    assert sum(found["misbehaved"].values()) > 20 and found["answered"] > 300
