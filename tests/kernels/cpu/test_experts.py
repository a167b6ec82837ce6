"""Native experts: bit for bit those that run one after the other, dense and quantized."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import experts as native_experts
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.experts import ExpertLayers, Routed, TorchExperts
from aiakq.kernels.types import ExpertsProblem

HIDDEN, WIDTH = 72, 40
#: Rows of each of five experts.
COUNTS = [[3, 0, 17, 1, 4], [0, 0, 0, 1, 0], [0] * 5]
KINDS = ["dense", "w4", "w5 offsets", "w8a8", "e2m1", "nf4", "some dense", "dense, no gates", "w4, no gates"]


@pytest.fixture
def make_layers(make_weight):
    """``make_layers(kind, dtype)`` -> five experts, whose layers are native."""

    def make(kind: str, dtype: torch.dtype) -> ExpertLayers:
        kind, gated = kind.removesuffix(", no gates"), not kind.endswith("no gates")
        ops, generator = Ops(torch.device("cpu"), dtype, exact=False), torch.Generator().manual_seed(0)

        def linear(number: int, n: int, k: int):
            if kind == "dense" or (kind == "some dense" and number % 2):
                return ops.dense(torch.randn(n, k, generator=generator).to(dtype))
            if kind == "w8a8":
                return ops.linear(make_weight(n, k, 8, k, w8a8=True))
            if kind == "w5 offsets":
                return ops.linear(make_weight(n, k, 5, 8, "offsets"))
            return ops.linear(make_weight(n, k, 4, 8, table=kind if kind in ("e2m1", "nf4") else None))

        first = [linear(number, 2 * WIDTH if gated else WIDTH, HIDDEN) for number in range(5)]
        second = [linear(number, HIDDEN, WIDTH) for number in range(5)]
        return ExpertLayers(first, second, ops.activation("silu" if gated else "relu2"), 1, gated=gated)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_gives_the_bits_of_one_expert_after_the_other(isa, threads, make_layers, kind, dtype):
    layers, make = make_layers(kind, dtype), torch.Generator().manual_seed(1)
    together, one_by_one = native_experts.prepare(layers, ExpertsProblem(dtype, "cpu")), TorchExperts(layers)
    assert isinstance(together, native_experts.NativeExperts)
    for counts in COUNTS:
        x = torch.randn(sum(counts), HIDDEN, generator=make).to(dtype)
        for count in (1, 3):
            threads(count)
            assert torch.equal(together(x, counts), one_by_one(x, counts)), counts
    with pytest.raises(ValueError, match="experts of 3 rows"):
        together(x, [3, 0, 0, 0, 0])


@pytest.mark.parametrize("weigh_inputs", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_gives_the_bits_of_its_experts_and_sums(isa, threads, make_layers, kind, dtype, weigh_inputs):
    layers, make = make_layers(kind, dtype), torch.Generator().manual_seed(2)
    together, one_by_one = native_experts.prepare(layers, ExpertsProblem(dtype, "cpu")), TorchExperts(layers)
    for tokens, top_k, numbers in ((0, 2, 5), (1, 1, 5), (1, 3, 5), (37, 2, 5), (40, 3, 3), (7, 5, 5)):
        selected = torch.rand(tokens, numbers, generator=make).argsort(dim=1)[:, :top_k].contiguous()
        routed = Routed(selected, torch.rand(tokens, top_k, generator=make), 5, weigh_inputs)
        x, shared = ((torch.randn(tokens, HIDDEN, generator=make) / 64).to(dtype) for _ in range(2))
        for count in (1, 3):
            threads(count)
            for added in (None, shared):
                assert torch.equal(together.output(x, routed, added), one_by_one.output(x, routed, added))


def test_shared_experts_are_weighted_by_the_sigmoid_of_their_gate(isa, make_layers):
    layers, make = make_layers("dense", torch.float32), torch.Generator().manual_seed(3)
    together, one_by_one = native_experts.prepare(layers, ExpertsProblem(torch.float32, "cpu")), TorchExperts(layers)
    routed = Routed(torch.tensor([[4, 1]] * 9), torch.rand(9, 2, generator=make), 5)
    x, shared = (torch.randn(9, HIDDEN, generator=make) for _ in range(2))
    gate = torch.tensor([[0.0], [1.5], [-3.0], [90.0], [-90.0], [1e30], [-1e30], [float("nan")], [20.0]])
    found, expected = together.output(x, routed, shared, gate), one_by_one.output(x, routed, shared, gate)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    one_by_one.sigmoid = Ops(torch.device("cpu"), torch.float32, exact=False).activation("sigmoid")
    assert torch.equal(found.nan_to_num(7), one_by_one.output(x, routed, shared, gate).nan_to_num(7)), "as ranks do"
    assert torch.equal(
        together.output(x[2:3], Routed(routed.selected[2:3], routed.weights[2:3], 5), shared[2:3], gate[2:3]),
        found[2:3],
    )


def test_rows_that_do_not_fit_are_refused(make_layers):
    together = native_experts.prepare(make_layers("dense", torch.float32), ExpertsProblem(torch.float32, "cpu"))
    x, selected = torch.zeros(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int64)
    for wrong in (x[:, 1:], x[:2], x.half(), torch.zeros(HIDDEN, 3).T):
        with pytest.raises(ValueError, match="for 3 tokens"):
            together.output(wrong, Routed(selected, torch.ones(3, 1), 5))
    with pytest.raises(ValueError, match="6 experts instead of 5"):
        together.output(x, Routed(selected, torch.ones(3, 1), 6))
