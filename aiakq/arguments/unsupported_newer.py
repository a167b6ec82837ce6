"""Arguments of newer vLLM versions that do not apply to aiakq, see unsupported.py. Standard library only."""

from __future__ import annotations

from aiakq.arguments.unsupported_row import Unsupported


def no_effect(reason: str, *names: str, many: bool = False) -> tuple[Unsupported, ...]:
    """Return rows of options with values. ``name=value`` gives the default, which is accepted silently."""
    return tuple(_row(name, reason, many=many) for name in names)


def no_effect_switch(reason: str, *names: str) -> tuple[Unsupported, ...]:
    return tuple(_row(name, reason, switch=True) for name in names)


def refused(reason: str, *names: str, many: bool = False) -> tuple[Unsupported, ...]:
    return tuple(_row(name, reason, refused=True, many=many) for name in names)


def refused_switch(reason: str, *names: str) -> tuple[Unsupported, ...]:
    return tuple(_row(name, reason, refused=True, switch=True) for name in names)


def _row(name: str, reason: str, *, refused: bool = False, switch: bool = False, many: bool = False) -> Unsupported:
    """``name`` may be followed by its short flag and by ``=`` and defaults: ``nnodes -n =1``."""
    words = name.split()
    defaults: list[object] = []
    for word in words[1:]:
        if word.startswith("="):
            defaults += [True if value == "True" else value for value in word[1:].split("|")]
    short = next((word for word in words[1:] if word.startswith("-")), None)
    return Unsupported(words[0], reason, tuple(defaults), refused, switch, many, short)


_PILLOW = "Pillow reads images, as the files of the model say"
_ENCODER = "the encoder of images runs through transformers, whole, with eager attention"
_KERNELS = "the kernels of aiakq are selected when the model is loaded, and are listed in the start-up table"
_GRAPHS = "models are not compiled"
_ONE_NODE = "one server runs on one machine; on several, use --distributed-executor-backend ray"
_REPLICAS = "the server starts and balances all replicas of --data-parallel-size itself"
_EXPERTS = "with -tp, experts are always distributed whole"
_OVERLAP = "steps are not split into micro-batches"
_CONTEXT_PARALLEL = "every rank holds its heads of the whole context"
_NO_SLEEP = "weights and pages stay where they are"
_OFFLOADING = "KV cache pages and weights stay in the memory of the compute device"
_STATES = "states of recurrent layers are stored in float32, a snapshot per page"
_METRICS = "the metrics of docs/operations.md are always on"
_READING = "weights are memory-mapped, and read by all ranks in parallel"
_PROFILING = "there are no routes for profiling"
_PLUGINS = "there are no such plug-ins"
_DISAGGREGATED = "prefill and decoding are not disaggregated"

NEWER: tuple[Unsupported, ...] = (
    # --- loading ------------------------------------------------------------------------------------------------
    *no_effect(
        _READING,
        "safetensors_load_strategy =lazy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "pt_load_map_location =cpu",
    ),
    *no_effect_switch(_READING, "enable_ep_weight_filter"),
    *refused("quantize the model with aiakq quantize first", "quantization_config"),
    *no_effect_switch("no method is deprecated", "allow_deprecated_quantization"),
    *refused(_PLUGINS, "model_class_overrides", "io_processor_plugin"),
    *refused(_PLUGINS, "logits_processors", many=True),
    *refused("the weights of a running server do not change", "weight_transfer_config"),
    *refused("models with n-gram embeddings are not supported", "engram_config"),
    *refused("diffusion models are not supported", "diffusion_config -dc"),
    *no_effect_switch("there is no list of environment variables of vLLM", "fail_on_environ_validation"),
    # --- outputs ------------------------------------------------------------------------------------------------
    *refused_switch(
        "responses have no field for it",
        "enable_return_routed_experts",
        "return_sampling_mask",
        "enable_trace_replay",
    ),
    *refused("responses have no field for it", "aux_output_config", "per_request_spec_decode_metrics =none"),
    *no_effect_switch(
        "random numbers of sampling depend on the seed, the sequence and the position only", "use_fp64_gumbel"
    ),
    *refused_switch("prompts are text or token ids", "enable_prompt_embeds"),
    *refused("outputs have no watermark", "watermark_config"),
    *refused("--chat-template can rewrite the effort", "reasoning_effort_map"),
    *refused("a tool's own field strict decides", "tool_strict_level =auto"),
    *refused("the server runs no tools", "tool_server"),
    *refused("the field thinking of a request decides", "anthropic_disabled_thinking_effort =auto"),
    *no_effect_switch("there is no route of Cohere", "cohere_is_reasoning_model =True"),
    *no_effect("there is no route of Cohere", "cohere_format =cmd4|cmd3"),
    *no_effect("it is a hash of the model, its dtype and the version", "fingerprint_mode =full", "fingerprint_value"),
    *refused_switch("a template of a request could run for any time", "trust_request_chat_template"),
    *no_effect_switch("requests have no arguments of the image processor", "trust_request_mm_kwargs"),
    # --- several devices ----------------------------------------------------------------------------------------
    *refused(_ONE_NODE, "nnodes -n =1", "node_rank -r =0"),
    *refused_switch(_ONE_NODE, "headless"),
    *no_effect(_ONE_NODE, "master_addr =127.0.0.1", "master_port =29501"),
    *no_effect("--distributed-timeout-seconds applies to all groups", "cpu_distributed_timeout_seconds"),
    *no_effect_switch("ranks are bound to their NUMA nodes", "numa_bind"),
    *no_effect("ranks are bound to their NUMA nodes", "numa_bind_nodes", "numa_bind_cpus", many=True),
    *refused("the variable CUDA_VISIBLE_DEVICES selects GPUs", "device_ids"),
    *no_effect(
        _CONTEXT_PARALLEL,
        "decode_context_parallel_size -dcp =1",
        "prefill_context_parallel_size -pcp =1",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size =1",
        "cp_kv_cache_interleave_size =1",
    ),
    *no_effect_switch(_CONTEXT_PARALLEL, "dcp_q_replicate"),
    *refused(
        _REPLICAS,
        "data_parallel_rank -dpn",
        "data_parallel_start_rank -dpr",
        "data_parallel_size_local -dpl",
        "data_parallel_address -dpa",
        "data_parallel_rpc_port -dpp",
        "data_parallel_backend -dpb =mp",
    ),
    *refused_switch(_REPLICAS, "data_parallel_hybrid_lb -dph", "data_parallel_external_lb -dpe"),
    *refused_switch(_REPLICAS, "data_parallel_multi_port_external_lb -dpm"),
    *no_effect(
        _REPLICAS,
        "data_parallel_supervisor_port =9256",
        "dp_supervisor_probe_interval_s =5.0",
        "dp_supervisor_probe_timeout_s =5.0",
        "dp_supervisor_probe_failure_threshold =3",
        "dp_sync_interval =16",
    ),
    *no_effect_switch(_REPLICAS, "disable_nccl_for_dp_synchronization"),
    *no_effect_switch(
        "ranks share the work of a layer as --tensor-parallel-math says",
        "enable_hc_sp",
        "enable_batch_sharded_sampling",
        "enable_shm_tensor_arena",
        "enable_cumem_allocator",
    ),
    *no_effect(
        _EXPERTS,
        "all2all_backend =allgather_reducescatter",
        "eplb_config",
        "expert_placement_strategy =linear",
        "elastic_ep_max_dp_size",
    ),
    *no_effect_switch(_EXPERTS, "enable_eplb", "enable_elastic_ep"),
    *no_effect_switch(_OVERLAP, "enable_dbo"),
    *no_effect(_OVERLAP, "ubatch_size =0", "dbo_decode_token_threshold =32", "dbo_prefill_token_threshold =512"),
    *no_effect_switch("the server restarts an engine that ends, see --max-engine-restarts", "enable_fault_tolerance"),
    *no_effect("the server restarts an engine that ends, see --max-engine-restarts", "fault_tolerance_config"),
    *no_effect("--step-timeout watches the engine", "watchdog_config"),
    # --- memory and steps ---------------------------------------------------------------------------------------
    *no_effect(_NO_SLEEP, "sleep_mode_backend =cumem"),
    *no_effect_switch(_NO_SLEEP, "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"),
    *no_effect(_NO_SLEEP, "sleep_preserve_parameter_names", many=True),
    *no_effect(
        "all full pages are kept until memory is needed", "prefix_cache_retention_interval", "prefix_match_unit"
    ),
    *refused("--kv-cache-dtype applies to all layers", "kv_cache_dtype_skip_layers", many=True),
    *no_effect_switch("every layer computes all tokens of a prompt", "kv_sharing_fast_prefill"),
    *no_effect_switch("pages of all layers are cached together", "swa_bounded_replay =True"),
    *refused(_STATES, "mamba_cache_dtype =auto|float32", "mamba_ssm_cache_dtype =auto|float32"),
    *no_effect(_STATES, "mamba_block_size", "mamba_cache_mode =none", "replayssm_buffer_len =16"),
    *no_effect_switch(_STATES, "enable_mamba_shared_prefix_checkpoint", "use_replayssm"),
    *refused_switch(_STATES, "enable_mamba_cache_stochastic_rounding"),
    *no_effect(_STATES, "mamba_cache_philox_rounds =0"),
    *no_effect(
        _OFFLOADING,
        "kv_offloading_size",
        "kv_offloading_backend =native",
        "offload_backend =auto",
        "offload_group_size =0",
        "offload_num_in_group =1",
        "offload_prefetch_step =1",
    ),
    *no_effect(_OFFLOADING, "cpu_offload_params", "offload_params", many=True),
    *refused(_DISAGGREGATED, "kv_events_config", "ec_transfer_config"),
    *no_effect(_ENCODER, "ec_manager_config"),
    *no_effect("--max-num-batched-tokens limits the tokens of a step", "max_num_scheduled_tokens"),
    *no_effect("--max-num-seqs limits the sequences of a step", "max_num_active_seqs"),
    *no_effect_switch("--long-prefill-token-threshold is a fixed number", "long_prefill_token_threshold_adaptive"),
    *no_effect_switch(
        "a prompt gets pages for what is computed next, and is preempted when none are left",
        "scheduler_reserve_full_isl =True",
    ),
    *no_effect("a prompt gets pages for what is computed next, and is preempted when none are left", "watermark =0.0"),
    *no_effect("prompts are admitted in every step", "prefill_schedule_interval =1"),
    # --- kernels ------------------------------------------------------------------------------------------------
    *no_effect(
        _KERNELS,
        "attention_backend =auto",
        "attention_config -ac",
        "kernel_config",
        "mamba_backend =triton",
        "mamba_ssu_algorithm",
        "moe_backend =auto",
        "linear_backend =auto",
        "sparse_indexer_topk_backend =auto",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "kda_decode_backend",
        "ir_op_priority",
    ),
    *no_effect_switch(_KERNELS, "enable_flashinfer_autotune =True", "monokernel"),
    *no_effect(_GRAPHS, "performance_mode =balanced", "jit_monitor_mode =warn"),
    *no_effect_switch(_GRAPHS, "jit_monitor_verbose"),
    # --- images and sound ---------------------------------------------------------------------------------------
    *no_effect(_PILLOW, "mm_processor_device =auto"),
    *no_effect_switch(_PILLOW, "mm_device_do_normalize =True"),
    *no_effect(
        "embeddings of images are kept, by their content, and not the pixels that they were computed from",
        "mm_processor_cache_type =lru",
        "mm_shm_cache_max_object_size_mb =128",
    ),
    *no_effect("images are found by the BLAKE2b hash of their pixels", "mm_hasher_algorithm =blake3"),
    *no_effect(
        _ENCODER,
        "mm_encoder_tp_mode =weights",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_fp8_scale_save_margin =1.5",
    ),
    *no_effect("all tokens of a video are computed", "video_pruning_rate", "video_pruning_method =evs"),
    *no_effect("pixels are a part of the request", "mm_tensor_ipc =direct_rpc", "mm_ipc_gpu_memory_gb =0"),
    *no_effect("requests name their adapter", "default_mm_loras"),
    *no_effect_switch("prompts have images, not embeddings", "enable_mm_embeds"),
    *no_effect_switch("a placeholder is where the image is in the message, always", "interleave_mm_strings"),
    *no_effect_switch("no image is encoded at the start", "skip_mm_profiling"),
    *no_effect_switch("adapters change the language model only", "enable_tower_connector_lora"),
    *no_effect_switch("a chunk may end within an image, with the same result", "disable_chunked_mm_input"),
    *refused_switch("there are no separate encoders", "mm_encoder_only"),
    # --- adapters -----------------------------------------------------------------------------------------------
    *refused("an adapter changes the modules that its file names", "lora_target_modules", many=True),
    *no_effect_switch(
        "one kernel computes all adapters of a step", "specialize_active_lora", "enable_mixed_moe_lora_format"
    ),
    *refused_switch("adapters of experts have one pair of matrices per expert", "enable_moe_shared_loras"),
    *no_effect("adapters have no classification heads", "max_lora_cls_labels"),
    # --- logs and HTTP ------------------------------------------------------------------------------------------
    *no_effect("--uvicorn-log-level and --log-format set up the log", "logging_config", "log_level =info"),
    *no_effect_switch("--enable-log-outputs writes whole outputs", "enable_log_deltas =True"),
    *no_effect_switch("tracebacks of internal errors are always in the log", "log_error_stack"),
    *no_effect_switch(
        _METRICS, "kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics", "enable_logging_iteration_details"
    ),
    *no_effect(_METRICS, "kv_cache_metrics_sample =0.01", "custom_histogram_buckets"),
    *no_effect_switch("statistics are those of all engines together", "aggregate_engine_logging"),
    *no_effect(_PROFILING, "profiler_config"),
    *no_effect_switch(_PROFILING, "enable_layerwise_nvtx_tracing"),
    *no_effect("one process renders templates and tokenizes, with several threads", "renderer_num_workers =1"),
    *refused_switch("the server speaks HTTP only", "grpc"),
    *refused("the server speaks HTTP only", "grpc_port"),
    *refused_switch("there are no such routes", "tokens_only", "enable_scale_out"),
    *no_effect(
        "headers have fixed limits, and --max-body-bytes limits bodies",
        "h11_max_incomplete_event_size",
        "h11_max_header_count",
    ),
    *no_effect_switch(
        "/docs needs no network, and is served unless --disable-fastapi-docs is given",
        "enable_offline_docs",
        "enable_fastapi_docs",
    ),
    *no_effect_switch("scores are computed from single vectors", "enable_flash_late_interaction =True"),
)
