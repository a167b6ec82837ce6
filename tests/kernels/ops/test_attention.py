"""Paged attention against dense attention in float64, with shuffled pages, ragged lengths and poisoned neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import IMPLEMENTATIONS
from aiakq.kernels.types import AttentionContext, AttentionSpec

CPU = torch.device("cpu")


def dense(query, keys, values, scale, window):
    """query [L, H, D] at the last L positions of keys, values [N, Hkv, D]; float64."""
    L, H, D = query.shape
    N, Hkv, _ = keys.shape
    keys, values = (x.double().repeat_interleave(H // Hkv, dim=1) for x in (keys, values))
    scores = torch.einsum("lhd,nhd->hln", query.double(), keys) * scale
    position, at = torch.arange(N - L, N)[:, None], torch.arange(N)[None, :]
    hidden = at > position
    if window:
        hidden |= at <= position - window
    return torch.einsum("hln,nhd->lhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


class Case:
    """Sequences with (cached, new) token counts in a shuffled page pool; unowned slots hold large values."""

    def __init__(self, lengths, H, Hkv, D, P, dtype=torch.float32):
        generator = torch.Generator().manual_seed(sum(map(sum, lengths)) + H)
        # As the scheduler promises: single tokens first.
        self.lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
        counts = [-(-(old + new) // P) for old, new in self.lengths]
        free = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
        self.spec = AttentionSpec(H, Hkv, D, D**-0.5)
        self.ops = Ops(CPU, dtype)
        layer = self.ops.attention(self.spec)
        self.caches = self.ops.new_cache(self.spec, sum(counts) + 4, P)
        for cache in self.caches:
            cache.fill_(1e4)
        width = max(counts)
        table, slots, starts, self.keys, self.values, queries = [], [], [0], [], [], []
        for (old, new), count in zip(self.lengths, counts, strict=True):
            pages = [free.pop() for _ in range(count)]
            at = torch.arange(old + new)
            where = torch.tensor(pages)[at // P] * P + at % P
            k, v = (torch.randn(old + new, Hkv, D, generator=generator).to(dtype) for _ in range(2))
            layer.write(k[:old], v[:old], self.caches, where[:old])
            self.keys.append(k)
            self.values.append(v)
            queries.append(torch.randn(new, H, D, generator=generator).to(dtype))
            slots.append(where[old:])
            table.append(pages + [0] * (width - count))
            starts.append(starts[-1] + new)
        self.query = torch.cat(queries)
        kv_len = [old + new for old, new in self.lengths]
        self.context = AttentionContext(
            query_start=torch.tensor(starts, dtype=torch.int32),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            slots=torch.cat(slots),
            page_table=torch.tensor(table, dtype=torch.int32),
            num_decodes=sum(new == 1 for _, new in self.lengths),
            query_start_list=starts,
            kv_len_list=kv_len,
        )
        new_keys = torch.cat([k[old:] for k, (old, _) in zip(self.keys, self.lengths, strict=True)])
        new_values = torch.cat([v[old:] for v, (old, _) in zip(self.values, self.lengths, strict=True)])
        layer.write(new_keys, new_values, self.caches, self.context.slots)

    def check(self, window, tolerance):
        scale = self.query.shape[-1] ** -0.5
        layer = self.ops.attention(replace(self.spec, sliding_window=window))
        found = layer.attend(self.query, self.caches, self.context)
        starts = self.context.query_start_list
        for s, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = slice(starts[s], starts[s + 1])
            wanted = dense(self.query[rows], keys, values, scale, window)
            error = (found[rows].double() - wanted).norm() / wanted.norm()
            assert error < tolerance, (s, self.lengths[s], error)


LENGTHS = {
    "decode": [(0, 1), (14, 1), (15, 1), (16, 1), (127, 1), (128, 1), (300, 1)],
    "prefill": [(0, 2), (0, 15), (0, 17), (0, 129), (0, 260)],
    "chunk": [(5, 3), (120, 20), (256, 4)],
    "mixed": [(40, 1), (0, 33), (7, 1), (130, 6)],
}


@pytest.mark.parametrize("window", [None, 1, 20, 128], ids=lambda w: f"window{w}")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_matches_dense_attention(lengths, window):
    for H, Hkv, D in [(4, 4, 16), (8, 2, 64), (6, 1, 40)]:
        for P in (1, 7, 16, 256):
            Case(lengths, H, Hkv, D, P).check(window, 1e-5)


@pytest.mark.parametrize("implementation", ["torch", "cpu"])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("old, new", [(0, 1), (0, 3), (17, 1), (130, 6)])
def test_what_others_left_in_a_page_need_not_be_finite(implementation, stored, old, new):
    """A request that overflowed may leave a page to the next one, whose positions fill it one by one."""
    P, H, D = 4, 2, 32
    total = old + new
    pages = -(-total // P)
    slots = torch.arange(P, P + total)
    context = AttentionContext(
        query_start=torch.tensor([0, new], dtype=torch.int32),
        kv_len=torch.tensor([total], dtype=torch.int32),
        slots=slots[old:],
        page_table=torch.arange(1, pages + 2, dtype=torch.int32).unsqueeze(0),
        num_decodes=int(new == 1),
        query_start_list=[0, new],
        kv_len_list=[total],
    )
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(total, H, D, generator=generator) for _ in range(2))
    query = torch.randn(new, H, D, generator=generator)
    spec = AttentionSpec(H, H, D, 1.0)
    module = IMPLEMENTATIONS.load(implementation)
    problem = spec.problem(torch.float32, stored, "cpu")
    if reason := module.supports(problem):
        pytest.skip(reason)
    layer = module.prepare(spec, problem)
    found = []
    for left in (0.0, float("nan")):
        cache = module.new_cache(pages + 2, P, H, D, stored, CPU)
        for part in cache:
            part.fill_(7 if part.dtype == torch.int8 else left)
        layer.write(key, value, cache, slots)
        found.append(layer.attend(query, cache, context))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_half_precision_caches(dtype, tolerance):
    Case(LENGTHS["mixed"], 8, 2, 64, 16, dtype).check(None, tolerance)


def test_result_does_not_depend_on_how_a_sequence_is_cut_or_who_is_near():
    """The same position, as part of a prompt, a chunk or a decode step, next to longer ones: equal bit for bit."""
    H, Hkv, D, P = 8, 2, 64, 16
    whole = Case([(0, 150)], H, Hkv, D, P)
    layer = whole.ops.attention(whole.spec)
    expected = layer.attend(whole.query, whole.caches, whole.context)
    for old in (0, 3, 127, 128, 140, 149):
        context = whole.context
        part = AttentionContext(
            query_start=torch.tensor([0, 150 - old]),
            kv_len=context.kv_len,
            slots=context.slots[old:],
            page_table=context.page_table,
            num_decodes=int(old == 149),
            query_start_list=[0, 150 - old],
            kv_len_list=[150],
        )
        found = layer.attend(whole.query[old:], whole.caches, part)
        assert torch.equal(found, expected[old:]), old
