"""Native paged attention against float64, on every instruction set, and bitwise independence of batch and chunking.

Pages are shuffled, and cache slots that no sequence owns hold NaN.
"""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu.attention import NativeAttention, new_cache
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.attention import TorchAttention
from aiakq.kernels.types import AttentionContext, AttentionSpec

CPU = torch.device("cpu")

NAN = float("nan")
CACHES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]
#: (H, Hkv, D): multiples of 16 and others, all heads for themselves, more heads per key than a tile has rows.
HEADS = [(4, 4, 16), (8, 2, 64), (6, 1, 40), (9, 3, 17), (101, 1, 8), (2, 2, 130)]
LENGTHS = [(0, 1), (14, 1), (127, 1), (128, 1), (300, 1), (0, 2), (0, 17), (5, 3), (120, 20), (0, 150)]


class Case:
    """Sequences of (cached, new) tokens in a shuffled pool of pages, and a few rows of padding."""

    def __init__(self, lengths, H, Hkv, D, P, dtype=torch.float32, cache=torch.float32, padding=3):
        random = torch.Generator().manual_seed(sum(map(sum, lengths)) + H)
        # As the scheduler promises: single tokens first.
        self.lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
        counts = [-(-(old + new) // P) for old, new in self.lengths]
        free = (torch.randperm(sum(counts) + 3, generator=random) + 1).tolist()
        problem = AttentionSpec(H, Hkv, D, D**-0.5).problem(dtype, cache, "cpu")
        self.cache = new_cache(problem, sum(counts) + 4, P, CPU)
        for part in self.cache:
            part.fill_(127 if part.dtype == torch.int8 else NAN)
        table, self.slots, starts = [], [], [0]
        for (old, new), count in zip(self.lengths, counts, strict=True):
            pages = [free.pop() for _ in range(count)]
            at = torch.arange(old + new)
            self.slots.append(torch.tensor(pages)[at // P] * P + at % P)
            table.append(pages + [0] * (max(counts) - count))
            starts.append(starts[-1] + new)
        T = starts[-1] + padding
        slots = torch.cat([slots[old:] for slots, (old, _) in zip(self.slots, self.lengths, strict=True)])
        kv_len = [old + new for old, new in self.lengths]
        self.context = AttentionContext(
            query_start=torch.tensor(starts, dtype=torch.int32),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            slots=torch.cat((slots, torch.zeros(padding, dtype=torch.int64))),
            page_table=torch.tensor(table, dtype=torch.int32),
            num_decodes=sum(new == 1 for _, new in self.lengths),
            query_start_list=starts,
            kv_len_list=kv_len,
        )
        owned = torch.cat(self.slots)
        k, v = (torch.randn(len(owned), Hkv, D, generator=random) for _ in range(2))
        NativeAttention(AttentionSpec(H, Hkv, D, 1.0)).write(k, v, self.cache, owned)
        self.query = torch.randn(T, H * D, generator=random).to(dtype)
        self.shape = (H, Hkv, D)

    def run(self, window=None, context=None, query=None):
        H, Hkv, D = self.shape
        layer = NativeAttention(AttentionSpec(H, Hkv, D, D**-0.5, window))
        return layer.attend(self.query if query is None else query, self.cache, context or self.context)

    def read(self, which, s):
        """Keys (0) or values (1) of sequence s as they are in the cache, [N, Hkv, D] float64."""
        place = self.place(s)
        rows = self.cache[which][place].double()
        return rows if len(self.cache) == 2 else rows * self.cache[which + 2][place].unsqueeze(-1)

    def place(self, s):
        """Pages and offsets of the positions of sequence s, to index a cache with."""
        P = self.cache[0].shape[1]
        return self.slots[s] // P, self.slots[s] % P

    def part(self, s, old, new):
        """A step with tokens ``old`` to ``old + new`` of sequence s alone, and its queries' rows."""
        start = self.context.query_start_list[s] - self.lengths[s][0] + old
        part = AttentionContext(
            query_start=torch.tensor([0, new], dtype=torch.int32),
            kv_len=torch.tensor([old + new], dtype=torch.int32),
            slots=self.slots[s][old : old + new],
            page_table=self.context.page_table[s : s + 1],
            num_decodes=int(new == 1),
            query_start_list=[0, new],
            kv_len_list=[old + new],
        )
        return part, slice(start, start + new)


def dense(query, keys, values, window):
    """query [L, H, D] at the last L positions of keys, values [N, Hkv, D]; float64."""
    L, H, D = query.shape
    N, Hkv, _ = keys.shape
    keys, values = (x.repeat_interleave(H // Hkv, dim=1) for x in (keys, values))
    scores = torch.einsum("lhd,nhd->hln", query.double(), keys) * D**-0.5
    position, at = torch.arange(N - L, N)[:, None], torch.arange(N)[None, :]
    hidden = at > position
    if window:
        hidden |= at <= position - window
    return torch.einsum("hln,nhd->lhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).flatten(1)


def check(case, window, tolerance, worst_row):
    H, _, D = case.shape
    found = case.run(window)
    starts = case.context.query_start_list
    for s in range(len(case.lengths)):
        rows = slice(starts[s], starts[s + 1])
        wanted = dense(case.query[rows].unflatten(1, (H, D)), case.read(0, s), case.read(1, s), window)
        assert worst_row(found[rows], wanted) < tolerance, (case.shape, case.lengths[s], window)
    assert (found[starts[-1] :] == 0).all(), "padding is 0"


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_matches_dense_attention(isa, cache, worst_row):
    for index, (H, Hkv, D) in enumerate(HEADS):
        P = (1, 7, 16, 64)[index % 4]
        case = Case(LENGTHS, H, Hkv, D, P, cache=cache)
        for window in (None, 1, 20, 128):
            check(case, window, 1e-5, worst_row)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 300])
def test_any_page_size_and_several_segments_match_dense_attention(isa, page_size, worst_row):
    case = Case([(1023, 1), (1024, 1), (2100, 1), (1000, 40), (0, 1100)], 4, 2, 32, page_size)
    for window in (None, 7, 1025):
        check(case, window, 1e-5, worst_row)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_half_precision_activations_match_dense_attention(isa, dtype, tolerance, worst_row):
    check(Case(LENGTHS, 8, 2, 64, 16, dtype, dtype), 50, tolerance, worst_row)


def test_queries_may_have_any_row_stride(isa):
    case = Case(LENGTHS, 8, 2, 64, 16)
    wide = torch.full((len(case.query), 777), NAN)
    wide[:, 100:612] = case.query
    assert torch.equal(case.run(query=wide[:, 100:612]), case.run())


@pytest.mark.parametrize("window", [None, 400])
def test_any_chunking_batch_and_number_of_threads_gives_the_same_bits(isa, window, threads):
    """A prompt in one step on one thread, next to others, in any pieces, decoded token by token on several threads."""
    case = Case([(0, 1300), (37, 1), (500, 30)], 8, 2, 32, 16, cache=torch.bfloat16)
    s = next(s for s, pair in enumerate(case.lengths) if pair == (0, 1300))
    threads(1)
    expected = case.run(window)
    for count in (1, 2, 5):
        threads(count)
        assert torch.equal(case.run(window), expected)
        for old, new in [
            (0, 1300),
            (0, 1),
            (0, 127),
            (1, 130),
            (600, 700),
            (1023, 1),
            (1024, 1),
            (1299, 1),
            (1290, 10),
        ]:
            part, rows = case.part(s, old, new)
            assert torch.equal(case.run(window, part, case.query[rows]), expected[rows]), (old, new, count)


def test_threads_that_share_a_long_decode_give_the_same_bits(isa, threads):
    """More threads than key-value heads: segments are shared out, the bits stay."""
    for H, Hkv, D, cache in [(4, 1, 64, torch.float32), (3, 3, 24, torch.int8)]:
        case = Case([(5000, 1), (1500, 1)], H, Hkv, D, 16, cache=cache)
        threads(1)
        expected = case.run()
        for count in (2, 3, 8):
            threads(count)
            assert torch.equal(case.run(), expected), count


def test_random_shapes_match_dense_attention(isa, threads, worst_row):
    random = torch.Generator().manual_seed(5)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=random))

    for _ in range(12):
        threads(draw(1, 3))
        Hkv = draw(1, 3)
        lengths = [(draw(0, 400), draw(1, 1 if draw(0, 1) else 60)) for _ in range(draw(1, 4))]
        cache = CACHES[draw(0, 3)]
        case = Case(lengths, Hkv * draw(1, 7), Hkv, draw(1, 90), draw(1, 40), cache=cache, padding=draw(0, 2))
        check(case, None if draw(0, 1) else draw(1, 300), 1e-5, worst_row)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_non_finite_values_affect_only_rows_that_attend_to_them(isa, which, bad):
    case = Case([(0, 40), (200, 1)], 4, 2, 32, 16)
    s = next(s for s, pair in enumerate(case.lengths) if pair == (0, 40))
    start = case.context.query_start_list[s]
    before = case.run()
    if which == "query":
        case.query[start + 17, 3] = bad
    else:
        page, offset = case.place(s)
        case.cache[which == "value"][page[17], offset[17], :, 3] = bad
    after = case.run()
    touched = torch.zeros(len(after), dtype=torch.bool)
    touched[start + 17 : start + (18 if which == "query" else 40)] = True
    assert torch.equal(after[~touched], before[~touched])
    if which == "query":
        assert after[touched, :32].isnan().all(), "the head it is in"
    elif which == "key":
        assert after[touched].isnan().all()
    else:
        assert not after[touched].view(-1, 4, 32)[..., 3].isfinite().any()


def test_very_large_score_differences_do_not_overflow(isa):
    """One key that outweighs all others by more than floats can hold; and equal keys."""
    case = Case([(300, 1)], 2, 1, 16, 16, padding=0)
    keys, values = case.cache
    place = case.place(0)
    case.query[:] = 1.0
    keys[place] = -1000.0
    keys[place[0][7], place[1][7]] = 1000.0
    assert torch.equal(case.run(), values[place][7].repeat(1, 2).view(1, 32))
    keys[place] = 0.0
    mean = values[place].double().mean(0).repeat(1, 2).view(1, 32)
    assert torch.allclose(case.run().double(), mean, atol=1e-6)


def test_native_attention_is_selected_where_it_is_supported(native, monkeypatch):
    def selected(dtype=torch.float32, cache=torch.float32, head_dim=8, device=CPU):
        ops = Ops(device, dtype, cache)
        ops.attention(AttentionSpec(2, 2, head_dim, 1.0))
        return ops.selected("attention")

    assert selected() == selected(cache=torch.int8) == {"cpu"}
    assert selected(torch.float64) == selected(cache=torch.float8_e5m2) == {"torch"}
    assert selected(head_dim=2000) == {"torch"}, "larger heads than it has room for"
    assert selected(device=torch.device("meta")) == {"torch"}
    monkeypatch.setenv("AIAKQ_KERNELS", "attention=torch")
    assert selected() == {"torch"}


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_matches_the_torch_implementation(native, cache):
    """The other implementation of the same functions, caches of 8 bits included."""
    case = Case([(30, 1), (200, 1), (0, 40), (10, 5)], 8, 2, 32, 16, cache=cache, padding=0)
    for part in case.cache:
        part.nan_to_num_(0)  # torch multiplies hidden values by 0
    H, Hkv, D = case.shape
    spec = AttentionSpec(H, Hkv, D, D**-0.5, 33)
    reference = TorchAttention(spec, spec.problem(torch.float32, cache, "cpu"))
    query = case.query.view(-1, H, D)
    wanted = reference.attend(query, case.cache, case.context)
    found = NativeAttention(spec).attend(query, case.cache, case.context)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
