"""/v1/chat/completions, /tokenize and /detokenize, /v1/models and the small routes."""

from __future__ import annotations

import json

import openai
import pytest

import aiakq

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is there?"}]
GREEDY = {"model": "tinybooks", "messages": MESSAGES, "temperature": 0, "max_tokens": 16}


def test_a_chat_stream_adds_up_to_the_whole_message(client):
    whole = client.chat.completions.create(**GREEDY)
    choice = whole.choices[0]
    assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion"
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.sentence_length == whole.sentence_length == len(choice.message.content)
    assert choice.cum_log_probs == whole.cum_log_probs < 0
    chunks = list(client.chat.completions.create(**GREEDY, stream=True))
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"
    assert chunks[-1].sentence_length == len(choice.message.content)


def test_chat_equals_a_completion_of_the_templated_text(http):
    """A chat answers as a completion of the templated text does."""
    chat = http.post("/v1/chat/completions", json=GREEDY).json()
    ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert (
        text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho is there?<|im_end|>\n<|im_start|>assistant\n"
    )
    completion = http.post("/v1/completions", json={"prompt": ids, "temperature": 0, "max_tokens": 16}).json()
    assert completion["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert chat["usage"]["prompt_tokens"] == len(ids)


def test_content_can_be_a_list_of_text_parts(http):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who is"}, {"type": "text", "text": "there?"}]}]
    plain = [{"role": "user", "content": "Who is\nthere?"}]
    counts = [http.post("/tokenize", json={"messages": messages}).json()["tokens"] for messages in (parts, plain)]
    assert counts[0] == counts[1]


def test_chat_logprobs_have_openai_shape(client):
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 16 and "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True) and tops[0] == entry.logprob
    assert sum(entry.logprob for entry in content) == pytest.approx(answer.cum_log_probs, abs=1e-4)
    bare = client.chat.completions.create(**GREEDY, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in bare)
    assert client.chat.completions.create(**GREEDY).choices[0].logprobs is None


def test_seeded_chat_choices_differ_and_stream_equally(client):
    body = GREEDY | {"temperature": 1.0, "n": 3, "seed": 3}
    first = client.chat.completions.create(**body)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**body, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts


def test_max_completion_tokens_overrides_max_tokens(http):
    body = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    short = http.post("/v1/chat/completions", json=body | {"max_completion_tokens": 2, "max_tokens": 9}).json()
    assert short["usage"]["completion_tokens"] == 2
    end = {"stop": [" "], "temperature": 1.0, "seed": 1}
    assert http.post("/v1/chat/completions", json=body | end).json()["usage"]["completion_tokens"] > 0


def test_continue_final_message_leaves_the_message_open(http):
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("<|im_start|>assistant\nIt is")


def test_include_usage_adds_a_last_chunk(http):
    body = GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
    events = [line[6:] for line in http.post("/v1/chat/completions", json=body).text.splitlines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 16


def test_the_chunk_that_opens_a_message_counts_no_tokens(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = GREEDY | {"stream": True, "stream_options": options, "max_tokens": 4}
    chunks = events(http, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts[1] > 0 and counts[-1] == 4 and chunks[0]["usage"]["prompt_tokens"] > 0


def events(http, body: dict) -> list[dict]:
    """The chunks of a stream."""
    lines = [line[6:] for line in http.post("/v1/chat/completions", json=body).text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_fields_of_the_prompt_are_next_to_the_choices(http, client):
    ids = http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    extra = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = client.chat.completions.create(**GREEDY, n=2, extra_body=extra)
    assert answer.prompt_token_ids == ids and len(answer.prompt_logprobs) == len(ids)
    assert all(len(choice.token_ids) == 16 for choice in answer.choices)
    assert not hasattr(answer.choices[0], "prompt_token_ids") and not hasattr(answer.choices[0], "prompt_logprobs")
    plain = client.chat.completions.create(**GREEDY)
    assert plain.prompt_token_ids is plain.prompt_logprobs is plain.choices[0].token_ids is None
    assert plain.choices[0].message.reasoning_content is None
    chunks = events(http, GREEDY | {"stream": True, "return_token_ids": True})
    assert chunks[0]["prompt_token_ids"] == ids and not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert sum((chunk["choices"][0].get("token_ids", []) for chunk in chunks), []) == answer.choices[0].token_ids


def test_the_bytes_of_tokens_join_to_the_content(http):
    """A character cut into tokens: the bytes are the tokens' own."""
    ids = http.post("/tokenize", json={"prompt": "🙂", "add_special_tokens": False}).json()["tokens"]
    body = GREEDY | {"allowed_token_ids": ids, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    found = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    entries = found["logprobs"]["content"]
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode(errors="replace") == found["message"]["content"] and "\ufffd".encode() not in data
    assert all(top["bytes"] for entry in entries for top in entry["top_logprobs"])


def test_echo_returns_the_last_message_of_the_same_role(http):
    last = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    body = GREEDY | {"messages": [*MESSAGES, last], "add_generation_prompt": False, "continue_final_message": True}
    plain = http.post("/v1/chat/completions", json=body | {"echo": False}).json()["choices"][0]["message"]
    echoed = http.post("/v1/chat/completions", json=body | {"echo": True}).json()["choices"][0]
    assert echoed["message"]["content"] == "It is" + plain["content"]
    assert echoed["sentence_length"] == len(plain["content"])
    pieces = [chunk["choices"][0]["delta"]["content"] for chunk in events(http, body | {"echo": True, "stream": True})]
    assert pieces[:2] == ["", "It is"] and "".join(pieces) == echoed["message"]["content"]
    other = http.post("/v1/chat/completions", json=GREEDY | {"echo": True}).json()["choices"][0]["message"]
    assert other["content"] == http.post("/v1/chat/completions", json=GREEDY).json()["choices"][0]["message"]["content"]
    asked = GREEDY | {"add_generation_prompt": False}
    assert http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["role"] == "user"


def test_models_lists_every_served_name(client, http):
    cards = client.models.list().data
    assert [card.id for card in cards] == ["tinybooks", "alias/name"]
    assert cards[0].max_model_len == 1024 and cards[0].vocab_size == 4096
    assert client.models.retrieve("alias/name").id == "alias/name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    answer = http.post("/v1/chat/completions", json=GREEDY | {"model": "alias/name"}).json()
    assert answer["model"] == "tinybooks"


def test_health_ping_version_and_docs_respond(http):
    assert http.get("/health").status_code == 200
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/version").json() == {"version": aiakq.__version__}
    schema = http.get("/openapi.json").json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["properties"] and "$ref" not in json.dumps(body)
    assert http.get("/docs").status_code == 200


def test_tokenize_and_detokenize_round_trip(http):
    text = "Sing, O goddess — 𝄞 \u0000 naïve"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    words = http.post("/tokenize", json={"prompt": "the sea 🙂", "return_token_strs": True}).json()["token_strs"]
    assert "Ġsea" in words and "\ufffd" not in "".join(words)  # as the vocabulary spells them
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == text


def test_tokens_have_their_pieces_if_llama_cpp_s_client_asks_for_them(http):
    text = "Sing — 𝄞 sea"
    answer = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()
    plain = http.post("/tokenize", json={"content": text, "with_pieces": False}).json()["tokens"]
    assert [token["id"] for token in answer["tokens"]] == plain and answer["count"] == len(plain)
    pieces = [token["piece"] for token in answer["tokens"]]
    assert b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in pieces).decode() == text
    assert any(isinstance(each, list) for each in pieces), "parts of a character are bytes"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "with_pieces": True}
    assert "Hi" in "".join(token["piece"] for token in http.post("/tokenize", json=chat).json()["tokens"])


def test_responses_have_a_request_id_of_the_server(http):
    first, second = (http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json()["id"] == "cmpl-" + first.headers["x-request-id"]
