"""Options of ``aiakq compare``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import argument
from aiakq.arguments.common import device_argument


@dataclass(frozen=True, kw_only=True)
class ModelComparisonArguments:
    """Options of ``aiakq compare``."""

    models: tuple[str, ...] = argument(
        ...,
        "The models: folders, or hub names (org/name).",
        positional=True,
        metavar="MODEL...",
        separator="\0",
    )
    original: str | None = argument(
        None,
        "The model that all were quantized from, to compare predictions with.",
        flags=("--against", "--original"),
        metavar="MODEL",
    )
    text: tuple[str, ...] = argument(
        ("prose",),
        "Text to evaluate on: a file, or prose, dialogue or code for a bundled one. The first is shown.",
        metavar="FILE",
    )
    limit: int = argument(32768, "Maximum number of tokens of each text.", low=2)
    dtype: str = argument("float32", "Dtype of tensors that are not quantized, for predictions; auto: as for serve.")
    device: str = device_argument()
    speed: bool = argument(True, "Also measure tokens per second.")
    rounds: int = argument(3, "Measurements of the speed of each model, in turns; the median is shown.", low=1)
    input_len: int = argument(128, "Prompt tokens of a measurement.", low=1)
    output_len: int = argument(64, "Generated tokens of a measurement.", low=2)
    output: tuple[str, ...] = argument(
        (),
        "Also write the table to this file, which must end in .md, .html or .json.",
        flags=("--output", "-o"),
        metavar="FILE",
    )

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in self.output)
