"""How the processes of a model are started, and how many."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.config.engine import EngineConfig


def parallel(model, **arguments):
    return EngineConfig.from_args({"model": str(model), "device": "cpu", **arguments}).parallel


def test_executor_backends_match_the_number_of_processes(example_model):
    for backend in (None, "mp", "ray"):
        found = parallel(example_model, tensor_parallel_size=2, distributed_executor_backend=backend)
        assert found.by_ray == (backend == "ray") and found.world_size == 2
    assert parallel(example_model, distributed_executor_backend="uni").world_size == 1
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(AiakqError, match="uni.*these sizes need 2 processes") as failure:
            parallel(example_model, distributed_executor_backend="uni", **sizes)
        assert failure.value.id == "option_conflict"


def test_identical_engines_that_something_else_starts_are_refused(example_model):
    with pytest.raises(AiakqError, match="rank 0 starts and controls the other ranks") as failure:
        parallel(example_model, distributed_executor_backend="external_launcher")
    assert failure.value.id == "option_refused"
