"""ModelShare: what of a model one rank loads."""

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
    """What of a model one rank loads.

    collective  of the ranks that share each of its layers; None: it has them to itself.
    stage       the number of its part of the layers, of ``num_stages``.
    """

    collective: Collective | None = None
    stage: int = 0
    num_stages: int = 1


def stage_of(config: EngineConfig, share: ModelShare, checkpoint: Checkpoint | None) -> Stage | None:
    """The layers of ``share``; None: all. Every rank finds the same ones, from the headers of the ``checkpoint``;
    without one, layers are taken to be equal.

    Raises ``ranks_unavailable`` where there are not enough layers, and ``bad_option``.
    """
    count, layers = share.num_stages, config.model.num_layers
    if layers < count:
        raise error("ranks_unavailable", reason=f"the model has {layers} layers, too few for {count} stages")
    partition = config.parallel.layer_partition
    if partition is not None and (len(partition) != count or sum(partition) != layers):
        numbers = "1 number" if count == 1 else f"{count} numbers"
        expected = f"{numbers} whose sum is {layers}, the layers of the model"
        given = ",".join(map(str, partition))
        raise error("bad_option", option="--pp-layer-partition", value=given, expected=expected, hint="")
    if count == 1:
        return None
    if partition is not None:
        first = sum(partition[: share.stage])
        return Stage(first, first + partition[share.stage], layers)
    layer_bytes, head_bytes = _sizes(config, checkpoint)
    return balanced_stages(layer_bytes, 0, head_bytes, count)[share.stage]


def _sizes(config: EngineConfig, checkpoint: Checkpoint | None) -> tuple[list[int], int]:
    """Bytes of every layer's weights, and of the head's. The embedding takes no time: a step reads a few rows of it."""
    model = config.model
    head = model.vocab_size * model.hidden_size * config.device.dtype.itemsize
    if checkpoint is None:
        bits = 8 * config.device.dtype.itemsize if config.spec is None else config.spec.bits
        values = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.intermediate_size
        return [values * bits // 8] * model.num_layers, head
    layers = [0] * model.num_layers
    for name, info in checkpoint.inventory.items():
        found = None if name in checkpoint.beside_text else _LAYER.search(name)
        if found is not None and int(found[1]) < len(layers):
            layers[int(found[1])] += info.nbytes
    return layers, head
