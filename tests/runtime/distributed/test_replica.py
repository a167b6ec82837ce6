"""Devices of the replicas of one server."""

from __future__ import annotations

import os

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.runtime.distributed.replica import take_devices

ARGUMENTS = {
    "device": "auto", "distributed_executor_backend": None, "tensor_parallel_size": 2, "pipeline_parallel_size": 1,
}  # fmt: skip


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


@pytest.mark.parametrize("arguments, replicas", [(ARGUMENTS, 1), (ARGUMENTS | {"device": "cpu"}, 3)])
def test_nothing_is_hidden_from_the_only_replica_or_on_a_cpu(arguments, replicas):
    take_devices(arguments, 0, replicas)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_replicas_do_not_share_gpus():
    with pytest.raises(AiakqError, match="4 replicas need 8 GPUs, but 6 are visible"):
        take_devices(ARGUMENTS, 0, 4)


def test_replicas_do_not_share_a_placement_group():
    os.environ["AIAKQ_RAY_PLACEMENT_GROUP"] = "00"
    with pytest.raises(AiakqError, match="is for one replica, and there are 2"):
        take_devices(ARGUMENTS | {"distributed_executor_backend": "ray"}, 0, 2)
