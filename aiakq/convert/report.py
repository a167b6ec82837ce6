"""ConversionReport: what a conversion wrote, and how far every layer is from what was read."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from aiakq.system.memory import peak_memory_bytes


@dataclass(frozen=True)
class LayerConversion:
    """One converted linear [N, K].

    before, after   how it was stored, and how it is stored, in a phrase like ``w4a16 g128 sym``.
    relative_error  Frobenius norm of the difference of the weights, beside that of those that were read; 0 if every
                    weight is the same number, bit for bit.
    largest_error   largest difference of a weight.
    change          what was done to it that is not exact; empty if nothing was.
    """

    name: str
    n: int
    k: int
    before: str
    after: str
    relative_error: float = 0.0
    largest_error: float = 0.0
    change: str = ""


@dataclass
class ConversionReport:
    """The outcome of one ``aiakq convert``; ``bytes_before`` and ``bytes_after`` are those of all weights.

    source_format, source_scheme  how the input is stored.
    to, scheme                    how the output is stored; ``to`` is a format, or a dtype of floats.
    notes                         decisions made on the user's behalf, one sentence each.
    """

    input: str
    output: str
    source_format: str
    source_scheme: str
    method: str
    to: str
    scheme: str
    bytes_before: int = 0
    bytes_after: int = 0
    layers: list[LayerConversion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    version: str = ""

    @property
    def exact(self) -> bool:
        """Whether every weight is the number that was read, bit for bit, and is computed with in the same way."""
        return not any(layer.largest_error or layer.change for layer in self.layers)

    @property
    def worst(self) -> LayerConversion | None:
        """The layer with the largest relative error; None if none was rounded."""
        worst = max(self.layers, key=lambda layer: layer.relative_error, default=None)
        return worst if worst is not None and worst.relative_error else None

    @property
    def mean_error(self) -> float:
        """The mean of the relative errors of all layers."""
        return sum(layer.relative_error for layer in self.layers) / max(len(self.layers), 1)

    def record_cost(self, started_at: float) -> None:
        """Set the seconds since ``started_at``, a value of ``time.monotonic()``, and this process's peak memory."""
        self.seconds = round(time.monotonic() - started_at, 2)
        self.peak_memory_bytes = peak_memory_bytes()

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "exact": self.exact, "mean_error": self.mean_error}
