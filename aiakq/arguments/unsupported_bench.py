"""Options of vLLM's benchmarks that aiakq's have under another name or not at all, see unsupported.py."""

from __future__ import annotations

from aiakq.arguments.unsupported_newer import no_effect, no_effect_switch, refused, refused_switch
from aiakq.arguments.unsupported_row import Unsupported

_SAMPLING = """--extra-body '{"temperature": 0.5}' sends it"""
_RESULT = "--output FILE writes the result"
_NO_WORKLOAD = "--workload lists the sources of requests"
_PROFILING = "there are no routes for profiling"
_NO_BEAMS = "there is no beam search"

_ALL: tuple[Unsupported, ...] = (
    *no_effect_switch("progress is shown where there is a terminal", "disable_tqdm"),
    *refused_switch(_PROFILING, "profile"),
    *refused(_PROFILING, "profile_result_dir"),
    *refused_switch(_NO_BEAMS, "use_beam_search"),
    *refused("a request has one sequence", "n =1", "best_of =1"),
    *refused("--workload selects the source of requests", "dataset_name =random"),
    *no_effect_switch("tokens are always detokenized", "disable_detokenize"),
)
_DATA: tuple[Unsupported, ...] = (
    *refused(
        _NO_WORKLOAD,
        "hf_subset",
        "hf_split",
        "hf_name",
        "custom_output_len =256",
        "asr_min_audio_len_sec",
        "asr_max_audio_len_sec",
        "prefix_repetition_suffix_len =256",
    ),
    *refused_switch(_NO_WORKLOAD, "enable_multimodal_chat", "no_oversample"),
    *refused("the lengths of a random prompt are fixed", "random_range_ratio =0.0|0|1.0"),
    *refused("--workload prefix with --prefix-len shares prefixes", "random_prefix_len =0"),
)
SERVE: tuple[Unsupported, ...] = (
    *_ALL,
    *_DATA,
    *refused("--endpoint selects the route", "backend =openai|vllm"),
    *refused(_RESULT, "result_dir", "result_filename", "label"),
    *refused_switch(_RESULT, "save_result", "append_result"),
    *refused("the result names model, machine and settings", "metadata", many=True),
    *no_effect("the result has all metrics, and the percentiles 50, 90, 95 and 99", "percentile_metrics"),
    *no_effect("the result has all metrics, and the percentiles 50, 90, 95 and 99", "metric_percentiles =99"),
    *refused(
        _SAMPLING,
        "logprobs",
        "top_p",
        "top_k",
        "min_p",
        "temperature",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "chat_template_kwargs",
    ),
    *refused("only --api-key sends a header", "header", many=True),
    *refused("there are no requests beside the load", "probe_request_rate =0.0|0"),
    *refused("--workload trace replays a trace", "timed_trace_chunk_hash_size", "timed_trace_sec_multiplier"),
    *refused("--workload trace replays a trace", "timed_trace_label_timestamp", "timed_trace_label_input_length"),
    *refused("--workload trace replays a trace", "timed_trace_label_output_length", "timed_trace_label_hash_ids"),
    *refused_switch("--workload trace replays a trace", "self_timed"),
    *no_effect("ids of requests are random", "request_id_prefix"),
    *refused("--model is the name in requests", "served_model_name"),
    *refused("--adapter names the adapters of requests", "lora_modules", many=True),
    *refused("--adapter names the adapters of requests", "lora_assignment =random"),
    *no_effect("the server must be ready", "ready_check_timeout_sec =0"),
    *refused_switch("certificates are always verified", "insecure"),
    *no_effect_switch("--html FILE writes charts", "plot_timeline", "plot_dataset_stats"),
    *no_effect("--html FILE writes charts", "timeline_itl_thresholds =25,50"),
    *refused_switch(
        _NO_WORKLOAD,
        "no_stream",
        "skip_chat_template",
        "disable_shuffle",
        "custom_ensure_client_side_data",
        "no_reranker",
    ),
    *refused(
        _NO_WORKLOAD,
        "spec_bench_output_len =256",
        "spec_bench_category",
        "sharegpt_output_len",
        "blazedit_min_distance =0.0",
        "blazedit_max_distance =1.0",
        "hf_output_len",
        "bfcl_categories",
        "speed_bench_dataset_subset =qualitative",
        "speed_bench_output_len =4096",
        "speed_bench_category",
        "random_batch_size =1",
        "random_mm_base_items_per_request =1",
        "random_mm_num_mm_items_range_ratio =0.0",
        "random_mm_limit_mm_per_prompt",
        "random_mm_bucket_config",
        "sonnet_input_len =550",
        "sonnet_output_len =150",
        "sonnet_prefix_len =200",
    ),
)
THROUGHPUT: tuple[Unsupported, ...] = (
    *_ALL,
    *_DATA,
    *refused("aiakq's own engine is measured", "backend =vllm", "hf_max_batch_size"),
    *refused_switch("aiakq's own engine is measured", "hf_enable_torch_compile"),
    *no_effect_switch("the engine is called directly", "async_engine", "prequeue_requests"),
    *refused("requests have no adapter", "lora_path", "lora_assignment =random"),
)
LATENCY: tuple[Unsupported, ...] = _ALL
