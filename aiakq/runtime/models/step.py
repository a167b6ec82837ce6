"""Input and output of one step of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from aiakq.kernels.types import AttentionContext


@dataclass
class StageOutput:
    """Output of a pipeline stage: ``x`` [T, hidden], and ``residual`` [T, hidden] or None, not yet added to it."""

    x: Tensor
    residual: Tensor | None


def whole_logits(output: Tensor | StageOutput) -> Tensor:
    """Return the logits [R, V] of a model that is not split into stages."""
    assert isinstance(output, Tensor), "the head is in another stage"
    return output


@dataclass
class ModelInput:
    """The flattened tokens of one step.

    token_ids   token ids [T] int64.
    positions   positions [T] int64.
    context     locations of keys and values in the KV cache.
    logit_rows  rows of T whose logits are needed, [R] int64.
    hidden      output of the previous stage, or of the target model of an EAGLE-3 head, which is modified; None
                elsewhere.
    aux_hidden_states  filled in by the model: [T, hidden] before each of its ``aux_layers``.
    """

    token_ids: Tensor
    positions: Tensor
    context: AttentionContext
    logit_rows: Tensor
    hidden: StageOutput | None = None
    aux_hidden_states: list[Tensor] = field(default_factory=list)
