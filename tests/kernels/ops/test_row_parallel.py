"""Linear layers that are cut along their inputs: the parts of all ranks add up to the whole layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.ops.parallel import REPLICATED, ROW, Column, Row
from aiakq.kernels.ops.row_parallel import RowParallelOps
from aiakq.kernels.ops.sharded import ShardedOps
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import AttentionSpec, QWeight
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.loader.binding import LinearBuilder

CPU = torch.device("cpu")


class Part:
    """One rank by itself, which keeps its part of every sum."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.gathers = 0

    def gather(self, x, bounds):
        self.gathers += 1
        whole = torch.zeros(len(x), bounds[-1], dtype=x.dtype)
        whole[:, bounds[self.rank] : bounds[self.rank + 1]] = x
        return whole

    def sum(self, x):
        return x


def operations(size: int) -> list[RowParallelOps]:
    return [RowParallelOps(Ops(CPU, torch.float32), Part(rank, size)) for rank in range(size)]


def random_weight(
    n: int, k: int, group: int, *, order: bool = False, zeros: bool = True, bias: bool = False
) -> QWeight:
    groups = -(-k // group)
    return QWeight(
        "w4a16",
        torch.randint(0, 16, (n, k), dtype=torch.uint8),
        (torch.rand(n, groups) - 0.5) * 0.2,
        torch.randint(0, 16, (n, groups), dtype=torch.uint8) if zeros else None,
        torch.randperm(k) if order else None,
        torch.randn(n) if bias else None,
        group,
    )


def floats(weight: QWeight) -> Tensor:
    return dequantize(weight, torch.float32).double()


@pytest.mark.parametrize("first, end", [(0, 128), (128, 320), (0, 160), (160, 320), (96, 320)])
def test_columns_of_a_weight_are_those_of_the_whole(first, end):
    """Groups of 128 that straddle 96 and 160 are divided, and the last one is short."""
    whole = random_weight(5, 320, 128, order=True)
    part = whole.with_inputs(first, end)
    assert part.perm is None and part.k == end - first
    assert torch.equal(floats(part), floats(whole)[:, whole.perm[first:end]])


@pytest.mark.parametrize("kind", ["offsets", "table"])
def test_shares_of_weights_with_offsets_and_tables_add_up(kind):
    """Each share's native product, of groups of 32 that a boundary divides."""
    whole = random_weight(40, 160, 32, zeros=False)
    more = {"offsets": torch.randn(whole.scales.shape)} if kind == "offsets" else {"table": torch.tensor(TABLES["nf4"])}
    whole = replace(whole, scheme="w4a16" if kind == "offsets" else "lut4a16", **more)
    x = torch.randn(3, 160)
    ops = Ops(CPU, torch.float32)
    parts = [ops.linear(whole.with_inputs(first, end))(x[:, first:end]) for first, end in ((0, 80), (80, 160))]
    assert torch.equal(floats(whole.with_inputs(80, 160)), floats(whole)[:, 80:])
    wanted = x.double() @ floats(whole).T
    assert (sum(parts) - wanted).norm() < 2e-6 * wanted.norm()


def test_columns_of_a_weight_with_one_scale_for_each_output():
    whole = random_weight(5, 64, 64, zeros=False)
    part = whole.with_inputs(32, 64)
    assert part.group_size == 32 and torch.equal(floats(part), floats(whole)[:, 32:])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("group", [32, 128, 320])
@pytest.mark.parametrize("size", [2, 3])
def test_an_mlp_of_any_order_needs_no_gather(size, group, order, parts):
    """Outputs of the first layer are computed in the order in which the second one reads them."""
    width = 320
    first = random_weight(parts * width, 64, 32, order=order, bias=True)
    second = random_weight(48, width, group, order=order, bias=True)
    x = torch.randn(3, 64)
    total = torch.zeros(3, 48, dtype=torch.float64)
    for ops in operations(size):
        two = ops.linear(second, role=ROW)
        one = ops.linear(first, role=Column(two, "gu"[:parts]))
        act = ops.activation("silu")
        both = one(x)
        mid = act.gated(both) if parts == 2 else act(both)
        total += two(mid)
        assert ops.collective.gathers == 0 and ops.notes == {"MLP": 1}
    hidden = x.double() @ floats(first).T + first.bias
    gate, up = hidden.chunk(2, dim=1) if parts == 2 else (hidden, 1)
    wanted = torch.nn.functional.silu(gate) * up @ floats(second).T + second.bias
    assert (total - wanted).norm() / wanted.norm() < 0.02  # activations of 8 bits


@pytest.mark.parametrize(
    "second, reason",
    [
        (lambda ops: ops.linear(random_weight(48, 40, 20), role=ROW), "it is too narrow"),
        (lambda ops: ops.linear(random_weight(48, 80, 24), role=ROW), "its groups of 24 straddle shares"),
        (lambda ops: ops.dense(torch.randn(48, 40), role=ROW), "it is too narrow"),
    ],
)
def test_an_mlp_that_cannot_be_cut_is_gathered_and_says_why(second, reason):
    for ops in operations(3):
        width = 80 if "24" in reason else 40
        two = second(ops)
        one = ops.linear(random_weight(width, 64, 32), role=Column(two, "u"))
        assert ops.notes == {f"MLP gathered ({reason})": 1}
        assert one(torch.randn(3, 64)).shape == (3, width)


def test_parts_of_several_schemes_are_each_split():
    """Gate and up that cannot be fused are two layers, each with the outputs that the down projection reads."""
    gate, up = random_weight(320, 64, 32), random_weight(320, 64, 64)
    down, x = random_weight(48, 320, 32, order=True), torch.randn(3, 64)
    total = torch.zeros(3, 48, dtype=torch.float64)
    for ops in operations(2):
        weights = LinearBuilder(ops)
        last = weights.quantized([down], ROW)
        first = weights.quantized([gate, up], Column(last, "gu"))
        assert isinstance(first, ConcatLinear)
        total += last(ops.activation("silu").gated(first(x)))
        assert ops.collective.gathers == 0
    hidden = torch.nn.functional.silu(x.double() @ floats(gate).T) * (x.double() @ floats(up).T)
    wanted = hidden @ floats(down).T
    assert (total - wanted).norm() / wanted.norm() < 0.02  # activations of 8 bits


def test_an_output_whose_order_crosses_heads_is_gathered():
    """Attention itself is cut by heads all the same."""
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    for ops in operations(2):
        qkv = ops.linear(random_weight(256, 64, 32), role=Column(spec, "qkv"))
        output = ops.linear(random_weight(64, 128, 32, order=True), role=Row(spec))
        ops.attention(spec, [qkv], output)
        assert ops.notes == {"attention, its output (its order of inputs crosses heads) gathered": 1}
        assert qkv(torch.randn(2, 64)).shape == (2, 128)
        assert output(torch.randn(2, 128)).shape == (2, 64)


def test_the_bias_of_a_sum_is_added_once():
    bias = torch.randn(8)
    x = torch.randn(2, 64)
    total = torch.zeros(2, 8)
    weight = torch.zeros(8, 64)
    for ops in operations(2):
        two = ops.dense(weight, bias, role=ROW)
        one = ops.dense(torch.randn(64, 64), role=Column(two, "u"))
        total += two(one(x))
    assert torch.allclose(total, bias.expand(2, 8))


def test_programs_divide_the_work_of_a_share_alone():
    """Unlike those of ranks that gather, whose sums have to be those of the whole layer."""
    spec = AttentionSpec(4, 2, 32, 32**-0.5)
    [ops, _] = operations(2)
    assert ops._local(spec).uncut_heads == (2, 1)
    gathering = ShardedOps(Ops(CPU, torch.float32), Part(0, 2))
    assert gathering._local(spec).uncut_heads == (4, 2)
    problems = []
    for each in (ops, gathering):
        each._select = lambda ops, problem, select=each._select: problems.append(problem) or select(ops, problem)
        each.linear(random_weight(1024, 64, 32))
    assert [(problem.n, problem.uncut_n) for problem in problems] == [(512, 0), (512, 1024)]


def test_replicated_layers_are_on_every_rank():
    router = torch.randn(8, 64)
    x = torch.randn(2, 64)
    for ops in operations(2):
        assert torch.allclose(ops.dense(router, role=REPLICATED)(x), x @ router.T, atol=1e-4)
        assert ops.collective.gathers == 0
