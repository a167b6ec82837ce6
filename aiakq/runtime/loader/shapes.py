"""ShapeRecorder: the shapes of a model's linear layers, determined without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import GATHERED, Role
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import Part, RequiredWeights
from aiakq.runtime.models import FAMILIES, family_module, is_native


@dataclass
class ShapeRecorder(RequiredWeights):
    """``Weights`` that record the linear layers as they run, with those that share an input fused."""

    shapes: list[tuple[str, int, int]] = field(default_factory=list)

    def linear(
        self,
        name: str,
        n: int,
        k: int,
        *,
        bias: bool = False,
        rows: Tensor | None = None,
        role: Role = GATHERED,
    ) -> LinearLayer:
        """Record and return a layer [N, K]; the order ``rows`` [N] and ``role`` do not matter."""
        return self.stacked([(name, n)], k, bias=bias)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False, role: Role = GATHERED) -> LinearLayer:
        self.shapes.append((parts[0][0], sum(n for _, n in parts), k))
        return TorchDense(self._empty(self.shapes[-1][1], k))

    def embedding(
        self, name: str, vocab: int, width: int, *, tied: bool, bias: Tensor | None = None
    ) -> tuple[EmbeddingLayer, LinearLayer | None]:
        """See Weights: bias [V]."""
        if tied:
            self.shapes.append(("lm_head", vocab, width))
        return super().embedding(name, vocab, width, tied=tied, bias=bias)


def linear_shapes(config: ModelConfig, checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Return the name, N and K of every linear layer that runs; a fused layer has the name of its first part.

    Raises ``model_unsupported``.
    """
    if not is_native(config.architecture):
        raise error(
            "model_unsupported",
            architecture=config.architecture,
            reason="aiakq has no native model for it",
            known=FAMILIES,
        )
    recorder = ShapeRecorder(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    family_module(config.architecture).build(config, recorder)
    return recorder.shapes
