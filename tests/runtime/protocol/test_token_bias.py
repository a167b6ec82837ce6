"""Forms of logit_bias."""

from __future__ import annotations

import math

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.token_bias import bias_of_list


def test_biases_are_clamped_and_false_excludes_a_token():
    assert SamplingParams(logit_bias={"5": 7, 6: 1e9, 7: False, 8: -1000}).logit_bias == {
        5: 7.0, 6: 100.0, 7: -math.inf, 8: -100.0
    }  # fmt: skip
    for wrong in ({5: True}, {5: "1"}, {5: math.nan}, {"a": 1}, {"05": 1}):
        with pytest.raises(AiakqError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)


@pytest.mark.parametrize("token", ["id", "token", "token_id"])
def test_lists_mean_what_they_mean_in_llama_cpp(token):
    objects = [{token: 5, "bias": 2}, {"bias": False, token: 6}, {token: 5, "bias": -0.5}]
    pairs = [[5, 2], ["6", False], [5, -0.5]]
    assert bias_of_list(objects) == bias_of_list(pairs) == {"5": 1.5, "6": False}
    assert bias_of_list([[5, False], [5, 3]]) == bias_of_list([[5, 3], [5, False]]) == {"5": False}
    assert bias_of_list([]) == {}


@pytest.mark.parametrize("entry", [5, [5], [5, 1, 2], {"id": 5}, {"bias": 1}, {"id": 5, "bias": 1, "x": 1}, None])
def test_an_entry_of_another_form_is_named(entry):
    with pytest.raises(AiakqError, match="entry 1 is not"):
        bias_of_list([[1, 1], entry])


@pytest.mark.parametrize("entry", [[" the", 1], [True, 1], [1.5, 1], ["05", 1], [None, 1]])
def test_a_text_instead_of_a_token_is_refused(entry):
    with pytest.raises(AiakqError, match="entry 0 has no token id .POST /tokenize"):
        bias_of_list([entry])
