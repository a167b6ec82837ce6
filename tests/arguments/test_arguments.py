"""The tables of arguments are complete, values are parsed and checked, and every row that works has a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiakq import LLM, SamplingParams
from aiakq.arguments.argument import parse_number
from aiakq.arguments.renamed import RENAMED
from aiakq.arguments.server import ARGUMENTS, checked
from aiakq.arguments.unsupported import UNSUPPORTED
from aiakq.errors import AiakqError

TESTS = Path(__file__).parents[1]

#: vLLM 0.7.3's EngineArgs, all of them.
VLLM_073 = """
model served_model_name tokenizer hf_config_path task skip_tokenizer_init tokenizer_mode trust_remote_code
allowed_local_media_path download_dir load_format config_format dtype kv_cache_dtype seed max_model_len
distributed_executor_backend pipeline_parallel_size tensor_parallel_size enable_expert_parallel
max_parallel_loading_workers block_size enable_prefix_caching disable_sliding_window use_v2_block_manager swap_space
cpu_offload_gb gpu_memory_utilization max_num_batched_tokens max_num_partial_prefills max_long_partial_prefills
long_prefill_token_threshold max_num_seqs max_logprobs disable_log_stats revision code_revision rope_scaling rope_theta
hf_overrides tokenizer_revision quantization enforce_eager max_seq_len_to_capture disable_custom_all_reduce
tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config limit_mm_per_prompt mm_processor_kwargs
disable_mm_preprocessor_cache enable_lora enable_lora_bias max_loras max_lora_rank enable_prompt_adapter
max_prompt_adapters max_prompt_adapter_token fully_sharded_loras lora_extra_vocab_size long_lora_scaling_factors
lora_dtype max_cpu_loras device num_scheduler_steps multi_step_stream_outputs ray_workers_use_nsight
num_gpu_blocks_override num_lookahead_slots model_loader_extra_config ignore_patterns preemption_mode
scheduler_delay_factor enable_chunked_prefill guided_decoding_backend logits_processor_pattern speculative_model
speculative_model_quantization speculative_draft_tensor_parallel_size num_speculative_tokens
speculative_disable_mqa_scorer speculative_max_model_len speculative_disable_by_batch_size ngram_prompt_lookup_max
ngram_prompt_lookup_min spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
typical_acceptance_sampler_posterior_alpha qlora_adapter_name_or_path disable_logprobs_during_spec_decoding
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces disable_async_output_proc
scheduling_policy scheduler_cls override_neuron_config override_pooler_config compilation_config worker_cls
worker_extension_cls kv_transfer_config generation_config override_generation_config enable_sleep_mode model_impl
calculate_kv_scales additional_config enable_reasoning reasoning_parser use_tqdm_on_load
""".split()

#: AIAK's page of server options, and what vLLM 0.4.0 had besides.
AIAK_AND_VLLM_040 = """
host port lora_modules chat_template tokenizer_extension_path response_role root_path uvicorn_log_level
worker_use_ray forced_num_gpu_blocks max_context_len_to_capture image_input_type image_token_id image_input_shape
image_feature_size max_paddings engine_use_ray disable_log_requests max_log_len api_key allow_credentials
allowed_origins allowed_methods allowed_headers ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs middleware
""".split()

#: Every row of our own table, and the test that shows what it does.
SHOWN_BY = {
    "model": "test_missing_and_half_written_models",
    "revision": "test_a_hub_model_is_found_where_it_was_downloaded_to_and_by_revision",
    "download_dir": "test_a_hub_model_is_found_where_it_was_downloaded_to_and_by_revision",
    "ignore_patterns": "test_ignored_files_are_not_read",
    "hf_config_path": "test_hf_config_path_names_another_config",
    "hf_overrides": "test_hf_overrides_act_as_if_written_in_the_config",
    "rope_scaling": "test_a_scaled_context_is_longer_by_the_factor",
    "rope_theta": "test_rotary_settings_are_as_if_written_in_the_config",
    "disable_sliding_window": "test_disabling_the_sliding_window_limits_the_context_to_it",
    "trust_remote_code": "test_remote_code_is_refused_without_the_flag",
    "dtype": "test_logits_are_equal_bit_for_bit_whatever_the_batch",
    "quantization": "test_gpt_is_an_alias_of_gptq",
    "load_format": "test_load_format_selects_the_kind_of_file",
    "model_loader_extra_config": "test_files_are_read_by_several_threads",
    "model_impl": "test_a_native_family_gives_the_same_tokens_through_transformers",
    "generation_config": "test_sources_of_default_sampling_values",
    "task": "test_any_language_model_embeds_on_request",
    "override_pooler_config": "test_the_operator_overrides_the_pooler",
    "override_generation_config": "test_sources_of_default_sampling_values",
    "device": "test_wrong_arguments_are_refused",
    "seed": "test_dummy_weights_depend_only_on_the_seed",
    "dequantize": "test_outputs_do_not_depend_on_concurrent_requests",
    "cpu_math": "test_facts_report_the_choices",
    "enforce_eager": "test_facts_report_the_choices",
    "compilation_config": "test_compilation_config_values_are_checked",
    "chat_template_content_format": "test_chat_reads_parts_in_the_form_of_the_template",
    "runner": "test_runner_and_convert_select_the_task",
    "config_format": "test_the_format_of_the_config_is_the_one_that_is_asked_for",
    "convert": "test_runner_and_convert_select_the_task",
    "logprobs_mode": "test_other_log_probabilities_are_refused_by_name",
    "optimization_level": "test_options_of_graphs_reach_the_compilation_config",
    "cudagraph_capture_sizes": "test_options_of_graphs_reach_the_compilation_config",
    "max_cudagraph_capture_size": "test_options_of_graphs_reach_the_compilation_config",
    "kv_cache_memory_bytes": "test_the_kv_cache_has_the_given_size",
    "spec_method": "test_short_names_of_speculation_are_those_of_the_config",
    "default_chat_template_kwargs": "test_a_request_takes_precedence_over_the_defaults_of_the_server",
    "stream_interval": "test_a_stream_interval_joins_tokens_after_the_first",
    "enable_log_outputs": "test_an_output_is_logged_when_it_ends",
    "log_config_file": "test_a_logging_configuration_is_applied_or_refused",
    "disable_access_log_for_endpoints": "test_the_access_log_leaves_out_paths",
    "ssl_ciphers": "test_unknown_ciphers_are_refused_at_the_start",
    "max_seq_len_to_capture": "test_options_that_disable_cuda_graphs",
    "tensor_parallel_size": "test_any_number_of_ranks_gives_the_tokens_of_one_process",
    "tensor_parallel_math": "test_a_layer_of_most_families_needs_two_collectives",
    "distributed_executor_backend": "test_executor_backends_match_the_number_of_processes",
    "distributed_timeout_seconds": "test_a_rank_that_hangs_is_named_after_the_time_limit",
    "pipeline_parallel_size": "test_any_number_of_stages_gives_the_tokens_of_one_process",
    "pp_layer_partition": "test_stages_have_the_given_numbers_of_layers",
    "tokenizer": "test_a_tokenizer_may_be_of_another_revision_or_another_model",
    "tokenizer_revision": "test_a_tokenizer_may_be_of_another_revision_or_another_model",
    "tokenizer_mode": "test_the_slow_tokenizer_gives_the_same_text",
    "tokenizer_extension_path": "test_an_extension_makes_the_tokenizer",
    "reasoning_config": "test_a_config_completes_the_marks_of_the_parser",
    "structured_outputs_config": "test_json_output_has_no_whitespace_by_default",
    "skip_tokenizer_init": "test_without_a_tokenizer_inputs_and_outputs_are_token_ids",
    "enable_lora": "test_adapters_of_a_batch_give_what_peft_gives",
    "max_loras": "test_no_more_adapters_run_than_allowed_and_base_sequences_are_not_delayed",
    "max_lora_rank": "test_an_adapter_that_does_not_fit_is_refused_before_anything_runs",
    "max_cpu_loras": "test_the_least_recently_used_adapter_is_evicted",
    "max_lora_bytes": "test_an_adapter_that_does_not_fit_is_refused_before_anything_runs",
    "lora_dtype": "test_adapters_may_be_stored_in_fewer_bits",
    "limit_mm_per_prompt": "test_refused_images",
    "mm_processor_kwargs": "test_processor_arguments_change_the_image",
    "media_io_kwargs": "test_files_are_read_as_the_arguments_say",
    "language_model_only": "test_without_the_encoder_images_are_refused_and_text_is_not",
    "allowed_local_media_path": "test_files_are_read_in_the_allowed_folder_only",
    "allowed_media_domains": "test_images_are_fetched_from_allowed_hosts_only",
    "max_model_len": "test_auto_max_model_len_is_the_longest_context_that_fits",
    "block_size": "test_block_size_and_number_of_blocks_are_as_given",
    "gpu_memory_utilization": "test_a_smaller_fraction_of_memory_holds_fewer_pages",
    "kv_cache_dtype": "test_keys_and_values_may_be_stored_in_fewer_bits",
    "num_gpu_blocks_override": "test_block_size_and_number_of_blocks_are_as_given",
    "enable_prefix_caching": "test_prefixes_are_reused_unless_caching_is_disabled",
    "max_num_seqs": "test_a_step_stays_within_its_limits",
    "max_num_batched_tokens": "test_a_step_stays_within_its_limits",
    "enable_chunked_prefill": "test_a_step_stays_within_its_limits",
    "async_scheduling": "test_async_scheduling_is_the_default_on_a_gpu",
    "speculative_config": "test_answers_are_those_without",
    "speculative_model": "test_a_text_that_repeats_itself_takes_fewer_steps",
    "speculative_model_quantization": "test_the_quantization_method_of_the_draft_model_is_checked",
    "num_speculative_tokens": "test_a_text_that_repeats_itself_takes_fewer_steps",
    "ngram_prompt_lookup_max": "test_arguments_mean_the_keys_of_the_same_meaning",
    "ngram_prompt_lookup_min": "test_arguments_mean_the_keys_of_the_same_meaning",
    "speculative_disable_by_batch_size": "test_arguments_mean_the_keys_of_the_same_meaning",
    "speculative_max_model_len": "test_arguments_mean_the_keys_of_the_same_meaning",
    "max_num_partial_prefills": "test_prompts_run_together_and_short_ones_overtake_long_ones",
    "max_long_partial_prefills": "test_prompts_run_together_and_short_ones_overtake_long_ones",
    "long_prefill_token_threshold": "test_a_long_prompt_gets_no_more_than_its_part_of_a_step",
    "scheduling_policy": "test_a_lower_priority_number_is_served_first_then_arrival",
    "scheduler_delay_factor": "test_waiting_prompts_gather_for_a_multiple_of_the_last_prompts_time",
    "max_logprobs": "test_log_probabilities_of_the_whole_vocabulary",
    "hf_token": "test_the_hub_gets_the_access_token",
    "uds": "test_a_unix_socket_instead_of_a_port",
    "fair_share": "test_clients_with_different_keys_share_the_engine",
    "unknown_fields": "test_misspelled_fields_can_be_ignored_with_a_warning",
    "enable_per_request_metrics": "test_the_operator_sets_what_responses_contain",
    "admin_api_key": "test_administration_can_have_a_key_of_its_own",
    "admin_api_key_file": "test_administration_can_have_a_key_of_its_own",
    "enable_force_include_usage": "test_the_operator_sets_what_responses_contain",
    "enable_prompt_tokens_details": "test_the_operator_sets_what_responses_contain",
    "return_tokens_as_token_ids": "test_the_operator_sets_what_responses_contain",
    "enable_request_id_headers": "test_request_ids_can_be_chosen_by_clients",
    "enable_tokenizer_info_endpoint": "test_the_tokenizer_can_be_described",
    "disable_fastapi_docs": "test_the_tokenizer_can_be_described",
    "disable_playground": "test_the_playground_can_be_left_out",
    "playground_servers": "test_the_playground_may_call_the_listed_servers",
    "disable_uvicorn_access_log": "test_the_http_log_has_the_configured_level_and_can_be_disabled",
    "host": "test_bind_finds_ports_in_use_and_foreign_addresses",
    "port": "test_a_port_in_use_is_found_before_loading",
    "served_model_name": "test_models_lists_every_served_name",
    "chat_template": "test_chat_template_is_a_file_or_the_text",
    "enable_auto_tool_choice": "test_without_the_flag_tools_are_refused",
    "tool_call_parser": "test_parsers_are_named_or_found_from_the_template",
    "tool_parser_plugin": "test_parsers_of_the_operators_own_file",
    "enable_reasoning": "test_tool_calls_and_reasoning_are_separated",
    "reasoning_parser": "test_parsers_are_named_or_found_from_the_template",
    "reasoning_parser_plugin": "test_parsers_of_the_operators_own_file",
    "response_role": "test_the_response_role_can_be_configured",
    "api_key": "test_keys_come_from_arguments_file_and_environment",
    "api_key_file": "test_keys_come_from_arguments_file_and_environment",
    "allow_no_key": "test_a_public_address_without_key_causes_a_warning",
    "metrics_without_key": "test_allowed_hosts_and_metrics_without_key",
    "allowed_hosts": "test_allowed_hosts_and_metrics_without_key",
    "allowed_origins": "test_an_allowed_origin_gets_cors_headers",
    "data_parallel_size": "test_one_dead_replica_does_not_stop_the_others",
    "allowed_methods": "test_an_allowed_origin_gets_cors_headers",
    "allowed_headers": "test_an_allowed_origin_gets_cors_headers",
    "allow_credentials": "test_an_allowed_origin_gets_cors_headers",
    "ssl_keyfile": "test_https_with_timeouts",
    "ssl_certfile": "test_https_with_timeouts",
    "ssl_ca_certs": "test_client_certificates_can_be_required",
    "enable_ssl_refresh": "test_a_replaced_certificate_is_used_by_new_connections",
    "sse_keep_alive_interval": "test_silent_streams_get_comments",
    "log_format": "test_the_log_is_one_json_object_per_line",
    "otlp_traces_endpoint": "test_a_request_is_a_span_in_the_trace_of_its_client",
    "collect_detailed_traces": "test_a_request_is_a_span_in_the_trace_of_its_client",
    "ssl_cert_reqs": "test_client_certificates_can_be_required",
    "max_connections": "test_the_total_of_connections_is_limited",
    "max_connections_per_address": "test_connections_per_address_are_limited",
    "header_timeout": "test_slowly_sent_headers_time_out",
    "body_timeout": "test_an_incomplete_body_times_out",
    "idle_timeout": "test_an_idle_connection_is_closed",
    "write_timeout": "test_a_client_that_does_not_read_is_disconnected",
    "max_body_bytes": "test_bodies_over_the_limit_are_refused_early",
    "max_total_body_bytes": "test_all_bodies_together_are_limited",
    "max_num_queued_reqs": "test_requests_of_more_sequences_than_the_queue_holds_are_refused",
    "max_num_queued_tokens": "test_requests_of_more_tokens_than_the_queue_holds_are_refused",
    "max_queue_seconds": "test_requests_that_wait_or_run_for_too_long_fail",
    "max_request_seconds": "test_a_stream_that_runs_for_too_long_ends_with_an_error",
    "step_timeout": "test_a_hanging_engine_is_replaced",
    "first_step_timeout": "test_a_step_timeout_writes_the_stacks_of_the_engine",
    "max_engine_restarts": "test_too_many_engine_restarts_end_the_server",
    "shutdown_timeout": "test_term_finishes_running_requests",
    "uvicorn_log_level": "test_the_http_log_has_the_configured_level_and_can_be_disabled",
    "root_path": "test_root_path_prefixes_every_route",
    "enable_log_requests": "test_requests_are_logged_up_to_the_maximum_length",
    "max_log_len": "test_requests_are_logged_up_to_the_maximum_length",
    "lora_modules": "test_requests_name_an_adapter_as_their_model",
    "lora_root": "test_adapters_are_loaded_and_unloaded_while_the_server_runs",
    "enable_admin_routes": "test_reset_prefix_cache_empties_the_cache",
    "disable_log_stats": "test_the_statistics_log_can_be_disabled",
}


@pytest.mark.parametrize("name", VLLM_073 + AIAK_AND_VLLM_040)
def test_every_argument_of_the_reference_pages_is_in_one_table(name):
    assert len(VLLM_073) == len(set(VLLM_073)) == 111
    works = name in {row.name for row in ARGUMENTS}
    accepted_or_refused = name in {row.name for row in (*UNSUPPORTED, *RENAMED)}
    assert works != accepted_or_refused


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: row.name)
def test_every_row_that_works_is_shown_by_a_test(row):
    assert row.name in SHOWN_BY, "name the test that shows what it does"
    definition = f"def {SHOWN_BY[row.name]}("
    assert any(definition in path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("25.6k", 25600),
        ("32K", 32768),
        ("32k", 32000),
        ("1M", 1048576),
        ("1.5m", 1500000),
        ("2G", 2**31),
        (" 7 ", 7),
        ("1.5K", None),
        ("1.5", None),
        ("0.0001k", None),
        ("k", None),
        ("1e3", None),
        ("9" * 19, None),
        ("5T", None),
    ],
)
def test_numbers_may_have_suffixes(text, number):
    assert parse_number(text) == number
    if number is not None:
        assert checked({"max_model_len": text}, server=True).max_model_len == number


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_model_len": "long"}, "an integer (or like 25.6k, 32K, 1M) or auto"),
        ({"max_model_len": -2}, "at least 1"),
        ({"max_model_len": 1.5}, "an integer"),
        ({"max_num_batched_tokens": "auto"}, "an integer (or like 25.6k, 32K, 1M)"),
        ({"hf_overrides": "{"}, "a JSON object"),
        ({"hf_overrides": "5"}, "a JSON object"),
        ({"hf_overrides": [1]}, "a JSON object"),
        ({"ignore_patterns": [1]}, "a list of strings"),
        ({"enforce_eager": 1}, "true or false"),
        ({"seed": True}, "an integer"),
        ({"rope_theta": float("nan")}, "at least 1"),
        ({"scheduling_policy": "random"}, "one of fcfs, priority"),
        ({"tokenizer_mode": "other"}, "one of auto, hf, slow, mistral"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_what_is_expected(given, said):
    with pytest.raises(AiakqError) as caught:
        checked(given, server=True)
    assert caught.value.id == "bad_option" and said in str(caught.value)


@pytest.mark.parametrize("option", [row.flag for row in ARGUMENTS if row.type is dict])
@pytest.mark.parametrize("value", [10**30, -(2**63) - 1, "half \ud83d", {"\udcff": 1}, [{"a": [2**64]}]])
def test_objects_with_what_other_processes_cannot_be_sent_are_refused(option, value):
    name = option.removeprefix("--").replace("-", "_")
    with pytest.raises(AiakqError, match="integers of at most 64 bits and with text that is Unicode") as caught:
        checked({"model": "m", name: {"a": value}}, server=True)
    assert caught.value.id == "bad_option" and option in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"served_model_name": ["a\udcff"]}, "text that is Unicode"),
        ({"model": "a\udcff"}, "text that is Unicode"),
        ({"seed": 10**30}, "an integer of at most 64 bits"),
        ({"max_model_len": 10**5000}, "an integer of at most 64 bits"),
        ({"gpu_memory_utilization": 10**5000}, "at most 1"),
    ],
    ids=["a list", "a name", "an integer", "an integer that cannot be spelled", "a number"],
)
def test_values_that_other_processes_cannot_be_sent_are_refused(given, said):
    with pytest.raises(AiakqError) as caught:
        checked({"model": "m"} | given, server=True)
    assert caught.value.id == "bad_option" and said in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_partial_prefills": 2, "enable_chunked_prefill": False},
        {"max_num_partial_prefills": 2, "max_long_partial_prefills": 3},
    ],
    ids=str,
)
def test_conflicting_arguments_are_refused(given, tiny_model):
    with pytest.raises(AiakqError) as caught:
        LLM(str(tiny_model("LlamaForCausalLM")), **given)
    assert caught.value.id == "option_conflict"


def test_facts_report_the_choices(tiny_model):
    folder = str(tiny_model("LlamaForCausalLM"))
    plain = LLM(folder, dtype="float32", num_gpu_blocks_override=20)
    eager = LLM(folder, dtype="bfloat16", num_gpu_blocks_override=20, enforce_eager=True, cpu_math="exact")
    assert eager.engine.facts["step"] == "operation by operation" != plain.engine.facts["step"]
    assert plain.engine.facts["dtype"].startswith("float32") and eager.engine.facts["dtype"].startswith("bfloat16")
    assert eager.config.load.cpu_math == "exact"


def test_block_size_and_number_of_blocks_are_as_given(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), block_size=8, num_gpu_blocks_override=11)
    assert llm.engine.stats.num_pages == 10 and llm.engine.limits.max_kv_tokens == 80
    prompt = {"prompt_token_ids": [5] * 20}
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens == 16


def test_a_smaller_fraction_of_memory_holds_fewer_pages(tiny_model, monkeypatch):
    from aiakq.runtime.executor import kv_cache

    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 400 << 20)

    def pages(part: float) -> int:
        arguments = {"gpu_memory_utilization": part, "max_num_seqs": 4000, "max_num_batched_tokens": 64}
        return LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", **arguments).engine.stats.num_pages

    assert 1.8 < pages(0.4) / pages(0.2) < 2.4


def test_prefixes_are_reused_unless_caching_is_disabled(tiny_model):
    for caching in (True, False):
        llm = LLM(str(tiny_model("LlamaForCausalLM")), num_gpu_blocks_override=20, enable_prefix_caching=caching)
        for _ in range(2):
            answer = llm.generate({"prompt_token_ids": [7] * 40}, SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert (answer.num_cached_tokens > 0) == caching


@pytest.mark.parametrize(
    ("arguments", "most_tokens", "most_running"),
    [
        ({"max_num_seqs": 2}, 80, 2),
        ({"max_num_batched_tokens": 24}, 24, 5),
        (
            {"max_num_batched_tokens": 64, "max_model_len": 60, "enable_chunked_prefill": False},
            43,
            5,
        ),  # a whole prompt beside three answers
    ],
    ids=str,
)
def test_a_step_stays_within_its_limits(arguments, most_tokens, most_running, tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), num_gpu_blocks_override=60, **arguments)
    seen = []
    inner = llm.engine.step

    def step(now, inbox):
        output = inner(now, inbox)
        seen.append((output.stats.num_scheduled_tokens, output.stats.num_running))
        return output

    llm.engine.step = step
    prompts = [{"prompt_token_ids": [n + 3] * 40} for n in range(5)]
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert max(tokens for tokens, _ in seen) == most_tokens
    assert max(running for _, running in seen) <= most_running
