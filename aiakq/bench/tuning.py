"""``bench kernels --tune``: the quickest launch configuration of every kernel and number of rows, on this GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from aiakq.bench import timing
from aiakq.bench.offline import Progress
from aiakq.kernels.triton import configs, linear, tuning, w8a8
from aiakq.kernels.types import QWeight
from aiakq.runtime.weights import random_weight
from aiakq.spec import LayerSpec, QuantSpec

#: (kernel, bits) -> layers of it and how many there are of each.
Group = tuple[str, int]


def tune(products: Sequence, dtype: torch.dtype, device: torch.device, into: Path | None, progress: Progress) -> Path:
    """Try every candidate on the quantized ``products`` (kernels.Product); returns the file. Takes minutes."""
    name, _ = configs.gpu(device)
    groups: dict[Group, list] = {}
    for product in products:
        if product.spec is not None:
            groups.setdefault(_group(product.spec), []).append(product)
    found: dict[str, dict[str, dict[str, tuning.Entry]]] = {}
    total = sum(len(tuning.candidates(kernel, m)) for kernel, _ in groups for m in tuning.BUCKETS)
    done = 0
    with torch.inference_mode():
        for (kernel, bits), members in groups.items():
            trials = [_Trial(product.spec, product.n, product.k, dtype, device) for product in members]
            counts = [product.count for product in members]

            def cost(m: int, entry: tuning.Entry, trials: list = trials, counts: list = counts) -> float:
                nonlocal done
                done += 1
                progress("tune", done, total)
                return sum(count * trial(m, entry) for trial, count in zip(trials, counts, strict=True))

            found.setdefault(kernel, {})[str(bits)] = tuning.tuned(kernel, cost)
    return tuning.write(name, found, into or configs.users_folder())


def _group(spec: LayerSpec | QuantSpec) -> Group:
    if spec.activation_bits:
        return "integers", 8
    return "grouped", linear.STORED_BITS[f"w{spec.bits}a16"]


class _Trial:
    """One layer, in as many copies as no cache holds, under any entry of a table."""

    def __init__(self, spec: LayerSpec, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        self._integers = bool(spec.activation_bits)
        module = w8a8 if self._integers else linear

        def made() -> object:
            weight: QWeight = random_weight(spec, n, k, None, device, draw)
            return module.prepare(weight, weight.problem(dtype, device))

        self.states = [made() for _ in range(timing.copies(device, n * k * spec.bits / 8))]

    def __call__(self, m: int, entry: tuning.Entry) -> float:
        """Microseconds for ``m`` rows; infinity where it cannot be compiled or launched."""
        try:
            return timing.microseconds(self._calls(m, entry), self.device)
        except Exception:  # whatever Triton, ptxas or the driver has against it
            return float("inf")

    def _calls(self, m: int, entry: tuning.Entry) -> list[Callable[[], object]]:
        x = torch.randn(m, self.k, dtype=self.dtype, device=self.device)
        steps = self.k // w8a8.step_of(self.k) if self._integers else self.states[0].steps  # type: ignore[attr-defined]
        config = configs.config_of(entry, self.device, self.n, steps, m)
        if self._integers:
            codes, scales = w8a8.quantize(x, None)
            return [partial(w8a8.multiply, codes, scales, state, self.dtype, config) for state in self.states]
        return [partial(linear.run, x, state, config) for state in self.states]
