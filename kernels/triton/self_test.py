"""Self-test of a GPU: every family of kernels on a small problem, compared with torch on the same GPU.

Drivers, compilers and processors differ. A family whose results disagree is not used on that GPU, and the start-up
table and ``aiakq inspect`` show the reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.ops.activation import FUNCTIONS, TorchActivation
from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.experts import ExpertLayers, Routed, TorchExperts
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.lora import AdapterRows, LoraPart, LoraProblem
from aiakq.kernels.recurrent_types import (
    ConvolutionSpec,
    GatedNormProblem,
    RecurrenceSpec,
    SelectiveScanSpec,
    StateContext,
)
from aiakq.kernels.triton import configs
from aiakq.kernels.triton.self_test_linear import (
    floats4,
    floats8,
    fp8,
    fp8_of,
    relative_error,
    w8a8,
    weight_of,
    weight_only,
)
from aiakq.kernels.types import (
    ActivationProblem,
    AttentionContext,
    AttentionSpec,
    ExpertsProblem,
    InputRounding,
    NormProblem,
    RotaryTables,
    SamplingProblem,
)

#: Scheme -> implementation of its linear layers; others are those of "triton".
KERNELS = {"w8a8": "triton-w8a8", "fp8a8": "triton-fp8", "lut4a16": "triton-floats"}
#: Family -> the least compute capability, times ten, of GPUs that have what it needs.
SINCE = {"fp8 linear": 89}
#: Relative RMS error above which a kernel is considered wrong, not merely rounded.
MAX_ERROR = 0.02


@dataclass(frozen=True)
class Verdict:
    """The result of the self-test of one family of kernels.

    failure  None, or one sentence.
    error    relative RMS error; NaN if the family raised.
    details  the traceback if it raised.
    """

    failure: str | None
    error: float
    details: str = ""


@lru_cache
def verdict(number: int, family: str) -> Verdict:
    """Return the verdict on the kernels of ``family``, a name in FAMILIES, on GPU ``number``."""
    with torch.cuda.device(number):
        return examine(family, torch.device("cuda", number))


def examine(family: str, device: torch.device) -> Verdict:
    """``verdict`` on any device; with the interpreter that is the CPU."""
    if configs.gpu(device).capability < SINCE.get(family, 0):
        return Verdict(f"Triton's {family} kernels need a GPU of compute capability {SINCE[family] / 10}", float("nan"))
    try:
        error = FAMILIES[family](device)
    except Exception as problem:  # anything that Triton, ptxas or the driver raises
        first = (str(problem).splitlines() or [""])[0][:120]
        sentence = f"Triton's {family} kernels fail on this GPU: {type(problem).__name__}: {first}"
        return Verdict(sentence, float("nan"), traceback.format_exc())
    if error < MAX_ERROR:
        return Verdict(None, error)
    return Verdict(f"Triton's {family} kernels are off by {100 * error:.1f} % on this GPU", error)


def _norm(device: torch.device) -> float:
    """Check RMS norms in every layout."""
    from aiakq.kernels.triton.layouts import PackedLayout, QuantizedLayout

    x, residual = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    weight = torch.rand(300, device=device, dtype=torch.float16)
    summed = x.float() + residual.float()
    expected = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    problem = NormProblem("rms", 300, torch.float16, device.type)
    norm = REGISTRIES["norm"].load("triton").prepare(weight, None, 1e-5, problem)
    worst = relative_error(norm(x.clone(), residual), expected)
    quantized = norm(x.clone(), residual, QuantizedLayout(None))
    worst = max(worst, relative_error(quantized.codes * quantized.scales[:, None], expected))
    order = torch.randperm(300, device=device).to(torch.int32)
    packed = norm(x.clone(), residual, PackedLayout(order, 4, 32, 0, False))
    return max(worst, relative_error(packed.rows, expected[:, order]))


def _activation(device: torch.device) -> float:
    """Check a gated activation function."""
    gate, up = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    silu = REGISTRIES["activation"].load("triton").prepare(ActivationProblem("silu", torch.float16, device.type))
    return relative_error(silu.gated(torch.cat((gate, up), dim=1)), torch.nn.functional.silu(gate.float()) * up.float())


def _attention(device: torch.device) -> float:
    """Check the rotary embedding, cache writes, and attention over the cache: a prompt, then one more token.

    What the cache holds where nothing was written must not matter. Scores are large, so that their maximum rises late.
    """
    heads, kv_heads, size, tokens = 4, 2, 64, 70
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device, dtype=torch.float16)
    freqs = torch.rand(tokens, size // 2, device=device)
    tables = RotaryTables(freqs.cos(), freqs.sin())
    spec = AttentionSpec(heads, kv_heads, size, 0.5, rotary=tables)
    cache = [torch.full((6, 16, kv_heads, size), torch.nan, device=device, dtype=torch.float16) for _ in range(2)]
    return _attended(spec, qkv, cache, _expected_attention(qkv, tables, spec))


def _latent_attention(device: torch.device) -> float:
    """The same over latents, with blocks of more heads than there are."""
    heads, rotated, latent, tokens = 20, 16, 64, 70
    qkv = torch.randn(tokens, (heads + 1) * (rotated + latent), device=device, dtype=torch.float16)
    freqs = torch.rand(tokens, rotated // 2, device=device)
    tables = RotaryTables(freqs.cos(), freqs.sin())
    spec = AttentionSpec(heads, 1, rotated + latent, 0.1, value_dim=latent, latent=True, rotary=tables)
    q, k = (part.unflatten(1, (-1, rotated + latent)).float() for part in qkv.split(spec.widths[:2], 1))
    rows = [torch.cat((_rotated(x[..., :rotated], tables), x[..., rotated:]), -1).transpose(0, 1) for x in (q, k)]
    keys = rows[1].expand(heads, -1, -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rows[0], keys, keys[..., rotated:], is_causal=True, scale=0.1
    )
    cache = [torch.full((6, 16, 1, rotated + latent), torch.nan, device=device, dtype=torch.float16)]
    return _attended(spec, qkv, cache, expected.transpose(0, 1).flatten(1))


def _attended(spec: AttentionSpec, qkv: Tensor, cache: list[Tensor], expected: Tensor) -> float:
    """Return the error of attention over the rows of qkv [70, ...], all but the last as a prompt, in an empty cache of
    six pages of 16 tokens.
    """
    tokens, device = len(qkv), qkv.device
    pages = torch.tensor([3, 1, 5, 2, 4], dtype=torch.int32, device=device)
    position = torch.arange(tokens, device=device)
    slots = pages.long()[position // 16] * 16 + position % 16
    layer = (
        REGISTRIES["attention"].load("triton").prepare(spec, spec.problem(torch.float16, torch.float16, device.type))
    )
    worst = 0.0
    for begin, end in ((0, tokens - 1), (tokens - 1, tokens)):
        context = _step(device, [end - begin], [end])
        context.slots, context.page_table = slots[begin:end], pages[None]
        outputs = layer(qkv[begin:end], position[begin:end], cache, context)
        worst = max(worst, relative_error(outputs, expected[begin:end]))
    return worst


def _step(device: torch.device, new: list[int], lengths: list[int]) -> AttentionContext:
    """Create a step of ``new`` tokens of sequences of ``lengths``, those of one token first; it has no pages."""
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    return AttentionContext(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        page_table=torch.zeros(len(new), 1, dtype=torch.int32, device=device),
        num_decodes=new.count(1),
        query_start_list=starts,
        kv_len_list=lengths,
    )


def _expected_attention(qkv: Tensor, tables: RotaryTables, spec: AttentionSpec) -> Tensor:
    """Compute attention of qkv [T, (H + 2 Hkv) D] -> [T, H D] float32 with torch."""
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q, k, v = (part.unflatten(1, (-1, size)).float() for part in qkv.split([heads * size] + [kv_heads * size] * 2, 1))
    rotated = [_rotated(x, tables).transpose(0, 1) for x in (q, k)]
    keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (rotated[1], v.transpose(0, 1)))
    out = torch.nn.functional.scaled_dot_product_attention(rotated[0], keys, values, is_causal=True, scale=spec.scale)
    return out.transpose(0, 1).flatten(1)


def _rotated(x: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate x [T, H, R] float32 at positions 0 to T - 1, each half of a head with the other."""
    first, second = x.chunk(2, -1)
    c, s = tables.cosines[:, None], tables.sines[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def _lora(device: torch.device) -> float:
    """Adapters of several dtypes, parts and kinds, for some of the rows."""
    n, k, worst = 200, 700, 0.0
    segments = [(0, range(0, 40, 2)), (2, [1, 37]), (1, [5])]
    x, before = (torch.randn(40, size, device=device, dtype=torch.float16) for size in (k, n))
    bias = torch.randn(n, device=device)
    errors = []
    for name in ("triton", "torch"):
        rows = AdapterRows()
        rows.assign(segments)
        problem = LoraProblem(n, k, 3, 40, torch.float16, device.type)
        product = REGISTRIES["lora"].load(name).prepare(problem, rows, bias)
        generator = torch.Generator().manual_seed(0)
        for slot, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            parts = []
            for first, end, rank in ((0, 100, 20), (100, 150, 5)):
                a, b, extra = (torch.randn(s, generator=generator) / 10 for s in ((rank, k), (end - first, rank), 100))
                extra = extra[: end - first].to(device)
                given = (extra, extra) if slot == 0 else (None, None)
                parts.append(LoraPart(first, 2.0, a.to(device, dtype), b.to(device, dtype), *given))
            product.load(slot, product.pack(parts))
        y = before.clone()
        product(x, y)
        worst = max(worst, float((y[3] - before[3]).abs().max()))  # a row without an adapter
        errors.append(y - before)
    return max(worst, relative_error(*errors))


def _convolution(device: torch.device) -> float:
    """Check a convolution with all its optional parts."""
    weight, bias = torch.randn(150, 4, device=device), torch.randn(150, device=device)
    spec = ConvolutionSpec(weight, bias, silu=True)
    x, before, after = (torch.randn(21, 150, device=device, dtype=torch.float16) for _ in range(3))
    return _with_states("convolution", spec, (x,), {"before": before, "after": after})


def _recurrence(device: torch.device) -> float:
    """Check all kinds of recurrence, token by token and in chunks, of which one saves a state within."""
    worst = 0.0
    for kind, steps in (("state_space", 4), ("delta_rule", 4), ("channel_delta_rule", 4 * 64)):
        a_log, skip, bias = *torch.randn(2, 4, device=device), torch.randn(steps, device=device)
        spec = RecurrenceSpec(kind, 4, 2, 64, 48, a_log - 2, bias - 2, skip=skip if kind == "state_space" else None)
        cases = (20, torch.float16), (75, torch.float16), (75, torch.bfloat16)
        for tokens, dtype in cases[:1] if spec.has_channel_steps else cases:
            rows = [torch.randn(1 + tokens, n, device=device, dtype=dtype) for n in (spec.width, spec.gates_width)]
            worst = max(worst, _with_states("recurrence", spec, tuple(rows), {}))
    return worst


def _selective_scan(device: torch.device) -> float:
    """Check a selective scan."""
    a_log, bias, skip = (torch.randn(*shape, device=device) for shape in ((150, 12), (150,), (150,)))
    widths = (150, 150, 12, 12, 150)
    rows = tuple(torch.randn(21, width, device=device, dtype=torch.float16) for width in widths)
    return _with_states("selective_scan", SelectiveScanSpec(a_log - 2, bias - 2, skip), rows, {})


def _with_states(
    operation: str,
    spec: ConvolutionSpec | RecurrenceSpec | SelectiveScanSpec,
    rows: tuple[Tensor, ...],
    factors: dict[str, Tensor],
) -> float:
    """Return the error of ``operation`` for rows of two sequences, of one token and of the others, and of the states
    that it saves.
    """
    device, outputs, last = rows[0].device, [], len(rows[0]) - 2
    states = torch.randn(5, *spec.state_shape, device=device)
    for name, dtype in (("triton", rows[0].dtype), ("torch", torch.float32)):
        layer = REGISTRIES[operation].load(name).prepare(spec, spec.problem(dtype, device.type))
        context, own = _step(device, [1, last + 1], [1, last + 11]), states.clone()
        context.states = StateContext([0, 1], [[(0, 2)], [(6, 3), (last, 4)]])
        y = layer(*(x.to(dtype) for x in rows), own, context, **{key: x.to(dtype) for key, x in factors.items()})
        outputs.append((y, own[2:]))
    return max(relative_error(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


def _gated_norm(device: torch.device) -> float:
    """Check grouped RMS norms, with the gate before and after, and with a sigmoid."""
    x, gate = (torch.randn(5, 300, device=device, dtype=torch.float16) for _ in range(2))
    weight, worst = torch.rand(300, device=device, dtype=torch.float16), 0.0
    for first, sigmoid in ((False, False), (True, False), (False, True)):
        ours, theirs = (
            REGISTRIES["gated_norm"]
            .load(name)
            .prepare(weight, 1e-5, GatedNormProblem(300, 100, first, dtype, device.type, sigmoid))
            for name, dtype in (("triton", torch.float16), ("torch", torch.float32))
        )
        worst = max(worst, relative_error(ours(x, gate), theirs(x.float(), gate.float())))
    return worst


def _sampling(device: torch.device) -> float:
    """Check masks over some rows of logits, and the most likely tokens of all rows with and without."""
    logits, rows = torch.randn(87, 5003, device=device), torch.tensor([3, 0], device=device)
    # The highest logits are odd and even ones of every register of a thread, and several in one row.
    peaks = torch.arange(87, device=device)
    logits[peaks, peaks * 57] = 9.0
    logits[2, 4500:] = 9.0
    bits = torch.randint(-(2**31), 2**31, (2, 157), dtype=torch.int64, device=device).int()
    answers = []
    for name in ("triton", "torch"):
        masked = logits.clone()
        sampler = REGISTRIES["sampling"].load(name).prepare(SamplingProblem(torch.float32, device.type))
        sampler.mask(masked, rows, bits)
        greedy = [sampler.greedy(logits, each, True) for each in (logits, masked)]
        # A token of another row or register is as wrong as one far away.
        tokens = torch.cat([found[0] for found in greedy])
        answers.append((masked.clamp(min=-100), tokens, torch.cat([found[2].float() for found in greedy])))
    (masked, tokens, numbers), (expected, expected_tokens, expected_numbers) = answers
    wrong = (tokens != expected_tokens).sum().item()
    return max(wrong, relative_error(masked, expected), relative_error(numbers, expected_numbers))


def _sorted_pairs(device: torch.device) -> float:
    """Check which pairs are in which blocks, for some of the experts and more pairs than a program reads at once."""
    from aiakq.kernels.triton.experts import sort_pairs

    selected = torch.randint(0, 5, (550, 2), device=device)
    blocks = sort_pairs(selected, 1, 3, 8)
    own = [(selected.flatten() == expert).nonzero().flatten() for expert in (1, 2, 3)]
    pairs = torch.cat([torch.nn.functional.pad(each, (0, -len(each) % 8), value=1100) for each in own])
    numbers = torch.full_like(blocks.experts, -1)
    numbers[: len(pairs) // 8] = torch.cat([torch.full((-(-len(each) // 8),), at) for at, each in enumerate(own)])
    found = torch.cat((blocks.pairs.flatten()[: len(pairs)], blocks.experts))
    return relative_error(found, torch.cat((pairs, numbers)))


def _experts(device: torch.device) -> float:
    """Check mixtures with weights of each kind: few and many tokens, and one with a share of the experts."""
    from aiakq.kernels.triton.activation import TritonActivation
    from aiakq.kernels.triton.experts import TritonExperts

    count, hidden, width, worst = 5, 192, 128, _sorted_pairs(device)
    schemes = [("w16", 16, 0), ("w4a16", 4, 64), ("lut4a16", 4, 32), ("w8a8", 8, 0)]
    if configs.gpu(device).capability >= SINCE["fp8 linear"]:
        schemes.append(("fp8a8", 8, 0))
    for scheme, bits, group in schemes:
        layers: list[list[LinearLayer]] = [[], []]
        exact: list[list[LinearLayer]] = [[], []]
        for number in range(2 * count):
            n, k = (2 * width, hidden) if number % 2 == 0 else (hidden, width)
            if scheme == "w16":
                floats = torch.randn(n, k, device=device) / k**0.5
                layer, reference = TorchDense(floats.half()), TorchDense(floats)
            else:
                if scheme == "fp8a8":
                    weight = fp8_of(n, k, k, InputRounding(), device)
                else:
                    weight = weight_of(scheme, bits, n, k, group or k, device)
                names = KERNELS.get(scheme, "triton"), "reference"
                layer, reference = (
                    REGISTRIES["linear"].load(name).prepare(weight, weight.problem(dtype, device.type))
                    for name, dtype in zip(names, (torch.float16, torch.float32), strict=True)
                )
            layers[number % 2].append(layer)
            exact[number % 2].append(reference)
        one_by_one = TorchExperts(ExpertLayers(exact[0], exact[1], TorchActivation(FUNCTIONS["silu"]), 1))
        problem = ExpertsProblem(torch.float16, device.type)
        kernel, act = REGISTRIES["experts"].load("triton"), TritonActivation("silu")
        for tokens in (1, 40):
            x = torch.randn(tokens, hidden, device=device, dtype=torch.float16)
            weights, selected = torch.rand(tokens, count, device=device).topk(2)
            routed = Routed(selected, weights, count)
            expected = one_by_one.mixture(x.float(), routed)
            shares = [
                kernel.prepare(ExpertLayers(layers[0][part], layers[1][part], act, 1, part.start), problem)
                for part in (slice(0, 3), slice(3, count))
            ]
            assert all(isinstance(share, TritonExperts) for share in shares)
            found = [share.weighted_sums(share.outputs(x, routed, zeros=False), routed, own=True) for share in shares]
            worst = max(worst, relative_error(found[0] + found[1], expected))
    return worst


def _gptq(device: torch.device, n: int = 20, length: int = 40, count: int = 24) -> float:
    """Check that errors of a block, and moves of a sweep, follow from the codes that were chosen, that these are the
    nearest ones, and that no range is better than the one found.

    Codes are not compared with those of another loop: where a weight lies in the middle between two, either is right.
    Of ``length`` columns, at most 128, ``count`` of n rows each are rounded.
    """
    from aiakq.kernels.triton import gptq

    make = torch.Generator().manual_seed(0)
    weight, old = torch.randn(2, length, n, generator=make).to(device)
    response = (torch.randn(length, length, generator=make) * 0.1 + torch.eye(length)).triu().to(device)
    scales = (torch.rand(-(-count // 16), n, generator=make) + 0.5).to(device) / 4
    zeros = torch.full_like(scales, 8)
    places, groups = list(range(count))[::-1], [i // 16 for i in range(count)]
    worst = 0.0
    for sweep in (False, True):
        block, values, codes = weight.clone(), old.clone(), torch.zeros(count, n, dtype=torch.uint8, device=device)
        more = {"values": values, "steps": [0.5] * count} if sweep else {}
        gptq.round_columns(block, response, 4, scales, zeros, codes, groups, places, **more)
        change = response[:count].double().T @ block[:count].double()
        own = response.diagonal()[:count, None].double() * block[:count].double()
        new = (codes.flip(0).double() - 8) * scales[groups]
        if sweep:
            targets = old[:count] + 0.5 * (weight[:count] - (change[:count] - own))
            rest = weight - change
            worst = max(worst, relative_error(old[:count] + block[:count], new), relative_error(values[:count], new))
        else:
            targets, rest = new + own, weight - change
            worst = max(worst, relative_error(new, rest[:count]))
        worst = max(worst, relative_error(block[count:], rest[count:]))
        nearest = ((targets / scales[groups]).round() + 8).clamp(0, 15)
        worst = max(worst, float((nearest != codes.flip(0)).float().mean()))
    cost = torch.rand(length, generator=make).to(device)
    found, _ = gptq.search(weight.T, 4, True, torch.float32, cost, (1.0, 0.7), 1e-30, signed=False)
    tried = [weight.abs().amax(0) * (2 * fraction / 15) for fraction in (1.0, 0.7)]
    losses = [
        (((weight / scale).round().clamp(-8, 7) * scale - weight).square() * cost[:, None]).sum(0)
        for scale in (found, *tried)
    ]
    return max(worst, float((losses[0] / torch.minimum(*losses[1:]) - 1).abs().max()))


#: Family -> its check, which returns the maximum error on a device.
FAMILIES: dict[str, Callable[[torch.device], float]] = {
    "weight-only linear": weight_only,
    "float linear": floats8,
    "4-bit float linear": floats4,
    "fp8 linear": fp8,
    "w8a8 linear": w8a8,
    "norm": _norm,
    "activation": _activation,
    "attention": _attention,
    "latent attention": _latent_attention,
    "convolution": _convolution,
    "recurrence": _recurrence,
    "selective scan": _selective_scan,
    "gated norm": _gated_norm,
    "sampling": _sampling,
    "LoRA": _lora,
    "experts": _experts,
    "GPTQ": _gptq,
}
