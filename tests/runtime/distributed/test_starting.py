"""The GPU of each rank, and configurations that are refused before any rank starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.config.parallel import ParallelConfig
from aiakq.runtime.distributed import child_ranks, starting


def config(size: int, stages: int = 1) -> SimpleNamespace:
    parallel = ParallelConfig(size, stages, None, "fast", False, 30.0, EngineArguments())
    return SimpleNamespace(parallel=parallel, device=SimpleNamespace(device=torch.device("cuda")))


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)


def test_rank_0_has_the_current_gpu_and_the_others_one_each(four_gpus, monkeypatch):
    given = []
    monkeypatch.setattr(child_ranks, "start_child_ranks", lambda *arguments: given.append(arguments))
    starting.start_ranks(config(3))
    assert given == [(config(3).parallel, "torch", [2, 0, 1])]


def test_fewer_gpus_than_ranks_are_refused(four_gpus):
    with pytest.raises(AiakqError, match="5 ranks need a GPU each, but 4 are visible") as failure:
        starting.start_ranks(config(5))
    assert failure.value.id == "ranks_unavailable"


def test_every_rank_of_every_stage_has_a_gpu(four_gpus, monkeypatch):
    given = []
    monkeypatch.setattr(child_ranks, "start_child_ranks", lambda *arguments: given.append(arguments))
    starting.start_ranks(config(2, 2))
    assert given == [(config(2, 2).parallel, "torch", [2, 0, 1, 3])]
    with pytest.raises(AiakqError, match="6 ranks need a GPU each, but 4 are visible"):
        starting.start_ranks(config(2, 3))


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_without_nccl_no_rank_is_started(monkeypatch):
    monkeypatch.setattr(child_ranks, "Child", None)
    with pytest.raises(AiakqError, match="this torch was built without NCCL"):
        child_ranks.start_child_ranks(config(2).parallel, "torch", [0, 1])


def test_the_default_numerics_are_fast_on_gpus_and_exact_on_cpus():
    found = {
        (given, device): ParallelConfig.from_args(
            EngineArguments(tensor_parallel_size=2, tensor_parallel_math=given), device
        ).math
        for given in ("auto", "fast", "exact")
        for device in ("cpu", "cuda")
    }
    assert found == {
        ("auto", "cpu"): "exact", ("auto", "cuda"): "fast", ("fast", "cpu"): "fast", ("fast", "cuda"): "fast",
        ("exact", "cpu"): "exact", ("exact", "cuda"): "exact",
    }  # fmt: skip
