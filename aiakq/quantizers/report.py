"""QuantizeReport: what was done, how big it is, how wrong it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from aiakq.quantizers.experts import ExpertTokens


@dataclass
class LayerError:
    """Relative error of one linear's output on calibration inputs: ``||y_q - y|| / ||y||``, without bias."""

    name: str
    error: float


@dataclass
class QuantizeReport:
    """The outcome of one ``aiakq quantize``.

    bits_per_weight     from the bytes of the quantized linears' tensors, scales and zero points included.
    bytes_before/after  of all weights of the model.
    kl, top1_agreement  against the source: nats per token; the part of tokens whose likeliest successor is the same.
    verified            linears that were read back from the disk and compared bit for bit.
    resumed_from        steps taken over from an interrupted run.
    perplexity_*        on ``evaluation_text``; None where it was not measured.
    experts             of mixture-of-experts models, block by block: the calibration tokens each one was given.
    tokens              calibration tokens used; ``dropped_tokens`` of them had inputs that were not finite.
    """

    input: str
    output: str
    method: str
    scheme: str
    format: str
    group_size: int
    symmetric: bool
    dtype: str
    tp: int
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    layers: list[LayerError] = field(default_factory=list)
    experts: list[ExpertTokens] = field(default_factory=list)
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    evaluation_text: str | None = None
    evaluation_tokens: int = 0
    calibration: str | None = None
    calibration_sha256: str | None = None
    tokens: int = 0
    dropped_tokens: int = 0
    smooth_alpha: float | None = None
    seed: int = 0
    verified: int = 0
    resumed_from: int = 0
    peak_memory_bytes: int = 0
    seconds: float = 0.0
    version: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float | None:
        """Mean over the layers whose error was measured."""
        return sum(layer.error for layer in self.layers) / len(self.layers) if self.layers else None

    @property
    def worst(self) -> LayerError | None:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: layer.error, default=None)

    def document(self) -> dict[str, Any]:
        """The report as JSON values."""
        worst = self.worst
        return {
            **asdict(self),
            "mean_error": self.mean_error,
            "worst_layer": None if worst is None else asdict(worst),
        }

    to_json = document
