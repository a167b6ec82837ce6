"""Devices of the replicas of one server."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.distributed.replica import take_devices

ARGUMENTS = EngineArguments(tensor_parallel_size=2)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize("given, expected", [("", "2,3"), ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f", "GPU-c,GPU-d")])
def test_a_replica_sees_a_gpu_for_each_of_its_ranks(given, expected):
    if given:
        os.environ["CUDA_VISIBLE_DEVICES"] = given
    take_devices(ARGUMENTS, 1, 3)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("arguments, replicas", [(ARGUMENTS, 1), (replace(ARGUMENTS, device="cpu"), 3)])
def test_nothing_is_hidden_from_the_only_replica_or_on_a_cpu(arguments, replicas):
    take_devices(arguments, 0, replicas)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_replicas_do_not_share_gpus():
    with pytest.raises(AiakqError, match="4 replicas need 8 GPUs, but 6 are visible"):
        take_devices(ARGUMENTS, 0, 4)


def test_replicas_do_not_share_a_placement_group():
    os.environ["AIAKQ_RAY_PLACEMENT_GROUP"] = "00"
    with pytest.raises(AiakqError, match="is for one replica, and there are 2"):
        take_devices(replace(ARGUMENTS, distributed_executor_backend="ray"), 0, 2)
