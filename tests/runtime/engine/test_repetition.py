"""Repeated patterns at the end of a sequence are found as vLLM defines them."""

from __future__ import annotations

import random

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.engine.sequence import repeats
from aiakq.runtime.protocol.repetition import RepetitionDetectionParams
from aiakq.runtime.protocol.sampling_params import SamplingParams


def repeats_reference(tokens: list[int], least: int, most: int, count: int) -> bool:
    sizes = [size for size in range(least or 1, most + 1) if size * count <= len(tokens)]
    return any(tokens[-size * count :] == tokens[-size:] * count for size in sizes)


def test_patterns_are_found_where_a_plain_comparison_finds_them():
    draw = random.Random(0)
    for _ in range(5000):
        outputs = [draw.randint(0, 1) for _ in range(draw.randint(1, 14))]
        least, count = draw.randint(0, 3), draw.randint(2, 4)
        most = draw.randint(max(least, 1), 5)
        found = repeats(
            [*[0] * 20, *outputs],
            len(outputs),
            {"min_pattern_size": least, "max_pattern_size": most, "min_count": count},
        )
        assert found == repeats_reference(outputs, least, most, count), (outputs, least, most, count)


def test_it_is_a_class_or_a_dict():
    params = SamplingParams(repetition_detection=RepetitionDetectionParams(5, 2, 3))
    assert params.repetition_detection == {"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}
    for wrong in ({"max_pattern_size": 5, "min_count": True}, [], {"max_pattern_size": 1, "min_pattern_size": 2}):
        with pytest.raises(AiakqError):
            SamplingParams(repetition_detection=wrong)
