"""The values of --quantization that vLLM has, or had, and what each of them says about a checkpoint.

A value names the container of the weights (``quant_method`` in config.json), a kernel that computes them, or a
rounding of 16-bit weights while they are loaded. A container agrees with the checkpoints that have it, whether or not
aiakq reads them: a new format needs an entry here only if vLLM has further names for it. Names are compared without
regard to case, with underscores for dashes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_INT8, _FP8, _INT4 = "int8", "fp8", "int4"


@dataclass(frozen=True)
class QuantizationName:
    """What one value says.

    containers  values of ``quant_method``, as ``quantization_config.method_of`` returns them, of checkpoints that vLLM
                accepts with this value; empty for values that only round.
    rounding    how the weights of a 16-bit checkpoint are rounded while they are loaded, which comes closest to what
                vLLM does with this value: int8, fp8 or int4; None if vLLM refuses that.
    gone        whether vLLM 0.33 has the value no longer.
    """

    containers: tuple[str, ...] = ()
    rounding: str | None = None
    gone: bool = False


def _named(*containers: str, rounding: str | None = None, gone: bool = False) -> QuantizationName:
    return QuantizationName(containers, rounding, gone)


#: Value of --quantization -> what it says. vLLM 0.2 to 0.33.
NAMES: Mapping[str, QuantizationName] = {
    # --- containers that aiakq reads, and kernels that compute them -------------------------------------------------
    "gptq": _named("gptq"),
    "auto_gptq": _named("gptq"),
    "gptq_marlin": _named("gptq"),
    "gptq_bitblas": _named("gptq", gone=True),
    "awq": _named("awq"),
    "auto_awq": _named("awq"),
    "awq_marlin": _named("awq"),
    "marlin": _named("marlin", "gptq", "awq", gone=True),
    "ipex": _named("gptq", "awq", gone=True),
    "cpu_gptq": _named("gptq", gone=True),
    "cpu_awq": _named("awq", gone=True),
    "moe_wna16": _named("gptq", "awq"),
    "compressed_tensors": _named("compressed-tensors"),
    "sparseml": _named("compressed-tensors", gone=True),
    "auto_round": _named("auto-round", gone=True),
    "inc": _named("auto-round"),
    "humming": _named(
        *("gptq", "awq", "compressed-tensors", "auto-round", "fp8", "modelopt", "mxfp4", "mxfp8"), rounding=_INT8
    ),
    # --- other containers -------------------------------------------------------------------------------------------
    "mxfp4": _named("mxfp4", rounding=_INT4),
    "gpt_oss_mxfp4": _named("mxfp4"),
    "fp8": _named("fp8", rounding=_FP8),
    "fbgemm_fp8": _named("fbgemm_fp8"),
    "deepseek_v4_fp8": _named("deepseek_v4_fp8", "fp8"),
    "modelopt": _named("modelopt"),
    "modelopt_fp4": _named("modelopt_fp4", "modelopt", "nvfp4"),
    "modelopt_mxfp8": _named("modelopt_mxfp8", "modelopt", "mxfp8"),
    "modelopt_mixed": _named("modelopt_mixed", "modelopt"),
    "nvfp4": _named("modelopt_fp4", "modelopt", "nvfp4", gone=True),
    "petit_nvfp4": _named("modelopt_fp4", "modelopt", "nvfp4", gone=True),
    "mxfp8": _named("mxfp8", "modelopt_mxfp8", rounding=_FP8),
    "fp_quant": _named("fp_quant"),
    "quark": _named("quark"),
    "torchao": _named("torchao", rounding=_INT8),
    "bitsandbytes": _named("bitsandbytes", rounding=_INT4, gone=True),
    "gguf": _named("gguf", gone=True),
    "hqq": _named("hqq", gone=True),
    "qqq": _named("qqq", gone=True),
    "aqlm": _named("aqlm", gone=True),
    "squeezellm": _named("squeezellm", gone=True),
    "bitblas": _named("bitblas", gone=True),
    "gptq_marlin_24": _named("gptq_marlin_24", gone=True),
    # --- rounding while loading -------------------------------------------------------------------------------------
    "deepspeedfp": _named(rounding=_FP8, gone=True),
    "experts_int8": _named(rounding=_INT8),
    "tpu_int8": _named(rounding=_INT8, gone=True),
    "neuron_quant": _named(rounding=_INT8, gone=True),
    "ptpc_fp8": _named(rounding=_FP8, gone=True),
    "rtn": _named(rounding=_INT8, gone=True),
    "online": _named(rounding=_FP8),
    "fp8_per_tensor": _named(rounding=_FP8),
    "fp8_per_block": _named(rounding=_FP8),
    "fp8_per_channel": _named(rounding=_FP8),
    "int8_per_channel_weight_only": _named(rounding=_INT8),
    "nvfp4_per_token": _named(rounding=_INT4),
    # The name of AIAK. Its other methods need calibration, and are names of checkpoints only.
    "weight_only_int8": _named(rounding=_INT8),
    # Names of this program.
    "int8": _named(rounding=_INT8),
    "int4": _named(rounding=_INT4),
}


def find(name: str) -> QuantizationName | None:
    """Return what ``name`` says in vLLM; None if vLLM never had it."""
    return NAMES.get(name.strip().lower().replace("-", "_"))
