"""The shapes of a model's linear layers, without its weights."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from aiakq.errors import error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.linear import AnyLinear, Embedding
from aiakq.runtime.loader.weights import Part, WantedWeights
from aiakq.runtime.models import ARCHITECTURES, FAMILIES


@dataclass
class _Noted(WantedWeights):
    """``Weights`` that note the linear layers as they run: those with the same input as one."""

    found: list[tuple[str, int, int]] = field(default_factory=list)

    def linear(self, name: str, n: int, k: int, *, bias: bool = False) -> AnyLinear:
        return self.stacked([(name, n)], k, bias=bias)

    def stacked(self, parts: Sequence[Part], k: int, *, bias: bool = False) -> AnyLinear:
        self.found.append((parts[0][0], sum(n for _, n in parts), k))
        return self.dense(torch.empty((), dtype=self.dtype, device="meta").expand(self.found[-1][1], k))

    def embedding(self, name: str, vocab: int, width: int, *, tied: bool) -> tuple[Embedding, AnyLinear | None]:
        if tied:
            self.found.append(("lm_head", vocab, width))
        return super().embedding(name, vocab, width, tied=tied)


def linear_shapes(config: ModelConfig, checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Name, N and K of every linear layer that runs; of several as one, the first's name.

    Raises ``model_unsupported``.
    """
    if config.architecture not in ARCHITECTURES:
        raise error(
            "model_unsupported",
            architecture=config.architecture,
            reason="aiakq has no model of its own for it",
            known=FAMILIES,
        )
    weights = _Noted(checkpoint, limit=4 * len(checkpoint.inventory) + 1000)
    with torch.device("meta"):
        importlib.import_module(ARCHITECTURES[config.architecture]).build(config, weights)
    return weights.found
