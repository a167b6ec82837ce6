"""Attention over pages in Triton: decoding in parts, prompts, chunks, windows, caches of 8 bits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from aiakq.kernels.ops.attention import TorchAttention, as_bytes
from aiakq.kernels.triton import attention as paged
from aiakq.kernels.triton import configs
from aiakq.kernels.triton.attention_blocks import MAX_SPLITS, decode_splits, query_blocks
from aiakq.kernels.triton.configs import AttentionConfig
from aiakq.kernels.types import LARGEST, AttentionContext, AttentionSpec

LENGTHS = {
    "decode": [(0, 1), (14, 1), (15, 1), (70, 1)],
    "prefill": [(0, 2), (0, 17), (0, 70)],
    "chunk": [(5, 3), (60, 20)],
    "mixed": [(40, 1), (7, 1), (0, 33), (50, 6)],
}


class Case:
    """Sequences of (cached, new) tokens on shuffled pages; unused slots are NaN."""

    def __init__(self, lengths, heads, kv_heads, size, page, dtype, stored=None):
        draw = torch.Generator().manual_seed(7)
        self.lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
        counts = [-(-(old + new) // page) for old, new in self.lengths]
        free = (torch.randperm(sum(counts) + 2, generator=draw) + 1).tolist()
        shape = (sum(counts) + 3, page, kv_heads)
        if stored is not None:
            self.cache = [torch.full((*shape, size), 100).to(stored) for _ in range(2)]
            self.cache += [torch.full(shape, float("nan")) for _ in range(2)]
        else:
            self.cache = [torch.full((*shape, size), float("nan"), dtype=dtype) for _ in range(2)]
        self.keys, self.values, queries, table, starts = [], [], [], [], [0]
        for (old, new), count in zip(self.lengths, counts, strict=True):
            pages = [free.pop() for _ in range(count)]
            at = torch.arange(old + new)
            where = torch.tensor(pages)[at // page], at % page
            for number, kept in enumerate((self.keys, self.values)):
                x = torch.randn(old + new, kv_heads, size, generator=draw).to(dtype)
                if stored is not None:
                    scale = x.float().abs().amax(-1) / LARGEST[stored]
                    codes = x.float() / scale[..., None]
                    codes = (codes.round() if stored == torch.int8 else codes).to(stored)
                    as_bytes(self.cache[number])[where], self.cache[2 + number][where] = as_bytes(codes), scale
                    x = codes.float() * scale[..., None]
                else:
                    self.cache[number][where] = x
                kept.append(x)
            queries.append(torch.randn(new, heads, size, generator=draw).to(dtype))
            table.append(pages + [0] * (max(counts) - count))
            starts.append(starts[-1] + new)
        self.query = torch.cat(queries)
        kv_len = [old + new for old, new in self.lengths]
        self.context = AttentionContext(
            query_start=torch.tensor(starts, dtype=torch.int32),
            kv_len=torch.tensor(kv_len, dtype=torch.int32),
            slots=torch.empty(0, dtype=torch.int64),
            page_table=torch.tensor(table, dtype=torch.int32),
            num_decodes=sum(new == 1 for _, new in self.lengths),
            query_start_list=starts,
            kv_len_list=kv_len,
        )

    def to(self, device):
        context = self.context
        for name in ("query_start", "kv_len", "page_table"):
            setattr(context, name, getattr(context, name).to(device))
        self.cache = [tensor.to(device) for tensor in self.cache]
        return self

    def wanted(self, scale, window=None):
        """The same in float64, one sequence after the other."""
        rows = []
        for (old, new), keys, values, start in zip(
            self.lengths, self.keys, self.values, self.context.query_start_list, strict=False
        ):
            query = self.query[start : start + new].double()
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("lhd,nhd->hln", query, keys) * scale
            own, at = torch.arange(old, old + new)[:, None], torch.arange(old + new)[None]
            hidden = at > own
            if window:
                hidden |= at <= own - window
            rows.append(torch.einsum("hln,nhd->lhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
        return torch.cat(rows)


def check(case, device, close, window=None, tolerance=None, config=None, target=0):
    case.to(device)
    query = case.query.to(device)
    out = torch.full_like(query, float("nan"))
    scale = query.shape[-1] ** -0.5
    spec = AttentionSpec(query.shape[1], case.cache[0].shape[2], query.shape[2], scale, window)
    if case.context.num_decodes:
        paged.decode(query, out, case.cache, case.context, spec, config, target)
    if case.context.num_decodes < len(case.lengths):
        paged.prefill(query, out, case.cache, case.context, spec, config)
    close(out.cpu(), case.wanted(scale, window), tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention_matches_float64(lengths, dtype, device, close):
    check(Case(LENGTHS[lengths], 8, 2, 32, 16, dtype), device, close)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page"), [(4, 4, 64, 16), (6, 2, 24, 5), (7, 1, 128, 32), (2, 1, 16, 1)]
)
def test_any_head_count_head_size_and_page_size(heads, kv_heads, size, page, device, close):
    check(Case(LENGTHS["mixed"], heads, kv_heads, size, page, torch.float16), device, close)


@pytest.mark.parametrize("window", [1, 16, 33, 500])
def test_a_sliding_window_limits_the_context(window, device, close):
    check(Case(LENGTHS["mixed"], 4, 2, 32, 16, torch.float16), device, close, window=window)


@pytest.mark.parametrize("lengths", ["mixed", "decode"])
@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.5},
        {"sinks": torch.linspace(-2, 3, 4)},
        {"alibi": torch.linspace(0.01, 0.5, 4), "softcap": 2.0, "sinks": torch.ones(4), "sliding_window": 20},
        {"chunk_size": 24},
        {"value_dim": 40},
        {"value_dim": 24, "sliding_window": 9},
    ],
    ids=lambda options: " ".join(options),
)
def test_variants_match_the_reference(options, stored, lengths, device, close):
    case = Case(LENGTHS[lengths], 4, 2, 32, 16, torch.float16, stored)
    spec = AttentionSpec(4, 2, 32, 32**-0.5, **options)
    # Values of another width: of the first elements, or of the elements twice.
    width, values = spec.value_dim, case.cache[1]
    case.cache[1] = as_bytes(values).repeat(1, 1, 1, 2)[..., :width].contiguous().view(values.dtype)
    problem = spec.problem(torch.float16, stored or torch.float16, device.type)
    wanted = TorchAttention(spec, problem).attend(case.query, case.cache, case.context)
    case.to(device)
    on_device = {name: x.to(device) for name in ("sinks", "alibi") if isinstance(x := options.get(name), torch.Tensor)}
    layer = paged.prepare(replace(spec, **on_device), problem)
    case.context.plans.clear()
    found = layer.attend(case.query.to(device), case.cache, case.context)
    close(found.cpu(), wanted.double(), 0.01)


@pytest.mark.parametrize("target", [1, 4, 7, 16, 40])
def test_any_number_of_splits(target, device, close):
    config = AttentionConfig(16, 3, 4, 2)
    check(Case(LENGTHS["decode"], 4, 2, 32, 16, torch.float16), device, close, config=config, target=target)


def test_a_long_sequence_among_short_ones_has_more_splits_than_are_added_at_once(device, close):
    lengths = [(0, 1), (399, 1), (20, 1), (15, 1)]
    config = AttentionConfig(16, 3, 4, 2)
    check(Case(lengths, 4, 2, 32, 16, torch.float16), device, close, config=config, target=24)


def splits_of(lengths, device, tile, target, **limits):
    """Items of every sequence as (begin, end), and how many could have been used."""
    numbers = torch.tensor(lengths, dtype=torch.int32, device=device)
    context = AttentionContext(numbers, numbers, numbers, numbers, len(lengths), [], [])
    items, starts = decode_splits(context, torch.device(device), tile, target, **limits)
    assert decode_splits(context, torch.device(device), tile, target, **limits).items is items, "made once a step"
    used = items[: int(starts[-1])].tolist()
    assert [sequence for sequence, _, _ in used] == sorted(sequence for sequence, _, _ in used)
    bounds = starts.tolist()
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        assert first < end and all(sequence == s for sequence, _, _ in used[first:end])
    return [[tuple(item[1:]) for item in used[a:b]] for a, b in itertools.pairwise(bounds)], len(items)


@pytest.mark.parametrize("target", [1, 2, 7, 33, 200])
@pytest.mark.parametrize("window", [0, 40])
def test_splits_cover_each_sequence_once_and_are_nearly_equal(target, window, device):
    draw = torch.Generator().manual_seed(target)
    lengths = torch.randint(1, 300, (11,), generator=draw).tolist() + [3000]
    found, bound = splits_of(lengths, device, 16, target, window=window)
    firsts = [max(0, length - window) // 16 if window else 0 for length in lengths]
    tiles = [-(-length // 16) - first for length, first in zip(lengths, firsts, strict=True)]
    most = max(-(-sum(tiles) // target), -(-max(tiles) // MAX_SPLITS))
    for items, length, first, count in zip(found, lengths, firsts, tiles, strict=True):
        assert items[0][0] == first * 16 and items[-1][1] == length
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(items))
        sizes = [-(-end // 16) - begin // 16 for begin, end in items]
        assert max(sizes) <= most and max(sizes) - min(sizes) <= 1 and len(items) == -(-count // most)
    assert sum(map(len, found)) <= bound


def test_more_sequences_than_a_program_reads_at_once(device):
    lengths = [1 + 7 * number % 90 for number in range(300)]
    found, bound = splits_of(lengths, device, 16, 500)
    assert [items[-1][1] for items in found] == lengths and sum(map(len, found)) <= bound


def test_splits_depend_on_lengths_alone(device):
    """A graph and the same step without one, and all ranks, add up in the same order."""
    lengths = [5, 700, 90]
    assert splits_of(lengths, device, 16, 20) == splits_of(lengths, device, 16, 20)
    assert splits_of(lengths, device, 16, 20)[1] == splits_of([1, 1, 1], device, 16, 20)[1], "programs of a launch"


@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_that_tuning_tries(tile, rows, device, close):
    check(
        Case(LENGTHS["mixed"], 4, 2, 32, 16, torch.float16),
        device,
        close,
        config=AttentionConfig(tile, 2, 4, rows),
        target=9,
    )


def test_programs_that_attend_to_most_positions_start_first():
    context = Case([(7, 1), (0, 40), (90, 20)], 2, 1, 16, 16, torch.float16).context
    blocks = query_blocks(context, 16, torch.device("cpu"))
    assert blocks.tolist() == [[2, 16], [2, 0], [1, 32], [1, 16], [1, 0]], "sequence and first token, decoding left out"


def test_heads_of_many_numbers_take_smaller_tiles():
    widths = (64, 128, 256, 1024)
    tiles = [configs.attention_config("decode", torch.device("cpu"), 2, width, 8).tile for width in widths]
    assert tiles == [64, 64, 32, 16]
    assert configs.attention_config("prefill", torch.device("cpu"), 1, 128, 10**6) == AttentionConfig(64, 3, 0, 64)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_caches_of_another_type_than_activations(stored, device, close):
    case = Case(LENGTHS["mixed"], 4, 2, 32, 16, torch.float16)
    case.cache = [tensor.to(stored) for tensor in case.cache]
    check(case, device, close, tolerance=3e-3)


@pytest.mark.parametrize("stored", LARGEST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_eight_bit_caches_match_the_reference(dtype, stored, window, device, close):
    check(Case(LENGTHS["mixed"], 4, 2, 32, 16, dtype, stored), device, close, window=window)
