"""Paged attention against dense attention in float64, with shuffled pages, ragged lengths and poisoned neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiakq.kernels.ops.attention import IMPLEMENTATIONS
from aiakq.kernels.selection import unsupported
from aiakq.kernels.types import AttentionContext, AttentionSpec, RotaryTables

CPU = torch.device("cpu")


def dense(query, keys, values, spec, ends=None):
    """query [L, H, D] at the last L positions of keys [N, Hkv, D] and values [N, Hkv, value_dim]; float64.

    ends  [L] of the positions that each query attends to; None: behind its own.
    """
    L, H, D = query.shape
    N, Hkv, _ = keys.shape
    keys, values = (x.double().repeat_interleave(H // Hkv, dim=1) for x in (keys, values))
    scores = torch.einsum("lhd,nhd->hln", query.double(), keys) * spec.scale
    position, at = torch.arange(N - L, N)[:, None], torch.arange(N)[None, :]
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.alibi is not None:
        scores = scores + spec.alibi.double().view(H, 1, 1) * (at - position)
    hidden = at > position if ends is None else at >= ends[:, None]
    if spec.sliding_window:
        hidden |= at <= position - spec.sliding_window
    if spec.chunk_size:
        hidden |= at // spec.chunk_size < position // spec.chunk_size
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.double().view(H, 1, 1).expand(H, L, 1)), dim=-1)
    return torch.einsum("hln,nhd->lhd", scores.softmax(-1)[..., :N], values)


class Case:
    """Sequences with (cached, new) token counts in a shuffled page pool; unowned slots hold large values."""

    def __init__(self, lengths, H, Hkv, D, P, dtype=torch.float32, implementation="torch", stored=None, **options):
        generator = torch.Generator().manual_seed(sum(map(sum, lengths)) + H)
        # As the scheduler promises: single tokens first.
        self.lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
        counts = [-(-(old + new) // P) for old, new in self.lengths]
        free = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
        self.spec = AttentionSpec(H, Hkv, D, D**-0.5, **options)
        self.module = IMPLEMENTATIONS.load(implementation)
        self.problem = self.spec.problem(dtype, stored or dtype, "cpu")
        if reason := unsupported(implementation, self.module, self.problem):
            pytest.skip(reason)
        layer = self.module.prepare(self.spec, self.problem)
        self.caches = self.module.new_cache(self.problem, sum(counts) + 4, P, CPU)
        for cache in self.caches:
            cache.fill_(100 if cache.dtype == torch.int8 else 1e4)
        width = max(counts)
        table, slots, starts, self.keys, self.values, queries = [], [], [0], [], [], []
        for (old, new), count in zip(self.lengths, counts, strict=True):
            pages = [free.pop() for _ in range(count)]
            at = torch.arange(old + new)
            where = torch.tensor(pages)[at // P] * P + at % P
            sizes = (D, self.spec.value_dim)
            k, v = (torch.randn(old + new, Hkv, size, generator=generator).to(dtype) for size in sizes)
            if self.spec.latent:
                v = k[..., -self.spec.value_dim :]
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

    def check(self, tolerance, **options):
        spec = replace(self.spec, **options)
        layer = self.module.prepare(spec, self.problem)
        found = layer.attend(self.query, self.caches, self.context)
        starts = self.context.query_start_list
        for s, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = slice(starts[s], starts[s + 1])
            wanted = dense(self.query[rows], keys, values, spec)
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
            Case(lengths, H, Hkv, D, P).check(1e-5, sliding_window=window)


def of_heads(low, high):
    return lambda heads: torch.linspace(low, high, heads)


#: What attention layers of some families ask for; functions give values for so many heads.
VARIANTS = {
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": of_heads(-2, 3)},
    "sinks in a window": {"sinks": of_heads(-2, 3), "sliding_window": 20},
    "alibi": {"alibi": of_heads(0.01, 0.5)},
    "alibi, softcap and sinks": {"alibi": of_heads(0.01, 0.5), "softcap": 2.0, "sinks": of_heads(0, 1)},
    "chunks": {"chunk_size": 24},
    "long chunks": {"chunk_size": 128},
    "wide values": {"value_dim": 72},
    "narrow values": {"value_dim": 24, "sliding_window": 20},
    "latent": {"latent": True, "value_dim": 32},
    "latent with softcap": {"latent": True, "value_dim": 40, "softcap": 1.0},
}


@pytest.mark.parametrize("implementation", ["torch", "cpu"])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_match_dense_attention(implementation, stored, variant):
    for lengths in LENGTHS.values():
        for H, Hkv, D, P in [(4, 4, 40, 16), (8, 2, 48, 7), (20, 1, 64, 32)]:
            options = {name: value(H) if callable(value) else value for name, value in variant.items()}
            case = Case(lengths, H, Hkv, D, P, implementation=implementation, stored=stored, **options)
            case.check(0.03 if stored == torch.int8 else 1e-5)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_does_not_depend_on_how_a_sequence_is_cut(variant):
    """In the native kernels, bit for bit: positions as one prompt, in chunks, and decoded."""
    H, Hkv, D, P, length = 8, 2, 48, 16, 150
    options = {name: value(H) if callable(value) else value for name, value in variant.items()}
    whole = Case([(0, length)], H, Hkv, D, P, implementation="cpu", **options)
    layer = whole.module.prepare(whole.spec, whole.problem)
    expected = layer.attend(whole.query, whole.caches, whole.context)
    for old in (3, 127, 140, 149):
        part = replace(
            whole.context,
            query_start=torch.tensor([0, length - old]),
            slots=whole.context.slots[old:],
            num_decodes=int(old == 149),
            query_start_list=[0, length - old],
            plans={},
        )
        assert torch.equal(layer.attend(whole.query[old:], whole.caches, part), expected[old:]), old


def with_runs(lengths, runs):
    """The ends of the positions that each new token of sequences attends to, where ``runs`` attend to each other."""
    ends = []
    for old, new in lengths:
        own = torch.arange(old + 1, old + new + 1)
        for first, count in runs:
            if first + count <= old + new:
                own[max(0, first - old) : max(0, first + count - old)] = first + count
        ends.append(own)
    return ends


@pytest.mark.parametrize("implementation", ["torch", "cpu"])
@pytest.mark.parametrize("window", [None, 5, 20], ids=lambda w: f"window{w}")
def test_tokens_of_an_image_attend_to_each_other(implementation, window):
    """In a whole prompt, behind a cached beginning within the image, and beside decodes."""
    lengths = [(0, 60), (14, 40), (40, 1), (0, 300), (0, 5)]
    for H, Hkv, D, P in [(4, 4, 40, 16), (8, 2, 48, 7), (20, 1, 64, 32)]:
        case = Case(lengths, H, Hkv, D, P, implementation=implementation, sliding_window=window)
        ends = with_runs(case.lengths, [(10, 30), (40, 3), (100, 150)])
        case.context.row_ends = torch.cat(ends).int()
        layer = case.module.prepare(case.spec, case.problem)
        found = layer.attend(case.query, case.caches, case.context)
        starts = case.context.query_start_list
        for s, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
            rows = slice(starts[s], starts[s + 1])
            wanted = dense(case.query[rows], keys, values, case.spec, ends[s])
            assert (found[rows].double() - wanted).norm() / wanted.norm() < 1e-5, case.lengths[s]


@pytest.mark.parametrize("implementation", ["torch", "cpu"])
def test_tokens_around_an_image_do_not_depend_on_where_its_prompt_is_cut(implementation):
    H, Hkv, D, P, length = 8, 2, 48, 16, 150
    whole = Case([(0, length)], H, Hkv, D, P, implementation=implementation, sliding_window=40)
    layer = whole.module.prepare(whole.spec, whole.problem)
    [ends] = with_runs(whole.lengths, [(30, 100)])
    whole.context.row_ends = ends.int()
    expected = layer.attend(whole.query, whole.caches, whole.context)
    for old in (20, 30, 77, 129, 140):
        part = replace(
            whole.context,
            query_start=torch.tensor([0, length - old]),
            slots=whole.context.slots[old:],
            query_start_list=[0, length - old],
            plans={},
            row_ends=ends[old:].int() if old < 130 else None,
        )
        assert torch.equal(layer.attend(whole.query[old:], whole.caches, part), expected[old:]), old


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interleaved": True},
        {"value_dim": 40},
        {"latent": True, "value_dim": 32},
        {"norms": True},
        {"norms": True, "rotated_norms": True},
    ],
    ids=str,
)
def test_whole_layers_match_the_reference(stored, options):
    """Head norms, rotary positions and cache writes of the native kernels, over a prompt."""
    H, Hkv, D, P, length = 6, 2, 48, 16, 21
    generator = torch.Generator().manual_seed(7)
    options = dict(options)
    angles = torch.outer(torch.arange(64.0), 10000 ** (-torch.arange(0, 16) / 16))
    tables = RotaryTables(angles.cos(), angles.sin(), options.pop("interleaved", False))
    if options.pop("norms", False):
        options |= {name: torch.rand(D, generator=generator) + 0.5 for name in ("q_norm", "k_norm")}
        options["norm_eps"] = 1e-6
    spec = AttentionSpec(H, Hkv, D, D**-0.5, rotary=tables, **options)
    problem = spec.problem(torch.float32, stored, "cpu")
    if reason := unsupported("cpu", IMPLEMENTATIONS.load("cpu"), problem):
        pytest.skip(reason)
    qkv = torch.randn(length, sum(spec.widths), generator=generator)
    context = AttentionContext(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        kv_len=torch.tensor([length], dtype=torch.int32),
        slots=torch.arange(P, P + length),
        page_table=torch.tensor([[1, 2]], dtype=torch.int32),
        num_decodes=0,
        query_start_list=[0, length],
        kv_len_list=[length],
    )
    found = []
    for name in ("torch", "cpu"):
        module = IMPLEMENTATIONS.load(name)
        cache = module.new_cache(problem, 4, P, CPU)
        layer = module.prepare(spec, problem)
        out = layer(qkv.clone(), torch.arange(length), cache, replace(context, plans={}))
        assert out.shape == (length, H * spec.value_dim)
        stored_rows = [part.flatten(0, 1)[context.slots].float() for part in cache]
        found.append((out, stored_rows))
    (wanted, rows), (got, others) = found
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.int8: 2e-2}[stored]
    assert (got - wanted).norm() / wanted.norm() < tolerance
    assert len(rows) == len(others) == (1 if spec.latent else 2) * (2 if stored == torch.int8 else 1)
    for one, other in zip(rows, others, strict=True):
        assert (one - other).abs().max() <= (1 if stored == torch.int8 else 0.02)


@pytest.mark.parametrize("implementation", ["torch", "cpu"])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_a_layer_that_only_reads_attends_to_what_another_wrote(implementation, stored):
    module, (H, Hkv, D, P, length) = IMPLEMENTATIONS.load(implementation), (6, 2, 48, 16, 21)
    generator = torch.Generator().manual_seed(7)
    angles = torch.outer(torch.arange(64.0), 300 ** (-torch.arange(0, 24) / 24))
    norms = {name: torch.rand(D, generator=generator) + 0.5 for name in ("q_norm", "k_norm")}
    spec = AttentionSpec(H, Hkv, D, 1.0, 9, RotaryTables(angles.cos(), angles.sin()), **norms, norm_eps=1e-6)
    reading = replace(spec, k_norm=None, reads_only=True)
    assert reading.widths == (H * D, 0, 0) and reading.cache_bytes(stored) == 0
    if reason := unsupported(implementation, module, spec.problem(torch.float32, stored, "cpu")):
        pytest.skip(reason)
    qkv = torch.randn(length, sum(spec.widths), generator=generator)
    cut = [torch.tensor(each, dtype=torch.int32) for each in ([0, length], [length], [[1, 2]])]
    context = AttentionContext(cut[0], cut[1], torch.arange(P, P + length), cut[2], 0, [0, length], [length], {})
    cache = module.new_cache(spec.problem(torch.float32, stored, "cpu"), 4, P, CPU)
    layers = [module.prepare(each, each.problem(torch.float32, stored, "cpu")) for each in (spec, reading)]
    wanted = layers[0](qkv.clone(), torch.arange(length), cache, context)
    written = [part.clone() for part in cache]
    found = layers[1](qkv[:, : H * D].clone(), torch.arange(length), cache, replace(context, plans={}))
    assert torch.equal(found, wanted)
    assert all(torch.equal(part, before) for part, before in zip(cache, written, strict=True))


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
    if reason := unsupported(implementation, module, problem):
        pytest.skip(reason)
    layer = module.prepare(spec, problem)
    found = []
    for left in (0.0, float("nan")):
        cache = module.new_cache(problem, pages + 2, P, CPU)
        for part in cache:
            part.fill_(7 if part.dtype == torch.int8 else left)
        layer.write(key, value, cache, slots)
        found.append(layer.attend(query, cache, context))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_half_precision_caches(dtype, tolerance):
    Case(LENGTHS["mixed"], 8, 2, 64, 16, dtype).check(tolerance)


def test_result_does_not_depend_on_chunks_or_other_sequences():
    """The same position, as part of a prompt, a chunk or a decode step, next to longer ones: equal bit for bit."""
    H, Hkv, D, P = 8, 2, 64, 16
    whole = Case([(0, 150)], H, Hkv, D, P)
    layer = whole.module.prepare(whole.spec, whole.problem)
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
