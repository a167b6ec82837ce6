"""Processors reserved for each rank, and the error without Ray; no cluster is started."""

from __future__ import annotations

import builtins
import sys

import pytest

from aiakq import LLM
from aiakq.errors import AiakqError
from aiakq.runtime.distributed.ray_cluster import CPUS_VARIABLE, cpus_per_rank


@pytest.mark.parametrize(
    "nodes, own, count, size, expected",
    [
        ([16], 16, 2, 2, 8),  # a stage fills the node
        ([16, 16], 16, 2, 2, 8),
        ([16, 16], 16, 4, 2, 8),  # each stage fills a node
        ([16, 16], 16, 2, 1, 16),
        ([16], 16, 4, 2, 4),  # two stages share the node
        ([16, 4, 4], 16, 3, 1, 5),  # three ranks on the large node
        ([0, 8, 8], 0, 3, 1, 8),  # rank 0's node has no processors in Ray
        ([0, 8], 0, 3, 1, 4),
        ([1, 1], 1, 2, 2, 1),
        ([1], 1, 9, 9, 1),  # the ranks do not fit: the minimum is requested
        ([], 0, 2, 2, 1),
    ],
)
def test_a_stage_fills_a_node_as_long_as_all_ranks_have_room(nodes, own, count, size, expected):
    assert cpus_per_rank(nodes, own, count, size) == expected


def test_processors_of_a_rank_can_be_set(monkeypatch):
    monkeypatch.setenv(CPUS_VARIABLE, "3")
    assert cpus_per_rank([16], 16, 2, 2) == 3
    for wrong in ("0", "-1", "x", "1.5"):
        monkeypatch.setenv(CPUS_VARIABLE, wrong)
        with pytest.raises(AiakqError, match="a whole number above 0"):
            cpus_per_rank([16], 16, 2, 2)


def test_ray_that_is_not_installed_is_named_with_the_remedy(example_model, monkeypatch):
    original = builtins.__import__

    def without_ray(name, *args, **kwargs):
        if name.split(".")[0] == "ray":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_ray)
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "max_model_len": 64}
    with pytest.raises(AiakqError, match=r"Ray is not installed\. Run pip install 'aiakq\[ray\]'"):
        LLM(str(example_model), **arguments)
    # A single process does not need Ray.
    LLM(str(example_model), distributed_executor_backend="ray", max_model_len=64)
