"""What kernels are run with on the emulator: the product's self-test, and sizes that it has no time for on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem
from aiakq.kernels.triton import attention, attention_blocks, configs, latent_attention, self_test, self_test_linear
from aiakq.kernels.triton.experts import sort_pairs
from aiakq.kernels.triton.self_test import Verdict
from aiakq.kernels.types import AttentionSpec, NormProblem

CPU = torch.device("cpu")


def _quantized_norm() -> float:
    """Check the codes of rows whose largest element is in another column each: none is left out of the maximum."""
    from aiakq.kernels.triton.layouts import QuantizedLayout

    x = torch.randn(300, 300, dtype=torch.float16)
    x += torch.eye(300, dtype=torch.float16) * 40
    problem = NormProblem("rms", 300, torch.float16, "cpu")
    norm = REGISTRIES["norm"].load("triton").prepare(torch.ones(300).half(), None, 1e-5, problem)
    quantized = norm(x.clone(), torch.zeros_like(x), QuantizedLayout(None))
    expected = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return float((quantized.codes * quantized.scales[:, None] - expected).abs().max() / expected.max())


def _long_products() -> float:
    """Check products whose steps are many more than are loaded ahead, for few rows."""
    linear = REGISTRIES["linear"].load("triton")
    weight = self_test_linear.weight_of("w4a16", 4, 70, 2048, 128, CPU)
    whole = (weight.codes.float() - 8) * weight.scales.float().repeat_interleave(128, dim=1)
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        state = linear.prepare(weight, weight.problem(dtype, "cpu"))
        # Halves of a register are one value for the emulator: rows are stored in pairs.
        for m in (2, 16):
            x = torch.randn(m, 2048, dtype=dtype)
            # Parts of unequal length, too.
            for split in (1, 3):
                config = replace(linear.choose(state, m), split=split)
                worst = max(worst, self_test.relative_error(linear.run(x, state, config), x.float() @ whole.T))
    return worst


def _padded_adapters() -> float:
    """Check adapters of the sizes of the self-test: nothing uses what is between rows, nor beyond the last input."""
    n, k, worst = 200, 700, 0.0
    rows = AdapterRows()
    rows.assign([(0, [3, 19])])
    others = [row for row in range(20) if row not in (3, 19)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, y = torch.randn(20, k, dtype=torch.float16), torch.zeros(20, n, dtype=torch.float16)
        problem = LoraProblem(n, k, 1, 20, torch.float16, "cpu")
        product = REGISTRIES["lora"].load("triton").prepare(problem, rows, torch.zeros(n))
        product._kept = lambda tensor, padding=(0, 0): F.pad(tensor, padding, value=torch.nan).contiguous()
        a, b = ((torch.randn(shape) / 10).to(dtype) for shape in ((20, k), (n, 20)))
        product.load(0, product.pack([LoraPart(0, 2.0, a, b, None, None)]))
        product(x, y)
        assert not y[others].any()
        worst = max(worst, self_test.relative_error(y[[3, 19]], 2 * x[[3, 19]].float() @ a.float().T @ b.float().T))
    return worst


def _blocks_of_experts() -> float:
    """Check blocks of pairs: of few, of one expert for more than a program reads at once, and most of them unused."""
    worst = 0.0
    for tokens, count, start, experts, rows in (
        (3, 40, 0, 40, 8),
        (40, 9, 2, 5, 16),
        (4500, 1, 0, 1, 8),
        (90, 3, 3, 4, 8),
    ):
        selected = torch.randint(0, count, (tokens, 2))
        blocks = sort_pairs(selected, start, experts, rows)
        pairs, numbers = [], []
        for expert in range(experts):
            own = (selected.flatten() == start + expert).nonzero().flatten()
            pairs.append(F.pad(own, (0, -len(own) % rows), value=2 * tokens))
            numbers += [expert + 1.0] * (len(pairs[-1]) // rows)
        expected = F.pad(torch.tensor(numbers), (0, len(blocks.experts) - len(numbers)))
        worst = max(worst, float((blocks.experts + 1 - expected).abs().max()))
        sorted_pairs = torch.cat(pairs)
        worst = max(worst, float((blocks.pairs.flatten()[: len(sorted_pairs)] != sorted_pairs).sum()))
    return worst


def _uneven_decoding(latent: bool) -> float:
    """Check decoding of a long sequence among short ones: items of several tiles, more of one sequence than are added
    up at once, and programs without an item.
    """
    lengths, heads, size = [65, 2600, 1, 20, 700], 4, 64
    spec = (
        AttentionSpec(heads, 1, size, 0.3, value_dim=48, latent=True) if latent else AttentionSpec(heads, 2, size, 0.3)
    )
    counts = [-(-length // 16) for length in lengths]
    pages = (torch.randperm(sum(counts), dtype=torch.int32) + 1).split(counts)
    context = self_test._step(CPU, [1] * len(lengths), lengths)
    context.page_table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    shape = (sum(counts) + 1, 16, spec.num_kv_heads, size)
    cache = [torch.full(shape, torch.nan, dtype=torch.float16) for _ in range(1 if latent else 2)]
    query = torch.randn(len(lengths), heads, size, dtype=torch.float16)
    out, expected = query.new_empty(len(lengths), heads, spec.value_dim), []
    for row, (length, own) in enumerate(zip(lengths, pages, strict=True)):
        keys, *values = (torch.randn(length, spec.num_kv_heads, size, dtype=torch.float16) for _ in cache)
        for stored, given in zip(cache, (keys, *values), strict=True):
            stored[own.repeat_interleave(16)[:length].long(), torch.arange(length) % 16] = given
        k, v = (
            x.float().repeat_interleave(heads // spec.num_kv_heads, 1) for x in (keys, values[0] if values else keys)
        )
        weights = (torch.einsum("hd,nhd->hn", query[row].float(), k) * spec.scale).softmax(-1)
        expected.append(torch.einsum("hn,nhd->hd", weights, v[..., -spec.value_dim :]))
    decode = (latent_attention if latent else attention).decode
    decode(query, out, tuple(cache), context, spec, target=16)
    return self_test.relative_error(out, torch.stack(expected))


def _splits() -> float:
    """Check the items of more sequences than a program reads at once, and of a window: unequal ones attend, too.

    Either all tiles or those of the longest sequence decide on the size of an item, and many sequences fill items.
    """
    worst = 0.0
    for tile, window, target, full in ((16, 0, 500, 16), (16, 200, 769, 6), (64, 0, 5000, 16), (64, 0, 20, 16)):
        lengths = [tile * full if number % 3 else 1 + 7 * number % 90 for number in range(300)] + [tile * 999, 33]
        context = self_test._step(CPU, [1] * len(lengths), lengths)
        items, starts = attention_blocks.decode_splits(context, CPU, tile, target, window)
        firsts = [max(0, length - window) // tile if window else 0 for length in lengths]
        tiles = [-(-length // tile) - first for length, first in zip(lengths, firsts, strict=True)]
        size = max(-(-sum(tiles) // target), -(-max(tiles) // attention_blocks.MAX_SPLITS))
        expected, ends = [], [0]
        for number, (length, first, count) in enumerate(zip(lengths, firsts, tiles, strict=True)):
            parts = -(-count // size)
            bounds = [(first + count * part // parts) * tile for part in range(parts)] + [length]
            expected += [(number, begin, end) for begin, end in itertools.pairwise(bounds)]
            ends.append(len(expected))
        worst = max(worst, self_test.relative_error(starts, torch.tensor(ends).float()))
        worst = max(worst, self_test.relative_error(items[: len(expected)], torch.tensor(expected).float()))
    return worst


#: More checks of a family, each with its worst error; see ``self_test.FAMILIES``.
MORE: dict[str, list[Callable[[], float]]] = {
    "norm": [_quantized_norm],
    "attention": [lambda: _uneven_decoding(latent=False), _splits],
    "latent attention": [lambda: _uneven_decoding(latent=True), _splits],
    "weight-only linear": [_long_products],
    "LoRA": [_padded_adapters],
    "experts": [_blocks_of_experts],
    # Nearly full tiles of 128 columns.
    "GPTQ": [lambda: self_test._gptq(CPU, 150, 127, 127)],
}


def family(name: str) -> str:
    """Return the name of a family. Raises ValueError."""
    if name not in self_test.FAMILIES:
        raise ValueError(name)
    return name


def examine(family: str) -> Verdict:
    """Return the verdict of the self-test with fixed inputs, or of the first of the other checks that fails."""
    torch.manual_seed(0)
    verdict = self_test.examine(family, CPU)
    for check in MORE.get(family, []):
        if verdict.failure is not None:
            break
        self_test.FAMILIES["more"] = lambda _, check=check: check()
        more = self_test.examine("more", CPU)
        del self_test.FAMILIES["more"]
        verdict = more if more.failure is not None else Verdict(None, max(verdict.error, more.error))
    return verdict


def errors(family: str) -> list[float]:
    """Return the errors of all comparisons that the checks of a family make; none if it fails."""
    # A kernel that ended with a fault may have left counters that are not zero.
    configs._counters.clear()
    found: list[float] = []
    modules, compare = (self_test, self_test_linear), self_test.relative_error

    def recorded(*tensors: torch.Tensor) -> float:
        found.append(compare(*tensors))
        return found[-1]

    for module in modules:
        module.relative_error = recorded
    try:
        verdict = examine(family)
    finally:
        for module in modules:
            module.relative_error = compare
    return found + [verdict.error] if verdict.failure is None else []
