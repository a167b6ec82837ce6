"""LoRA adapters over HTTP: by the name of a model, in the list of models, loaded and unloaded, across a restart."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from lora_adapters import adapted, save_adapter
from starlette.requests import Request

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.arguments.lora import LoraModule, parse_module
from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.server.api.adapter_routes import load_adapter, unload_adapter
from aiakq.server.api.adapters import AdapterRegistry
from aiakq.server.api.model_info import ModelInfo
from aiakq.server.api.request_tracker import RequestTracker
from aiakq.server.api.service import ServerState
from aiakq.server.api.service_options import ServiceOptions
from aiakq.server.background import RunningServer
from aiakq.server.telemetry.metrics import Metrics

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def root(example_model, tmp_path_factory) -> Path:
    """A folder with three adapters of the example model."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("one", "two", "three")):
        model = AutoModelForCausalLM.from_pretrained(example_model, dtype=torch.float32)
        save_adapter(adapted(model, seed=number, r=4 + number), folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(example_model, root) -> dict[str, str]:
    """The answers of an engine of its own."""
    llm = LLM(str(example_model), dtype="float32", num_gpu_blocks_override=200, enable_lora=True, max_loras=3)
    params, answers = SamplingParams(temperature=0, max_tokens=8), {}
    for name in (None, "one", "two", "three"):
        request = None if name is None else LoRARequest(name, 1, str(root / name))
        (answer,) = llm.generate(PROMPT, params, False, lora_request=request)
        answers[name or "tinybooks"] = answer.outputs[0].text
    assert len(set(answers.values())) == 4
    return answers


@pytest.fixture(scope="module")
def running(start_server, root) -> Iterator[RunningServer]:
    modules = [f"one={root / 'one'}", json.dumps({"name": "two", "path": str(root / "two")})]
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "enable_admin_routes": True}
    with start_server(**options, lora_modules=modules, lora_root=str(root)) as server:
        yield server


@pytest.fixture
def client(running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
        yield client


def complete(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0})


def text_of(client: httpx.Client, model: str) -> str:
    answer = complete(client, model).json()
    assert answer["model"] == model, answer
    return answer["choices"][0]["text"]


def names_of(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_requests_name_an_adapter_as_their_model(client, expected):
    names = ["tinybooks", "one", "two"]
    assert {name: text_of(client, name) for name in names} == {name: expected[name] for name in names}
    many = names * 6
    with ThreadPoolExecutor(9) as threads:
        assert list(threads.map(lambda name: text_of(client, name), many)) == [expected[name] for name in many]
    chat = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).json().get("model", "one") == "one"
    unknown = complete(client, "three")
    assert unknown.status_code == 404 and "tinybooks, alias/name, one, two" in unknown.text


def test_the_list_of_models_has_adapters_with_their_parent(client, root):
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["tinybooks", "alias/name", "one", "two"]
    assert cards["one"]["parent"] == "tinybooks" and cards["one"]["root"] == str((root / "one").resolve())
    assert cards["tinybooks"]["parent"] is None
    assert client.get("/v1/models/two").json() == cards["two"]


def load(client: httpx.Client, name: str, path: str, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(client, expected, root):
    answer = load(client, "new", "three")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert text_of(client, "new") == expected["three"]
    assert load(client, "new", "three").json()["error"]["code"] == "adapter_exists"
    assert load(client, "tinybooks", "three", load_inplace=True).json()["error"]["code"] == "adapter_exists"
    assert load(client, "new", str(root / "two"), load_inplace=True).status_code == 200
    assert text_of(client, "new") == expected["two"]
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "new", "lora_int_id": 7})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert complete(client, "new").status_code == 404 and "new" not in names_of(client)
    assert (
        client.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).json()["error"]["code"] == "unknown_adapter"
    )
    assert text_of(client, "two") == expected["two"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nowhere", "adapter_missing"),
        ("..", "adapter_outside_root"),
        ("../..", "adapter_outside_root"),
        ("/etc", "adapter_outside_root"),
        (".", "adapter_missing"),
        ("broken", "adapter_malformed"),
    ],
)
def test_what_cannot_be_loaded_is_refused(client, root, path, code):
    (root / "broken").mkdir(exist_ok=True)
    (root / "broken" / "adapter_config.json").write_text("{}")
    answer = load(client, "bad", path)
    assert answer.json()["error"]["code"] == code and 400 <= answer.status_code < 500
    assert "bad" not in names_of(client)


def test_metrics_count_requests_by_adapter(client, metrics_of, expected):
    before = metrics_of(str(client.base_url))
    text_of(client, "one")
    after = metrics_of(str(client.base_url))
    count, seconds = "vllm:lora_count{lora_name=one}", "vllm:lora_time_e2e_requests{lora_name=one}"
    assert after[count] == before.get(count, 0) + 1 and after[seconds] > before.get(seconds, 0)
    info = "vllm:lora_requests_info{max_lora=2,running_lora_adapters=,waiting_lora_adapters=}"
    assert abs(after[info] - time.time()) < 60
    for number in range(5):
        load(client, f"name {number}", "three")
        text_of(client, f"name {number}")
        client.post("/v1/unload_lora_adapter", json={"lora_name": f"name {number}"})
    assert not [name for name in metrics_of(str(client.base_url)) if "lora_name=name" in name]


def posted(body: dict[str, Any]) -> Request:
    """A request with this body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    state = {"arrival_time": time.monotonic(), "request_id": "r"}
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state}, receive)


def test_labels_of_metrics_stay_those_of_served_adapters_over_a_thousand_loads():
    """Also where a request ends after its adapter was unloaded."""

    async def check(name: str, path: str, root: str | None, client: str) -> AdapterRef:
        return AdapterRef(f"key of {name}", name, path, 1)

    async def prefetch(adapter: AdapterRef) -> None:
        pass

    async def load_and_unload(count: int) -> None:
        for number in range(count):
            name = f"name {number}"
            await load_adapter(service, posted({"lora_name": name, "lora_path": "x"}))
            request = SimpleNamespace(options=SimpleNamespace(adapter=registry.get(name)))
            stream = SimpleNamespace(request=request, sequences=[])
            before, after = (RequestTracker(service, posted({}).scope) for _ in range(2))
            for tracker in (before, after):
                tracker._streams = [stream]
            before.finish("stop")
            assert number % 100 or f'lora_name="{name}"' in metrics.render().decode()
            await unload_adapter(service, posted({"lora_name": name}))
            after.finish("stop")

    metrics = Metrics("model", 100, {"block_size": "16"})
    registry = AdapterRegistry("/adapters", {"kept": AdapterRef("key", "kept", "/", 1)}, {"kept": "model"})
    manager: Any = SimpleNamespace(
        adapters=SimpleNamespace(check=check),
        prefetch_adapter=prefetch,
        send=lambda command: None,
        failure=None,
    )
    text: Any = None
    service: Any = SimpleNamespace(
        model=SimpleNamespace(adapters=registry, adapter=registry.get, names=["model"]),
        state=ServerState(manager, text, metrics, dict),
        options=ServiceOptions(),
        max_body_bytes=1000,
    )
    metrics.request_ended("stop", 1.0, "kept")
    asyncio.run(load_and_unload(1000))
    labels = set(re.findall(r'lora_name="([^"]*)"', metrics.render().decode()))
    assert labels == {"", "kept"} and registry.names == ["kept"]


@pytest.mark.process_failures
def test_a_restarted_engine_has_the_same_adapters(running, client, expected):
    load(client, "kept", "three")
    assert text_of(client, "kept") == expected["three"]
    os.kill(running.ready.engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (answer := complete(client, "kept")).status_code != 200:
        assert answer.status_code == 503 and time.monotonic() < deadline, answer.text
        time.sleep(0.2)
    assert answer.json()["choices"][0]["text"] == expected["three"]
    assert text_of(client, "one") == expected["one"]
    client.post("/v1/unload_lora_adapter", json={"lora_name": "kept"})


def test_files_that_are_gone_fail_their_requests_only(client, root, expected):
    names = ["lost", "next", "later", "last"]  # the others take its place in memory
    for number, name in enumerate(names):
        shutil.copytree(root / "three", root / name)
        config = root / name / "adapter_config.json"
        config.write_text(config.read_text() + " " * (number + 1))  # another key than that of "three"
        assert load(client, name, name).status_code == 200
        shutil.rmtree(root / name)
    assert text_of(client, "last") == expected["three"], "it was read when it was loaded"
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(complete, client, "lost")  # waits for load_inplace
        assert text_of(client, "one") == expected["one"]
        client.post("/v1/unload_lora_adapter", json={"lora_name": "lost"})
        assert answer.result().status_code == 503 and answer.result().json()["error"]["code"] == "adapter_lost"
    for name in names[1:]:
        client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_an_adapter_unloaded_while_its_request_is_read_is_not_replaced_by_the_base_model():
    adapter = AdapterRef("key", "sql", "/sql", 1)
    registry = AdapterRegistry("/", {"sql": adapter}, {"sql": "base"})
    limits = ModelLimits(10, 20, 30)
    model = ModelInfo(("base",), "/base", "float32", limits, {}, "assistant", registry)
    assert model.adapter("sql") == adapter and model.adapter("base") is model.adapter(None) is None
    registry.remove("sql")
    with pytest.raises(AiakqError, match="sql"):
        model.adapter("sql")


@pytest.fixture(scope="module")
def narrow(start_server, root) -> Iterator[httpx.Client]:
    """A server that runs one adapter at a time."""
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_num_seqs": 2, "enable_admin_routes": True}
    options["scheduling_policy"] = "priority"
    with (
        start_server(**options, lora_root=str(root)) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_requests_of_an_adapter_that_is_replaced_are_answered_by_the_version_they_began_with(narrow, expected, root):
    """Its files are overwritten while they wait."""
    folder, versions = root / "swapped", ["one", "two", "three"] * 3
    shutil.copytree(root / "one", folder)
    assert load(narrow, "swapped", "swapped").status_code == 200
    loading, loaded = ["one"], ["one"]

    def ask(_: int) -> tuple[int, str, list[str]]:
        oldest = len(loaded) - 1
        answer = complete(narrow, "swapped")
        return answer.status_code, answer.text, [expected[name] for name in loading[oldest:]]

    with ThreadPoolExecutor(12) as threads:
        answers = []
        for version in versions[1:]:
            answers += [threads.submit(ask, number) for number in range(6)]
            for file in (root / version).iterdir():
                shutil.copy(file, folder / file.name)
            loading.append(version)
            while (answer := load(narrow, "swapped", "swapped", load_inplace=True)).status_code != 200:
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "adapters_in_use", answer.text
                time.sleep(0.05)
            loaded.append(version)
        for status, text, possible in [each.result() for each in answers]:
            assert status == 200, text
            assert json.loads(text)["choices"][0]["text"] in possible
    assert text_of(narrow, "swapped") == expected[versions[-1]]


def overwrite(folder: Path, version: Path) -> None:
    """Replace an adapter's files one by one, as cp does."""
    folder.mkdir(exist_ok=True)
    for file in version.iterdir():
        shutil.copy(file, folder / file.name)


def texts_of(client: httpx.Client, model: str, **fields: Any) -> list[str] | str:
    """Texts of two answers to each of two prompts; or the failure."""
    body = {"model": model, "prompt": [PROMPT] * 2, "n": 2, "max_tokens": 8, "temperature": 0} | fields
    if not fields.get("stream"):
        answer = client.post("/v1/completions", json=body)
        return [choice["text"] for choice in answer.json()["choices"]] if answer.status_code == 200 else answer.text
    texts = [""] * 4
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices") or [{"index": 0, "text": line}]:
                    texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize("is_used", [True, False])
def test_a_replaced_adapter_that_is_not_in_memory_is_answered_by_its_next_version(narrow, expected, root, is_used):
    """It was evicted, or never used, before its files were overwritten; its requests arrive before load_inplace."""
    name = f"replaced {is_used}"
    overwrite(root / name, root / "one")
    assert load(narrow, name, name).status_code == 200
    assert not is_used or text_of(narrow, name) == expected["one"]
    others = [f"{name}, other {number}" for number in range(3)]
    for number, other in enumerate(others):
        overwrite(root / other, root / "three")
        config = root / other / "adapter_config.json"
        config.write_text(config.read_text() + " " * (number + 5 * is_used))  # a version of its own
        assert load(narrow, other, other).status_code == 200
    assert [text_of(narrow, other) for other in others] == [expected["three"]] * 3
    overwrite(root / name, root / "two")
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(texts_of, narrow, name, stream=bool(number % 2)) for number in range(6)]
        time.sleep(0.5)
        assert load(narrow, name, name, load_inplace=True).status_code == 200
        assert [answer.result() for answer in answers] == [[expected["two"]] * 4] * 6
    assert text_of(narrow, name) == expected["two"]


def test_a_streamed_request_keeps_its_adapter_for_the_choices_that_have_not_begun(narrow, expected, root):
    """Two of six run at a time; meanwhile others need the place of the adapter, and its files are overwritten."""
    overwrite(root / "kept", root / "one")
    assert load(narrow, "kept", "kept").status_code == 200
    for name in ("two", "three"):
        assert load(narrow, f"beside {name}", name).status_code == 200
    body = {"model": "kept", "prompt": PROMPT, "n": 6, "max_tokens": 8, "temperature": 0, "stream": True, "priority": 1}
    texts, others = [""] * 6, []
    with ThreadPoolExecutor(8) as threads, narrow.stream("POST", "/v1/completions", json=body) as answer:
        for line in filter(lambda line: line.startswith("data: {"), answer.iter_lines()):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
            if not others:
                overwrite(root / "kept", root / "two")
                names = ["two", "three"] * 4
                others = [threads.submit(text_of, narrow, f"beside {name}") for name in names]
        assert [each.result() for each in others] == [expected[name] for name in names]
    assert texts == [expected["one"]] * 6


def test_the_forms_of_lora_modules():
    given = ["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "base"}']
    assert checked({"lora_modules": given}, server=True).lora_modules == given
    assert [parse_module(text) for text in given] == [LoraModule("a", "/x=y"), LoraModule("b", "/z", "base")]
    for wrong in ("a", "=b", "a=", "{}", "{", '{"name": "b", "path": 3}', '{"name": "b", "path": "c", "rank": "4"}'):
        with pytest.raises(AiakqError) as caught:
            checked({"lora_modules": [wrong]}, server=True)
        assert caught.value.id == "bad_option"
