"""Data parallel replicas: the devices of each of several engines of one server."""

from __future__ import annotations

import os

import torch

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_devices(arguments: EngineArguments, replica: int, num_replicas: int) -> None:
    """Restrict CUDA_VISIBLE_DEVICES of this process to the GPUs of its replica, one per rank.

    Must be called before CUDA is initialized.

    arguments  engine arguments.
    replica    index of this replica, below ``num_replicas``.

    Raises ``ranks_unavailable`` if there are too few GPUs, or if all replicas would share one placement group.
    """
    if num_replicas == 1:
        return
    if arguments.distributed_executor_backend == "ray":
        from aiakq.runtime.distributed.ray_cluster import GROUP_VARIABLE

        if os.environ.get(GROUP_VARIABLE):
            reason = f"the placement group of {GROUP_VARIABLE} is for one replica, and there are {num_replicas}"
            raise error("ranks_unavailable", reason=reason)
    count = 0 if arguments.device == "cpu" else torch.cuda.device_count()
    if count == 0:
        return
    size = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if count < size * num_replicas:
        reason = f"{num_replicas} replicas need {size * num_replicas} GPUs, but {count} are visible"
        raise error("ranks_unavailable", reason=reason)
    visible = os.environ.get(_VISIBLE)
    names = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    os.environ[_VISIBLE] = ",".join(names[size * replica : size * (replica + 1)])
