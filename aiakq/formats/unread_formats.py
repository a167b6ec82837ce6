"""Formats that aiakq does not read, recognized by ``quant_method`` or by their tensors, to name them in the refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiakq import formats
from aiakq.formats.config_values import unsupported
from aiakq.spec import QuantSpec

if TYPE_CHECKING:  # safetensors_file imports torch, which the server's text processes do without
    from aiakq.formats.safetensors_file import TensorInfo

#: ``quant_method`` -> what such a checkpoint is.
METHODS = {
    "gptq_marlin_24": "its sparse weights are repacked for the Marlin kernel; use the checkpoint from before that",
    "bitblas": "its weights are repacked for BitBLAS; use the checkpoint from before that",
    "exl2": "its weights are packed for ExLlamaV2",
    "exl3": "its weights are packed for ExLlamaV3",
    "gptq_p": "its weights are cut into bit planes (gptq_p); export it as gptq or gptq_v2",
    "deepseek_v4_fp8": "FP8 weights with experts in FP4",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4, which is read for GPT-OSS only",
    "gpt_oss_mxfp4": "MXFP4, which is read for GPT-OSS only",
    "mxfp8": "MXFP8",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "fp_quant": "FP-Quant",
    "sinq": "SINQ",
    "paroquant": "ParoQuant",
    "quip": "QuIP#",
    "fouroversix": "NVFP4 of Four Over Six",
}

#: Factors by which AutoAWQ divides the outputs of an activation function; without effect if all are 1.
ACTIVATION_FACTORS = "act.scales"
#: Keys of configs without a ``quant_method`` -> the one that they imply.
KEYS = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "llm_int8_threshold"), "bitsandbytes"),
    **dict.fromkeys(("quant_algo", "producer", "modelopt_version"), "modelopt"),
    "global_quant_config": "quark",
    "quant_config": "hqq",
    "weight_quant_params": "hqq",
    "quant_type": "torchao",
    "config_for_layers": "vptq",
    "nbits_per_codebook": "aqlm",
    "tensor_storage": "exl3",
    "forward_dtype": "fp_quant",
    "activation_scheme": "fp8",
    "weight_block_size": "fp8",
    # Alone, as all the others have more.
    "group_size": "mlx",
}


#: Dtypes of 8-bit floats.
FLOAT8 = ("F8_E4M3", "F8_E5M2")


def check(inventory: Mapping[str, TensorInfo], config: Mapping[str, object], spec: QuantSpec | None) -> None:
    """Raise ``format_unsupported`` if some tensors of a checkpoint with this config.json are in a format that is not
    read; ``spec`` is what the config says of them.
    """
    named = of_tensors(inventory)
    if spec is None:
        named = named or without_config(inventory)
    else:
        named = named or formats.unreadable(spec.format, config, inventory)
    if named is not None:
        raise unsupported(named)


def without_config(inventory: Mapping[str, TensorInfo]) -> str | None:
    """Return what the tensors are that only a config explains, with one of their names, if there is no config."""
    for name, info in sorted(inventory.items()):
        module, _, last = name.rpartition(".")
        what = _OF_DTYPES.get(info.dtype) or _EXPLAINED.get(last)
        if info.dtype == "U8" and last.startswith("weight") and f"{module}.weight_scale" in inventory:
            what = "FP4 weights"
        # Scales of 4-bit floats are 8-bit floats or bytes.
        if what is not None and not last.startswith("weight_scale"):
            return f"{what}, without a quantization_config in config.json ({name:.200})"
    return None


#: Dtypes -> what only a config explains.
_OF_DTYPES = {**dict.fromkeys(FLOAT8, "FP8 weights"), "U32": "weights of MLX"}
#: Last parts of the names of tensors -> what only a config explains.
_EXPLAINED = {
    "SCB": "weights of bitsandbytes",
    "quant_map": "weights of bitsandbytes",
    "W_q": "weights of HQQ",
    "_data": "weights of optimum-quanto",
    "_weight_qdata": "weights of torchao",
}


def of_tensors(inventory: Mapping[str, TensorInfo]) -> str | None:
    """Return the format of tensors that no format of aiakq has, with one of their names, or None."""
    for name, info in sorted(inventory.items()):
        found = _of_tensor(name, info, inventory)
        if found is not None:
            return f"{found} ({name:.200})"
    return None


def _of_tensor(name: str, info: TensorInfo, inventory: Mapping[str, TensorInfo]) -> str | None:
    module, _, last = name.rpartition(".")
    if last == "weight":
        return _of_weight(module, info, inventory)
    if last == "weight_packed" and "embed" in module.rpartition(".")[2]:
        return "compressed-tensors with a quantized embedding"
    if name.startswith("layers.0.attention.wq."):
        return "Llama's and Mistral's own names of tensors (consolidated.*); use the files in Hugging Face's format"
    if last.endswith(":qdata"):
        return "torchao before version 0.15, whose tensors have other names; load the model with it, and save it again"
    if last.endswith("_qdata") and last != "_weight_qdata":
        return "torchao with quantized experts"
    if last.endswith("pre_quant_scale"):
        weight = inventory.get(f"{module}.weight")
        if last != "pre_quant_scale" or weight is None or weight.dtype != "U8":
            return "NVIDIA ModelOpt with pre_quant_scale beside weights that are not packed in bytes"
    if last.startswith("svdquant_lora"):
        return "NVIDIA ModelOpt with weights of low rank beside the quantized ones (NVFP4_SVD)"
    return None


def _of_weight(module: str, info: TensorInfo, inventory: Mapping[str, TensorInfo]) -> str | None:
    def holds(suffix: str) -> bool:
        return f"{module}.{suffix}" in inventory

    if holds("weight_scale_inv") and not info.dtype.startswith("F8"):
        return f"scales of FP8 beside weights in {info.dtype}"
    if info.dtype in ("I8", "U8", *FLOAT8) and holds("weight_scale") and "embed" in module.rpartition(".")[2]:
        return "compressed-tensors with a quantized embedding"
    return None
