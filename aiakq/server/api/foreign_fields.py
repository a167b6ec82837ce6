"""Request fields of other servers and clients, and what they mean here.

A field is translated to fields of this server, ignored because it changes nothing about the answer, or refused because
ignoring it would change the answer. Which one may depend on its value: ``mirostat: 0`` changes nothing. The table
covers OpenAI, vLLM, SGLang, llama.cpp, Ollama, TGI, LMDeploy, text-generation-webui, Mistral, Cohere, DashScope,
OpenRouter, LiteLLM and LangChain. ``--unknown-fields refuse`` does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol


class Sent(Protocol):
    """A request."""

    def sent(self, name: str) -> Any:
        """Return the value of a field of any server, or of Ollama's options; None if it is not set."""

    def has(self, name: str) -> bool:
        """Whether requests of this kind have the field ``name``."""


#: Fields of this server by name.
Fields = Mapping[str, Any]


class NotSupported(Exception):
    """The value would change the answer; the text says what is not supported."""


@dataclass(frozen=True)
class ForeignField:
    """A field of another server.

    translate  returns the fields of this server for a value, or raises ``NotSupported``.
    replaces   whether they replace fields that the request sets.
    hint       whether it is ignored by name if the request has no such field.
    named      whether it is ignored by name if its value is not supported, instead of refused.
    """

    translate: Callable[[Any, Sent], Fields]
    replaces: bool = False
    hint: bool = False
    named: bool = False


def _equal(value: Any, other: Any) -> bool:
    """Whether two values are equal; numbers of both types are, booleans and numbers are not."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _refuse(reason: str) -> NoReturn:
    raise NotSupported(reason)


def renamed(name: str, *unset: Any) -> ForeignField:
    """Another name of the field ``name``, which is not set if the value is one of ``unset``."""

    def translate(value: Any, sent: Sent) -> Fields:
        return {} if any(_equal(value, each) for each in unset) else {name: value}

    return ForeignField(translate)


def refused(reason: str, *neutral: Any) -> ForeignField:
    """A field that only has an effect if its value is none of ``neutral``."""

    def translate(value: Any, sent: Sent) -> Fields:
        return {} if any(_equal(value, each) for each in neutral) else _refuse(reason)

    return ForeignField(translate)


IGNORED = ForeignField(lambda value, sent: {})


def _ignored(names: str) -> dict[str, ForeignField]:
    return dict.fromkeys(names.split(), IGNORED)


def _refused(reason: str, names: str, *neutral: Any) -> dict[str, ForeignField]:
    return dict.fromkeys(names.split(), refused(reason, *neutral))


# --- sampling


def _do_sample(value: Any, sent: Sent) -> Fields:
    if value is False:
        return {"temperature": 0.0}
    return {} if value is True else _refuse("it is true or false")


def _token_limit(value: Any, sent: Sent) -> Fields:
    """-1 and -2 are Ollama's and llama.cpp's values for no limit."""
    return {} if _equal(value, -1) or _equal(value, -2) else {"max_tokens": value}


def _penalty_window(value: Any, sent: Sent) -> Fields:
    """The penalties of other servers see only the last tokens. -1 is the whole context, as here."""
    penalties = {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    penalizes = any(sent.sent(name) not in (None, off) for name, off in penalties.items())
    return _refuse("penalties apply to the whole text; use -1") if penalizes and not _equal(value, -1) else {}


def _newline_penalty(value: Any, sent: Sent) -> Fields:
    penalizes = any(sent.sent(name) not in (None, 1) for name in ("repetition_penalty", "repeat_penalty"))
    return _refuse("penalties apply to all tokens") if value is False and penalizes else {}


def _stops(value: Any, sent: Sent) -> Fields:
    return {"stop": [value] if isinstance(value, str) else value}


_SAMPLING: dict[str, ForeignField] = {
    "do_sample": ForeignField(_do_sample, replaces=True),
    **dict.fromkeys(
        ("num_predict", "n_predict", "max_new_tokens", "max_gen_len", "max_tokens_to_sample", "max_output_tokens"),
        ForeignField(_token_limit),
    ),
    "max_completion_tokens": renamed("max_tokens"),
    "min_new_tokens": renamed("min_tokens"),
    "repeat_penalty": renamed("repetition_penalty"),
    **dict.fromkeys(("repeat_last_n", "penalty_last_n"), ForeignField(_penalty_window)),
    **dict.fromkeys(("penalize_newline", "penalize_nl"), ForeignField(_newline_penalty)),
    **dict.fromkeys(("random_seed", "sampling_seed"), renamed("seed")),
    **dict.fromkeys(("stop", "stop_sequences", "stop_strings", "stopping_strings"), ForeignField(_stops)),
    "max_tokens": renamed("max_tokens"),
    "no_stop_trim": renamed("include_stop_str_in_output"),
    "ban_eos_token": renamed("ignore_eos"),
    "truncate": renamed("truncate_prompt_tokens"),
    **_refused("this sampler is not built", "typical_p typ_p typical tfs_z tfs", 1, 0),
    **_refused(
        "this sampler is not built",
        "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor top_a epsilon_cutoff "
        "eta_cutoff penalty_alpha no_repeat_ngram_size skew min_keep",
        0,
        False,
    ),
    **_refused("this sampler is not built", "top_n_sigma nsigma adaptive_target", -1, 0),
    **_refused("this sampler is not built", "encoder_repetition_penalty guidance_scale cfg_scale", 1),
    **_refused("this sampler is not built", "dynamic_temperature early_stopping watermark watermarking", False, {}),
    **_refused("samplers are applied in the order of vLLM", "samplers sampler_order sampler_priority sampler_seq", []),
    **_refused("beam search is not built", "num_beams beam_size beam_width num_beam_groups", 1, 0),
    **_refused("it counts the prompt; use max_tokens or min_tokens", "max_length min_length", 0),
    **_refused("use stop_token_ids", "eos_token_id"),
    **_refused("stop strings are no expressions", "stop_regex", []),
    **_refused("use bad_words or logit_bias", "custom_token_bans banned_tokens banned_strings bad_words_ids", "", []),
    **_refused("there is no second prompt", "negative_prompt", ""),
    **_refused("a request has no time limit of its own", "t_max_predict_ms max_time", 0, -1),
    **_ignored(
        # settings of samplers that are off
        "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold "
        "dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve temperature_last adaptive_decay diversity_penalty"
    ),
}

# --- answers

_BUDGET = "thinking_token_budget"
_ELSEWHERE = "requests to this route have no such field"


def _top_tokens(value: Any, sent: Sent) -> Fields:
    if _equal(value, 0):
        return {}
    return {"logprobs": True, "top_logprobs": value} if sent.has("top_logprobs") else {"logprobs": value}


def _grammar(value: Any, sent: Sent) -> Fields:
    """A grammar of llama.cpp, or an object of TGI."""
    if value == "":
        return {}
    if isinstance(value, Mapping):
        kinds = {"json": "guided_json", "json_object": "guided_json", "regex": "guided_regex"}
        name = kinds.get(str(value.get("type")))
        return {name: value.get("value")} if name else _refuse("the types json and regex are known")
    return {"guided_grammar": value}


def _format(value: Any, sent: Sent) -> Fields:
    """Ollama's: "json", or a schema."""
    if value in ("", {}):
        return {}
    return {"response_format": {"type": "json_object"}} if value == "json" else {"guided_json": value}


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
    **_refused(
        "it is not returned",
        "return_hidden_states return_routed_experts return_meta_info return_prompt_text return_prompt_token_ids "
        "return_token_offsets return_mm_kwargs return_weight_versions return_cached_tokens_details "
        "decoder_input_details post_sampling_probs return_images citations",
        False,
    ),
    **_refused("it is not returned", "top_n_tokens routed_experts_prompt_start routed_experts_start_len", 0),
    **_refused("one answer is given at once", "stream_reasoning separate_reasoning reasoning_split", True),
    "mode": refused("conversations use the chat template", "instruct"),
    "reasoning_format": refused("it is chosen by --reasoning-parser", "auto", "deepseek", "parsed", ""),
    **_refused("answers are not mocked", "mock_response mock_tool_calls", "", []),
    **_refused("nothing is checked or changed", "guardrails plugins safe_prompt moderation", [], {}, False),
    **_refused(
        "nothing is fetched from the web", "search_parameters enable_search search_settings web_search", False, {}
    ),
    **_refused("every answer is returned at once or streamed", "deferred background", False),
    **_refused("an adapter is chosen by the field model", "lora lora_path adapter_id lora_request", [], ""),
    **_refused("requests bring no code", "custom_logit_processor"),
    **_refused(
        "only text is read", "images image image_data video_data audio_data mm_payload images_config", [], {}, ""
    ),
    **_refused("prompts are computed here", "ec_transfer_params bootstrap_host bootstrap_room", {}),
    **_refused("its fields belong into the request itself", "extra_body model_kwargs parameters", {}),
    **_refused(_ELSEWHERE, "messages prompt inputs input_ids text instructions response_format structured_outputs", ""),
    **_refused(_ELSEWHERE, "input system template raw context", "", [], False),
    **_refused(_ELSEWHERE, "guided_json guided_regex guided_choice guided_grammar structural_tag top_logprobs", 0),
    **_refused(_ELSEWHERE, "logprob_token_ids truncate_prompt_tokens truncation_side"),
    **_refused(_ELSEWHERE, "n best_of num_return_sequences", 1),
    **_refused(_ELSEWHERE, "logprobs prompt_logprobs echo", False),
}

# --- reasoning: of conversations only


def _thinking(value: Any, sent: Sent) -> Fields:
    """A boolean, or the object of Anthropic, DeepSeek and GLM."""
    if isinstance(value, Mapping):
        fields: dict[str, Any] = {"thinks": value.get("type") != "disabled"}
        if value.get("type") not in ("enabled", "disabled", "adaptive", "auto", None):
            _refuse("its type is enabled, disabled or adaptive")
        return fields | (_budget(value, "budget_tokens") if fields["thinks"] else {})
    return _think(value, sent)


def _think(value: Any, sent: Sent) -> Fields:
    """A boolean, or Ollama's levels."""
    if isinstance(value, bool):
        return {"thinks": value}
    return {"reasoning_effort": value} if isinstance(value, str) else _refuse("it is true, false or a level")


def _reasoning(value: Any, sent: Sent) -> Fields:
    """OpenRouter's object."""
    if not isinstance(value, Mapping):
        return _think(value, sent)
    fields: dict[str, Any] = {}
    if value.get("effort") is not None:
        fields["reasoning_effort"] = value["effort"]
    if isinstance(value.get("enabled"), bool):
        fields["thinks"] = value["enabled"]
    if value.get("exclude") is True:
        fields["include_reasoning"] = False
    return fields | _budget(value, "max_tokens")


def _budget(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The budget that ``value`` has under one of ``names``."""
    given = [value[name] for name in names if value.get(name) is not None]
    return {_BUDGET: given[0]} if given else {}


def _custom_params(value: Any, sent: Sent) -> Fields:
    """SGLang's arguments of its processors of logits, one of which ends thoughts."""
    return _budget(value, "thinking_budget") if isinstance(value, Mapping) else {}


def _thinking_config(value: Any, sent: Sent) -> Fields:
    """Gemini's object, which has either spelling."""
    if not isinstance(value, Mapping):
        _refuse("it is an object")
    shows = value.get("include_thoughts", value.get("includeThoughts"))
    fields: dict[str, Any] = {} if shows is not False else {"include_reasoning": False}
    level = value.get("thinking_level", value.get("thinkingLevel"))
    if isinstance(level, str):
        fields["reasoning_effort"] = level.lower()
    return fields | _budget(value, "thinking_budget", "thinkingBudget")


def _google(value: Any, sent: Sent) -> Fields:
    """Gemini's fields in requests of OpenAI's form."""
    if not isinstance(value, Mapping) or value.get("cached_content") or value.get("cachedContent"):
        _refuse("an object is expected, without prompts that are stored")
    config = value.get("thinking_config", value.get("thinkingConfig"))
    return {} if config is None else _thinking_config(config, sent)


def _nvext(value: Any, sent: Sent) -> Fields:
    """The object of NVIDIA's servers."""
    names = {"max_thinking_tokens": _BUDGET}
    names |= {name: name for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")}
    if not isinstance(value, Mapping) or not value.keys() <= names.keys():
        _refuse(f"an object with {', '.join(names)} is expected")
    return {names[name]: entry for name, entry in value.items() if entry is not None}


def _effort(value: Any, sent: Sent) -> Fields:
    """OpenAI's field of chat."""
    return {"reasoning_effort": value}


def _switch(value: Any, sent: Sent) -> Fields:
    return {"thinks": value} if isinstance(value, bool) else _refuse("it is true or false")


REASONING_FIELDS: Mapping[str, ForeignField] = {
    "enable_thinking": ForeignField(_switch, hint=True),
    "thinking": ForeignField(_thinking, hint=True),
    "think": ForeignField(_think, hint=True),
    "reasoning": ForeignField(_reasoning, hint=True),
    # A number of tokens; a route without thoughts has nothing to limit.
    _BUDGET: IGNORED,
    **dict.fromkeys(
        (
            *("thinking_budget", "thinking_budget_tokens", "reasoning_budget", "reasoning_budget_tokens"),
            *("reasoning_max_tokens", "max_thinking_tokens", "max_reasoning_tokens"),
        ),
        ForeignField(lambda value, sent: {_BUDGET: value}, hint=True),
    ),
    "custom_params": ForeignField(_custom_params, hint=True),
    **dict.fromkeys(("thinking_config", "thinkingConfig"), ForeignField(_thinking_config, hint=True)),
    "google": ForeignField(_google, hint=True),
    "nvext": ForeignField(_nvext),
    **_refused(
        "reasoning_end_str of --reasoning-config says what ends a thought",
        "reasoning_budget_message thinking_budget_message think_stop_sentence",
        "",
    ),
    "reasoning_effort": ForeignField(_effort, hint=True),
}

#: OpenRouter's fields of the object ``reasoning`` in responses, besides those that are declared.
REASONING_OPTIONS: Mapping[str, ForeignField] = {
    "exclude": refused("reasoning is returned in full", False),
}

# --- bookkeeping, routing and settings of the server

_WITHOUT_EFFECT: dict[str, ForeignField] = {
    **_ignored(
        # OpenAI, Anthropic
        "prompt_cache_options cache_control inference_geo speed betas "
        # vLLM, SGLang, LMDeploy
        "session_id session_params stream_interval extra_key custom_labels routed_dp_rank "
        "data_parallel_rank disagg_prefill_dp_rank bootstrap_port ngram_corpus_id incremental_output result_format "
        # llama.cpp
        "cache_prompt id_slot slot_id timings_per_token return_progress response_fields n_cache_reuse "
        "n_keep n_discard n_indent speculative.n_max speculative.n_min speculative.p_min sse_ping_interval "
        # Ollama: how a model is loaded
        "keep_alive num_ctx num_batch num_gpu main_gpu num_thread num_keep num_gqa numa low_vram f16_kv vocab_only "
        "use_mmap use_mlock rope_frequency_base rope_frequency_scale "
        # TGI, text-generation-webui
        "details auto_max_new_tokens use_cache wait_for_model "
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
#: Fields of requests with embeddings, classes or scores, which sampling does not change.
POOLING_FIELDS: Mapping[str, ForeignField] = {
    **_WITHOUT_EFFECT,
    **_refused("instructions are part of the text", "input_type instruction prompt_name prompt task_type", ""),
    **_refused("numbers are float32", "embedding_types output_dtype", ["float"], "float"),
    **dict.fromkeys(("output_dimension", "dims"), renamed("dimensions")),
    **_refused("texts are not cut in parts", "late_chunking late_chunking_params", False),
    **_refused("only text is read", "images image", []),
}

#: Fields of messages of other servers' answers, which clients send back, and hints for their caches.
MESSAGE_FIELDS: Mapping[str, ForeignField] = {
    **_ignored(
        "refusal annotations reasoning_details provider_specific_fields cache_control id created object model "
        "token_ids stop_reason finish_reason index logprobs usage citations context tool_plan signature "
        "thinking_blocks thought_signature encrypted_content phase status metadata timestamp parsed "
        "tool_name additional_kwargs response_metadata invalid_tool_calls usage_metadata example type"
    ),
    "is_error": ForeignField(refused("templates show no errors", False).translate, named=True),
    "thinking": renamed("reasoning_content"),
    **_refused("only text is read", "images audio_data", []),
    **_refused("use continue_final_message", "prefix partial", False),
}
CALL_FIELDS: Mapping[str, ForeignField] = _ignored(
    "index extra_content thought_signature provider_specific_fields cache_control parsed_arguments description strict"
)


def _schema_of_format(value: Any, sent: Sent) -> Fields:
    """llama.cpp, SGLang and others put the schema beside the type."""
    return {"type": "json_schema", "json_schema": {"schema": value}}


FORMAT_FIELDS: Mapping[str, ForeignField] = {
    "schema": ForeignField(_schema_of_format, replaces=True),
    **_ignored("name description strict"),
}
