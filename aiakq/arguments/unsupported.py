"""vLLM and AIAK arguments that do not apply to aiakq, accepted or refused so that existing scripts start.

A value that changes nothing (``defaults``) is accepted silently. Any other is accepted with a line that explains why it
has no effect or, if ignoring it would change results, refused. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.arguments.unsupported_newer import NEWER
from aiakq.arguments.unsupported_row import Unsupported
from aiakq.errors import error

_EXACT_DRAFTS = "a draft token is accepted only if it equals the sampled token, so that the output never changes"
_EMBEDDINGS_KEPT = "embeddings of images are kept, by their content, and not the pixels that they were computed from"
_IMAGES_OF_CONFIG = "the files of the model say how it reads images"
_NO_PROMPT_ADAPTERS = "prompt adapters are not supported"
_TEXT_PROCESS = "detokenization runs in the HTTP process, concurrently with the engine"

_OLDER: tuple[Unsupported, ...] = (
    # --- loading ------------------------------------------------------------------------------------------------
    Unsupported("code_revision", "code of a model is taken from the revision of the model", refused=True),
    Unsupported("max_parallel_loading_workers", "all ranks read their shards of the weights in parallel"),
    Unsupported("use_tqdm_on_load", "progress is shown where there is a terminal", (True,), switch=True),
    Unsupported(
        "qlora_adapter_name_or_path",
        "adapters are given by --lora-modules, also for models in bitsandbytes' formats",
        refused=True,
    ),
    Unsupported("override_neuron_config", "there are no kernels for Neuron devices", refused=True),
    Unsupported("additional_config", "no platform has extra settings", refused=True),
    Unsupported("disable_mm_preprocessor_cache", _EMBEDDINGS_KEPT, switch=True),
    Unsupported("mm_processor_cache_gb", _EMBEDDINGS_KEPT, (4,)),
    Unsupported("image_input_type", _IMAGES_OF_CONFIG),
    Unsupported("image_token_id", _IMAGES_OF_CONFIG),
    Unsupported("image_input_shape", _IMAGES_OF_CONFIG),
    Unsupported("image_feature_size", _IMAGES_OF_CONFIG),
    # --- several devices -----------------------------------------------------------------------------------------
    Unsupported("api_server_count", "one process serves HTTP, and another runs the engine", (1,), short="-asc"),
    Unsupported("disable_frontend_multiprocessing", "the engine always runs in its own process", switch=True),
    Unsupported("engine_use_ray", "the engine runs in its own process without Ray", switch=True),
    Unsupported("ray_workers_use_nsight", "it profiles GPUs, but ranks started by Ray run on CPUs", switch=True),
    Unsupported("enable_expert_parallel", "with -tp, experts are always distributed whole", switch=True, short="-ep"),
    Unsupported(
        "disable_custom_all_reduce",
        "GPUs reduce with NCCL, and processors in shared memory: there is no kernel of our own to disable",
        switch=True,
    ),
    Unsupported("worker_cls", "there are no plug-ins for workers", ("auto",), refused=True),
    Unsupported("worker_extension_cls", "there are no plug-ins for workers", refused=True),
    Unsupported("kv_transfer_config", "prefill and decoding are not disaggregated", refused=True),
    # --- memory and steps ----------------------------------------------------------------------------------------
    Unsupported("swap_space", "nothing is swapped: preempted requests are recomputed", (0, 4)),
    Unsupported("cpu_offload_gb", "weights stay in the memory of the compute device", (0, 0.0), refused=True),
    Unsupported("max_paddings", "prompts are not padded"),
    Unsupported("preemption_mode", "preempted requests are recomputed", ("recompute",), refused=True),
    Unsupported("use_v2_block_manager", "there is a single page manager", switch=True),
    Unsupported("disable_hybrid_kv_cache_manager", "pages of all layers are managed together", switch=True),
    Unsupported("disable_cascade_attn", "no kernel computes a common prefix separately", switch=True),
    Unsupported("prefix_caching_hash_algo", "pages are found by their BLAKE2b hash", ("sha256",)),
    Unsupported("enable_sleep_mode", "weights and pages stay where they are", refused=True, switch=True),
    Unsupported("quantization_param_path", "8-bit keys and values are scaled dynamically, a scale per token and head"),
    Unsupported(
        "calculate_kv_scales", "8-bit keys and values are scaled dynamically when they are written", switch=True
    ),
    Unsupported("num_scheduler_steps", "every step is scheduled; on a CPU it is one call", (1,)),
    Unsupported("multi_step_stream_outputs", "every step streams its outputs", (True,), switch=True),
    Unsupported("num_lookahead_slots", "pages for draft tokens are allocated in every step", (0,)),
    Unsupported("disable_async_output_proc", _TEXT_PROCESS, switch=True),
    Unsupported(
        "scheduler_cls", "there are no plug-ins for schedulers", ("vllm.core.scheduler.Scheduler",), refused=True
    ),
    # --- text ----------------------------------------------------------------------------------------------------
    Unsupported("tokenizer_pool_size", _TEXT_PROCESS, (0,)),
    Unsupported("tokenizer_pool_type", _TEXT_PROCESS, ("ray",)),
    Unsupported("tokenizer_pool_extra_config", _TEXT_PROCESS),
    Unsupported("guided_decoding_backend", "one library, llguidance, enforces every grammar", ("auto", "guidance")),
    Unsupported("guided_decoding_disable_fallback", "there is one library, and nothing to fall back to", switch=True),
    Unsupported("logits_processor_pattern", "a request that names Python functions could run anything", refused=True),
    Unsupported("exclude_tools_when_tool_choice_none", "they are always left out", switch=True),
    # --- adapters and drafts -------------------------------------------------------------------------------------
    Unsupported("enable_lora_bias", "a bias of B is always supported", switch=True),
    Unsupported("lora_extra_vocab_size", "adapters with additional tokens are refused", (256,)),
    Unsupported("long_lora_scaling_factors", "LongLoRA's context needs --rope-scaling for all requests", refused=True),
    Unsupported("fully_sharded_loras", "every rank has whole adapters", switch=True),
    Unsupported("enable_prompt_adapter", _NO_PROMPT_ADAPTERS, refused=True, switch=True),
    Unsupported("prompt_adapters", _NO_PROMPT_ADAPTERS, refused=True),
    Unsupported("max_prompt_adapters", _NO_PROMPT_ADAPTERS, (1,)),
    Unsupported("max_prompt_adapter_token", _NO_PROMPT_ADAPTERS, (0,)),
    Unsupported("max_cpu_prompt_adapters", _NO_PROMPT_ADAPTERS),
    Unsupported("prompt_adapter_dtype", _NO_PROMPT_ADAPTERS, ("auto",)),
    Unsupported(
        "speculative_draft_tensor_parallel_size", "the draft model runs on the first rank", (1,), short="-spec-draft-tp"
    ),
    Unsupported(
        "speculative_disable_mqa_scorer", "draft tokens are verified in the same step as other tokens", switch=True
    ),
    Unsupported("spec_decoding_acceptance_method", _EXACT_DRAFTS, ("rejection_sampler",), refused=True),
    Unsupported("typical_acceptance_sampler_posterior_threshold", _EXACT_DRAFTS),
    Unsupported("typical_acceptance_sampler_posterior_alpha", _EXACT_DRAFTS),
    Unsupported(
        "disable_logprobs_during_spec_decoding",
        "log-probabilities are the same with and without draft tokens",
        switch=True,
    ),
    # --- logs ----------------------------------------------------------------------------------------------------
    Unsupported("disable_log_requests", "requests are logged with --enable-log-requests only", switch=True),
    Unsupported("enable_server_load_tracking", "/load counts requests, always", switch=True),
    Unsupported("middleware", "there are no plug-ins for the server", refused=True),
    Unsupported("show_hidden_metrics_for_version", "no metric is hidden"),
)

UNSUPPORTED: tuple[Unsupported, ...] = (*_OLDER, *NEWER)
BY_NAME = {row.name: row for row in UNSUPPORTED}

_RANKS = "it holds vLLM's own tensors, cut for its ranks; give the folder it was made from, each rank reads its part"
#: (keyword, value of vLLM) -> why an argument that is supported cannot have it, and what replaces it.
REFUSED_VALUES = {
    ("load_format", "sharded_state"): _RANKS,
    ("load_format", "runai_streamer_sharded"): _RANKS,
    ("load_format", "tensorizer"): "such a file holds a pickled module; give the folder it was made from",
    ("tokenizer_mode", "custom"): "name the Python file that makes the tokenizer with --tokenizer-extension-path",
    ("tokenizer_mode", "deepseek_v32"): "messages are encoded by chat templates only; give one with --chat-template",
}


def refuse(given: Mapping[str, object], rows: Mapping[str, Unsupported] = BY_NAME) -> None:
    """Raise ``option_refused`` for the first argument that is not supported, or whose value is not."""
    for name, value in given.items():
        if isinstance(value, str) and (name, value) in REFUSED_VALUES:
            option = f"--{name.replace('_', '-')} {value}"
            raise error("option_refused", option=option, reason=REFUSED_VALUES[name, value])
        row = rows.get(name)
        if row is not None and row.refused and not row.is_default(value):
            option = row.flag if row.switch else f"{row.flag} {value}"
            raise error("option_refused", option=option, reason=row.reason)


def notices(given: Mapping[str, object], by_name: Mapping[str, Unsupported] = BY_NAME) -> list[str]:
    """Return a line for each argument that is accepted without an effect."""
    rows = [(by_name[name], value) for name, value in given.items() if name in by_name]
    return [
        f"{row.flag} does nothing here: {row.reason}."
        for row, value in rows
        if not row.refused and not row.is_default(value)
    ]
