"""Linear recurrences (Mamba 2 state space, gated delta rule): interface, torch reference and implementations.

For each head and token, with a query q and a key k [key_dim], a value v [value_dim], a step d = softplus(a + step_bias)
clamped to its limits, and a state S [key_dim, value_dim],

    state_space    S = S e^(-e^a_log d) + k (d v)^T                  y = S^T q + skip v
    delta_rule     S = S e^(-e^a_log d);  S = S + k (b (v - S^T k))^T    y = S^T q

where the delta rule first normalizes q and k to unit length and divides q by sqrt(key_dim), and b is ``strength`` times
the sigmoid of one input per head and token. In ``channel_delta_rule`` every element of a key has a step d, by which the
row of S that belongs to it decays. Everything is computed in float32, on a CPU token by token, so that a
token's result is bit-identical whether it was computed in a whole prompt, in a chunk, or beside other sequences. A GPU
computes prompts in chunks (kernels/triton/recurrence.py): results depend on where chunks begin, by less than rounding
to 16 bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.recurrent_types import RecurrenceProblem, RecurrenceSpec, StateContext
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import AttentionContext

#: Added to the squared lengths in the delta rule's normalization.
EPSILON = 1e-6


class Recurrence(Protocol):
    """The recurrence of one layer, computed in float32 and rounded once."""

    def __call__(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """x [T, width] -> [T, H * value_dim] of the same dtype; padding rows become zeros. Reads and writes ``states``
        [rows, H, key_dim, value_dim] float32 as specified by ``context.states``.

        x      values, keys and queries (``state_space``), or queries, keys and values (``delta_rule``), concatenated.
        gates  [T, H], inputs of the steps; for the delta rule [T, 2 H]: inputs of b, then of the steps, or if
               these are of key elements [T, H + H * key_dim].
        """


class TorchRecurrence:
    """The torch reference."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self.spec = spec
        self.rate = -spec.a_log.float().exp()
        self.step_bias = spec.step_bias.float()
        self.skip = None if spec.skip is None else spec.skip.float().unsqueeze(-1)

    def __call__(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """x [T, width] and gates [T, gates_width] -> [T, H * value_dim]; see Recurrence."""
        assert isinstance(context.states, StateContext)
        out = torch.zeros(len(x), self.spec.num_heads * self.spec.value_dim, dtype=x.dtype, device=x.device)
        step = self._delta_rule if self.spec.is_delta_rule else self._state_space
        starts = context.query_start_list
        for s, (source, saves) in enumerate(zip(context.states.sources, context.states.saves, strict=True)):
            state = states[source]
            written = 0
            for token in range(starts[s + 1] - starts[s]):
                row = starts[s] + token
                # One whole token at a time: results of torch functions depend on the size of the tensor.
                state, y = step(state, x[row].float(), gates[row].float())
                out[row] = y.flatten().to(x.dtype)
                while written < len(saves) and saves[written][0] == token:
                    states[saves[written][1]] = state
                    written += 1
        return out

    def _state_space(self, state: Tensor, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        keys = spec.num_key_heads * spec.key_dim
        v, k, q = x.split([spec.num_heads * spec.value_dim, keys, keys])
        v, k, q = v.view(spec.num_heads, -1), self._by_head(k), self._by_head(q)
        step = F.softplus(gates + self.step_bias).clamp(*spec.step_limits).unsqueeze(-1)
        decay = torch.exp(self.rate.unsqueeze(-1) * step)
        state = state * decay.unsqueeze(-1) + k.unsqueeze(-1) * (step * v).unsqueeze(-2)
        y = (state * q.unsqueeze(-1)).sum(-2)
        return state, y if self.skip is None else y + self.skip * v

    def _delta_rule(self, state: Tensor, x: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        keys = spec.num_key_heads * spec.key_dim
        q, k, v = x.split([keys, keys, spec.num_heads * spec.value_dim])
        q, k, v = self._by_head(_unit(q, spec)), self._by_head(_unit(k, spec)), v.view(spec.num_heads, -1)
        b, a = gates.tensor_split([spec.num_heads])
        step = F.softplus(a + self.step_bias).clamp(*spec.step_limits).view(spec.num_heads, -1)
        state = state * torch.exp(self.rate.unsqueeze(-1) * step).unsqueeze(-1)
        seen = (state * k.unsqueeze(-1)).sum(-2)
        change = (spec.strength * torch.sigmoid(b)).unsqueeze(-1) * (v - seen)
        state = state + k.unsqueeze(-1) * change.unsqueeze(-2)
        return state, (state * q.unsqueeze(-1)).sum(-2) * spec.key_dim**-0.5

    def _by_head(self, x: Tensor) -> Tensor:
        """Repeat keys or queries [num_key_heads * key_dim] for every head: [H, key_dim]."""
        spec = self.spec
        return x.view(spec.num_key_heads, -1).repeat_interleave(spec.num_heads // spec.num_key_heads, dim=0)


def _unit(x: Tensor, spec: RecurrenceSpec) -> Tensor:
    """Normalize each head of x [num_key_heads * key_dim] to unit length."""
    heads = x.view(spec.num_key_heads, -1)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + EPSILON)


class RecurrenceKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, spec: RecurrenceSpec, problem: RecurrenceProblem) -> Recurrence:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[RecurrenceKernel].of_backends("recurrence", "cpu", "triton")


def prepare(spec: RecurrenceSpec, problem: RecurrenceProblem) -> TorchRecurrence:
    """Return the reference for one layer."""
    return TorchRecurrence(spec)
