"""/v1/completions through the real openai client and over plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest
from openai import AsyncOpenAI
from reciting_model import write_model

from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.api.completions import prompt_offsets
from aiakq.server.api.openai import TextOffsets
from aiakq.server.background import start_in_background

PROMPT = "It was the best of times, it was"
GREEDY = {"model": "tinybooks", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def streamed(http: httpx.Client, body: dict) -> list[dict]:
    """The chunks of a stream that must end with [DONE]."""
    answer = http.post("/v1/completions", json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_answer_has_every_field(client):
    answer = client.completions.create(**GREEDY)
    choice = answer.choices[0]
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "tinybooks"
    assert choice.index == 0 and choice.text and choice.finish_reason == "length" and choice.logprobs is None
    assert answer.system_fingerprint.startswith("aiakq-") and len(answer.system_fingerprint.rpartition("-")[2]) == 8
    usage = answer.usage
    assert usage.completion_tokens == 24 and usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0 and usage.completion_tokens_details.reasoning_tokens == 0
    assert choice.sentence_length == answer.sentence_length == len(choice.text)
    assert choice.cum_log_probs == answer.cum_log_probs < 0


def test_a_stream_adds_up_to_the_whole_response(http, client):
    whole = client.completions.create(**GREEDY, logprobs=2)
    chunks = streamed(http, GREEDY | {"logprobs": 2})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [entry for choice in choices for entry in choice["logprobs"][name]]
        assert joined == getattr(whole.choices[0].logprobs, name)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    last = chunks[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["sentence_length"] == last["choices"][0]["sentence_length"] == len(whole.choices[0].text)
    assert last["cum_log_probs"] == pytest.approx(whole.choices[0].cum_log_probs)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_the_openai_client_can_stream(client):
    whole = client.completions.create(**GREEDY).choices[0].text
    stream = client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_async_openai_clients_do_not_disturb_each_other(server, client):
    """Eight concurrent streams give what each prompt gives alone."""
    prompts = [f"{PROMPT} {word}" for word in "a the one my no his her our".split()]
    alone = [client.completions.create(**GREEDY | {"prompt": prompt}).choices[0].text for prompt in prompts]

    async def together() -> list[str]:
        async with httpx.AsyncClient(trust_env=False) as plain:
            openai = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=plain)

            async def one(prompt: str) -> str:
                stream = await openai.completions.create(**GREEDY | {"prompt": prompt}, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(together()) == alone


def test_continuous_usage_counts_up(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(http, GREEDY | {"max_tokens": 5, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5 and chunks[-1]["choices"] == []


def test_continuous_usage_needs_include_usage(http):
    options = {"include_usage": False, "continuous_usage_stats": True}
    chunks = streamed(http, GREEDY | {"max_tokens": 3, "stream_options": options})
    assert not any(chunk.get("usage") for chunk in chunks) and chunks[-1]["choices"]


def test_fields_that_were_not_requested_are_null(client):
    choice = client.completions.create(**GREEDY).choices[0]
    assert choice.prompt_logprobs is choice.prompt_token_ids is choice.token_ids is None


def test_an_echo_has_its_special_tokens_and_offsets_that_fit(http):
    ids = [0, 1, 100, 2]
    body = GREEDY | {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 4}
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.startswith("<|")
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"].startswith(text)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    for token, offset in zip(tokens, offsets, strict=True):
        assert choice["text"][offset:].startswith(token)
    assert offsets[len(ids)] == len(text)


def test_offsets_of_parts_of_a_character_are_that_of_the_character(http):
    ids = http.post("/tokenize", json={"prompt": "a🙂b🙂"}).json()["tokens"]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 2}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"][: len(ids)]
    emoji = (len(ids) - 2) // 2
    assert emoji > 1 and offsets == [0, *[1] * emoji, 2, *[3] * emoji]
    assert choice["logprobs"]["text_offset"][len(ids)] == 4


def test_logprobs_have_openai_shape(http):
    choice = http.post("/v1/completions", json=GREEDY | {"logprobs": 3}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 24
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    for token, chosen, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == chosen == max(top.values())  # greedy
        assert 3 <= len(top) <= 4
    assert sum(logprobs["token_logprobs"]) == pytest.approx(choice["cum_log_probs"], abs=1e-4)


def test_zero_logprobs_give_the_chosen_token_only(http):
    logprobs = http.post("/v1/completions", json=GREEDY | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_echo_scores_the_prompt(http):
    """echo, logprobs and max_tokens 0: what evaluation harnesses send, here as token ids."""
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    body = {"model": "tinybooks", "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert choice["sentence_length"] == 0 and choice["cum_log_probs"] == 0
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) and "".join(logprobs["tokens"]) == PROMPT
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))


def test_echo_comes_before_the_answer(http):
    plain = http.post("/v1/completions", json=GREEDY | {"logprobs": 1}).json()["choices"][0]
    echoed = http.post("/v1/completions", json=GREEDY | {"logprobs": 1, "echo": True}).json()["choices"][0]
    assert echoed["text"] == PROMPT + plain["text"]
    assert echoed["sentence_length"] == len(plain["text"])
    count = len(echoed["logprobs"]["tokens"]) - 24
    assert echoed["logprobs"]["token_logprobs"][count:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    assert echoed["logprobs"]["text_offset"][count] == len(PROMPT)
    chunks = streamed(http, GREEDY | {"logprobs": 1, "echo": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed["text"]
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == echoed["logprobs"]["tokens"]


def test_prompt_logprobs_as_in_vllm(http):
    answer = http.post("/v1/completions", json=GREEDY | {"prompt_logprobs": 1, "max_tokens": 1}).json()
    positions = answer["choices"][0]["prompt_logprobs"]
    assert len(positions) == answer["usage"]["prompt_tokens"] and positions[0] is None
    for position in positions[1:]:
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in position.values())
        assert 1 in {entry["rank"] for entry in position.values()}


def test_seed_repeats_and_choices_differ(http):
    body = GREEDY | {"temperature": 1.0, "n": 2, "seed": 7, "best_of": 2}
    first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert texts[0] != texts[1] and [choice["index"] for choice in first["choices"]] == [0, 1]
    assert "sentence_length" not in first and "sentence_length" in first["choices"][1]
    assert first["usage"]["completion_tokens"] == 48
    pieces = {0: "", 1: ""}
    for chunk in streamed(http, body):
        pieces[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert [pieces[0], pieces[1]] == texts


def test_several_prompts_as_text_or_token_ids(http):
    texts = ["Call me", PROMPT]
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    alone = [http.post("/v1/completions", json=GREEDY | {"prompt": one}).json()["choices"][0]["text"] for one in texts]
    for prompts in (texts, ids):
        answer = http.post("/v1/completions", json=GREEDY | {"prompt": prompts}).json()
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    two_each = http.post("/v1/completions", json=GREEDY | {"prompt": texts, "n": 2}).json()
    assert [choice["text"] for choice in two_each["choices"]] == [alone[0], alone[0], alone[1], alone[1]]


def test_stop_strings_across_token_borders(http):
    whole = http.post("/v1/completions", json=GREEDY | {"logprobs": 0, "max_tokens": 40}).json()["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    at = next(i for i in range(8, 38) if len(tokens[i]) > 1 and len(tokens[i + 1]) > 2)
    stop = tokens[at][-1:] + tokens[at + 1][:2]
    before = whole["text"][: whole["text"].find(stop)]
    body = GREEDY | {"max_tokens": 40, "stop": ["nowhere to be found", stop]}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (before, "stop", stop)
    assert choice["sentence_length"] == len(before) and choice["matched_stop"] == stop and whole["matched_stop"] is None
    chunks = streamed(http, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before
    assert chunks[-1]["choices"][0]["stop_reason"] == chunks[-1]["choices"][0]["matched_stop"] == stop
    assert not any("matched_stop" in chunk["choices"][0] for chunk in chunks[:-1])
    kept = http.post("/v1/completions", json=body | {"include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["text"] == before + stop


def test_stop_token_ids_end_the_text(http):
    full = http.post("/v1/completions", json=GREEDY | {"return_token_ids": True}).json()["choices"][0]
    ids = full["token_ids"]
    assert len(ids) == 24 and full["prompt_token_ids"]
    last = next(i for i in range(3, 24) if ids[i] not in ids[:i])
    body = GREEDY | {"return_token_ids": True, "stop_token_ids": [ids[last]]}
    cut = http.post("/v1/completions", json=body).json()["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == ids[last]
    assert cut["token_ids"] == ids[: last + 1]


def test_logit_bias_and_tokens_as_token_ids(http):
    wanted = http.post("/tokenize", json={"prompt": " the"}).json()["tokens"][0]
    body = GREEDY | {
        "logit_bias": {str(wanted): 100},
        "max_tokens": 3,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == " the" * 3
    assert choice["logprobs"]["tokens"] == [f"token_id:{wanted}"] * 3


@pytest.mark.parametrize("form", ["object", "pairs", "objects"])
def test_a_token_whose_bias_is_false_is_never_generated(http, form):
    """Also with llama.cpp's lists, of which the biases of a token are added."""
    [first] = http.post("/v1/completions", json=GREEDY | {"max_tokens": 1, "return_token_ids": True}).json()["choices"]
    [best] = first["token_ids"]
    bias = {"object": {str(best): False}, "pairs": [[best, False], [best, 100]]}.get(
        form, [{"id": best, "bias": False}]
    )
    body = GREEDY | {"logit_bias": bias, "max_tokens": 8, "return_token_ids": True}
    assert best not in http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    body["logit_bias"] = [[best + 1, 60], [str(best + 1), 40]]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == [best + 1] * 8


def test_usage_reports_cached_tokens(http):
    body = GREEDY | {"prompt": "A prompt of this test only. " * 12}
    first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_fields_without_effect_are_accepted(http):
    extras = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "suffix": None, "tools": []}
    assert http.post("/v1/completions", json=GREEDY | extras).status_code == 200


def test_end_of_sequence_ends_the_text_unless_ignored(http):
    """A stop token ends the text; with ignore_eos it continues to max_tokens."""
    end = http.post("/tokenize", json={"prompt": "<|endoftext|>"}).json()["tokens"]
    assert len(end) == 1
    body = GREEDY | {"logit_bias": {str(end[0]): 100}, "max_tokens": 6}
    ended = http.post("/v1/completions", json=body).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["choices"][0]["stop_reason"] is None
    assert ended["choices"][0]["matched_stop"] == end[0]
    assert ended["choices"][0]["text"] == "" and ended["usage"]["completion_tokens"] == 1
    went_on = http.post("/v1/completions", json=body | {"ignore_eos": True}).json()
    assert went_on["choices"][0]["finish_reason"] == "length" and went_on["usage"]["completion_tokens"] == 6
    held = http.post("/v1/completions", json=body | {"min_tokens": 4}).json()
    assert held["usage"]["completion_tokens"] == 5


class _Words(Tokenizer):
    """Tokens 0 "<s>" (special), 1 " It", 2 " was" and the bytes of an emoji."""

    special_ids = frozenset({0})

    def token_bytes(self, id: int) -> bytes:
        return [b"<s>", b" It", b" was", b"\xf0\x9f", b"\x99\x82"][id]


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        ([0, 1, 2], "It was", [0, 0, 2]),
        ([0, 1, 2], "<s> It was", [0, 3, 6]),
        ([1, 2, 3, 4, 2], "It was🙂 was", [0, 2, 6, 6, 7]),
        ([1, 3, 2], " It\ufffd was", [0, 3, 4]),
    ],
)
def test_tokens_of_a_prompt_begin_where_its_text_has_them(ids, text, offsets):
    assert prompt_offsets(_Words(None), ids, text) == offsets


def test_offsets_of_broken_characters():
    offsets = TextOffsets(5)
    assert [offsets.add(data) for data in (b"\xf0\x9f", b"", b"a", b"\x99", b"b")] == [5, 5, 6, 7, 8]


SCRIPTS = {"<|fim_middle|>": ["  b", " = 1\n", "<|fim_pad|>", " more"], "<|fim_prefix|>": [], "<|fim_suffix|>": []}


@pytest.fixture(scope="module")
def filling_in(tmp_path_factory) -> Iterator[httpx.Client]:
    """A client of a server whose model always generates the same infill text, and continues after its end."""
    folder = tmp_path_factory.mktemp("models") / "infill"
    write_model(folder, SCRIPTS, "{{ messages }}")
    options = {"model": str(folder), "dtype": "float32", "num_gpu_blocks_override": 65}
    with (
        start_in_background(options, timeout=240) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


def test_the_middle_is_filled_in(filling_in):
    body = {"prompt": "a\n", "suffix": "\nc", "temperature": 0, "max_tokens": 9}
    answer = filling_in.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("  b = 1\n", "stop")
    tokens = {"tokens": choice["prompt_token_ids"]}
    prompt = filling_in.post("/detokenize", json=tokens).json()["prompt"]
    assert prompt == "<|fim_prefix|>a\n<|fim_suffix|>\nc<|fim_middle|>"
    assert answer["usage"]["prompt_tokens"] == 7
    streamed = filling_in.post("/v1/completions", json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_several_prompts_have_one_suffix(filling_in):
    for prompt in (["a", ""], [[97], [98]]):
        body = {"prompt": prompt, "suffix": "c", "temperature": 0, "max_tokens": 9, "stop": "="}
        texts = [choice["text"] for choice in filling_in.post("/v1/completions", json=body).json()["choices"]]
        assert texts == ["  b ", "  b "]


def test_what_cannot_be_filled_in_is_refused(filling_in, http):
    body = {"prompt": "a", "suffix": "c", "max_tokens": 1}
    refused = http.post("/v1/completions", json=body).json()["error"]
    assert (refused["code"], refused["param"]) == ("unsupported_parameter", "suffix")
    assert "no tokens for filling in the middle" in refused["message"]
    assert filling_in.post("/v1/completions", json=body | {"echo": True}).json()["error"]["param"] == "echo"
    assert filling_in.post("/v1/completions", json=body | {"suffix": 1}).json()["error"]["code"] == "invalid_type"
    long = filling_in.post("/v1/completions", json=body | {"suffix": "c" * 5000}).json()["error"]
    assert long["code"] == "context_length_exceeded"
    chat = {"messages": [{"role": "user", "content": "a"}], "suffix": "c"}
    assert filling_in.post("/v1/chat/completions", json=chat).json()["error"]["param"] == "suffix"
