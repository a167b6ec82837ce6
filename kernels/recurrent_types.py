"""Types of recurrent layers: problem descriptions, specifications of a layer, and where states are read and written.

Shapes as in types.py; rows are those of states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ConvolutionProblem:
    """A causal convolution of every channel by itself, over ``taps`` tokens; see ops/convolution.py."""

    channels: int
    taps: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class RecurrenceProblem:
    """A linear recurrence; the fields are those of RecurrenceSpec."""

    kind: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class GatedNormProblem:
    """RMS norm of every ``group`` of the columns [M, size], times the silu of a gate; see ops/gated_norm.py."""

    size: int
    group: int
    gate_first: bool
    dtype: torch.dtype
    device: str


@dataclass(eq=False)
class ConvolutionSpec:
    """A causal convolution of every channel by itself: y[t] = sum over j of weight[:, j] * x[t - K + 1 + j] + bias.

    weight  [C, K].
    bias    [C] or None.
    silu    whether y becomes silu(y).
    """

    weight: Tensor
    bias: Tensor | None = None
    silu: bool = False

    @property
    def state_shape(self) -> tuple[int, int]:
        """Of its state: the inputs of the K - 1 tokens before, oldest first."""
        return self.weight.shape[1] - 1, self.weight.shape[0]

    def problem(self, dtype: torch.dtype, device: str) -> ConvolutionProblem:
        """The question to ask an implementation about this layer."""
        return ConvolutionProblem(*self.weight.shape, dtype, device)


@dataclass(eq=False)
class RecurrenceSpec:
    """A linear recurrence of H heads, each with a state S [key_dim, value_dim]; see ops/recurrence.py.

    kind           ``state_space`` (Mamba 2; Dao and Gu 2024, arXiv:2405.21060) or ``delta_rule`` (the gated delta rule;
                   Yang et al. 2024, arXiv:2412.06464).
    num_key_heads  heads of keys and queries, each of which H / num_key_heads neighbouring heads share.
    a_log          [H] float32: a state decays by e^(-e^a_log * step) per token.
    step_bias      [H] float32, added to what softplus makes a step of.
    step_limits    between which a step is clamped.
    skip           [H] float32, factor of the values that are added to the output (``state_space``), or None.
    """

    kind: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    a_log: Tensor
    step_bias: Tensor
    step_limits: tuple[float, float] = (0.0, math.inf)
    skip: Tensor | None = None

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of its state."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def width(self) -> int:
        """Columns of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def problem(self, dtype: torch.dtype, device: str) -> RecurrenceProblem:
        """The question to ask an implementation about this layer."""
        sizes = self.num_heads, self.num_key_heads, self.key_dim, self.value_dim
        return RecurrenceProblem(self.kind, *sizes, dtype, device)


class States(tuple[Tensor, ...]):
    """The cache of a recurrent layer: states [rows, ...] float32. Row 0 is zeros, which every sequence starts from."""

    @staticmethod
    def zeros(rows: int, shapes: Sequence[Sequence[int]], device: torch.device) -> States:
        """States of several ``shapes`` beside each other, all zeros."""
        return States(torch.zeros(rows, *shape, dtype=torch.float32, device=device) for shape in shapes)


@dataclass(eq=False)
class StateContext:
    """Which rows of their states the recurrent layers read and write in one step.

    sources  [S] the row that holds the state before the first token of each sequence.
    saves    per sequence (token, row), ascending: the row gets the state after this token, counted from the first one
             of the step. No row that is written is read in the same step.
    """

    sources: list[int]
    saves: list[list[tuple[int, int]]]
