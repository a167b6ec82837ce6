"""What pooling adds to an engine. Its modules are imported only by engines that pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.models.interface import Model
    from aiakq.runtime.pooling.pooler import PoolingPart


def new_part(config: EngineConfig, model: Model, samples: bool) -> PoolingPart | None:
    """Return the part of pooling in an executor; None if prompts are not pooled. Raises as ``Projection.load``."""
    if config.pooling is None:
        return None
    from aiakq.runtime.pooling.pooler import PoolingPart
    from aiakq.runtime.pooling.projection import Projection

    projection = Projection.load(config.load.path, config.pooling.dense)
    if not config.pooling.limits.reads_both_ways:
        return PoolingPart(projection)
    from aiakq.runtime.models.encoders.encoder import EncoderModel
    from aiakq.runtime.pooling.encoder_part import EncoderPart, check_windows

    assert isinstance(model, EncoderModel), "the other families read from left to right"
    late = config.pooling.limits.late
    if late is not None:
        check_windows(late, config.model.sliding_windows)
    return EncoderPart(projection, model)
