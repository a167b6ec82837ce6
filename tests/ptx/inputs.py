"""What kernels are run with on the emulator: the product's self-test, and sizes that it has no time for on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.triton import configs, self_test
from aiakq.kernels.triton.self_test import Verdict
from aiakq.kernels.types import NormProblem

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


#: More checks of a family, each with its worst error; see ``self_test.FAMILIES``.
MORE: dict[str, list[Callable[[], float]]] = {
    "norm": [_quantized_norm],
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
    compare = self_test._error

    def recorded(*tensors: torch.Tensor) -> float:
        found.append(compare(*tensors))
        return found[-1]

    self_test._error = recorded
    try:
        verdict = examine(family)
    finally:
        self_test._error = compare
    return found + [verdict.error] if verdict.failure is None else []
