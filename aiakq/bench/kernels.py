"""``bench kernels``: measure each kernel on this device against its roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.arguments.bench import KernelArguments
from aiakq.bench.offline import Progress
from aiakq.bench.problem import Problem, Product, attention_of, products_of_model, sequences
from aiakq.bench.summary import geometric_mean
from aiakq.errors import error
from aiakq.records import Record, environment
from aiakq.spec import Float8, LayerSpec

if TYPE_CHECKING:
    from aiakq.bench.timing import Call
    from aiakq.runtime.config.engine import EngineConfig

#: The result of one measurement, by the names of its columns.
Row = dict[str, str | int | float]

#: Scheme name -> spec; --group-size sets the group size of schemes below 8 bits, but for those with a table.
SCHEMES = {
    "w16": None,
    "w8a8": LayerSpec(8, activation_bits=8),
    "fp8a16": LayerSpec(8, float8=Float8()),
    "w8a16": LayerSpec(8),
    "w6a16": LayerSpec(6),
    "w5a16": LayerSpec(5),
    "w4a16": LayerSpec(4),
    "mxfp4": LayerSpec(4, 32, table="e2m1"),
    "nf4": LayerSpec(4, 64, table="nf4"),
    "w3a16": LayerSpec(3),
    "w2a16": LayerSpec(2),
}

#: Schemes measured for --shape by default.
DEFAULT_SCHEMES = ("w16", "w4a16", "w8a16", "w8a8")


def check(options: KernelArguments) -> None:
    """Raise ``usage`` or ``bad_option`` for options that cannot be measured."""
    if options.model is None and not options.shapes:
        hint = "Example: aiakq bench kernels MODEL, or --shape 4096x4096"
        raise error("usage", reason="Neither a model nor a shape is given.", hint=hint)
    for name in options.schemes:
        if name not in SCHEMES:
            known = ", ".join(SCHEMES)
            raise error("bad_option", option="--scheme", value=name, expected=f"one of {known}", hint="4 bits: w4a16.")


def run(options: KernelArguments, progress: Progress) -> Record:
    """Time every kernel. Raises ``option_refused`` for --tune without a GPU, and the errors of reading the model."""
    import torch

    from aiakq.bench.timing import ceilings

    problem = _problem(options)
    device = problem.device
    config = asdict(options) | {"device": device.type, "dtype": str(problem.dtype).removeprefix("torch.")}
    written: Path | None = None
    if options.tune:
        if device.type != "cuda":
            reason = "CPU kernels have no launch configurations to tune"
            raise error("option_refused", option="--tune", reason=reason)
        from aiakq.bench.tuning import tune

        written = tune(problem, options.context, options.into, progress)
    progress("ceilings", 0, 1)
    with torch.inference_mode():
        problem.ceilings = ceilings(device, problem.dtype)
        measured = []
        jobs = [*_products(problem, options.rows), *_others(problem, options)]
        for number, job in enumerate(jobs):
            progress("measure", number, len(jobs))
            measured += job()
    progress("measure", len(jobs), len(jobs))
    notes = () if written is None else (f"launch configurations are in {written}",)
    found = environment(device.type, torch.get_num_threads())
    return Record("kernels", 0, config, metrics(problem.ceilings, measured), found, notes)


def metrics(ceilings: Mapping[str, float | None], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of the record; ``of_roofline`` is the geometric mean over all rows."""
    return {
        "ceilings": ceilings,
        "rows": rows,
        "of_roofline": geometric_mean([row["of_roofline"] for row in rows]),
    }


def template() -> dict[str, object]:
    """Return the document of a run without kernels, which has every key that a gate may name."""
    nothing = {"gbps": None, "float_tflops": None, "int8_tops": None}
    return Record("kernels", 0, {}, metrics(nothing, []), {}).document()


def _problem(options: KernelArguments) -> Problem:
    import torch

    from aiakq.runtime.config.device import DTYPES, pick_device
    from aiakq.runtime.config.engine import EngineConfig

    if options.model is None:
        device = pick_device(options.device)
        default = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = Problem(device, DTYPES.get(options.dtype, default), [])
    else:
        names = ("model", "dtype", "device", "kv_cache_dtype")
        config = EngineConfig.from_args({name: getattr(options, name) for name in names})
        problem = Problem(config.device.device, config.device.dtype, products_of_model(config), config)

    def of_scheme(name: str, n: int, k: int, scheme: str, count: int = 1) -> Product:
        spec = SCHEMES[scheme]
        if spec is not None and spec.bits < 8 and spec.table is None and k % options.group_size == 0:
            spec = replace(spec, group_size=options.group_size)
        return Product(name, n, k, spec, count)

    if options.schemes:
        problem.products = [
            of_scheme(p.name, p.n, p.k, scheme, p.count) for p in problem.products for scheme in options.schemes
        ]
    for n, k in options.shapes:
        problem.products += [of_scheme("layer", n, k, scheme) for scheme in options.schemes or DEFAULT_SCHEMES]
    return problem


def _row(problem: Problem, name: str, kind: str, m: int, us: float, moved: float, work: float, integers: bool) -> Row:
    """Return a row of the result for a call that moves ``moved`` bytes and executes ``work`` operations in ``us``.

    Its roofline is the larger of the times that either takes at the device's peak rate.
    """
    peak = problem.ceilings["int8_tops" if integers else "float_tflops"]
    roofline = max(moved / problem.ceilings["gbps"] / 1e3, work / peak / 1e6)
    return {
        "kernel": kind,
        "of": name,
        "rows": m,
        "us": round(us, 2),
        "gbps": round(moved / us / 1e3, 1),
        "tflops": round(work / us / 1e6, 3),
        "roofline_us": round(roofline, 2),
        "of_roofline": float(f"{roofline / us:.3g}"),  # significant digits keep it above 0 for geometric_mean
    }


def _products(problem: Problem, rows: Sequence[int]) -> Iterator[Callable[[], list[Row]]]:
    for product in problem.products:
        yield partial(_product, problem, product, rows)


def _product(problem: Problem, product: Product, rows: Sequence[int]) -> list[Row]:
    import torch

    from aiakq.bench import timing
    from aiakq.runtime.loader.dummy_weights import random_weight

    device, dtype, n, k, spec = problem.device, problem.dtype, product.n, product.k, product.spec
    generator = torch.Generator(device).manual_seed(0)
    ops = problem.ops()
    bits = 8 * dtype.itemsize if spec is None else spec.bits
    size = n * k * bits / 8

    def random_layer() -> Any:
        if spec is None:
            return ops.dense(torch.randn(n, k, dtype=dtype, device=device, generator=generator))
        return ops.linear(random_weight(spec, n, k, None, device, generator))

    layers = [random_layer() for _ in range(timing.copies(device, size))]
    implementation = next(iter(ops.bound)).selection.name
    groups = 0 if spec is None else n * (k // spec.group_size if spec.group_size > 0 else 1)
    found = []
    for m in rows:
        x = torch.randn(m, k, dtype=dtype, device=device)
        us = timing.microseconds([partial(layer, x) for layer in layers], device)
        moved = size + 4 * groups + m * (n + k) * dtype.itemsize
        # On a CPU, weight-only layers use integer arithmetic, too (--cpu-math fast).
        integers = spec is not None and (product.kind == "w8a8" or device.type == "cpu")
        row = _row(problem, f"{product.name} {n}x{k}", product.kind, m, us, moved, 2 * m * n * k, integers)
        found.append(row | {"implementation": implementation, "layers": product.count})
    return found


def _others(problem: Problem, options: KernelArguments) -> Iterator[Callable[[], list[Row]]]:
    """Yield the measurements of attention, norms and gated activations of the model, if there is one."""
    config = problem.config
    if config is None:
        return
    for m in options.rows:
        yield partial(_attention, problem, config, [(options.context - 1, 1)] * m, f"decode, {options.context} tokens")
    prefill_length = min(options.context, config.scheduler.max_num_batched_tokens)
    yield partial(_attention, problem, config, [(0, prefill_length)], "prefill")
    for m in options.rows:
        yield partial(_rows, problem, config, m)


def _attention(problem: Problem, config: EngineConfig, lengths: list[tuple[int, int]], name: str) -> list[Row]:
    from aiakq.bench import timing

    device, hf, ops = problem.device, config.model, problem.ops()
    query, cache, context = sequences(config, lengths, ops)
    call: Call = partial(ops.attention(attention_of(config)).attend, query, cache, context)
    us = timing.microseconds([call], device)
    num_pages = sum(-(-(old + new) // config.cache.block_size) for old, new in lengths)
    page_bytes = timing.nbytes(*cache) / len(cache[0]) * num_pages
    pairs = sum(new * old + new * (new + 1) / 2 for old, new in lengths)
    moved = page_bytes + 2 * timing.nbytes(query)
    work = 4 * pairs * hf.num_heads * hf.head_dim
    kind = f"attention {str(config.cache.dtype).removeprefix('torch.')}"
    row = _row(problem, name, kind, len(query), us, moved, work, False)
    return [row | {"implementation": next(iter(ops.selected("attention"))), "layers": hf.num_layers}]


def _rows(problem: Problem, config: EngineConfig, m: int) -> list[Row]:
    """Time norm and gated activation over M rows, whose roofline is memory bandwidth."""
    import torch

    from aiakq.bench import timing
    from aiakq.runtime.layers.activation import activation

    device, dtype, hf, ops = problem.device, problem.dtype, config.model, problem.ops()
    x, residual = (torch.randn(m, hf.hidden_size, dtype=dtype, device=device) for _ in range(2))
    both = torch.randn(m, 2 * hf.intermediate_size, dtype=dtype, device=device)
    norm = ops.rms_norm(torch.ones(hf.hidden_size, dtype=dtype, device=device), hf.norm_eps)
    act = activation(hf.activation, ops)
    found = []
    # The norm reads and writes x, reads the residual and writes the result.
    for name, operation, call, moved in (
        ("norm with residual", "norm", lambda: norm(x, residual), 4 * timing.nbytes(x)),
        ("gate", "activation", lambda: act.gated(both), 1.5 * timing.nbytes(both)),
    ):
        us = timing.microseconds([call], device)
        row = _row(problem, name, "rows", m, us, moved, 0, False)
        count = (2 if operation == "norm" else 1) * hf.num_layers
        found.append(row | {"implementation": next(iter(ops.selected(operation))), "layers": count})
    return found
