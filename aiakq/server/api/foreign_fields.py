"""Request fields of other servers and clients, and what they mean here.

A field is translated to fields of this server, ignored because it changes nothing about the answer, or refused because
ignoring it would change the answer. Which one may depend on its value: ``mirostat: 0`` changes nothing. The tables
cover OpenAI, vLLM, SGLang, llama.cpp, Ollama, TGI, LMDeploy, text-generation-webui, Mistral, Cohere, DashScope,
OpenRouter, LiteLLM, LangChain, TensorRT-LLM, NeMo, KoboldAI, Gemini and lm_eval. ``--unknown-fields refuse`` does not
use them.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.server.api.foreign_field import (
    Fields,
    ForeignField,
    Sent,
    all_refused,
    equal,
    ignored,
    refuse,
    refused,
    renamed,
)
from aiakq.server.api.foreign_reasoning import REASONING_FIELDS

# --- sampling


def _do_sample(value: object, sent: Sent) -> Fields:
    if value is False:
        return {"temperature": 0.0}
    return {} if value is True else refuse("it is true or false")


def _token_limit(value: object, sent: Sent) -> Fields:
    """-1 and -2 are Ollama's and llama.cpp's values for no limit."""
    return {} if equal(value, -1) or equal(value, -2) else {"max_tokens": value}


def _penalty_window(value: object, sent: Sent) -> Fields:
    """The penalties of other servers see only the last tokens. -1 is the whole context, as here."""
    penalties = {
        "repetition_penalty": 1,
        "repeat_penalty": 1,
        "rep_pen": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    penalizes = any(sent.sent(name) not in (None, off) for name, off in penalties.items())
    return refuse("penalties apply to the whole text; use -1") if penalizes and not equal(value, -1) else {}


def _newline_penalty(value: object, sent: Sent) -> Fields:
    penalizes = any(sent.sent(name) not in (None, 1) for name in ("repetition_penalty", "repeat_penalty"))
    return refuse("penalties apply to all tokens") if value is False and penalizes else {}


def _stops(value: object, sent: Sent) -> Fields:
    return {"stop": [value] if isinstance(value, str) else value}


_SAMPLING: dict[str, ForeignField] = {
    "do_sample": ForeignField(_do_sample, replaces=True),
    **dict.fromkeys(
        (
            *("num_predict", "n_predict", "max_new_tokens", "max_gen_len", "max_tokens_to_sample", "max_output_tokens"),
            *("tokens_to_generate", "request_output_len", "max_output_len", "max_gen_toks", "max_gen_tokens"),
        ),
        ForeignField(_token_limit),
    ),
    "max_completion_tokens": renamed("max_tokens"),
    "min_new_tokens": renamed("min_tokens"),
    "temp": renamed("temperature"),
    "vllm_xargs": renamed("extra_args"),
    "freq_penalty": renamed("frequency_penalty"),
    "pres_penalty": renamed("presence_penalty"),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "rep_penalty"), renamed("repetition_penalty")),
    "runtime_top_k": renamed("top_k"),
    "runtime_top_p": renamed("top_p"),
    **dict.fromkeys(("num_return_sequences", "candidate_count", "candidateCount", "num_generations"), renamed("n", 1)),
    **dict.fromkeys(
        ("repeat_last_n", "penalty_last_n", "rep_pen_range", "repetition_penalty_range"), ForeignField(_penalty_window)
    ),
    **dict.fromkeys(("penalize_newline", "penalize_nl"), ForeignField(_newline_penalty)),
    **dict.fromkeys(("random_seed", "sampling_seed", "sampler_seed", "rng_seed"), renamed("seed")),
    **dict.fromkeys(
        (
            *("stop", "stop_sequences", "stop_strings", "stopping_strings", "stop_sequence"),
            *("stop_words", "stop_words_list", "stop_str"),
        ),
        ForeignField(_stops),
    ),
    "bad_words_list": renamed("bad_words"),
    **dict.fromkeys(("streaming", "is_stream"), renamed("stream", False)),
    "max_tokens": renamed("max_tokens"),
    "no_stop_trim": renamed("include_stop_str_in_output"),
    "ban_eos_token": renamed("ignore_eos"),
    "truncate": renamed("truncate_prompt_tokens"),
    **all_refused("this sampler is not built", "typical_p typ_p typical tfs_z tfs", 1, 0),
    **all_refused(
        "this sampler is not built",
        "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor top_a epsilon_cutoff "
        "eta_cutoff penalty_alpha no_repeat_ngram_size skew min_keep",
        0,
        False,
    ),
    **all_refused("this sampler is not built", "top_n_sigma nsigma adaptive_target", -1, 0),
    **all_refused("this sampler is not built", "encoder_repetition_penalty guidance_scale cfg_scale", 1),
    **all_refused("this sampler is not built", "dynamic_temperature early_stopping watermark watermarking", False, {}),
    **all_refused(
        "samplers are applied in the order of vLLM", "samplers sampler_order sampler_priority sampler_seq", []
    ),
    **all_refused("beam search is not built", "num_beams beam_size beam_width num_beam_groups", 1, 0),
    **all_refused("it counts the prompt; use max_tokens or min_tokens", "max_length min_length", 0),
    **all_refused("use stop_token_ids", "eos_token_id eos_token end_id"),
    **all_refused("top_p does not change within a text", "top_p_decay top_p_min top_p_reset_ids", 1, 0),
    **all_refused("beam search is not built", "len_penalty", 1),
    **all_refused("use add_special_tokens", "add_bos_token", True),
    **all_refused("use include_stop_str_in_output", "trim_stop", True),
    **all_refused("stop strings are no expressions", "stop_regex", []),
    **all_refused(
        "use bad_words or logit_bias", "custom_token_bans banned_tokens banned_strings bad_words_ids", "", []
    ),
    **all_refused("there is no second prompt", "negative_prompt", ""),
    **all_refused("a request has no time limit of its own", "t_max_predict_ms max_time", 0, -1),
    **ignored(
        # settings of samplers that are off
        "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold "
        "dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve temperature_last adaptive_decay diversity_penalty"
    ),
}

# --- answers

_MEDIA = "media are parts of the content of a message"
_MEDIA_NAMES = "images image image_data videos video video_data audios audio_data multi_modal_data"
_ELSEWHERE = "requests to this route have no such field"


def _top_tokens(value: object, sent: Sent) -> Fields:
    if equal(value, 0):
        return {}
    return {"logprobs": True, "top_logprobs": value} if sent.has("top_logprobs") else {"logprobs": value}


def _grammar(value: object, sent: Sent) -> Fields:
    """A grammar of llama.cpp, or an object of TGI."""
    if value == "":
        return {}
    if isinstance(value, Mapping):
        kinds = {"json": "guided_json", "json_object": "guided_json", "regex": "guided_regex"}
        name = kinds.get(str(value.get("type")))
        return {name: value.get("value")} if name else refuse("the types json and regex are known")
    return {"guided_grammar": value}


def _json_mode(value: object, sent: Sent) -> Fields:
    if value is True:
        return {"response_format": {"type": "json_object"}}
    return {} if value is False else refuse("it is true or false")


def _format(value: object, sent: Sent) -> Fields:
    """Ollama's: "json", or a schema."""
    if value in ("", {}):
        return {}
    return {"response_format": {"type": "json_object"}} if value == "json" else {"guided_json": value}


_ADAPTERS = all_refused(
    "an adapter is chosen by the field model", "lora lora_path adapter_id lora_request lora_name adapter_name", [], ""
)
_ANSWERS: dict[str, ForeignField] = {
    "grammar": ForeignField(_grammar),
    "ebnf": renamed("guided_grammar", ""),
    "regex": renamed("guided_regex", ""),
    "json_schema": renamed("guided_json", "", {}),
    "format": ForeignField(_format),
    "n_probs": ForeignField(_top_tokens),
    "return_tokens": renamed("return_token_ids"),
    "rid": renamed("request_id"),
    "return_full_text": renamed("echo"),
    **all_refused(
        "it is not returned",
        "return_hidden_states return_routed_experts return_meta_info return_prompt_text return_prompt_token_ids "
        "return_token_offsets return_mm_kwargs return_weight_versions return_cached_tokens_details "
        "decoder_input_details post_sampling_probs return_images citations",
        False,
    ),
    **all_refused("it is not returned", "top_n_tokens routed_experts_prompt_start routed_experts_start_len", 0),
    "json_mode": ForeignField(_json_mode),
    **all_refused("texts are returned", "detokenize", True),
    **all_refused("use logprobs", "return_logprob return_logprobs top_logprobs_num token_ids_logprob", False, 0, []),
    **all_refused(
        "use response_format",
        "responseMimeType response_mime_type responseSchema response_schema responseJsonSchema response_json_schema "
        "output_format",
        "text/plain",
        {},
    ),
    **all_refused(
        "its text belongs into messages",
        "system_prompt systemPrompt system_instruction systemInstruction preamble chat_history history prefill "
        "assistant_prefix",
        "",
        [],
    ),
    **all_refused("use tool_choice", "tool_config toolConfig", {}),
    **all_refused("templates are chosen by the operator, with --chat-template", "prompt_template", ""),
    **all_refused("one answer is given at once", "stream_reasoning separate_reasoning reasoning_split", True),
    "mode": refused("conversations use the chat template", "instruct"),
    "reasoning_format": refused("it is chosen by --reasoning-parser", "auto", "deepseek", "parsed", ""),
    **all_refused("answers are not mocked", "mock_response mock_tool_calls", "", []),
    **all_refused("nothing is checked or changed", "guardrails plugins safe_prompt moderation", [], {}, False),
    **all_refused(
        "nothing is fetched from the web", "search_parameters enable_search search_settings web_search", False, {}
    ),
    **all_refused("every answer is returned at once or streamed", "deferred background", False),
    **_ADAPTERS,
    **all_refused("requests bring no code", "custom_logit_processor"),
    **all_refused("answers are not stored; send all messages", "session_params previous_response_id", {}, ""),
    **all_refused(_MEDIA, f"{_MEDIA_NAMES} mm_payload images_config", [], {}, ""),
    **all_refused("prompts are computed here", "ec_transfer_params bootstrap_host bootstrap_room", {}),
    **all_refused(
        "its fields belong into the request itself",
        "extra_body model_kwargs parameters sampling_params sampling_parameters generation_config generationConfig "
        "gen_kwargs generate_kwargs",
        {},
    ),
    **all_refused(
        _ELSEWHERE, "messages prompt inputs input_ids text instructions response_format structured_outputs", ""
    ),
    **all_refused(_ELSEWHERE, "input system template raw context", "", [], False),
    **all_refused(_ELSEWHERE, "guided_json guided_regex guided_choice guided_grammar structural_tag top_logprobs", 0),
    **all_refused(_ELSEWHERE, "logprob_token_ids truncate_prompt_tokens truncation_side"),
    **all_refused(_ELSEWHERE, "n best_of", 1),
    **all_refused(_ELSEWHERE, "logprobs prompt_logprobs echo", False),
}

# --- bookkeeping, routing and settings of the server

_WITHOUT_EFFECT: dict[str, ForeignField] = {
    **ignored(
        # OpenAI, Anthropic
        "prompt_cache_options cache_control inference_geo speed betas "
        # vLLM, SGLang, LMDeploy
        "session_id stream_interval extra_key custom_labels routed_dp_rank "
        "data_parallel_rank disagg_prefill_dp_rank bootstrap_port ngram_corpus_id incremental_output result_format "
        # llama.cpp
        "cache_prompt id_slot slot_id timings_per_token return_progress response_fields n_cache_reuse "
        "n_keep n_discard n_indent speculative.n_max speculative.n_min speculative.p_min sse_ping_interval "
        # Ollama: how a model is loaded
        "keep_alive num_ctx n_ctx max_context_length "
        "num_batch num_gpu main_gpu num_thread num_keep num_gqa numa low_vram f16_kv vocab_only "
        "use_mmap use_mlock rope_frequency_base rope_frequency_scale "
        # TGI, text-generation-webui
        "details auto_max_new_tokens use_cache wait_for_model skip_prompt pad_id rep_pen_slope "
        # OpenRouter, LiteLLM, Portkey, LangChain, Open WebUI
        "provider route models transforms usage preset litellm_metadata litellm_call_id litellm_logging_obj tags "
        "api_base api_key api_version base_url custom_llm_provider drop_params fallbacks num_retries max_retries "
        "timeout request_timeout stream_timeout caching cache no-log extra_headers extra_query organization verbose "
        "disabled_params chat_id conversation_id message_id run_id trace_id"
    )
}


#: Ollama's field with other fields, which are read as if they were fields of the request.
OPTIONS = "options"
#: Fields of requests that generate.
GENERATION_FIELDS: Mapping[str, ForeignField] = {**_WITHOUT_EFFECT, **_SAMPLING, **_ANSWERS, **REASONING_FIELDS}


_SIDES = {"END": "right", "START": "left"}


def _cut(value: object, sent: Sent) -> Fields:
    """Of TEI (a boolean) and Cohere (a side): a text that is too long is cut, by TEI at its end."""
    if value is False or value == "NONE":
        return {}
    side = "END" if value is True else value
    if not isinstance(side, str) or side not in _SIDES:
        refuse("it is true, false, NONE, START or END")
    return {"truncate_prompt_tokens": -1, "truncation_side": _SIDES[side]}


#: Fields of requests with embeddings, classes or scores, which sampling does not change.
POOLING_FIELDS: Mapping[str, ForeignField] = {
    **_WITHOUT_EFFECT,
    **all_refused("instructions are part of the text", "input_type instruction prompt_name prompt", ""),
    **all_refused("instructions are part of the text", "task_type text_type", ""),
    **all_refused("instructions are part of the text", "task", "", "embed", "embedding", "classify", "score", "rerank"),
    **all_refused("numbers are float32", "embedding_types embedding_type output_dtype", ["float"], "float"),
    **dict.fromkeys(("output_dimension", "dims"), renamed("dimensions")),
    **all_refused("texts are not cut in parts", "late_chunking late_chunking_params", False),
    **all_refused("only text is read", _MEDIA_NAMES, [], {}),
    **_ADAPTERS,
    "truncate": ForeignField(_cut),
}


def _task(value: object, sent: Sent) -> Fields:
    """Of Jina: the name of a prompt. Of others: what the route does."""
    return {} if value in (None, "", "embed", "embedding") else {"prompt_name": value}


#: Fields of requests with embeddings, of which a model may have several kinds.
EMBEDDING_FIELDS: Mapping[str, ForeignField] = {
    **POOLING_FIELDS,
    "task": ForeignField(_task),
    "text_type": renamed("input_type"),
}


def _text(value: object, sent: Sent) -> Fields:
    """llama.cpp's /tokenize adds special tokens only if asked to."""
    asked = any(sent.sent(name) is not None for name in ("add_special", "add_special_tokens"))
    return {"prompt": value} if asked else {"prompt": value, "add_special_tokens": False}


#: Fields of /tokenize.
TOKENIZATION_FIELDS: Mapping[str, ForeignField] = {
    "content": ForeignField(_text),
    "add_special": renamed("add_special_tokens"),
    "parse_special": refused("special tokens in a text are read as such", True),
    **all_refused("texts are not cut", "truncate_prompt_tokens truncation", False),
}
#: Fields of /detokenize.
DETOKENIZATION_FIELDS: Mapping[str, ForeignField] = {
    "skip_special_tokens": refused("special tokens are part of the text", False),
    "spaces_between_special_tokens": refused("the text is not changed", False),
}


def _parts(value: object, sent: Sent) -> Fields:
    """The content of Gemini's messages, and of those of the AI SDK, some of which have their text as content too."""
    return {} if sent.sent("content") else {"content": value}


#: Fields of messages of other servers' answers, which clients send back, and hints for their caches.
MESSAGE_FIELDS: Mapping[str, ForeignField] = {
    **ignored(
        "refusal annotations reasoning_details provider_specific_fields cache_control id created object model "
        "token_ids stop_reason finish_reason index logprobs usage citations context tool_plan signature "
        "thinking_blocks thought_signature encrypted_content phase status metadata timestamp parsed "
        "tool_name additional_kwargs response_metadata invalid_tool_calls usage_metadata example type"
    ),
    "is_error": ForeignField(refused("templates show no errors", False).translate, named=True),
    "thinking": renamed("reasoning_content"),
    "parts": ForeignField(_parts, replaces=True),
    **all_refused(_MEDIA, _MEDIA_NAMES, [], {}),
    **all_refused("use continue_final_message", "prefix partial", False),
}
CALL_FIELDS: Mapping[str, ForeignField] = ignored(
    "index extra_content thought_signature provider_specific_fields cache_control parsed_arguments description strict"
)


def _schema_of_format(value: object, sent: Sent) -> Fields:
    """llama.cpp, SGLang and others put the schema beside the type."""
    return {"type": "json_schema", "json_schema": {"schema": value}}


FORMAT_FIELDS: Mapping[str, ForeignField] = {
    "schema": ForeignField(_schema_of_format, replaces=True),
    **ignored("name description strict"),
}
