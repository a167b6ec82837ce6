"""LoRA adapters beside a linear layer: the native product against float64 and against the reference."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import lora
from aiakq.kernels.cpu.recording import Recording
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem, TorchLora

#: (N, K, ranges of outputs that have a part, ranks).
SHAPES = [
    (32, 16, [(0, 32)], [1]),
    (70, 37, [(0, 33), (33, 37)], [5, 3]),
    (129, 130, [(0, 64), (64, 32), (96, 33)], [16, 7, 64]),
    (48, 300, [(16, 17)], [9]),
    (200, 48, [(0, 160), (160, 40)], [6, 5]),  # more tiles than are computed at once, and some of two parts
]
SLOTS = 4


def random_parts(generator, k, ranges, ranks, dtype=torch.float32, bias=False, factors=False):
    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        LoraPart(
            first,
            0.25 * (1 + index),
            normal(rank, k).to(dtype),
            normal(n, rank).to(dtype),
            normal(n) if bias else None,
            0.1 * normal(n) if factors else None,
        )
        for index, ((first, n), rank) in enumerate(zip(ranges, ranks, strict=True))
    ]


def expected(x, y, segments, adapters, base_bias):
    """In float64."""
    y = y.double().clone()
    for slot, rows in segments:
        for part in adapters.get(slot, ()):
            at = slice(part.first, part.first + len(part.b))
            added = part.scale * (x[rows].double() @ part.a.double().T @ part.b.double().T)
            if part.bias is not None:
                added += part.scale * part.bias.double()
            if part.factors is not None:
                product = y[rows, at] - (0 if base_bias is None else base_bias[at].double())
                added = part.factors.double() * product + (1 + part.factors.double()) * added
            y[rows, at] += added
    return y


def product(problem, segments, adapters, base_bias=None, kind=lora.NativeLora):
    rows = AdapterRows()
    made = kind(problem, rows, base_bias) if kind is lora.NativeLora else kind(rows, base_bias)
    for slot, parts in adapters.items():
        made.load(slot, made.pack(parts))
    rows.assign(segments)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_get_what_their_adapters_make_of_them(native, shape, dtype, weights):
    n, k, ranges, ranks = shape
    generator = torch.Generator().manual_seed(n)
    plain = random_parts(generator, k, ranges, ranks, weights)
    adapters = {
        0: plain,
        1: random_parts(generator, k, ranges, ranks, weights, bias=True),
        3: random_parts(generator, k, ranges[:1], ranks[:1], weights, factors=True),
    }
    x = torch.randn(40, k, generator=generator).to(dtype)
    y = torch.randn(40, n, generator=generator).to(dtype)
    segments = [(3, [0, 7, 9]), (1, [5]), (0, [*range(20, 37), 3]), (2, [1, 2])]
    base_bias = torch.randn(n, generator=generator)
    problem = LoraProblem(n, k, SLOTS, sum(ranks), dtype, "cpu")
    given = torch.full((45, n + 3), float("nan"), dtype=dtype)  # what is around the rows is not read
    given[:40, :n] = y
    product(problem, segments, adapters, base_bias)(x, given[:40, :n])
    found, wanted = given[:40, :n], expected(x, y, segments, adapters, base_bias)
    assert given[40:].isnan().all() and given[:, n:].isnan().all()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
    others = [row for row in range(40) if not any(row in rows for slot, rows in segments if slot != 2)]
    assert torch.equal(found[others], y[others])
    reference = y.clone()
    product(problem, segments, adapters, base_bias, TorchLora)(x, reference)
    assert (found.double() - reference.double()).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(native, shape, dtype):
    n, k, ranges, ranks = shape
    generator = torch.Generator().manual_seed(1)
    adapters = {slot: random_parts(generator, k, ranges, ranks, dtype, bias=slot == 2) for slot in range(SLOTS)}
    x, y = torch.randn(50, k, generator=generator).to(dtype), torch.randn(50, n, generator=generator).to(dtype)
    problem = LoraProblem(n, k, SLOTS, sum(ranks), dtype, "cpu")
    slots = torch.randint(0, SLOTS, (50,), generator=generator).tolist()
    segments = [(slot, [row for row in range(50) if slots[row] == slot]) for slot in (2, 0, 3, 1)]
    together = y.clone()
    product(problem, segments, adapters)(x, together)
    for row in range(50):
        alone = y[row : row + 1].clone()
        product(problem, [(slots[row], [0])], adapters)(x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


def test_instruction_sets_agree(native):
    n, k, ranges, ranks = SHAPES[2]
    generator = torch.Generator().manual_seed(2)
    adapters = {0: random_parts(generator, k, ranges, ranks, torch.bfloat16, factors=True)}
    x, y = torch.randn(21, k, generator=generator), torch.randn(21, n, generator=generator)
    problem = LoraProblem(n, k, SLOTS, sum(ranks), x.dtype, "cpu")
    found, before = {}, native.isa
    try:
        for isa in ("avx2", "avx512", "vnni", "portable"):
            try:
                native.use_isa(isa)
            except OSError:
                continue
            found[isa] = y.clone()
            product(problem, [(0, list(range(0, 21, 2)))], adapters)(x, found[isa])
    finally:
        native.use_isa(before)
    assert all(torch.equal(each, found["avx2"]) for isa, each in found.items() if isa != "portable")
    torch.testing.assert_close(found["portable"], found.get("avx2", found["portable"]), rtol=1e-4, atol=1e-4)


def test_an_adapter_is_replaced_and_dropped(native):
    n, k, ranges, ranks = SHAPES[1]
    generator = torch.Generator().manual_seed(3)
    first, second = (random_parts(generator, k, ranges, ranks) for _ in range(2))
    x, y = torch.randn(3, k, generator=generator), torch.randn(3, n, generator=generator)
    made = product(LoraProblem(n, k, SLOTS, sum(ranks), x.dtype, "cpu"), [(0, [0, 1, 2])], {0: first})
    assert made.load(0, made.pack(second)) >= sum(part.nbytes for part in second)
    found = y.clone()
    made(x, found)
    assert (found - expected(x, y, [(0, [0, 1, 2])], {0: second}, None)).abs().max() < 1e-4
    made.unload(0)
    found = y.clone()
    made(x, found)
    assert torch.equal(found, y)


def test_a_recording_takes_the_rows_of_each_step(native):
    n, k, ranges, ranks = SHAPES[1]
    generator = torch.Generator().manual_seed(4)
    adapters = {slot: random_parts(generator, k, ranges, ranks) for slot in range(2)}
    rows = AdapterRows()
    made = lora.NativeLora(LoraProblem(n, k, SLOTS, sum(ranks), torch.float32, "cpu"), rows, None)
    x, y = torch.randn(6, k, generator=generator), torch.zeros(6, n)
    with Recording() as recording:
        made(x, y)
    ops = recording.op_list()
    for slot, parts in adapters.items():
        made.load(slot, made.pack(parts))
    for segments in ([], [(1, [0, 4])], [(0, [5]), (1, [1])], []):
        rows.assign(segments)
        y.zero_()
        ops()
        assert (y - expected(x, torch.zeros(6, n), segments, adapters, None)).abs().max() < 1e-4


def test_rows_that_do_not_fit_are_refused(native):
    made = product(LoraProblem(8, 16, SLOTS, 4, torch.float32, "cpu"), [(0, [0])], {})
    for x, y in (((2, 15), (2, 8)), ((2, 16), (3, 8)), ((2, 16), (2, 9))):
        with pytest.raises(ValueError, match="beside"):
            made(torch.zeros(x), torch.zeros(y))
