"""ModelShare: the part of a model that one rank loads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.sharded import Collective
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.models.stage import Stage, balanced_stages

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class ModelShare:
    """The part of a model that one rank loads.

    collective  collective of the ranks that its layers are sharded over; None if they are not sharded.
    stage       index of its pipeline stage.
    num_stages  number of pipeline stages.
    """

    collective: Collective | None = None
    stage: int = 0
    num_stages: int = 1


def stage_of(config: EngineConfig, share: ModelShare, checkpoint: Checkpoint | None) -> Stage | None:
    """Return the layers of ``share``'s stage; None if there is one stage.

    Every rank computes the same partition from the tensor sizes in the ``checkpoint``; without one, all layers are
    assumed to have the same size.

    Raises ``ranks_unavailable`` where there are not enough layers, and ``bad_option``.
    """
    count, layers = share.num_stages, config.model.num_layers
    if layers < count:
        raise error("ranks_unavailable", reason=f"the model has {layers} layers, too few for {count} stages")
    partition = config.parallel.layer_partition
    if partition is not None and (len(partition) != count or sum(partition) != layers):
        numbers = "1 number" if count == 1 else f"{count} numbers"
        expected = f"{numbers} whose sum is {layers}, the layers of the model"
        listed = ",".join(map(str, partition))
        raise error("bad_option", option="--pp-layer-partition", value=listed, expected=expected, hint="")
    if count == 1:
        return None
    if partition is not None:
        first = sum(partition[: share.stage])
        return Stage(first, first + partition[share.stage], layers)
    layer_bytes, head_bytes = _sizes(config, checkpoint)
    return balanced_stages(layer_bytes, 0, head_bytes, count)[share.stage]


def _sizes(config: EngineConfig, checkpoint: Checkpoint | None) -> tuple[list[int], int]:
    """Return the bytes of each layer's weights, and of the output layer's.

    The embedding does not count, because a step reads only a few rows of it.
    """
    model = config.model
    head = model.vocab_size * model.hidden_size * config.device.dtype.itemsize
    if checkpoint is None:
        bits = 8 * config.device.dtype.itemsize if config.spec is None else config.spec.bits
        values = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
        return [values * bits // 8] * model.num_layers, head
    layers = [0] * model.num_layers
    for name, info in checkpoint.inventory.items():
        match = None if name in checkpoint.beside_text else _LAYER.search(name)
        if match is not None and int(match[1]) < len(layers):
            layers[int(match[1])] += info.nbytes
    return layers, head
