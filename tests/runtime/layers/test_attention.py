"""The attention layer against attention over whole sequences in float64, however the sequence is cut into steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.types import AttentionContext, AttentionSpec, LayerCache, RotaryTables
from aiakq.runtime.layers.attention import Attention
from aiakq.runtime.layers.rotary import rotary_tables

CPU = torch.device("cpu")
PAGE_SIZE = 4
TOKENS = 23
#: Relative RMS.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """One layer with random projections of an odd hidden size, and its input [T, hidden]."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    norms: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.heads * self.head_dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        hidden, widths = 35, (self.heads + 2 * self.kv_heads) * self.head_dim
        self.x = random(TOKENS, hidden)
        self.qkv, self.qkv_bias = random(widths, hidden) / 6, random(widths)
        self.output = random(hidden, self.heads * self.head_dim) / 6
        self.q_norm, self.k_norm = (random(self.head_dim) if self.norms else None for _ in range(2))
        self.tables = rotary_tables({"partial_rotary_factor": 0.5}, self.head_dim, 64, CPU)
        spec = AttentionSpec(
            self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window, self.tables,
            self.q_norm, self.k_norm, 1e-6,
        )  # fmt: skip
        ops = Ops(CPU, self.dtype)
        self.layer = Attention(ops.dense(self.qkv, self.qkv_bias), ops.dense(self.output), spec, ops)

    def expected(self) -> Tensor:
        """[T, hidden] float64."""
        x = self.x.double() @ self.qkv.double().T + self.qkv_bias.double()
        counts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = x.unflatten(1, (-1, self.head_dim)).split(counts, dim=1)
        q, k = rotated(normed(q, self.q_norm), self.tables), rotated(normed(k, self.k_norm), self.tables)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
        at = torch.arange(TOKENS)
        distance = at[:, None] - at[None, :]
        hidden = (distance < 0) | (distance >= (self.window or TOKENS))
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return attended.flatten(1) @ self.output.double().T

    def run(self, steps: list[int]) -> Tensor:
        """The output [T, hidden] of the layer, computed in steps of so many tokens, in a cache of shuffled pages."""
        pages = torch.tensor([5, 2, 7, 1, 6, 3])
        cache = self.layer.new_cache(9, PAGE_SIZE, 0)
        found, start = [], 0
        for count in steps:
            found.append(self.step(cache, pages, start, count))
            start += count
        assert start == TOKENS
        return torch.cat(found)

    def step(self, cache: LayerCache, pages: Tensor, start: int, count: int) -> Tensor:
        positions = torch.arange(start, start + count)
        context = AttentionContext(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            kv_len=torch.tensor([start + count], dtype=torch.int32),
            slots=pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            page_table=pages[None].to(torch.int32),
            num_decodes=int(count == 1),
            query_start_list=[0, count],
            kv_len_list=[start + count],
        )
        return self.layer(self.x[start : start + count], positions, cache, context)


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    """RMS norm of every head of x [T, H, D]."""
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()


def rotated(x: Tensor, tables: RotaryTables) -> Tensor:
    """The first half of every head of x [T, H, D] rotated as complex numbers, whose parts are half a rotation apart."""
    part, rest = x[..., : tables.rotated], x[..., tables.rotated :]
    turn = torch.complex(tables.cosines[: len(x), None].double(), tables.sines[: len(x), None].double())
    turned = torch.complex(*part.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


CASES = {
    "one key head per query head": Case(3, 3, 20),
    "grouped queries": Case(8, 2, 32),
    "one key head": Case(5, 1, 12),
    "sliding window": Case(4, 2, 16, window=6),
    "head norms": Case(4, 2, 24, norms=True),
}


@pytest.mark.parametrize("steps", [[TOKENS], [7, 1, 1, 5, 9], [1] * TOKENS], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_is_that_of_attention_over_the_whole_sequence(case: Case, steps: list[int]) -> None:
    found, expected = case.run(steps), case.expected()
    assert found.dtype == case.dtype and found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_is_accurate_in_every_dtype(dtype: torch.dtype) -> None:
    case = Case(8, 2, 32, window=9, norms=True, dtype=dtype)
    found, expected = case.run([10, 1, 12]), case.expected()
    assert found.dtype == dtype
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_a_new_cache_is_zero_and_holds_all_heads() -> None:
    cache = Case(6, 2, 20).layer.new_cache(3, PAGE_SIZE, 0)
    assert [int(part.count_nonzero()) for part in cache] == [0] * len(cache)
    assert sum(part.numel() for part in cache) >= 2 * 3 * PAGE_SIZE * 2 * 20


def test_the_input_layout_is_that_of_the_projections() -> None:
    case = Case(4, 2, 16)
    assert [case.layer.input_layout(m) for m in (1, 16)] == [case.layer.qkv.input_layout(m) for m in (1, 16)]
