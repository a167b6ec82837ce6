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
        self._gap = dict.fromkeys(linears, 0.0)
        self._whole = dict.fromkeys(linears, 0.0)
        self._given: dict[str, Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> OutputErrors:
        for name, linear in self.linears.items():
            # Before the hook that rounds activations, because the original must see unrounded inputs.
            self._hooks.enter_context(linear.register_forward_pre_hook(self._before(name), prepend=True))
            self._hooks.enter_context(linear.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *problem: object) -> None:
        self._hooks.close()

    def errors(self) -> dict[str, float]:
        """Return ``||y_q - y|| / ||y||`` without bias, by name; linears with only zero outputs are left out."""
        return {name: (self._gap[name] / whole) ** 0.5 for name, whole in self._whole.items() if whole > 0}

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._given[name] = args[0]
            self.sizes[name] = max(self.sizes.get(name, 0.0), largest(args[0]))

        return note

    def _after(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def compare(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            wanted = nn.functional.linear(self._given.pop(name), self.originals[name])
            bias = self.linears[name].bias
            gap = total(((output if bias is None else output - bias) - wanted).square())
            whole = total(wanted.square())
            if gap < float("inf") and whole < float("inf"):
                self._gap[name] += gap
                self._whole[name] += whole

        return compare
