"""Options of ``aiakq convert``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from aiakq.arguments.argument import argument
from aiakq.arguments.byte_size import shard_bytes
from aiakq.arguments.common import MODEL, revision_argument, shard_size_argument


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Options of ``aiakq convert``."""

    input: str = argument(
        ...,
        f"The quantized model: {MODEL}. With --to gguf also one in 16 bits.",
        positional=True,
        metavar="MODEL",
    )
    output: str = argument(
        ...,
        "Folder for the converted model; with --to gguf a file, like model-Q8_0.gguf.",
        positional=True,
        metavar="DIR",
    )
    to: str = argument(
        ...,
        "What to write: gptq, gptq_v2, awq, awq_gemv, awq_gemv_fast, compressed-tensors, fp8, gguf, or a format that a "
        "package adds; or fp16, bf16 or fp32 for dequantized weights.",
        metavar="FORMAT",
    )
    gguf_type: str = argument(
        "auto",
        "Type of a GGUF file, as llama.cpp names them: f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q2_k_s, "
        "q3_k_s, q3_k_m, q3_k_l, q4_k_s, q4_k_m, q5_k_s, q5_k_m, q6_k, iq4_nl or iq4_xs. auto keeps what the model "
        "has: floats in their dtype, quantized layers in blocks with the same numbers.",
        metavar="TYPE",
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
    max_shard_size: str | None = shard_size_argument()
    overwrite: bool = argument(False, "Replace the output folder if it exists.")
    revision: str | None = revision_argument()

    @property
    def max_shard_bytes(self) -> int | None:
        """``max_shard_size`` in bytes. Raises ``bad_option``."""
        return shard_bytes(self.max_shard_size)
