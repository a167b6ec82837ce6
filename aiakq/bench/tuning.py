"""``bench kernels --tune``: find the fastest launch configuration of every Triton kernel, per number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from aiakq.bench import timing
from aiakq.bench.offline import Progress
from aiakq.bench.problem import Problem, Product, attention_of, sequences
from aiakq.kernels.ops import Ops
from aiakq.kernels.triton import DTYPES, attention, configs, linear, linear_fp8, linear_int8, tuning
from aiakq.kernels.triton.linear import GroupedLinear
from aiakq.kernels.triton.linear_int8 import Int8Linear
from aiakq.kernels.types import AttentionContext, LayerCache
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.dummy_weights import random_weight
from aiakq.spec import LayerSpec, QuantSpec

#: (kernel, bits).
Group = tuple[str, int]
#: (rows, configuration) -> microseconds; infinity if it cannot be compiled or launched.
Benchmark = Callable[[int, configs.Entry], float]


def tune(problem: Problem, context: int, into: Path | None, progress: Progress) -> Path:
    """Time every candidate on the quantized layers of ``problem`` and its model's attention over ``context`` tokens.

    Takes minutes. Returns the file written.
    """
    dtype, device, config = problem.dtype, problem.device, problem.config
    gpu = configs.gpu(device)
    groups: dict[Group, list[Callable[[], tuple[Benchmark, int]]]] = {}
    for product in problem.products:
        if product.spec is not None:
            create = partial(_product, product.spec, product, dtype, device)
            groups.setdefault(_group(product.spec), []).append(create)
    if config is not None and dtype in DTYPES:
        bits = 8 if config.cache.dtype.itemsize == 1 else 16
        for kernel in ("decode", "prefill"):
            groups[kernel, bits] = [partial(_attention, kernel, config, problem.ops(), context)]
    found: dict[str, dict[str, dict[str, configs.Entry]]] = {}
    total = sum(tuning.trials(kernel, m) for kernel, _ in groups for m in tuning.BUCKETS[kernel])
    done = 0
    with torch.inference_mode():
        for (kernel, bits), members in groups.items():
            benchmarks = [create() for create in members]

            def cost(m: int, entry: configs.Entry, benchmarks: list[tuple[Benchmark, int]] = benchmarks) -> float:
                nonlocal done
                done += 1
                progress("tune", done, total)
                return sum(count * benchmark(m, entry) for benchmark, count in benchmarks)

            found.setdefault(kernel, {})[str(bits)] = tuning.tuned(kernel, cost)
    return tuning.write(gpu, found, into or configs.users_folder())


def _product(
    spec: LayerSpec | QuantSpec, product: Product, dtype: torch.dtype, device: torch.device
) -> tuple[Benchmark, int]:
    return _LinearBenchmark(spec, product.n, product.k, dtype, device), product.count


def _attention(kernel: str, config: EngineConfig, ops: Ops, context: int) -> tuple[Benchmark, int]:
    return _AttentionBenchmark(kernel, config, ops, context), 1


def _group(spec: LayerSpec | QuantSpec) -> Group:
    if spec.activation_bits:
        return "integers" if spec.float8 is None else "fp8", 8
    return "grouped", linear.STORED_BITS[f"w{spec.bits}a16"]


class _LinearBenchmark:
    """Times one linear layer under a configuration, cycling through copies of its weight."""

    def __init__(self, spec: LayerSpec | QuantSpec, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        self._int8: list[Int8Linear] = []
        self._fp8: list[linear_fp8.Fp8Linear] = []
        self._grouped: list[GroupedLinear] = []
        for _ in range(timing.copies(device, n * k * spec.bits / 8)):
            weight = random_weight(spec, n, k, None, device, generator)
            problem = weight.problem(dtype, device.type)
            if spec.activation_bits and spec.float8 is not None:
                self._fp8.append(linear_fp8.prepare(weight, problem))
            elif spec.activation_bits:
                self._int8.append(linear_int8.prepare(weight, problem))
            else:
                self._grouped.append(linear.prepare(weight, problem))

    def __call__(self, m: int, entry: configs.Entry) -> float:
        return _microseconds(lambda: self._calls(m, entry), self.device)

    def _calls(self, m: int, entry: configs.Entry) -> list[Callable[[], object]]:
        x = torch.randn(m, self.k, dtype=self.dtype, device=self.device)
        steps = self._grouped[0].steps if self._grouped else self.k // linear_int8.step_of(self.k)
        config = configs.config_of(entry, self.device, self.n, steps, m)
        if self._grouped:
            return [partial(linear.run, x, layer, config) for layer in self._grouped]
        if self._fp8:
            rounded = linear_fp8.quantize(x, self._fp8[0].layout)
            return [partial(linear_fp8.multiply, rounded, layer, config) for layer in self._fp8]
        codes, scales = linear_int8.quantize(x, None)
        return [partial(linear_int8.multiply, codes, scales, layer, self.dtype, config) for layer in self._int8]


class _AttentionBenchmark:
    """Times attention of one layer under a configuration: decoding after ``context`` tokens, or prefill of a prompt."""

    def __init__(self, kernel: str, config: EngineConfig, ops: Ops, context: int) -> None:
        self.kernel, self.config, self.ops, self.context = kernel, config, ops, context
        self._inputs: tuple[int, list[tuple[Tensor, LayerCache, AttentionContext]]] = (0, [])

    def __call__(self, m: int, entry: configs.Entry) -> float:
        return _microseconds(lambda: self._calls(m, entry), self.ops.device)

    def _calls(self, m: int, entry: configs.Entry) -> list[Callable[[], object]]:
        if self._inputs[0] != m:
            self._inputs = 0, []
            lengths = [(0, m)]
            if self.kernel == "decode":
                lengths = [(self.context - 1, 1)] * max(1, m // self.config.model.num_kv_heads)
            first = sequences(self.config, lengths, self.ops)
            more = range(1, timing.copies(self.ops.device, timing.nbytes(*first[1])))
            others = [sequences(self.config, lengths, self.ops) for _ in more]
            self._inputs = m, [first, *others]
        launch = attention.decode if self.kernel == "decode" else attention.prefill
        width = max(16, 1 << (self.config.model.head_dim - 1).bit_length())
        config = configs.attention_config_of(entry, width)
        return [
            partial(launch, query, torch.empty_like(query), cache, context, attention_of(self.config), config)
            for query, cache, context in self._inputs[1]
        ]


def _microseconds(calls: Callable[[], list[Callable[[], object]]], device: torch.device) -> float:
    try:
        return timing.microseconds(calls(), device)
    except Exception:  # Triton, ptxas or the driver rejects it
        return float("inf")
