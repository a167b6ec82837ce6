"""Options of ``aiakq convert``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument
from aiakq.arguments.common import MODEL, revision_argument


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Options of ``aiakq convert``."""

    input: str = argument(..., f"The quantized model: {MODEL}.", positional=True, metavar="MODEL")
    output: str = argument(..., "Folder for the converted model.", positional=True, metavar="DIR")
    to: str = argument(
        ...,
        "What to write: gptq, gptq_v2, awq, awq_gemv, awq_gemv_fast, compressed-tensors, fp8, or a format that a "
        "package adds; or fp16, bf16 or fp32 for dequantized weights.",
        metavar="FORMAT",
    )
    lossy: bool = argument(
        False,
        "Also convert what the format cannot hold exactly: weights are rounded again, and the error of every layer is "
        "reported.",
    )
    bits: int | None = argument(
        None,
        "Bits per weight code; more than the source's change nothing, fewer need --lossy. If not given, the source's, "
        "or the next width that the format has.",
        choices=(2, 3, 4, 8),
        metavar="2|3|4|8",
        expected="2, 3, 4 or 8 bits",
    )
    group_size: int | None = argument(
        None,
        "Number of inputs that share a scale; one that divides the source's repeats its scales exactly. If not given, "
        "the source's, or a smaller one where the format has one size for all layers.",
        metavar="N",
    )
    overwrite: bool = argument(False, "Replace the output folder if it exists.")
    revision: str | None = revision_argument()
