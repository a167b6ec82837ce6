"""Sampling fields of requests are those of SamplingParams."""

from __future__ import annotations

import pytest

from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.openapi import request_schema

#: Requests have a field ``structured_outputs`` of their own, see structured_fields.py.
ONLY_LOCAL = {"detokenize", "logits_processors", "guided_decoding", "structured_outputs"}


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_every_parameter_is_a_field_unless_it_is_for_local_use(model):
    assert {name for name, parameter in PARAMETERS.items() if parameter.only_local} == ONLY_LOCAL
    assert PARAMETERS.keys() - ONLY_LOCAL <= model.model_fields.keys()
    assert ONLY_LOCAL & model.model_fields.keys() == {"structured_outputs"}


def test_every_field_reaches_the_sampling_params():
    values = {
        "n": 2,
        "best_of": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "temperature": 0.75,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "stop": ["a"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 1,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5],
        "bad_words": ["b"],
        "truncate_prompt_tokens": 4,
        "truncation_side": "right",
        "logprob_token_ids": [5, 6],
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "thinking_token_budget": 5,
        "extra_args": {"a": [1, "b"]},
    }
    assert values.keys() == PARAMETERS.keys() - ONLY_LOCAL, "a new parameter has a value here, too"
    params = CompletionRequest(prompt="a", **values).sampling_params({"temperature": 0.1})
    for name, value in values.items():
        assert getattr(params, name) == ({5: 1.0} if name == "logit_bias" else value), name


def test_absent_fields_take_the_model_s_values_then_the_defaults():
    params = CompletionRequest(prompt="a", top_k=3).sampling_params({"temperature": 0.1, "top_k": 9})
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.1, 3, 1.0, 16)
    chat = ChatCompletionRequest(messages=[{"role": "user"}]).sampling_params({})
    assert chat.max_tokens is None, "a chat response may fill the context"


def test_the_schema_states_defaults_bounds_and_descriptions():
    properties = request_schema(CompletionRequest)["properties"]
    for name, parameter in PARAMETERS.items():
        if name in ONLY_LOCAL:
            continue
        assert properties[name]["description"] == parameter.help
        assert properties[name]["default"] == getattr(SamplingParams(), name)
        if parameter.high is not None:
            bounds = properties[name]["anyOf"][0]
            assert (bounds.get("exclusiveMinimum"), bounds.get("minimum")) == (parameter.above, parameter.low)
            assert bounds["maximum"] == (parameter.http_maximum or parameter.high)
