"""Products of LoRA adapters in Triton, against the reference."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops import lora as reference
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem
from aiakq.kernels.triton import lora

#: N, K, (first output, outputs, rank) of each part.
SHAPES = [
    (48, 40, [(0, 48, 4)]),
    (200, 700, [(0, 130, 17), (130, 40, 1), (170, 30, 16)]),
    (70, 1200, [(10, 33, 33)]),
]
SEGMENTS = [(0, list(range(0, 40, 2))), (2, [1, 39]), (1, [5])]


def random_parts(k, ranges, seed, dtype, device, whole):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(shape, generator=generator) / 10).to(device)

    return [
        LoraPart(
            first, 1.5, normal(rank, k).to(dtype), normal(n, rank).to(dtype),
            normal(n) if whole else None, normal(n) if whole else None,
        )
        for first, n, rank in ranges
    ]  # fmt: skip


def made(module, problem, segments, parts, bias):
    rows = AdapterRows()
    product = module.prepare(problem, rows, bias)
    rows.assign(segments)
    for slot, own in parts.items():
        product.load(slot, product.pack(own))
    return product, rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_get_what_the_reference_adds(shape, dtype, device, close):
    n, k, ranges = shape
    problem = LoraProblem(n, k, 3, sum(rank for *_, rank in ranges), dtype, device.type)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    parts = {slot: random_parts(k, ranges, slot, kind, device, slot != 1) for slot, kind in enumerate(kinds)}
    generator = torch.Generator().manual_seed(9)
    x, y, bias = (torch.randn(s, generator=generator).to(device) for s in ((40, k), (40, n), (n,)))
    x, found = x.to(dtype), y.to(dtype)
    expected = found.clone()
    made(lora, problem, SEGMENTS, parts, bias)[0](x, found)
    made(reference, problem, SEGMENTS, parts, bias)[0](x, expected)
    close(found, expected)
    others = [row for row in range(40) if row not in {row for _, rows in SEGMENTS for row in rows}]
    assert torch.equal(found[others], y.to(dtype)[others])


def test_a_row_does_not_depend_on_the_others(device):
    n, k, ranges = SHAPES[1]
    problem = LoraProblem(n, k, 3, 40, torch.float32, device.type)
    parts = {slot: random_parts(k, ranges, slot, torch.float32, device, True) for slot in range(3)}
    x, y = torch.randn(40, k, device=device), torch.randn(40, n, device=device)
    together = y.clone()
    made(lora, problem, SEGMENTS, parts, None)[0](x, together)
    for slot, rows in SEGMENTS:
        row = rows[-1]
        alone = y[row : row + 1].clone()
        made(lora, problem, [(slot, [0])], parts, None)[0](x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])


def test_the_same_launches_serve_other_steps_and_adapters(device):
    """As in a CUDA graph: nothing but the tables says which rows there are, and whose."""
    n, k, ranges = SHAPES[0]
    problem = LoraProblem(n, k, 2, 4, torch.float32, device.type)
    parts = {slot: random_parts(k, ranges, slot, torch.float32, device, False) for slot in range(2)}
    x, y = torch.randn(6, k, device=device), torch.randn(6, n, device=device)
    product, rows = made(lora, problem, [(0, [0, 1, 2, 3, 4, 5])], parts, None)
    addresses = [product._segments.tiles.data_ptr(), product._segments.rows.data_ptr(), product._table.data_ptr()]
    rows.any_rows = True
    for segments in ([(1, [3]), (0, [0, 5])], [], [(0, [2])]):
        rows.assign(segments)
        found, expected = y.clone(), y.clone()
        product(x, found)
        made(reference, problem, segments, parts, None)[0](x, expected)
        torch.testing.assert_close(found, expected)
    rows.assign([(0, [1]), (1, [4])])
    product.unload(0)
    found = y.clone()
    product(x, found)
    assert torch.equal(found[1], y[1]) and not torch.equal(found[4], y[4])
    segments = product._segments
    assert addresses == [segments.tiles.data_ptr(), segments.rows.data_ptr(), product._table.data_ptr()]


def test_steps_of_more_rows_than_graphs_have(device, monkeypatch):
    monkeypatch.setattr(lora, "CAPACITY", 8)
    segments = lora.TritonSegments(device)
    segments.assign([(1, list(range(40)))])
    assert segments.tiles.tolist() == [[1, 0, 16], [1, 16, 16], [1, 32, 8]] and len(segments.rows) == 40
    segments.assign([(0, [7]), (1, [3, 4])])
    assert segments.tiles.tolist()[:3] == [[0, 0, 1], [1, 1, 2], [0, 0, 0]] and segments.count == 2
    segments.assign([])
    assert segments.tiles.abs().sum() == 0
