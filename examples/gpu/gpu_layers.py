"""Measurements of `make gpu` for layers that Llama does not have: latent attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from aiakq.bench.timing import microseconds
from aiakq.kernels.ops import REGISTRIES, Ops
from aiakq.kernels.ops.attention import as_bytes
from aiakq.kernels.recurrent_types import ConvolutionSpec, RecurrenceSpec, StateContext
from aiakq.kernels.triton import latent_attention
from aiakq.kernels.triton.attention_blocks import num_splits
from aiakq.kernels.triton.recurrence import TritonRecurrence, chunk_config, chunk_config_of
from aiakq.kernels.types import AttentionContext, AttentionSpec

#: DeepSeek V3's attention.
LATENTS = AttentionSpec(128, 1, 576, 0.1, value_dim=512, latent=True)
#: Kind, heads, heads of keys, sizes of keys and values: Qwen3-Next's, and Mamba 2's of 2.7 B parameters.
RECURRENCES = {"Qwen3-Next": ("delta_rule", 32, 16, 128, 128), "Mamba 2": ("state_space", 80, 1, 128, 64)}
PAGE = 16
#: Prompts: how many at once, and tokens of each.
PROMPTS = ((1, 2048), (8, 512))
#: Launches of recurrences in chunks that are compared, entries of kernels/triton/launch.
CHUNKS: tuple[list[int | str], ...] = (
    [64, 16, 3, 4, 4], [64, 32, 2, 4, 4], [64, 32, 3, 8, 8], [32, 32, 3, 4, 4], [32, 16, 3, 4, 4], [64, 64, 3, 4, 4],
    [32, 64, 3, 8, 4],
)  # fmt: skip


@dataclass
class Table:
    """Rows that are measured one after the other."""

    ceilings: dict[str, float]
    device: torch.device
    save: Callable[[dict[str, Any]], None]
    rows: list[dict[str, Any]]
    notes: dict[str, str]

    def add(
        self, case: str, title: str, call: Callable[[], object], moved: float, work: float = 0, optional: bool = False
    ) -> None:
        """Time ``call``, which moves and computes the given amounts, and may fail if it is ``optional`` or torch's."""
        least = max(moved / self.ceilings["gbps"] / 1e3, work / self.ceilings["float_tflops"] / 1e6)
        try:
            us = microseconds([call], self.device)
        except Exception as problem:
            if title != "torch" and not optional:
                raise
            self.notes[f"{case}, {title}"] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
            return
        self.rows.append({"case": case, "format": title, "us": us, "roofline_us": least, "reached": least / us})
        self.save(self.found())

    def found(self) -> dict[str, Any]:
        return {"rows": self.rows, "notes": self.notes}


def step(new: list[int], lengths: list[int], device: torch.device) -> AttentionContext:
    """A step that computes ``new`` tokens of sequences of ``lengths``, each on pages of its own and from no state."""
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    counts = [-(-length // PAGE) for length in lengths]
    pages = (torch.randperm(sum(counts)) + 1).to(torch.int32).split(counts)
    return AttentionContext(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        page_table=torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True).to(device),
        num_decodes=new.count(1) if max(new) == 1 else 0,
        query_start_list=starts,
        kv_len_list=lengths,
        states=StateContext([0] * len(new), [[(count - 1, s + 1)] for s, count in enumerate(new)]),
    )


def latents(
    table: Table,
    left: Callable[[], float],
    decoding: tuple = ((1, 8192), (16, 8192), (64, 2048)),
    prompts: tuple[int, ...] = (2048,),
    dtype: torch.dtype = torch.bfloat16,
    spec: AttentionSpec = LATENTS,
) -> dict[str, Any]:
    """Decoding over pages of latents in three types of cache, and prompts."""
    device = table.device
    cases = [(f"decode {batch} x {length}", [1] * batch, [length] * batch) for batch, length in decoding]
    cases += [(f"prompt {length}", [length], [length]) for length in prompts]
    for case, new, lengths in cases:
        for stored in (dtype, torch.int8, torch.float8_e4m3fn):
            if left() < 10:
                table.notes["not measured"] = f"from {case} on: no time left"
                return table.found()
            ops, context = Ops(device, dtype, stored), step(new, lengths, device)
            cache = ops.new_cache(spec, 1 + sum(-(-length // PAGE) for length in lengths), PAGE)
            as_bytes(cache[0]).random_(-100, 100) if stored != dtype else cache[0].normal_()
            for scales in cache[1:]:
                scales.fill_(1 / 64)
            query = torch.randn(sum(new), spec.num_heads, spec.head_dim, dtype=dtype, device=device)
            moved = sum(t.numel() * t.element_size() for t in cache) + 2 * query.numel() * query.element_size()
            pairs = sum(n * length - n * (n - 1) / 2 for n, length in zip(new, lengths, strict=True))
            work = 2 * pairs * spec.num_heads * (spec.head_dim + spec.value_dim)
            title = f"ours, {str(stored).removeprefix('torch.')}"
            table.add(case, title, partial(ops.attention(spec).attend, query, cache, context), moved, work)
            if stored == dtype and device.type == "cuda" and len(query) <= 16:
                module = REGISTRIES["attention"].load("torch")
                layer = module.prepare(spec, spec.problem(dtype, dtype, device.type))
                own = replace(context, plans={})
                table.add(case, "torch", partial(layer.attend, query, cache, own), moved, work)
            del cache, query
    return table.found()


def latent_splits(
    table: Table, left: Callable[[], float], decoding: tuple = ((1, 8192), (16, 8192), (64, 2048), (40, 3000))
) -> dict[str, Any]:
    """Decoding over 16-bit latents with other numbers of programs per multiprocessor, and other tiles."""
    device, spec, dtype = table.device, LATENTS, torch.bfloat16
    used = latent_attention.config_of(9, spec.num_heads, True, 16)
    for batch, length in decoding:
        context = step([1] * batch, [length] * batch, device)
        cache = (torch.randn(1 + batch * -(-length // PAGE), PAGE, 1, spec.head_dim, dtype=dtype, device=device),)
        query = torch.randn(batch, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
        out = torch.empty(batch, spec.num_heads, spec.value_dim, dtype=dtype, device=device)
        moved = 2.0 * (cache[0].numel() + query.numel() + out.numel())
        work = 2.0 * batch * length * spec.num_heads * (spec.head_dim + spec.value_dim)
        for config in (used, replace(used, tile=32)):
            for share in (1, 2, 3, 4):
                if left() < 10:
                    table.notes["not measured"] = f"from decode {batch} x {length}, {share} programs on: no time left"
                    return table.found()
                target = num_splits(device, batch, -(-spec.num_heads // config.heads), share)
                call = partial(latent_attention.decode, query, out, cache, context, spec, config, target)
                title = f"tile {config.tile}, {share} programs"
                table.add(f"decode {batch} x {length}", title, call, moved, work, optional=True)
    return table.found()


def recurrent(
    table: Table,
    left: Callable[[], float],
    batches: tuple[int, ...] = (1, 64),
    prompts: tuple[tuple[int, int], ...] = PROMPTS,
    dtype: torch.dtype = torch.bfloat16,
    models: dict[str, tuple[str, int, int, int, int]] = RECURRENCES,
) -> dict[str, Any]:
    """Convolution, recurrence and gated norm, each from states that are read once and written once."""
    device = table.device
    ops, element = Ops(device, dtype), dtype.itemsize
    for model, sizes in models.items():
        heads = torch.zeros(sizes[1], device=device)
        spec = RecurrenceSpec(*sizes, heads, heads, skip=heads if sizes[0] == "state_space" else None)
        weight = torch.randn(spec.width, 4, dtype=dtype, device=device)
        convolution = ConvolutionSpec(weight, silu=True)
        width = spec.num_heads * spec.value_dim
        norm = ops.gated_norm(torch.ones(width, device=device), spec.value_dim, 1e-6, gate_first=False)
        convolve, recur = ops.convolution(convolution), ops.recurrence(spec)
        gates = 2 if sizes[0] == "delta_rule" else 1
        for name, new in _cases(batches, prompts):
            if left() < 10:
                table.notes["not measured"] = f"from {model}, {name} on: no time left"
                return table.found()
            tokens, context = sum(new), step(new, new, device)
            x = torch.randn(tokens, spec.width, dtype=dtype, device=device)
            own = torch.randn(tokens, gates * spec.num_heads, dtype=dtype, device=device)
            y = torch.randn(tokens, width, dtype=dtype, device=device)
            rows = [torch.zeros(len(new) + 1, *each.state_shape, device=device) for each in (convolution, spec)]
            kept = [2 * 4 * each[1:].numel() for each in rows]
            case, moved = f"{model}, {name}", element * tokens * (spec.width + width)
            table.add(case, "convolution", partial(convolve, x, rows[0], context), 2 * element * x.numel() + kept[0])
            table.add(case, "recurrence", partial(recur, x, own, rows[1], context), moved + kept[1])
            table.add(case, "gated norm", partial(norm, y, y), 3 * element * y.numel())
    return table.found()


def _cases(batches: tuple[int, ...], prompts: tuple[tuple[int, int], ...]) -> list[tuple[str, list[int]]]:
    """Names and new tokens of decoding ``batches`` and of ``prompts``."""
    steps = [(f"decode {n}", [1] * n) for n in batches]
    return steps + [(f"prompt {count} x {n}", [n] * count) for count, n in prompts]


def chunked(
    table: Table,
    left: Callable[[], float],
    prompts: tuple[tuple[int, int], ...] = PROMPTS,
    dtype: torch.dtype = torch.bfloat16,
    models: dict[str, tuple[str, int, int, int, int]] = RECURRENCES,
    entries: tuple[list[int | str], ...] = CHUNKS,
) -> dict[str, Any]:
    """Recurrences of prompts token by token, in chunks, and each of both kernels; then with other launches."""
    device, element = table.device, dtype.itemsize
    for model, sizes in models.items():
        heads = torch.zeros(sizes[1], device=device)
        spec = RecurrenceSpec(*sizes, heads, heads, skip=heads if sizes[0] == "state_space" else None)
        used = chunk_config(spec, device, dtype)
        for name, new in _cases((), prompts):
            if left() < 15:
                table.notes["not measured"] = f"from {model}, {name} on: no time left"
                return table.found()
            tokens, context = sum(new), step(new, new, device)
            x = torch.randn(tokens, spec.width, dtype=dtype, device=device)
            gates = torch.randn(tokens, (2 if sizes[0] == "delta_rule" else 1) * sizes[1], dtype=dtype, device=device)
            y = torch.empty(tokens, spec.num_heads * spec.value_dim, dtype=dtype, device=device)
            states = torch.zeros(len(new) + 1, *spec.state_shape, device=device)
            moved = element * (x.numel() + y.numel()) + 8 * states[1:].numel()
            case, layer = f"{model}, {name}", TritonRecurrence(spec)
            by_token = partial(layer.by_token, x, gates, states, context, y, max(new))
            table.add(case, "token by token", by_token, moved)
            layers = {"in use": used} | {str(entry): chunk_config_of(entry, spec, dtype) for entry in entries}
            for title, config in layers.items():
                if title != "in use" and (config == used or left() < 10):
                    continue
                recur = partial(TritonRecurrence(spec, config), x, gates, states, context)
                table.add(case, f"chunks, {title}", recur, moved, optional=title != "in use")
            parts = layer.chunks(x, gates, context, used)
            table.add(case, "chunk_kernel", partial(layer.chunks, x, gates, context, used), moved)
            table.add(case, "scan_kernel", partial(layer.scan, x, *parts, states, context, y, used), moved)
    return table.found()
