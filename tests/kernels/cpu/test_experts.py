"""Native experts: bit for bit those that run one after the other, dense and quantized."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import experts as native_experts
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.experts import ExpertLayers, TorchExperts
from aiakq.kernels.types import ExpertsProblem

HIDDEN, WIDTH = 72, 40
#: Rows of each of five experts.
COUNTS = [[3, 0, 17, 1, 4], [0, 0, 0, 1, 0], [0] * 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind", ["dense", "w4", "w5 offsets", "w8a8", "e2m1", "nf4", "dense, no gates", "w4, no gates"]
)
def test_one_call_gives_the_bits_of_one_expert_after_the_other(isa, threads, make_weight, kind, dtype):
    kind, gated = kind.removesuffix(", no gates"), not kind.endswith("no gates")
    ops = Ops(torch.device("cpu"), dtype, exact=False)
    make = torch.Generator().manual_seed(0)

    def linear(n: int, k: int):
        if kind == "dense":
            return ops.dense(torch.randn(n, k, generator=make).to(dtype))
        if kind == "w8a8":
            return ops.linear(make_weight(n, k, 8, k, w8a8=True))
        if kind == "w5 offsets":
            return ops.linear(make_weight(n, k, 5, 8, "offsets"))
        return ops.linear(make_weight(n, k, 4, 8, table=None if kind == "w4" else kind))

    first = [linear(2 * WIDTH if gated else WIDTH, HIDDEN) for _ in range(5)]
    second = [linear(HIDDEN, WIDTH) for _ in range(5)]
    layers = ExpertLayers(first, second, ops.activation("silu" if gated else "relu2"), 1, gated=gated)
    together, one_by_one = native_experts.prepare(layers, ExpertsProblem(dtype, "cpu")), TorchExperts(layers)
    assert isinstance(together, native_experts.NativeExperts)
    for counts in COUNTS:
        x = torch.randn(sum(counts), HIDDEN, generator=make).to(dtype)
        for count in (1, 3):
            threads(count)
            assert torch.equal(together(x, counts), one_by_one(x, counts)), counts
    with pytest.raises(ValueError, match="experts of 3 rows"):
        together(x, [3, 0, 0, 0, 0])
