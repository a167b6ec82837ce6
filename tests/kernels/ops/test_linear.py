"""Every implementation, every scheme, a table of shapes: against a float64 product of the dequantized weight."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.kernels.ops.linear import IMPLEMENTATIONS
from aiakq.kernels.ops.linear_reference import dequantize, integer_matmul, quantize_activations
from aiakq.kernels.selection import select, unsupported
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import SCHEME_BITS, QWeight

# (M, N, K, G): one size that divides nothing, one row, one group, a ragged last group.
SHAPES = [(1, 96, 128, 32), (3, 40, 96, 96), (17, 33, 100, 20), (64, 64, 256, 128), (5, 8, 70, 32)]
#: Implementations that support every weight-only problem; others may refuse some.
COMPLETE = ("cpu", "dequantized", "reference")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def make(scheme: str, n: int, k: int, group: int, zeros: bool, perm: bool, bias: bool) -> QWeight:
    generator = torch.Generator().manual_seed(n * k + group)
    top = 1 << SCHEME_BITS[scheme]
    group = k if scheme == "w8a8" else group
    groups = -(-k // group)
    return QWeight(
        scheme=scheme,
        codes=torch.randint(0, top, (n, k), generator=generator).to(torch.uint8),
        # Signed: some tools write negative scales.
        scales=(torch.rand(n, groups, generator=generator) + 0.5) * torch.randn(n, groups, generator=generator).sign(),
        zeros=torch.randint(0, top, (n, groups), generator=generator).to(torch.uint8) if zeros else None,
        perm=torch.randperm(k, generator=generator) if perm else None,
        bias=torch.randn(n, generator=generator) if bias else None,
        group_size=group,
    )


def make_other(kind: str, n: int, k: int, group: int) -> QWeight:
    """A weight with offsets, or whose codes are indices of a table."""
    scheme, _, more = kind.partition(" ")
    weight = make(scheme, n, k, group, zeros=False, perm=False, bias=True)
    if more == "offsets":
        return replace(weight, offsets=torch.randn(weight.scales.shape, generator=torch.Generator().manual_seed(k)))
    return replace(weight, table=torch.tensor(TABLES[more])) if more else weight


def truth(weight: QWeight) -> torch.Tensor:
    """The definition in QWeight's docstring, element by element, in float64."""
    dense = torch.zeros(weight.n, weight.k, dtype=torch.float64)
    for j in range(weight.k):
        g = j // weight.group_size
        zero = 1 << (weight.bits - 1) if weight.zeros is None else weight.zeros[:, g].double()
        if weight.table is not None:
            values = weight.table[weight.codes[:, j].long()].double()
        else:
            values = weight.codes[:, j].double() - (0 if weight.offsets is not None else zero)
        column = values * weight.scales[:, g].double()
        if weight.offsets is not None:
            column += weight.offsets[:, g].double()
        dense[:, j if weight.perm is None else weight.perm[j]] = column
    return dense


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("perm", [False, True], ids=["", "perm"])
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("scheme", ["w2a16", "w3a16", "w4a16", "w8a16"])
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if not name.startswith("triton")])
def test_weight_only_products_match_the_dequantized_weight(implementation, scheme, zeros, perm):
    check_products(implementation, lambda n, k, group: make(scheme, n, k, group, zeros, perm, bias=True))


@pytest.mark.parametrize(
    "kind",
    [
        *("w5a16", "w6a16", "lut4a16 e2m1", "lut4a16 nf4"),
        *(f"w{bits}a16 offsets" for bits in (2, 3, 4, 5, 6, 8)),
    ],
)
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if not name.startswith("triton")])
def test_products_with_offsets_and_tables_match_the_dequantized_weight(implementation, kind):
    check_products(implementation, lambda n, k, group: make_other(kind, n, k, group))


def check_products(implementation, make_weight):
    """Compare products of all SHAPES with those of the definition; those of COMPLETE have to support them."""
    module = IMPLEMENTATIONS.load(implementation)
    supported = 0
    for M, N, K, G in SHAPES:
        weight = make_weight(N, K, G)
        dense = truth(weight)
        assert relative(dequantize(weight), dense) < 1e-6
        for dtype, tolerance in TOLERANCE.items():
            problem = weight.problem(dtype, "cpu")
            reason = unsupported(implementation, module, problem)
            if reason is not None:
                assert implementation not in COMPLETE, reason
                continue
            supported += 1
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(dtype)
            y = module.prepare(weight, problem)(x)
            assert y.shape == (M, N) and y.dtype == dtype
            assert relative(y, x.double() @ dense.T + weight.bias.double()) < tolerance, (M, N, K, G, dtype)
    if not supported:
        pytest.skip(f"{implementation} supports none of them")


def test_kernels_that_do_not_know_offsets_get_none():
    problem = make_other("w4a16 offsets", 8, 64, 32).problem(torch.float32, "cpu")
    kernel = SimpleNamespace(prepare=None, supports=lambda problem: None)
    assert unsupported("plugin", kernel, problem) == "it has no offsets"
    assert unsupported("plugin", kernel, replace(problem, has_offsets=False)) is None
    kernel.HAS_OFFSETS = True
    assert unsupported("plugin", kernel, problem) is None


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_w8a8_accumulates_exactly(static):
    module = IMPLEMENTATIONS.load("reference")
    for M, N, K, _ in SHAPES:
        weight = make("w8a8", N, K, K, zeros=False, perm=False, bias=True)
        weight.input_scale = torch.tensor(0.03) if static else None
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        y = module.prepare(weight, weight.problem(torch.float32, "cpu"))(x)
        codes, scale = quantize_activations(x, weight.input_scale)
        signed = weight.codes.int() - 128
        exact = codes.long() @ signed.long().T
        assert torch.equal(integer_matmul(codes, signed.to(torch.int8)).long(), exact)
        wanted = exact.double() * scale.double() * weight.scales[:, 0].double() + weight.bias.double()
        assert relative(y, wanted) < 1e-6


def test_activation_codes_use_the_whole_range_and_survive_zero_rows():
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]])
    codes, scale = quantize_activations(x)
    assert codes.tolist() == [[0, 0, 0], [64, -127, 32]]
    assert torch.isfinite(scale).all() and scale[1].item() == pytest.approx(2 / 127)


def test_binding_records_why_implementations_were_passed_over():
    weight = make("w8a8", 8, 16, 16, zeros=False, perm=False, bias=False)
    no_cpu = frozenset({"cpu"})
    ops = Ops(torch.device("cpu"), torch.float32, excluded=no_cpu)
    ops.linear(weight, 3)
    ((bound, count),) = ops.bound.items()
    assert (bound.operation, bound.kind, count) == ("linear", "w8a8", 3)
    assert bound.selection.name == "reference" and dict(bound.selection.passed_over)["dequantized"]
    problem = make("w4a16", 8, 16, 16, True, False, False).problem(torch.float32, "cpu")
    assert select(IMPLEMENTATIONS, problem, no_cpu)[0].name == "dequantized"
    passed_over = select(IMPLEMENTATIONS, problem, no_cpu | {"dequantized"})[0].passed_over
    assert passed_over == (("cpu", "excluded"), ("dequantized", "excluded"))


def test_packed_reference_is_smaller_than_its_weights():
    weight = make("w4a16", 64, 128, 32, True, False, False)
    state = IMPLEMENTATIONS.load("reference").prepare(weight, weight.problem(torch.float32, "cpu"))
    assert state.words.numel() * 4 == 64 * 128 // 2


def test_rows_are_padded_on_a_cpu_only():
    """CUDA graphs take decoding steps of any number of rows, so a GPU's steps have no padding of their own."""
    excluded = {"cpu"}  # the native kernels, whose rows are independent
    padded = {}
    for device in ("cpu", "cuda"):
        ops = PlannedOps(Ops(torch.device(device), torch.float32, excluded=excluded))
        ops.dense(torch.empty(32, 32, device="meta"))
        padded[device] = ops.row_multiple
    assert padded == {"cpu": 16, "cuda": 1}
