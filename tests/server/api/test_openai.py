"""Behaviour shared by completions and chat completions."""

from __future__ import annotations

import math

from aiakq.runtime.protocol.request_output import Logprob
from aiakq.server.api.openai import LOWEST_LOGPROB, finite, top_by_rank


def test_infinite_logprobs_can_be_encoded_as_json():
    assert finite(-math.inf) == finite(math.nan) == LOWEST_LOGPROB and finite(-3.0) == -3.0
    position = {9: Logprob(-5.0, 30), 1: Logprob(-0.5, 1), 2: Logprob(-0.7, 2)}
    assert [token for token, _ in top_by_rank(position, 2)] == [1, 2]
    assert top_by_rank(position, 0) == []


def test_the_whole_vocabulary_is_ranked_on_request():
    position = {9: Logprob(-5.0, 3), 1: Logprob(-0.5, 1), 2: Logprob(-0.7, 2), 7: Logprob(-9.0)}
    assert [token for token, _ in top_by_rank(position, -1)] == [1, 2, 9]
