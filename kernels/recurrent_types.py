"""Types of recurrent layers: problem descriptions, layer specifications, and the rows of states that are read and
written.

Shapes as in types.py; rows are rows of states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.transfer import on_device


@dataclass(frozen=True)
class ConvolutionProblem:
    """A causal depthwise convolution over ``taps`` tokens; see ops/convolution.py."""

    channels: int
    taps: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class RecurrenceProblem:
    """A linear recurrence; its fields are those of RecurrenceSpec."""

    kind: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class SelectiveScanProblem:
    """A selective scan of ``channels``, each with a state of ``state_size`` elements; see ops/selective_scan.py."""

    channels: int
    state_size: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class GatedNormProblem:
    """RMS norm over each group of ``group`` columns of [M, size], times silu(gate), or times the gate's sigmoid if
    ``sigmoid``; see ops/gated_norm.py.
    """

    size: int
    group: int
    gate_first: bool
    dtype: torch.dtype
    device: str
    sigmoid: bool = False


@dataclass(eq=False)
class ConvolutionSpec:
    """A causal depthwise convolution: y[t] = sum over j of weight[:, j] * x[t - K + 1 + j] + bias.

    weight  [C, K].
    bias    [C] or None.
    silu    whether y becomes silu(y).
    """

    weight: Tensor
    bias: Tensor | None = None
    silu: bool = False

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of its state: the inputs of the K - 1 preceding tokens, oldest first."""
        return self.weight.shape[1] - 1, self.weight.shape[0]

    def problem(self, dtype: torch.dtype, device: str) -> ConvolutionProblem:
        """Return the problem that describes this layer to implementations."""
        channels, taps = self.weight.shape
        return ConvolutionProblem(channels, taps, dtype, device)


@dataclass(eq=False)
class RecurrenceSpec:
    """A linear recurrence of H heads, each with a state S [key_dim, value_dim]; see ops/recurrence.py.

    kind           ``state_space`` (Mamba 2; Dao and Gu 2024, arXiv:2405.21060), ``delta_rule`` (the gated delta rule;
                   Yang et al. 2024, arXiv:2412.06464) or ``channel_delta_rule`` (the same with a step for each element
                   of a key: Kimi Delta Attention; Kimi Team 2025, arXiv:2510.26692).
    num_key_heads  number of key and query heads, each shared by H / num_key_heads adjacent heads.
    a_log          [H] float32: a state decays by e^(-e^a_log * step) per token.
    step_bias      [H] float32, added to the input of the softplus that gives the step; for ``channel_delta_rule``
                   [H * key_dim].
    step_limits    range to which a step is clamped.
    skip           [H] float32, factor of the values added to the output (``state_space``), or None.
    strength       1, or the maximum of b in the delta rule: with 2, the state may have negative eigenvalues (Grazzi et
                   al. 2024, arXiv:2411.12537).
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
    strength: float = 1.0

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of its state."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def is_delta_rule(self) -> bool:
        """Whether it is one of the delta rules."""
        return self.kind != "state_space"

    @property
    def has_channel_steps(self) -> bool:
        """Whether every element of a key has a step, and so every row of a state a decay."""
        return self.kind == "channel_delta_rule"

    @property
    def gates_width(self) -> int:
        """Number of columns of the gates: the inputs of b, if it is a delta rule, then those of the steps."""
        steps = self.num_heads * (self.key_dim if self.has_channel_steps else 1)
        return steps + self.num_heads if self.is_delta_rule else steps

    @property
    def width(self) -> int:
        """Total number of columns of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def problem(self, dtype: torch.dtype, device: str) -> RecurrenceProblem:
        """Return the problem that describes this layer to implementations."""
        sizes = self.num_heads, self.num_key_heads, self.key_dim, self.value_dim
        return RecurrenceProblem(self.kind, *sizes, dtype, device)


@dataclass(eq=False)
class SelectiveScanSpec:
    """A selective scan of C channels; see ops/selective_scan.py.

    a_log      [C, state_size] float32: element n of a channel's state decays by e^(-e^a_log * step) per token.
    step_bias  [C] float32, added to the input of the softplus that gives the step.
    skip       [C] float32, factor of the values added to the output.
    """

    a_log: Tensor
    step_bias: Tensor
    skip: Tensor

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of its state."""
        channels, size = self.a_log.shape
        return size, channels

    def problem(self, dtype: torch.dtype, device: str) -> SelectiveScanProblem:
        """Return the problem that describes this layer to implementations."""
        channels, size = self.a_log.shape
        return SelectiveScanProblem(channels, size, dtype, device)


class States(tuple[Tensor, ...]):
    """The cache of a recurrent layer: states [rows, ...] float32. Row 0 is zero, the initial state of all sequences."""

    @staticmethod
    def zeros(rows: int, shapes: Sequence[Sequence[int]], device: torch.device) -> States:
        """Allocate zero-initialized states of several ``shapes``."""
        return States(torch.zeros(rows, *shape, dtype=torch.float32, device=device) for shape in shapes)


def states_of(cache: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the states [rows, ...] in a layer's cache; none for attention alone."""
    if isinstance(cache, HybridCache):
        return cache.states
    return cache if isinstance(cache, States) else ()


class HybridCache(tuple[Tensor, ...]):
    """The cache of a layer with attention beside a recurrent layer: tensors of pages, then states.

    num_paged  number of tensors of pages.
    """

    num_paged: int

    @staticmethod
    def of(paged: Sequence[Tensor], states: Sequence[Tensor]) -> HybridCache:
        """Join the cache of attention, tensors [pages, ...], and states [rows, ...]."""
        cache = HybridCache((*paged, *states))
        cache.num_paged = len(paged)
        return cache

    @property
    def paged(self) -> Sequence[Tensor]:
        """The cache of attention, tensors [pages, ...]."""
        return self[: self.num_paged]

    @property
    def states(self) -> States:
        """The states [rows, ...] float32."""
        return States(self[self.num_paged :])


def paged_tensors(cache: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors [pages, ...] of a layer's cache."""
    if isinstance(cache, HybridCache):
        return cache.paged
    return () if isinstance(cache, States) else cache


@dataclass(eq=False)
class StateContext:
    """The state rows that recurrent layers read and write in one step.

    sources  [S] row with the state before the first token of each sequence.
    saves    per sequence: (token, row) pairs, ascending. The row receives the state after this token, counted from the
             sequence's first token of the step. No row is both written and read in a step.
    """

    sources: list[int]
    saves: list[list[tuple[int, int]]]


@dataclass(frozen=True)
class StateTables:
    """The states of S sequences as tensors on the device, all int32.

    sources  [S] as in StateContext.
    firsts   [S + 1] first save of each sequence.
    saves    [N, 3] sequence, token, row.
    blocks   [B, 2] sequence, first token of a block of its tokens (kernels/triton/states.py).
    """

    sources: Tensor
    firsts: Tensor
    saves: Tensor
    blocks: Tensor


class DecodeStates:
    """The tables of decoding steps of up to ``most`` sequences, at fixed addresses: every sequence has one token, and
    two saves, which may be the same.
    """

    def __init__(self, most: int, scratch: int, device: torch.device) -> None:
        """scratch: row of states that nothing reads, for padding."""
        self._scratch = scratch
        each = torch.arange(most, dtype=torch.int32, device=device)
        self._sources = torch.zeros_like(each)
        self._firsts = 2 * torch.arange(most + 1, dtype=torch.int32, device=device)
        self._saves = torch.zeros(2 * most, 3, dtype=torch.int32, device=device)
        self._saves[:, 0] = each.repeat_interleave(2)
        self._blocks = torch.stack([each, torch.zeros_like(each)], 1)

    def tables(self, size: int) -> StateTables:
        """Return the tables of steps of ``size`` sequences."""
        return StateTables(self._sources[:size], self._firsts[: size + 1], self._saves[: 2 * size], self._blocks[:size])

    def fill(self, states: StateContext, size: int) -> None:
        """Copy the rows of a step in which every sequence has one token; ``size`` sequences with the padding."""
        count = len(states.sources)
        rows = [row for kept in states.saves for row in (kept[0][1], kept[-1][1])]
        filled = on_device(states.sources + rows, self._sources.device)
        self._sources[:count] = filled[:count]
        self._sources[count:size] = 0
        self._saves[: 2 * count, 2] = filled[count:]
        self._saves[2 * count : 2 * size, 2] = self._scratch
