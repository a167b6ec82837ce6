"""Which keys of generation_config.json are applied to requests, have no effect, or are named as not applied.

The sampling values and limits below are defaults of requests, as in vLLM. Other keys change what ``generate`` of
transformers answers; a server does not apply them to the requests of all clients, and says so at the start.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Applied; all but the last two are also names of SamplingParams.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
APPLIED = (*SAMPLING, "max_new_tokens", "eos_token_id")
#: Keys without effect on the answers of a server -> why.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "it says where the file comes from": ("transformers_version", "_*"),
    "it selects what generate returns, or how many answers, which requests say": (
        *("output_*", "return_dict_in_generate", "num_return_sequences", "use_return_dict"),
    ),
    "it is about speed or memory": (
        *("use_cache", "cache_implementation", "cache_config", "low_memory", "max_time", "prefill_chunk_size"),
        *(
            "num_assistant_tokens*",
            "assistant_*",
            "is_assistant",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
        ),
        *(
            "target_lookbehind",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "specul*",
            "use_mtp",
            "max_cache_len",
        ),
    ),
    "requests have max_tokens, and the context length is a limit": ("max_length", "max_window_size", "max_context*"),
    "prompts are not padded, and their first token is the tokenizer's": (
        *(
            "bos_token_id",
            "pad_token_id",
            "decoder_start_token_id",
            "sep_token_id",
            "unk_token_id",
            "trust_remote_code",
        ),
    ),
    "it changes no probabilities that are finite": ("renormalize_logits", "remove_invalid_values"),
    "the chat template and parsers say it": ("chat_format", "user_token_id", "assistant_token_id", "lang_to_id"),
}
#: Key -> values, besides null, that mean it is off.
_OFF: Mapping[str, tuple[object, ...]] = {
    "do_sample": (True,),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale"), (1,)
    ),
    "top_h": (1,),
}
#: Keys that 0 and false turn off; of any other key they may be a value that does something.
_OFF_AT_ZERO = frozenset(
    {
        *("min_length", "min_new_tokens", "min_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "presence_penalty", "frequency_penalty"),
        *("penalty_alpha", "token_healing", "early_stopping", "constraints", "watermarking_config", "dola_layers"),
    }
)
#: Defaults of transformers' GenerationConfig, which old versions wrote into config.json.
_DEFAULTS: Mapping[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
#: Keys that have an effect only with beam search.
_BEAMS = frozenset({"length_penalty", "early_stopping", "diversity_penalty", "constraints", "force_words_ids"})


def not_applied(config: Mapping[str, object]) -> dict[str, object]:
    """Return the keys and values of a generation config that change what transformers answers, but not a server."""
    beams = config.get("num_beams")
    skipped = frozenset() if isinstance(beams, int) and beams > 1 else _BEAMS
    return {
        key: value
        for key, value in config.items()
        if key not in APPLIED and key not in skipped and not _is_off(key, value) and not _matches(key)
    }


def of_model_config(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the generation values in config.json ``raw``, which old files have, other than transformers' defaults."""
    return {key: raw[key] for key in SAMPLING if key in raw and raw[key] not in (None, _DEFAULTS.get(key))}


def describe(unapplied: Mapping[str, object]) -> str:
    """Return a line of the start-up table about keys that are not applied."""
    shown = [f"{key[:48]} {value!r:.32}" for key, value in sorted(unapplied.items())[:8]]
    more = f" and {len(unapplied) - len(shown)} more" if len(unapplied) > len(shown) else ""
    return f"not applied: {', '.join(shown)}{more}"


def _is_off(key: str, value: object) -> bool:
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return value in _OFF[key] if key in _OFF else key in _OFF_AT_ZERO and not value


def _matches(key: str) -> bool:
    patterns = (pattern for each in WITHOUT_EFFECT.values() for pattern in each)
    return any(key.startswith(each[:-1]) if each.endswith("*") else key == each for each in patterns)
