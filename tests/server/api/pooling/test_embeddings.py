"""/v1/embeddings, /pooling and /classify of real servers, against transformers and through the openai client."""

from __future__ import annotations

import base64
import json
import struct
import time

import httpx
import pytest
import torch
from openai import OpenAI

from aiakq import LLM, PoolingParams
from aiakq.server.api.pooling.pooled_results import MAX_INPUTS

TEXTS = ["The first text", "another text, which is a bit longer than a step has room for", "x"]


@pytest.fixture(scope="module")
def expected(embedder) -> list[torch.Tensor]:
    """The last hidden state of each text's last token, as transformers computes it."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(embedder, dtype=torch.float32), AutoTokenizer.from_pretrained(embedder)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]


def _normal(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def _close(numbers: list[float], vector: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(numbers), vector, rtol=1e-4, atol=1e-5)


def test_the_openai_client_gets_embeddings(embedding_server, embedder, expected):
    with httpx.Client(trust_env=False) as plain:
        client = OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0, http_client=plain)
        answer = client.embeddings.create(model=str(embedder), input=TEXTS)  # asks for base64
        floats = client.embeddings.create(model=str(embedder), input=TEXTS, encoding_format="float", user="me")
        one = client.embeddings.create(model=str(embedder), input=TEXTS[0], dimensions=32)
    assert answer.object == "list" and answer.model == str(embedder)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert {entry.object for entry in answer.data} == {"embedding"}
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    for entry, same, vector in zip(answer.data, floats.data, expected, strict=True):
        _close(entry.embedding, _normal(vector))
        assert entry.embedding == same.embedding
    _close(one.data[0].embedding, _normal(expected[0][:32]))


def test_token_ids_are_inputs_too(embed_http, byte_tokenizer):
    ids = byte_tokenizer(TEXTS)["input_ids"]

    def data(value: object) -> list:
        answer = embed_http.post("/v1/embeddings", json={"input": value})
        assert answer.status_code == 200, answer.text
        return [entry["embedding"] for entry in answer.json()["data"]]

    assert data(ids) == data(TEXTS)
    assert data(ids[0]) == data([TEXTS[0]]) == data(TEXTS[0])


def test_base64_holds_float32(embed_http):
    floats, packed = (
        embed_http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": name}).json()["data"]
        for name in ("float", "base64")
    )
    for one, other in zip(floats, packed, strict=True):
        data = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == one["embedding"]


def test_many_inputs_are_answered_in_order(embed_http):
    """More of them than the queue has places for."""
    texts = [f"text {number}" for number in range(150)]
    answer = embed_http.post("/v1/embeddings", json={"input": texts}).json()["data"]
    assert [entry["index"] for entry in answer] == list(range(150))
    alone = embed_http.post("/v1/embeddings", json={"input": texts[77]}).json()["data"]
    assert answer[77]["embedding"] == alone[0]["embedding"]


def test_pooling_returns_unnormalized_vectors(embed_http, expected):
    answer = embed_http.post("/pooling", json={"input": TEXTS, "normalize": False})
    assert answer.status_code == 200, answer.text
    for entry, vector in zip(answer.json()["data"], expected, strict=True):
        assert entry["object"] == "pooling"
        torch.testing.assert_close(torch.tensor(entry["data"]), vector, rtol=1e-4, atol=1e-4)


def test_texts_are_truncated_on_request(embed_http):
    long = "y" * 300
    answer = embed_http.post("/v1/embeddings", json={"input": long})
    failure = answer.json()["error"]
    assert answer.status_code == 400 and failure["code"] == "context_length_exceeded" and failure["param"] == "input"

    def embedding(text: str, **fields: int) -> list[float]:
        answer = embed_http.post("/v1/embeddings", json={"input": text, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    assert embedding(long, truncate_prompt_tokens=-1) == embedding("y" * 128)
    assert embedding("abcdef", truncate_prompt_tokens=3) == embedding("def")


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "empty_prompt", "input"),
        ("/v1/embeddings", {"input": []}, "empty_prompt", "input"),
        ("/v1/embeddings", {"input": 3}, "invalid_type", "input"),
        ("/v1/embeddings", {"input": [[1], "x"]}, "invalid_type", "input"),
        ("/v1/embeddings", {"input": [[1], [99999]]}, "invalid_token_id", "input"),
        ("/v1/embeddings", {}, "missing_field", "input"),
        ("/v1/embeddings", {"input": "x", "dimensions": 129}, "value_out_of_range", "dimensions"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "value_out_of_range", "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "invalid_type", "encoding_format"),
        ("/v1/embeddings", {"input": "x", "dimension": 1}, "unknown_field", "dimension"),
        ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "value_out_of_range", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x", "model": "other"}, "unknown_model", "model"),
        ("/v1/embeddings", {"input": ["x"] * (MAX_INPUTS + 1)}, "too_many_prompts", "input"),
        ("/pooling", {"input": "x", "activation": True}, "unsupported_parameter", "activation"),
        ("/classify", {"input": "x"}, "task_mismatch", None),
        ("/v1/completions", {"prompt": "x"}, "task_mismatch", None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "task_mismatch", None),
    ],
)
def test_what_cannot_be_embedded_is_refused(path, body, code, param, embed_http):
    answer = embed_http.post(path, json=body)
    failure = answer.json()["error"]
    assert (failure["code"], failure["param"]) == (code, param), failure
    assert answer.status_code == (404 if code == "unknown_model" else 400)
    if code == "task_mismatch":
        assert "--task" in failure["message"]


def test_labels_have_probabilities(classify_http, classifier):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    answer = classify_http.post("/classify", json={"input": TEXTS}).json()
    raw = classify_http.post("/classify", json={"input": TEXTS, "activation": False}).json()["data"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, TEXTS))
    for text, entry, scores in zip(TEXTS, answer["data"], raw, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        _close(entry["probs"], logits.softmax(-1))
        torch.testing.assert_close(torch.tensor(scores["probs"]), logits, rtol=1e-4, atol=1e-4)
        assert entry["label"] == scores["label"] == model.config.id2label[int(logits.argmax())]
        assert entry["num_classes"] == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x"}),
        ("/score", {"text_1": "x", "text_2": "y"}),
        ("/rerank", {"query": "x", "documents": ["y"]}),
    ],
)
def test_three_labels_are_no_score_and_no_embedding(path, body, classify_http):
    answer = classify_http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "task_mismatch"


def test_a_server_that_generates_has_no_embeddings(http):
    scores = {"/score": {"text_1": "x", "text_2": "y"}, "/rerank": {"query": "x", "documents": ["y"]}}
    for path in ("/v1/embeddings", "/pooling", "/classify", *scores):
        answer = http.post(path, json=scores.get(path, {"input": "x"}))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "task_mismatch" and "--task embed" in answer.json()["error"]["message"]


def test_requests_are_counted(embedding_server, embed_http, metrics_of):
    before = metrics_of(embedding_server.url)
    embed_http.post("/v1/embeddings", json={"input": ["abc", "defg"]})
    embed_http.post("/v1/embeddings", json={"input": []})
    after = metrics_of(embedding_server.url)
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["vllm:request_total"] == 2
    assert change["vllm:request_success_total{finished_reason=stop}"] == 1
    assert change["vllm:request_success_total{finished_reason=error}"] == 1
    assert change["vllm:prompt_tokens_total"] == 7
    assert change["vllm:generation_tokens_total"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_offline_and_served_embeddings_have_the_same_bits(embed_http, embedder):
    llm = LLM(str(embedder), task="embed", dtype="float32", hf_overrides={"is_matryoshka": True})
    for dimensions in (None, 20):
        found = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(dimensions=dimensions))
        body = {"input": TEXTS, **({} if dimensions is None else {"dimensions": dimensions})}
        served = embed_http.post("/v1/embeddings", json=body).json()["data"]
        assert [result.outputs.embedding for result in found] == [entry["embedding"] for entry in served]


def test_the_work_of_a_client_that_has_gone_is_dropped(embedding_server, embed_http, metrics_of):
    before = metrics_of(embedding_server.url)
    with pytest.raises(httpx.ReadTimeout):
        embed_http.post("/v1/embeddings", json={"input": ["y" * 120] * 1500}, timeout=0.3)
    name = "vllm:request_success_total{finished_reason=abort}"
    deadline = time.monotonic() + 20
    while (after := metrics_of(embedding_server.url))[name] == before[name] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert after[name] == before[name] + 1
    while after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"] and time.monotonic() < deadline:
        after = metrics_of(embedding_server.url)
    assert after["vllm:kv_cache_usage_perc"] == 0
    # Far fewer than the 180 000 tokens of the request.
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] < 90_000
    assert embed_http.post("/v1/embeddings", json={"input": "x"}).status_code == 200


def test_bytes_are_the_numbers_one_after_the_other(embed_http):
    floats = embed_http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    for name in ("bytes", "bytes_only"):
        answer = embed_http.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": name, "endianness": "big"})
        assert answer.headers["content-type"] == "application/octet-stream" and ("metadata" in answer.headers) == (
            name == "bytes"
        )
        numbers = list(struct.unpack(f">{len(answer.content) // 4}f", answer.content))
        assert numbers == [number for entry in floats for number in entry["embedding"]]
        if name == "bytes":
            metadata = json.loads(answer.headers["metadata"])
            assert [item["index"] for item in metadata["data"]] == [0, 1, 2]
            assert metadata["data"][-1]["end"] == len(answer.content) and metadata["usage"]["prompt_tokens"] > 0
    halves = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": "float16", "endianness": "little"}
    data = base64.b64decode(embed_http.post("/v1/embeddings", json=halves).json()["data"][0]["embedding"])
    found = struct.unpack(f"<{len(data) // 2}e", data)
    assert found == pytest.approx(floats[0]["embedding"], rel=1e-3, abs=1e-4)


def test_a_conversation_is_an_input_in_its_template(embed_http):
    messages = [{"role": "user", "content": "a"}]
    for path in ("/v1/embeddings", "/pooling"):
        answer = embed_http.post(path, json={"messages": messages})
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "no_chat_template"
        refused = embed_http.post(path, json={"messages": messages, "input": "a"}).json()["error"]
        assert (refused["code"], refused["param"]) == ("unsupported_parameter", "messages")
    assert embed_http.post("/v1/embeddings", json={}).json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"use_activation": False}, 200, None),
        ({"use_activation": False, "normalize": True}, 400, "use_activation"),
        ({"padding": "do_not_pad"}, 200, None),
        ({"padding": "longest"}, 200, None),
        ({"padding": True}, 200, None),
        ({"padding": "max_length"}, 200, None),
        ({"padding": "left"}, 400, "padding"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, 200, None),
        ({"truncate_prompt_tokens": 10**6}, 400, "truncate_prompt_tokens"),
        ({"embed_dtype": "fp8_e5m2"}, 400, "embed_dtype"),
        ({"embed_dtype": "int8"}, 400, "embed_dtype"),
        ({"input_type": "query"}, 400, "input_type"),
        ({"prompt": "query: "}, 400, "prompt"),
        ({"input_type": "query", "prompt_name": "query"}, 400, "input_type"),
        ({"task": "retrieval.query"}, 400, "prompt_name"),
        ({"task": "embed"}, 200, None),
        ({"text_type": "query"}, 400, "input_type"),
        ({"embedding_type": "binary"}, 400, "embedding_type"),
    ],
    ids=str,
)
def test_fields_of_other_servers(embed_http, fields, status, param):
    answer = embed_http.post("/v1/embeddings", json={"input": TEXTS[0], **fields})
    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", [{"raw_scores": False}, {"use_activation": True}, {"activation": True}], ids=str)
def test_scores_that_an_embedding_does_not_have_are_refused_under_the_name_that_was_sent(embed_http, fields):
    (name,) = fields
    failure = embed_http.post("/rerank", json={"query": "a", "texts": TEXTS, **fields}).json()["error"]
    assert (failure["code"], failure["param"]) == ("unsupported_parameter", name), failure


def test_the_side_that_is_kept(embed_http, byte_tokenizer):
    ids = byte_tokenizer(TEXTS)["input_ids"][0]

    def vector(**fields) -> list[float]:
        return embed_http.post("/v1/embeddings", json=fields).json()["data"][0]["embedding"]

    assert vector(input=TEXTS[0], truncate_prompt_tokens=3, truncation_side="right") == vector(input=ids[:3])
    assert vector(input=TEXTS[0], truncate_prompt_tokens=3) == vector(input=ids[-3:])


def test_prompts_are_padded_to_the_longest_one_after_truncation(embed_http, byte_tokenizer):
    """As in vLLM: the model reads padding like any other token."""
    ids, pad = byte_tokenizer(TEXTS)["input_ids"], byte_tokenizer.pad_token_id

    def answer(**fields) -> dict:
        return embed_http.post("/v1/embeddings", json=fields).json()

    padded = answer(input=TEXTS, padding="max_length")
    wanted = answer(input=[[*one, *[pad] * (128 - len(one))] for one in ids])
    assert padded["data"] == wanted["data"] and padded["usage"] == wanted["usage"]
    assert padded["usage"]["prompt_tokens"] == 3 * 128
    assert padded["data"][0]["embedding"] != answer(input=TEXTS)["data"][0]["embedding"]
    cut = answer(input=TEXTS[0], padding="max_length", truncate_prompt_tokens=3)
    assert cut["data"] == answer(input=[*ids[0][-3:], *[pad] * 125])["data"]


def test_the_task_of_a_request_is_that_of_the_server(embed_http):
    assert embed_http.post("/pooling", json={"input": "a", "task": "embed"}).status_code == 200
    for task in ("classify", "token_embed", "token_classify"):
        assert embed_http.post("/pooling", json={"input": "a", "task": task}).json()["error"]["param"] == "task"
