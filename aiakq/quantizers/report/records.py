"""QuantizeReport: options, sizes, errors per layer and quality of a run."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS
from aiakq.quantizers.model.experts import ExpertTokens
from aiakq.quantizers.options import QuantizeOptions
from aiakq.system.memory import peak_memory_bytes


@dataclass
class LayerResult:
    """The result for one linear.

    error      output error on calibration inputs, ``||y_q - y|| / ||y||``, without bias; None if not measured.
    weight_*   largest magnitude of its weight in the source, and of the written weight.
    input_*    largest magnitude of its calibration inputs, before and after scales were folded into the layer before.
    remarks    how the quantization parameters were chosen, by name.
    """

    name: str
    error: float | None
    n: int = 0
    k: int = 0
    bits: int = 0
    group_size: int = -1
    weight_before: float | None = None
    weight_after: float | None = None
    input_before: float | None = None
    input_after: float | None = None
    remarks: dict[str, float | str] = field(default_factory=dict)


@dataclass
class QuantizeReport:
    """The outcome of one ``aiakq quantize``.

    bits_per_weight     from the bytes of the quantized linears' tensors, including scales and zero points.
    bytes_before/after  of all weights of the model.
    kl, top1_agreement  relative to the source: nats per token; fraction of tokens with the same most likely successor.
    verified            number of linears read back from disk and compared bit for bit.
    resumed_from        number of steps reused from an interrupted run.
    command             the command line that created it, None from Python; ``created`` is its time in UTC.
    recipe              the recipe that repeats the run (``--recipe``).
    predicts_text       whether the model predicts text, of which the quality is measured; encoders do not.
    not_in_*            why transformers, or vLLM, does not compute this model although it reads its format; "" if so.
    padded              MLP widths padded with zeros: key of config.json -> (before, after).
    tuned               outcome of ``--tune``; None without.
    lora                name of the folder of the LoRA adapter that was merged into the weights first.
    notes               decisions made on the user's behalf, one sentence each; not a cause for concern.
    perplexity_*        on ``evaluation_text``, the first of the texts; None if not measured.
    evaluations         figures of every text with intervals, as ``text_quality.comparison_document`` returns them.
    experts             calibration token counts of experts, block by block.
    calibration_lengths number of tokens of the shortest, the median and the longest of the ``samples``.
    images              how many of the samples have an image.
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
    layers: list[LayerResult] = field(default_factory=list)
    experts: list[ExpertTokens] = field(default_factory=list)
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    predicts_text: bool = True
    kl: float | None = None
    top1_agreement: float | None = None
    evaluation_text: str | None = None
    evaluation_tokens: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    calibration: str | None = None
    calibration_sha256: str | None = None
    calibration_lengths: tuple[int, int, int] | None = None
    samples: int = 0
    images: int = 0
    tokens: int = 0
    dropped_tokens: int = 0
    smooth_alpha: float | None = None
    seed: int = 0
    verified: int = 0
    resumed_from: int = 0
    peak_memory_bytes: int = 0
    seconds: float = 0.0
    version: str = ""
    created: str = ""
    command: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    not_in_transformers: str = ""
    not_in_vllm: str = ""
    padded: dict[str, tuple[int, int]] = field(default_factory=dict)
    tuned: dict[str, float] | None = None
    lora: str | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def mean_error(self) -> float | None:
        """Mean error over the layers for which it was measured."""
        errors = [layer.error for layer in self.layers if layer.error is not None]
        return sum(errors) / len(errors) if errors else None

    @property
    def worst(self) -> LayerResult | None:
        """The layer with the largest error."""
        measured = [layer for layer in self.layers if layer.error is not None]
        return max(measured, key=lambda layer: layer.error or 0.0, default=None)

    def record_cost(self, started_at: float) -> None:
        """Set the seconds since ``started_at``, a value of ``time.monotonic()``, and this process's peak memory."""
        self.seconds = round(time.monotonic() - started_at, 2)
        self.peak_memory_bytes = peak_memory_bytes()

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        worst = self.worst
        return {
            **asdict(self),
            "mean_error": self.mean_error,
            "worst_layer": None if worst is None else asdict(worst),
        }

    to_json = document


def command_line(options: QuantizeOptions, **instead: str) -> str:
    """Return the command line for these options; ``instead`` replaces the values of some."""
    words = ["aiakq", "quantize"]
    for row in QUANTIZE_ARGUMENTS:
        value = instead.get(row.name, getattr(options, row.name))
        if value == row.default:
            continue
        if isinstance(value, bool):
            words.append(row.flag if value else row.off_flag)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [row.flag, str(one)]
    return shlex.join(words)
