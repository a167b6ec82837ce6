"""Fields of requests: wrong types, invalid values of the right type, unknown names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hostile_cases.requests import (
    BOMBS,
    CHAT,
    COMPLETIONS,
    CONTEXT,
    DETOKENIZE,
    GOOD,
    TOKENIZE,
    VOCABULARY,
    Case,
    Draw,
    Expected,
    post,
    refused,
    some_text,
)

#: Values of every JSON type; a field is given those of types that it does not accept.
VALUES: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (0, 1, -1, 7),
    "float": (0.5, 1.25, -2.5, 1e300),
    "str": ("1", "", "true", "x", "null"),
    "list": ([], [1], ["a"], [[]], [None]),
    "dict": ({}, {"a": 1}),
}
TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "n",
            "best_of",
            "top_k",
            "seed",
            "min_tokens",
            "max_tokens",
            "truncate_prompt_tokens",
            "priority",
            "prompt_logprobs",
        ),
        ("int",),
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        ("int", "float"),
    ),
    **dict.fromkeys(
        (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "return_tokens_as_token_ids",
            "return_token_ids",
            "stream",
        ),
        ("bool",),
    ),
    "model": ("str",),
    "cache_salt": ("str",),
    "request_id": ("str",),
    "stop": ("str", "list"),
    "stop_token_ids": ("list",),
    "allowed_token_ids": ("list",),
    "bad_words": ("list",),
    "logit_bias": ("dict", "list"),
    "stream_options": ("dict",),
}
OWN: dict[str, dict[str, tuple[str, ...]]] = {
    COMPLETIONS: {**TAKES, "prompt": ("str", "list"), "logprobs": ("int",), "echo": ("bool",)},
    CHAT: {
        **TAKES,
        "messages": ("list",),
        "max_completion_tokens": ("int",),
        "logprobs": ("bool",),
        "echo": ("bool",),
        "top_logprobs": ("int",),
        "add_generation_prompt": ("bool",),
        "continue_final_message": ("bool",),
        "chat_template_kwargs": ("dict",),
        "tools": ("list",),
        "parallel_tool_calls": ("bool",),
        "include_reasoning": ("bool",),
    },
    TOKENIZE: {
        "model": ("str",),
        "prompt": ("str",),
        "add_special_tokens": ("bool",),
        "return_token_strs": ("bool",),
        "with_pieces": ("bool",),
    },
    DETOKENIZE: {"model": ("str",), "tokens": ("list",)},
}


def wrong_types(draw: Draw) -> Case:
    path = draw.choice(list(OWN))
    field = draw.choice(list(OWN[path]))
    others = [kind for kind in VALUES if kind not in OWN[path][field]]
    value = draw.choice(VALUES[draw.choice(others)])
    return refused(draw, path, {field: value}, "invalid_type", field, f"{field}={value!r}")


FLOAT_BOUNDS = {
    "temperature": (-0.1, 1e5),
    "top_p": (0, 1.01),
    "min_p": (-0.01, 1.5),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-3, 2.0001),
    "repetition_penalty": (0, 1e5),
}
INT_BOUNDS = {
    "n": (0, 129),
    "best_of": (0, 129),
    "top_k": (-2, 2**31 + 1),
    "seed": (-(2**63) - 1, 2**63),
    "min_tokens": (-1, 2**31 + 1),
    "max_tokens": (-1, 2**31 + 1),
    "truncate_prompt_tokens": (-2, 2**31 + 1),
    "priority": (-(2**31) - 1, 2**31),
    "prompt_logprobs": (-2, 21),
}


def out_of_range(draw: Draw) -> Case:
    path = draw.choice((COMPLETIONS, CHAT))
    out = "value_out_of_range"
    if draw.random() < 0.5:
        field, (low, high) = draw.choice(list(FLOAT_BOUNDS.items()))
        value = draw.choice([low, low - draw.random() * 1e6, high, high + draw.random() * 1e6, -1e308])
        text = draw.choice([str(value), "NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
        body = json.dumps(GOOD[path]).encode()[:-1] + b', "%b": %b}' % (field.encode(), text.encode())
        return Case(f"{path} {field}={text:.20}", (post(path, body),), (Expected(400, out, field),), closed=False)
    field, (low, high) = draw.choice(list(INT_BOUNDS.items()))
    value = draw.choice(
        [low, low - draw.randrange(10**6), high, high + draw.randrange(10**6), 10 ** draw.randint(19, 400)]
    )
    change: dict[str, Any] = {field: value, **({"stream": False} if field == "prompt_logprobs" else {})}
    return refused(draw, path, change, out, field, f"{field}={value}")


#: A change of a valid request, and the expected code and param of the error.
Refusal = tuple[dict[str, Any], str, str | None]


def hostile_values(draw: Draw) -> Case:
    """Values of the right type that are out of range or name unknown things."""
    token_id = draw.choice([VOCABULARY, -1, 2**31, 2**40, 2**70, -(2**63)])
    common, completion, chat = common_values(draw, token_id), completion_values(draw, token_id), chat_values(draw)
    path = draw.choice((COMPLETIONS, CHAT))
    change, code, param = draw.choice(common + (completion if path == COMPLETIONS else chat))
    case = refused(draw, path, change, code, param, f"{code} {param}")
    return replace(case, answers=(Expected(404, code, param),)) if code == "unknown_model" else case


def common_values(draw: Draw, token_id: int) -> list[Refusal]:
    """Changes of fields of both completions and chat completions; ``token_id`` is not in the vocabulary."""
    out, token = "value_out_of_range", "invalid_token_id"
    long = "a" * 257
    return [
        ({"stop": [some_text(draw)] * 17}, out, "stop"),
        ({"stop": draw.choice(["", long, ["a", ""], ["a", long]])}, out, "stop"),
        ({"stop": draw.choice([["a", None], [1], [["a"]], [{}]])}, "invalid_type", "stop"),
        ({"stop_token_ids": [5, token_id]}, token, "stop_token_ids"),
        ({"allowed_token_ids": [5, token_id]}, token, "allowed_token_ids"),
        ({"allowed_token_ids": []}, out, "allowed_token_ids"),
        ({"logit_bias": {str(token_id): 1}}, token, "logit_bias"),
        ({"logit_bias": {draw.choice(["a", "", "1.5", "5 5", "0x5", "\u0000"]): 1}}, "invalid_type", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, out, "logit_bias"),
        ({"bad_words": ["a"] * 129}, out, "bad_words"),
        ({"bad_words": [draw.choice(["", " ", "\t\n", long])]}, out, "bad_words"),
        ({"min_tokens": 2, "max_tokens": 1}, out, "min_tokens"),
        ({"cache_salt": ""}, out, "cache_salt"),
        ({"n": 3, "best_of": 2}, out, "best_of"),
        ({"best_of": 2, "stream": True}, "unsupported_parameter", "best_of"),
        ({"priority": draw.randint(1, 9)}, "unsupported_parameter", "priority"),
        ({"stream_options": {"include_usage": True}}, "unsupported_parameter", "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"stream": True, "stream_options": {"usage": 1}}, "unknown_field", "stream_options.usage"),
        ({"model": model_name(draw)}, "unknown_model", "model"),
    ]


def completion_values(draw: Draw, token_id: int) -> list[Refusal]:
    """Changes of fields of completions."""
    out, token = "value_out_of_range", "invalid_token_id"
    return [
        ({"prompt": draw.choice(["", [], [[]], ["a", ""]])}, "empty_prompt", "prompt"),
        (
            {"prompt": draw.choice([["a", 1], [1, "a"], [True], [[1.5]], [None], [[None]], [{}]])},
            "invalid_type",
            "prompt",
        ),
        ({"prompt": [5, token_id]}, token, "prompt"),
        ({"prompt": [[5], [token_id]]}, token, "prompt"),
        ({"prompt": ["a"] * draw.randint(33, 9000)}, "too_many_prompts", "prompt"),
        ({"prompt": ["a"] * draw.randint(5, 32), "n": 32}, "too_many_prompts", "n"),
        ({"prompt": [5] * draw.randint(CONTEXT, 30_000)}, "context_length_exceeded", "prompt"),
        ({"prompt": "word " * draw.randint(1500, 19_000)}, "context_length_exceeded", "prompt"),
        ({"max_tokens": draw.randint(CONTEXT, 2**31)}, "context_length_exceeded", "max_tokens"),
        ({"logprobs": draw.choice([21, 4096, -2])}, out, "logprobs"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1}, "nothing_left", None),
    ]


def chat_values(draw: Draw) -> list[Refusal]:
    """Changes of fields of chat completions."""
    out = "value_out_of_range"
    message = {"role": "user", "content": "Hi"}
    return [
        ({"messages": []}, out, "messages"),
        ({"messages": [message, {"content": "Hi"}]}, "missing_field", "messages[1].role"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, "invalid_type", "messages[0].role"),
        ({"messages": [draw.choice([5, "a", None, []])]}, "invalid_type", "messages[0]"),
        (
            {"messages": [{"role": "user", "content": draw.choice([5, True, 0.5, {}])}]},
            "invalid_type",
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "invalid_type", "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [part(draw)]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        ({"messages": [message | {"tool_calls": [{}]}]}, "missing_field", "messages[0].tool_calls[0].function"),
        ({"messages": [message] * draw.randint(500, 1500)}, "context_length_exceeded", "messages"),
        ({"chat_template": draw.choice(BOMBS)}, "unsupported_parameter", "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "unsupported_parameter", "chat_template_kwargs.tokenize"),
        (
            {"chat_template_kwargs": {"documents": draw.choice([5, {}, [1]])}},
            "invalid_type",
            "chat_template_kwargs.documents",
        ),
        ({"chat_template_kwargs": {"a b": 1}}, "unsupported_parameter", "chat_template_kwargs.a b"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": draw.choice([21, -2, 10**9])}, out, "top_logprobs"),
        ({"max_completion_tokens": draw.randint(CONTEXT, 2**31)}, "context_length_exceeded", "max_completion_tokens"),
    ]


def part(draw: Draw) -> dict[str, Any]:
    url = draw.choice(
        ["file:///etc/passwd", "http://127.0.0.1:1/x", "http://169.254.169.254/", "data:image/png;base64,AA"]
    )
    kinds = ("image_url", "input_audio", "video_url", "file", "refusal", "image", "")
    return {"type": draw.choice(kinds), "image_url": {"url": url}}


def model_name(draw: Draw) -> str:
    return draw.choice(
        [
            "../../etc/passwd",
            "/etc/passwd",
            "tinybooks\u0000",
            "tinybooks/..",
            "TINYBOOKS",
            " tinybooks",
            "tinybooks:lora/../..",
            "file:///etc/passwd",
            "a" * draw.randint(100, 20_000),
            "",
            some_text(draw) + "x",
            "{{7*7}}",
        ]
    )


SPELLED = (
    "temprature",
    "max_token",
    "Prompt",
    "PROMPT",
    "prompt ",
    "__class__",
    "__proto__",
    "constructor",
    "model_config",
)
WITHHELD: dict[str, Any] = {
    "functions": [{}],
    "suffix": "end",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "logits_processors": ["os.system"],
    "prompt_embeds": "AAAA",
    "documents": [{"text": "a"}],
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "web_search_options": {},
    "reasoning_effort": "high",
}


def unknown_fields(draw: Draw) -> Case:
    path = draw.choice(list(GOOD))
    if draw.random() < 0.4:
        path, name = draw.choice(list(OWN)), draw.choice(list(WITHHELD))
        return refused(draw, path, {name: WITHHELD[name]}, "unsupported_parameter", name, name)
    name = draw.choice([draw.choice(SPELLED), some_text(draw, 30) + "!", "x" * draw.randint(65, 5000)])
    value = draw.choice([1, False, "a", [], {"a": {}}])  # null means that a field is not set
    return refused(draw, path, {name: value}, "unknown_field", name[:64], f"unknown {name!r:.20}")
