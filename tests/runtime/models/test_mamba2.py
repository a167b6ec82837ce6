"""Settings of Mamba 2 layers that are no settings."""

import math

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.models.mamba2 import step_limits


def test_steps_are_not_clamped_unless_the_config_says_so():
    assert step_limits({}) == step_limits({"time_step_limit": None}) == (0.0, math.inf)
    assert step_limits({"time_step_limit": [0.001, 1]}) == (0.001, 1.0)


@pytest.mark.parametrize(
    "limits", [[1.0, 0.5], [-1.0, 1.0], [math.nan, 1.0], [0.0, math.nan], [1.0], "01", [0, "1"], 3]
)
def test_step_limits_that_are_no_range_are_refused(limits):
    with pytest.raises(AiakqError, match="time_step_limit is") as refused:
        step_limits({"time_step_limit": limits})
    assert refused.value.id == "model_malformed"
