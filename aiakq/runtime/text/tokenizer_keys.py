"""Which keys of a tokenizer's settings transformers applies, have no effect, or are named as not applied.

The tokenizer is that of transformers, so whatever its class reads is applied to prompts. The settings are those of
tokenizer_config.json and special_tokens_map.json.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping

#: Keys that transformers' classes read, with the same effect as there. ``*`` stands for the rest of a key.
APPLIED: Mapping[str, tuple[str, ...]] = {
    "tokens": (
        *("*_token", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
        *("added_tokens_decoder", "split_special_tokens", "never_split", "extra_ids", "vocab_size", "offset"),
    ),
    "the tokens around a prompt": ("add_bos_token", "add_eos_token", "post_processor"),
    "how text is split and normalized": (
        *("add_prefix_space", "legacy", "do_lower_case", "lowercase", "strip_accents", "tokenize_chinese_chars"),
        *("do_basic_tokenize", "do_wordpiece_tokenize", "do_subword_tokenize", "subword_tokenizer_type"),
        *("word_tokenizer_type", "wordpieces_prefix", "trim_offsets", "errors", "sp_model_kwargs", "fix_mistral_regex"),
        *("remove_space", "keep_accents", "add_dummy_prefix", "normalization", "unicode_normalizer", "dropout"),
    ),
    "the class": ("tokenizer_class", "auto_map", "from_slow", "backend", "tokenizer_type", "tokenizer_object"),
    "conversations": ("chat_template",),
}
#: Keys without effect on prompts and answers -> why.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "prompts are neither padded nor cut, except as a request says": (
        *("padding*", "pad_to_multiple_of", "pad_token_type_id", "truncation*", "stride", "max_length", "max_len"),
        *("model_max_length", "tokenizer_truncation", "tokenizer_padding", "model_input_names", "return_*"),
    ),
    "it says where the files come from": (
        *("name_or_path", "*_file", "special_tokens_map*", "is_local", "local_files_only", "files_loaded", "_*"),
        *(
            "transformers_version",
            "processor_class",
            "image_processor_type",
            "device_map",
            "use_auth_token",
            "use_fast",
        ),
        *("trust_remote_code", "revision", "model_type", "verbose", "max_model_input_sizes", "subfolder"),
    ),
    "requests say it": ("spaces_between_special_tokens", "skip_special_tokens", "add_special_tokens"),
    "transformers 5 does not read it": ("use_default_system_prompt", "response_schema", "clean_text"),
    "answers are parsed by the server's parsers": ("response_template", "chat_control_tokens"),
    "it is for images, audio or video": ("image_*", "video_*", "audio_*", "patch_size", "num_additional_image_tokens"),
}
#: Rewrite the decoded text as a whole, such as " ." to ".", which would change what has been streamed.
_CLEANING = "clean_up_tokenization_spaces"
_CLEANING_ALWAYS = f"{_CLEANING}_for_bpe_even_though_it_will_corrupt_output"


def not_applied(config: Mapping[str, object], is_bpe: bool, read: Collection[str] = ()) -> dict[str, object]:
    """Return the keys and values of a tokenizer's settings that are unknown, or change text only in transformers.

    0 and false are values like others: what an unknown key turns off may be on.

    is_bpe  whether the tokenizer's model is BPE, after which transformers does not clean up spaces unless forced to.
    read    further keys that the tokenizer's class reads.
    """
    cleans = bool(config.get(_CLEANING)) and (not is_bpe or bool(config.get(_CLEANING_ALWAYS)))
    unapplied = {
        key: value
        for key, value in config.items()
        if key not in (_CLEANING, _CLEANING_ALWAYS)
        and value not in (None, "", [], {})
        and not (key in read or _is_known(key))
    }
    return unapplied | ({_CLEANING: True} if cleans else {})


def remark(settings: Mapping[str, object], tokenizer: object) -> str:
    """Return the end of a line of the start-up table: the settings of ``tokenizer`` that are not applied, if any."""
    model = getattr(getattr(tokenizer, "_tokenizer", None), "model", None)
    unapplied = sorted(not_applied(settings, type(model).__name__ == "BPE", read_by(tokenizer)).items())
    if not unapplied:
        return ""
    more = f" and {len(unapplied) - 8} more" if len(unapplied) > 8 else ""
    return f"; not applied: {', '.join(f'{key[:48]} {value!r:.32}' for key, value in unapplied[:8])}{more}"


def read_by(tokenizer: object) -> set[str]:
    """Return the keys that the class of a transformers tokenizer reads: the parameters of its constructors."""
    constructors = [each.__dict__["__init__"] for each in type(tokenizer).__mro__[:-1] if "__init__" in each.__dict__]
    return {name for each in constructors for name in inspect.signature(each).parameters}


def _is_known(key: str) -> bool:
    return any(
        _matches(key, pattern) for each in (APPLIED, WITHOUT_EFFECT) for keys in each.values() for pattern in keys
    )


def _matches(key: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return key.startswith(pattern[:-1])
    return key.endswith(pattern[1:]) if pattern.startswith("*") else key == pattern
