"""OutputErrors: relative output error of quantized linears on calibration inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from aiakq.quantizers.numerics.magnitudes import largest
from aiakq.quantizers.numerics.sums import total


class OutputErrors:
    """Compares every output of ``linears`` with that of the original weight, name -> [N, K] float32, while entered.

    ``sizes`` (name -> float) records the largest magnitude of each linear's inputs.
    """

    def __init__(
        self, linears: Mapping[str, nn.Linear], originals: Mapping[str, Tensor], sizes: dict[str, float]
    ) -> None:
        self.linears, self.originals, self.sizes = linears, originals, sizes
        self._squared_errors = dict.fromkeys(linears, 0.0)
        self._squared_norms = dict.fromkeys(linears, 0.0)
        self._inputs: dict[str, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> OutputErrors:
        for name, linear in self.linears.items():
            # Before the hook that rounds activations, because the original must see unrounded inputs.
            self._hooks.enter_context(linear.register_forward_pre_hook(self._input_hook(name), prepend=True))
            self._hooks.enter_context(linear.register_forward_hook(self._output_hook(name)))
        return self

    def __exit__(self, *problem: object) -> None:
        self._hooks.close()

    def errors(self) -> dict[str, float]:
        """Return ``||y_q - y|| / ||y||`` without bias, by name; linears with only zero outputs are left out."""
        return {
            name: (self._squared_errors[name] / squared_norm) ** 0.5
            for name, squared_norm in self._squared_norms.items()
            if squared_norm > 0
        }

    def _input_hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inputs[name] = args[0]
            self.sizes[name] = max(self.sizes.get(name, 0.0), largest(args[0]))

        return hook

    def _output_hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: Tensor) -> None:
            expected = nn.functional.linear(self._inputs.pop(name), self.originals[name])
            bias = self.linears[name].bias
            squared_error = total(((output if bias is None else output - bias) - expected).square())
            squared_norm = total(expected.square())
            if squared_error < float("inf") and squared_norm < float("inf"):
                self._squared_errors[name] += squared_error
                self._squared_norms[name] += squared_norm

        return hook
