"""Native quantized linear layers against float64, on every instruction set of this machine."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from aiakq.kernels.cpu import build, linear
from aiakq.kernels.ops import linear_reference as reference

CPU = torch.device("cpu")
#: (N, K, G): every kind of group, sizes that divide nothing, one output, one input more than a block.
SHAPES = [
    (64, 128, 128),
    (33, 96, 32),
    (100, 80, 16),
    (48, 72, 24),
    (17, 200, 200),
    (64, 64, 8),
    (5, 130, 130),
    (96, 100, 48),
    (31, 300, 96),
    (1, 33, 8),
    (40, 70, 20),
    (65, 257, 128),
    (32, 1, 1),
]
EXTRAS = [(None, False, False), ("codes", False, True), ("floats", True, True), ("offsets", False, True)]
#: Names of tables for make_weight.
TABLES = ("e2m1", "nf4", "int8")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ROWS = 7


def rounded(x, weight):
    """What ``fast`` makes of the activations [M, K], in the order of the codes: 8 bits and a scale per block of 32.

    Blocks begin anew with every group, but for groups of 8 and 16, of which one block holds several; groups of 8 with
    5 or 6 bits or a table are padded.
    """
    x = x.float() if weight.perm is None else x.float()[:, weight.perm]
    shared = (16,) if weight.bits in (5, 6) or weight.table is not None else (8, 16)
    size = 32 if weight.group_size in shared else weight.group_size
    out = torch.empty_like(x)
    for group in range(0, x.shape[1], size):
        for start in range(group, min(group + size, x.shape[1]), 32):
            block = slice(start, min(start + 32, group + size))
            highest = x[:, block].abs().amax(dim=1, keepdim=True)
            # A number divided by a tensor would be its reciprocal times the number.
            steps = torch.where(highest > 1e-30, torch.full_like(highest, 127.0) / highest, 0.0)
            out[:, block] = (x[:, block] * steps).round() * (highest / 127.0)
    return out


def in_order(weight):
    """The weight in float64, columns in the order of the codes."""
    natural = reference.dequantize(weight).double()
    return natural if weight.perm is None else natural[:, weight.perm]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_weight_only_products_match_float64(isa, bits, make_weight):
    for n, k, group in SHAPES:
        for zeros, perm, bias in EXTRAS:
            check(make_weight(n, k, bits, group, zeros, perm, bias))


@pytest.mark.parametrize("table", TABLES)
def test_products_with_tables_match_float64(isa, table, make_weight):
    """Without offsets, tables are multiplied with rounded activations: integers as they are, floats as 16 bits."""
    for n, k, group in SHAPES:
        for zeros, perm, bias in ((None, False, False), (None, True, True), ("offsets", False, True)):
            check(make_weight(n, k, 4, group, zeros, perm, bias, table=table), zeros is None)


def check(weight, rounds=True):
    """Compare products of each dtype with float64; ``rounds``: activations are rounded unless math is exact."""
    n, k, bias = weight.n, weight.k, weight.bias
    added = 0.0 if bias is None else bias.double()
    dense, of_words = in_order(weight), in_order(weight)
    if weight.table is not None and rounds and not torch.equal(weight.table * 2, (weight.table * 2).round()):
        factor = weight.table.abs().max().double() / 32767
        of_words = in_order(replace(weight, table=((weight.table / factor).round() * factor).float()))
    for dtype, tolerance in TOLERANCE.items():
        x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        ordered = x if weight.perm is None else x[:, weight.perm]
        for exact in (True, False):
            seen = ordered.double() if exact or not rounds else rounded(x, weight).double()
            y = linear.prepare(weight, weight.problem(dtype, "cpu", exact=exact))(x)
            assert y.shape == (ROWS, n) and y.dtype == dtype
            # One output alone can come out near 0: measured against the size of what was added up.
            wanted = seen @ (dense if exact else of_words).T + added
            scale = (seen.abs() @ dense.abs().T).norm(dim=1) / k**0.5 + wanted.norm(dim=1)
            error = (y.double() - wanted).norm(dim=1) / scale
            assert (error <= tolerance).all(), (weight.scheme, n, k, weight.group_size, dtype, exact, error)


def test_rounding_activations_to_8_bits_adds_a_small_error(isa, make_weight, worst_row):
    for bits in (2, 3, 4, 5, 6, 8):
        weight = make_weight(96, 512, bits, 128, "codes")
        x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(1))
        y = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=False))(x)
        assert worst_row(y, x.double() @ in_order(weight).T) < 0.012


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_w8a8_equals_the_reference_bit_for_bit(isa, make_weight, static):
    for n, k in ((64, 128), (33, 100), (5, 64), (96, 4096), (31, 31)):
        weight = make_weight(n, k, 8, k, bias=True, w8a8=True)
        weight.input_scale = torch.tensor(0.011) if static else None  # small enough that some are clamped
        for dtype in TOLERANCE:
            weight.bias = weight.bias.to(dtype)
            x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(n)).to(dtype)
            x[1] = 0.0
            problem = weight.problem(dtype, "cpu")
            wanted = reference.prepare(weight, problem)(x)
            assert torch.equal(linear.prepare(weight, problem)(x), wanted), (n, k, dtype)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_a_row_does_not_depend_on_the_other_rows(isa, make_weight, exact):
    random = torch.Generator().manual_seed(3)
    for bits, group, zeros, more in (
        (2, 8, "codes", {}),
        (3, 16, "codes", {}),
        (4, 32, "codes", {}),
        (4, 48, "codes", {}),
        (5, 16, "offsets", {}),
        (6, 32, None, {}),
        (8, 96, "codes", {}),
        (8, 96, None, {"w8a8": True}),
        (4, 16, None, {"table": "e2m1"}),
        (4, 32, None, {"table": "nf4"}),
        (4, 32, None, {"table": "int8"}),
    ):
        weight = make_weight(70, 96, bits, group, zeros, **more)
        state = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))
        x = torch.randn(29, 96, generator=random)
        together = state(x)
        for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24):
            rows = torch.randperm(29, generator=random)[:count]
            assert torch.equal(state(x[rows].contiguous()), together[rows]), (bits, group, count)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_non_finite_values_stay_in_their_row(isa, make_weight, exact, value):
    for bits, group, more in (
        (2, 8, {}),
        (3, 16, {}),
        (4, 24, {}),
        (4, 64, {}),
        (5, 32, {}),
        (6, 16, {}),
        (8, 96, {}),
        (8, 96, {"w8a8": True}),
        *((4, 32, {"table": table}) for table in TABLES),
    ):
        for zeros in (None,) if more else (None, "codes", "floats", "offsets"):
            weight = make_weight(40, 96, bits, group, zeros, **more)
            state = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(5))
            clean = state(x)
            x[3, 70] = value
            y = state(x)
            others = [0, 1, 2, 4, 5, 6, 7]
            assert torch.equal(y[others], clean[others])
            assert not y[3].isfinite().any(), (bits, group, zeros, more)


def test_a_row_of_zeros_gives_the_bias(isa, make_weight):
    for exact in (True, False):
        weight = make_weight(50, 64, 4, 32, "codes", bias=True)
        state = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))
        assert torch.equal(state(torch.zeros(3, 64)), weight.bias.expand(3, -1))
        # And the smallest numbers there are do no harm.
        assert torch.allclose(state(torch.full((3, 64), 1e-40)), weight.bias.expand(3, -1))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_rows_of_any_stride_and_nothing_written_outside_the_output(isa, make_weight, apply, exact):
    for n, dtype in ((33, torch.float32), (5, torch.bfloat16), (50, torch.float16), (64, torch.float32)):
        weight = make_weight(n, 72, 4, 24, "codes", bias=True)
        state = linear.prepare(weight, weight.problem(dtype, "cpu", exact=exact))
        random = torch.Generator().manual_seed(n)
        x = torch.randn(7, 72, generator=random).to(dtype)
        wide = torch.full((7, 80), float("nan"), dtype=dtype)
        wide[:, 3:75] = x
        plain = apply(state, x.float(), torch.empty(7, n))  # before it is rounded to dtype
        canvas = torch.full((9, n + 5), 77.0, dtype=dtype)
        apply(state, wide[:, 3:75], canvas[1:8, 2 : n + 2])
        assert torch.equal(canvas[1:8, 2 : n + 2], plain.to(dtype))
        canvas[1:8, 2 : n + 2] = 77.0
        assert (canvas == 77.0).all(), "written outside the output"


def test_any_number_of_threads_gives_the_same_bits(isa, make_weight, threads):
    weight = make_weight(500, 192, 4, 64, "codes", bias=True)
    x = torch.randn(19, 192, generator=torch.Generator().manual_seed(9))
    found = []
    for count in (1, 2, 3, 4):
        threads(count)
        for exact in (True, False):
            found.append(linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))(x))
    assert all(torch.equal(one, found[i % 2]) for i, one in enumerate(found))


def test_zero_rows_give_an_empty_result(isa, make_weight):
    weight = make_weight(33, 64, 4, 32)
    state = linear.prepare(weight, weight.problem(torch.float32, "cpu"))
    assert state(torch.empty(0, 64)).shape == (0, 33)


@pytest.mark.parametrize("zeros", [None, "codes", "offsets"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_activations_with_a_mean_lose_no_digits_over_long_groups(isa, bits, zeros, make_weight):
    """The sums of code * x and of zero * x are large where x has a mean; their difference must not lose digits."""
    n, k = 48, 8192
    weight = make_weight(n, k, bits, k, zeros)
    if zeros:  # weights around their zero point, as real ones are
        normal = torch.randn(n, k, generator=torch.Generator().manual_seed(k))
        zero = weight.zeros if zeros == "codes" else -weight.offsets / weight.scales
        codes = normal * 2**bits / 8 + zero
        weight = replace(weight, codes=codes.round().clamp(0, 2**bits - 1).to(torch.uint8))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(bits)) + 4
    y = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=True))(x)
    wanted = x.double() @ in_order(weight).T
    spread = (x.double().square() @ in_order(weight).square().T).sqrt()
    error = ((y - wanted).abs() / spread).max().item()
    # With offsets, the weight that is compared with is rounded to float32, too.
    assert error < {(8, None): 2e-5, (8, "codes"): 3e-4}.get((bits, zeros), 1e-4 if zeros == "offsets" else 6e-5), error


def test_scratch_memory_suffices_for_every_instruction_set(native, make_weight):
    """A layer that was prepared with one instruction set may be run with another."""
    weight = make_weight(32, 512, 8, 512, w8a8=True)
    problem = weight.problem(torch.float32, "cpu", exact=True)
    before, sizes = native.isa, set()
    try:
        for name in ("vnni_bf16", *build.X86):
            with contextlib.suppress(OSError):
                native.use_isa(name)
                sizes.add(linear.prepare(weight, problem).scratch_per_row)
    finally:
        native.use_isa(before)
    assert len(sizes) == 1
