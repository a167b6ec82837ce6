"""The keys of ``quantization_config`` that aiakq knows; any other key with a value is refused by name.

A key is either *applied* by the format that reads the config, or known to be *harmless*: it records how the weights
were made, or tells another program how to run them, and does not change what the stored tensors mean. Some keys are
harmless only with certain values. A key without a value (null, false, an empty list) says nothing and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from aiakq.formats.config_values import (
    first_of,
    read_bits,
    read_flag,
    read_group_size,
    read_integer,
    read_object,
    says_nothing,
    unsupported,
)
from aiakq.spec import LayerSpec

#: Records of how codes and scales were chosen.
_SEARCH = frozenset(
    "act_group_aware act_order actorder adaptive_rounding amp apply_clip auto_clip auto_scale blocksize "
    "clip_percentile damp_auto_increment damp_percent duo_scaling enable_alg_ext enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input fail_safe failsafe failsafe_strategy fallback foem "
    "gptaq gptaq_alpha gptaq_memory_device gradient_accumulate_steps hessian hessian_chunk_size hyb_act "
    "iters lr max_calib_samples max_calib_seq_len minmax_lr mock_quantization model_free momentum mse "
    "not_use_best_mse nsamples observer observer_kwargs optimize_lm_head percdamp preprocessors sampler "
    "scale_search_chunked_activations seed static_groups true_sequential v2 v2_alpha v2_memory_device".split()
)
#: Calibration data.
_CALIBRATION = frozenset(
    "batch_size cache_block_outputs cache_examples_on_gpu calib_data calibration calibration_data_device "
    "dataset max_input_length model_seqlen pad_token_id seqlen text_column tokenizer".split()
)
#: Settings of the program that wrote the files, and of programs that load them.
_PROGRAM = frozenset(
    "auto_forward_data_parallel autoround_version awq_gemm_checkpoint backend compute_device_filter "
    "conversion_method dense_vram_strategy dense_vram_strategy_devices dequantize device disable_exllama "
    "do_fuse exllama_config export_compatible fuse_max_seq_len gc_mode low_cpu_mem_usage "
    "low_gpu_mem_usage model_file_base_name model_name_or_path modules_to_fuse moe moe_vram_strategy "
    "moe_vram_strategy_devices n_parallel_calib_samples offload_to_disk offload_to_disk_path pack_impl "
    "parallel_packing provider quantizer run_compressed telemetry uri use_cuda_fp16 use_exllama "
    "use_optimized_inference vram_strategy wait_for_submodule_finalizers".split()
)
#: Which modules are quantized: the stored tensors tell.
_MODULES = frozenset(
    "block_name_to_quantize ignore layers_in_block_to_quantize mixed_precision "
    "module_name_preceding_first_block modules_in_block_to_quantize modules_not_quantized "
    "modules_to_convert modules_to_not_convert quant_block_list quant_lm_head quant_nontext_module "
    "supported_types to_quant_block_names".split()
)
#: Facts about the stored tensors, whose dtypes and shapes are read from the files.
_FACTS = frozenset(
    "global_compression_ratio quantization_status scale_dtype source_dtype target_dtype weight_only zp_dtype".split()
)
#: The KV cache and attention, which aiakq computes in the precision that --kv-cache-dtype says.
_CACHE = frozenset(
    "kv_cache_scheme kv_cache_quant_algo static_attention_dtype static_attention_granularity static_kv_dtype "
    "static_kv_granularity".split()
)
#: bitsandbytes: the dtypes in which it computes and stores, and what it does while it loads weights.
_BITSANDBYTES = frozenset(
    "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_use_double_quant "
    "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight".split()
)
#: Without effect if activations are not quantized, which ``act_bits`` tells.
_ACTIVATIONS = frozenset("act_data_type act_dynamic act_group_size act_sym".split())
HARMLESS = _SEARCH | _CALIBRATION | _PROGRAM | _MODULES | _FACTS | _CACHE | _BITSANDBYTES | _ACTIVATIONS

_BITS = frozenset("bits w_bit wbits group_size q_group_size sym zero_point".split())
_NAMES = frozenset("quant_method method checkpoint_format format version meta desc_act lm_head dynamic".split())
_GPTQ = _BITS | _NAMES | {"is_marlin_format", "pack_dtype", "rotation"}
_MODELOPT = frozenset(
    "quant_method quant_algo quantization quantized_layers producer exclude_modules group_size config_groups "
    "has_zero_point pre_quant_scale".split()
)
#: ``quant_method`` -> the keys that its reader applies.
APPLIED: Mapping[str, Collection[str]] = {
    "gptq": _GPTQ,
    "awq": _BITS | _NAMES | {"is_marlin_format", "pack_dtype"},
    "auto-round": _GPTQ | {"packing_format", "extra_config"},
    "compressed-tensors": {
        "quant_method",
        "format",
        "version",
        "config_groups",
        "sparsity_config",
        "transform_config",
    },
    "mxfp4": {"quant_method"},
    "fp8": frozenset(
        "quant_method activation_scheme fmt expert_dtype scale_fmt weight_block_size ignored_layers".split()
    ),
    "bitsandbytes": frozenset(
        "quant_method load_in_4bit load_in_8bit llm_int8_threshold llm_int8_skip_modules bnb_4bit_quant_type".split()
    ),
    "hqq": {"quant_method", "quant_config", "skip_modules"},
    "fbgemm_fp8": {"quant_method", "activation_scale_ub"},
    "torchao": frozenset("quant_method quant_type include_input_output_embeddings untie_embedding_weights".split()),
    "gguf": {"quant_method", "blocks", "modules", "not_quantized"},
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), _MODELOPT),
}
#: Keys that ``layer_override`` applies.
OVERRIDE = _BITS | {"desc_act", "pack_dtype"}
#: Keys of the arguments of compressed-tensors for weights or activations, and of one config group.
ARGUMENTS = frozenset("num_bits type symmetric group_size strategy block_structure dynamic".split())
GROUP = frozenset("targets weights input_activations format".split())


def _unquantized(value: object) -> bool:
    return read_integer(value, "act_bits") >= 16


#: Key -> whether a value changes nothing.
_BY_VALUE: Mapping[str, Callable[[object], bool]] = {
    "act_bits": _unquantized,
    "data_type": lambda value: str(value).lower() in ("int", "int_sym", "int_asym"),
    "checkpoint_version": lambda value: str(value) == "1",
}
#: Keys that change the arithmetic in some program, looked for in ``meta`` too, whose other keys are records.
_NEVER_RECORDS = ("rotation", "activation", "adapter", "act_bits", "rotation_config", "transform_config", "had_dim")


def check_keys(config: Mapping[str, object], applied: Collection[str], where: str) -> None:
    """Raise ``format_unsupported`` for a key that is neither in ``applied`` nor harmless, naming it and ``where``."""
    for key, value in config.items():
        if key in applied or says_nothing(value):
            continue
        if key in _BY_VALUE:
            if not _BY_VALUE[key](value):
                raise unsupported(f"{where} has {key} {value!r:.60}, which aiakq does not compute")
        elif key not in HARMLESS:
            raise unsupported(f"{where} has {key!r:.60} ({value!r:.60}), which may change the arithmetic")
    _check_meta(config.get("meta"), where)


def _check_meta(meta: Any, where: str) -> None:
    for key in _NEVER_RECORDS if isinstance(meta, Mapping) else ():
        value = meta.get(key)
        if not says_nothing(value) and not (key in _BY_VALUE and _BY_VALUE[key](value)):
            raise unsupported(f"{where} has {key} {value!r:.60} in meta, which aiakq does not compute")


def _check_override(entry: Mapping[str, object]) -> None:
    """Check the values for one layer. The type of a layer that is not quantized does not matter."""
    bits = first_of(entry, "bits", "w_bit")
    floats = isinstance(bits, int) and bits >= 16
    check_keys(entry, OVERRIDE | {"data_type"} if floats else OVERRIDE, "the entry of a layer")


def layer_override(values: object, base: LayerSpec) -> LayerSpec | None:
    """Return ``base`` with the config's values for one layer; None if they are 16 bits or more, or the layer is off."""
    if values is False:
        return None
    entry = read_object(values, "the entry of a layer")
    _check_override(entry)
    bits = read_integer(first_of(entry, "bits", "w_bit", default=base.bits), "bits")
    if bits >= 16:
        return None
    size = first_of(entry, "group_size", "q_group_size", default=base.group_size)
    return replace(
        base,
        bits=read_bits(bits, "a layer"),
        group_size=read_group_size(size),
        symmetric=read_flag(first_of(entry, "sym", default=base.symmetric), "sym"),
    )
