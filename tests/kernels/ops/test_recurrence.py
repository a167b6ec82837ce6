"""Convolutions, recurrences, selective scans and gated norms of every implementation: values, states, the same bits in
every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.cpu import library
from aiakq.kernels.ops import convolution, gated_norm, recurrence, selective_scan
from aiakq.kernels.recurrent_types import (
    ConvolutionSpec,
    GatedNormProblem,
    RecurrenceSpec,
    SelectiveScanSpec,
    StateContext,
)
from aiakq.kernels.types import AttentionContext

LENGTHS = (1, 37, 6)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
NAMES = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(library.unavailable() is not None, reason="not built"))]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def context(lengths: list[int], states: StateContext) -> AttentionContext:
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    none = torch.zeros(len(lengths), 1, dtype=torch.int32)
    starts_tensor, lengths_tensor = (torch.tensor(x, dtype=torch.int32) for x in (starts, lengths))
    slots = torch.zeros(starts[-1], dtype=torch.int64)
    return AttentionContext(starts_tensor, lengths_tensor, slots, none, 0, starts, lengths, states=states)


Layer = Callable[[Tensor, Tensor, AttentionContext], Tensor]


def of_convolution(module, dtype: torch.dtype) -> tuple[Layer, tuple[int, ...], int]:
    """A layer over rows [T, width], the shape of its state and the width."""
    spec = ConvolutionSpec(random(70, 4, seed=1), random(70, seed=2), silu=True)
    layer = module.prepare(spec, spec.problem(dtype, "cpu"))

    def call(x: Tensor, states: Tensor, step: AttentionContext) -> Tensor:
        before, values, after = x.chunk(3, dim=-1)
        return layer(values, states, step, before=before, after=after)

    return call, spec.state_shape, 210


def of_recurrence(
    kind: str, sizes: tuple[int, int, int, int], strength: float = 1.0
) -> Callable[..., tuple[Layer, tuple[int, ...], int]]:
    heads = sizes[0]
    spec = RecurrenceSpec(
        kind,
        *sizes,
        a_log=random(heads, seed=3),
        # softplus changes its form at 20
        step_bias=random(heads * (sizes[2] if kind == "channel_delta_rule" else 1), seed=4) + 19,
        step_limits=(0.1, 20.5),
        skip=random(heads, seed=5) if kind == "state_space" else None,
        strength=strength,
    )
    spec.a_log -= 4

    def made(module, dtype: torch.dtype) -> tuple[Layer, tuple[int, ...], int]:
        layer = module.prepare(spec, spec.problem(dtype, "cpu"))

        def call(x: Tensor, states: Tensor, step: AttentionContext) -> Tensor:
            return layer(x[:, : spec.width], x[:, spec.width :], states, step)

        return call, spec.state_shape, spec.width + spec.gates_width

    return made


def of_selective_scan(module, dtype: torch.dtype) -> tuple[Layer, tuple[int, ...], int]:
    """Steps on both sides of where softplus changes its form, and some too small for the sum of 1 and e^x."""
    spec = SelectiveScanSpec(random(70, 9, seed=3) - 4, 12 * random(70, seed=4), random(70, seed=5))
    layer = module.prepare(spec, spec.problem(dtype, "cpu"))

    def call(x: Tensor, states: Tensor, step: AttentionContext) -> Tensor:
        values, steps, keys, queries, gate = x.split([70, 70, 9, 9, 70], dim=-1)
        return layer(values, steps, keys, queries, gate, states, step)

    return call, spec.state_shape, 228


LAYERS = {
    "convolution": (convolution, of_convolution),
    "state_space": (recurrence, of_recurrence("state_space", (6, 2, 24, 40))),
    "delta_rule": (recurrence, of_recurrence("delta_rule", (4, 2, 33, 72))),
    "negative eigenvalues": (recurrence, of_recurrence("delta_rule", (4, 2, 24, 40), 2.0)),
    "selective_scan": (selective_scan, of_selective_scan),
    "channel_delta_rule": (recurrence, of_recurrence("channel_delta_rule", (4, 2, 33, 72))),
    "wide heads": (recurrence, of_recurrence("delta_rule", (2, 2, 16, 150))),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_token_is_the_same_in_every_step(kind, name, dtype):
    """Three sequences at once, in one piece; then one after the other, cut into chunks, from the states kept."""
    operation, make = LAYERS[kind]
    layer, shape, width = make(operation.IMPLEMENTATIONS.load(name), dtype)
    x = random(sum(LENGTHS) + 2, width).to(dtype)
    states = torch.zeros(8, *shape)
    states[6], states[7] = random(*shape, seed=8), float("nan")
    saves = [[(0, 1)], [(4, 2), (15, 3), (36, 4)], [(5, 5)]]
    y = layer(x, states, context(list(LENGTHS), StateContext([0, 6, 0], saves)))
    assert not y[sum(LENGTHS) :].any(), "padding"
    kept = states.clone()

    start = 0
    for source, length, ends in zip([0, 6, 0], LENGTHS, [(1,), (5, 16, 37), (6,)], strict=True):
        first = 0
        for end in ends:
            rows = slice(start + first, start + end)
            step = context([end - first], StateContext([source], [[(end - first - 1, 7)]]))
            assert torch.equal(layer(x[rows], states, step), y[rows])
            states[6], source, first = states[7], 6, end
        assert torch.equal(states[7], kept[{1: 1, 37: 4, 6: 5}[length]])
        start, states[6] = start + length, kept[6]
    assert torch.equal(kept[0], torch.zeros(shape))

    exact, _, _ = make(operation.IMPLEMENTATIONS.load("torch"), torch.float32)
    again = torch.zeros(8, *shape)
    again[6] = kept[6]
    expected = exact(x.float(), again, context(list(LENGTHS), StateContext([0, 6, 0], saves)))
    assert float((y.float() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    torch.testing.assert_close(kept[1:6], again[1:6], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("gate_first", "sigmoid"), [(False, False), (True, False), (False, True)])
def test_gated_norms(gate_first, sigmoid, name, dtype):
    problem = GatedNormProblem(90, 30, gate_first, dtype, "cpu", sigmoid)
    layer = gated_norm.IMPLEMENTATIONS.load(name).prepare(random(90), 1e-3, problem)
    x = random(17, 200, seed=6).to(dtype)
    values, gate = x[:, :90], x[:, 100:190]
    y = layer(values, gate)
    assert all(torch.equal(layer(values[at : at + 1], gate[at : at + 1])[0], y[at]) for at in range(17))
    wide, factor = values.double(), torch.sigmoid(gate.double()) if sigmoid else F.silu(gate.double())
    groups = (wide * factor if gate_first else wide).unflatten(1, (3, 30))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(1) * random(90)
    expected = normed if gate_first else normed * factor
    assert float((y.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
