"""The tokenizer of a GGUF file as the files of a Hugging Face tokenizer, which gives the same ids.

``gpt2`` is byte-level BPE: its merges are stored, and tokenizer.ggml.pre names how texts are split. ``llama`` is
SentencePiece's BPE: merges follow from the scores, and characters without a token become bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.formats.gguf_model.keys import Metadata, unsupported
from aiakq.formats.gguf_model.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from aiakq.formats.gguf_model.vocabulary import (
    BYTE,
    CONTROL,
    SPECIAL,
    UNKNOWN,
    USER_DEFINED,
    GGUFVocabulary,
    merges_by_score,
    no_tokenizer,
    token_scores,
)

_SPACE = "\u2581"
#: Metadata of sampling in the file -> in generation_config.json; others are passed on under their own names.
SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
#: Of Phi-3: control tokens after which white space is not part of the text, all but these.
_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_files(keys: Metadata) -> dict[str, dict[str, Any]]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json, by name.

    Raises ``model_malformed``, and ``gguf_unsupported`` for a tokenizer that is not known exactly.
    """
    vocabulary = GGUFVocabulary.of(keys)
    pre = _pre_tokenizer(vocabulary) if vocabulary.model == "gpt2" else None
    tokenizer = _sentencepiece(vocabulary) if pre is None else _byte_level(vocabulary, pre)
    adds_bos = vocabulary.switch("add_bos_token")
    if adds_bos is None:
        adds_bos = pre is None or pre.add_bos
    adds_eos = bool(vocabulary.switch("add_eos_token"))
    tokenizer["post_processor"] = _post_processor(vocabulary, adds_bos, adds_eos, tokenizer["post_processor"])
    config = _config(vocabulary, chat_templates(keys))
    generation = {"eos_token_id": vocabulary.end_ids("chat_template" in config), **_sampling(keys)}
    if (bos := vocabulary.special("bos")) is not None:
        generation["bos_token_id"] = bos
    vocabulary.check_all_read()
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "generation_config.json": generation}


def special_ids(keys: Metadata) -> dict[str, int]:
    """Return bos_token_id, eos_token_id and pad_token_id of config.json, as far as there are such."""
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {hf: keys.get(f"tokenizer.ggml.{name}_token_id") for name, hf in names.items()}
    return {name: id for name, id in found.items() if type(id) is int and 0 <= id < 2**31}


def chat_templates(keys: Metadata) -> str | list[dict[str, str]] | None:
    """Return ``chat_template`` of tokenizer_config.json, or a list of named ones. Raises ``model_malformed``."""
    main = keys.text("tokenizer.chat_template")
    names = keys.array("tokenizer.chat_templates", str, "names") or []
    named = {name: keys.text(f"tokenizer.chat_template.{name}") for name in names}
    others = {name: template for name, template in named.items() if template}
    if not others:
        return main
    all_named = ({"default": main} if main else {}) | others
    return [{"name": name, "template": template} for name, template in all_named.items()]


def _pre_tokenizer(vocabulary: GGUFVocabulary) -> PreTokenizer:
    name = vocabulary.keys.text("tokenizer.ggml.pre")
    if name is None and vocabulary.keys.architecture in ("gpt2", "starcoder"):
        name = "gpt-2" if vocabulary.keys.architecture == "gpt2" else "starcoder"
    pre = PRE_TOKENIZERS.get(name or "")
    if pre is None:
        named = f"with the pre-tokenizer {name!r:.40}" if name else "without tokenizer.ggml.pre"
        raise unsupported(no_tokenizer(f"{named} (known ones: {', '.join(sorted(PRE_TOKENIZERS))})"))
    return pre


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


def _byte_level(vocabulary: GGUFVocabulary, pre: PreTokenizer) -> dict[str, Any]:
    """Return a tokenizer.json of byte-level BPE."""
    vocabulary.keys.get("tokenizer.ggml.scores")
    vocabulary.keys.get("tokenizer.ggml.add_space_prefix")  # byte-level BPE of llama.cpp has no prefix
    processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, rstrip=False, spaces=False),
        "normalizer": {"type": pre.normalizer} if pre.normalizer else None,
        "pre_tokenizer": pre.to_json(),
        "post_processor": processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary.ids, vocabulary.merges, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(vocabulary: GGUFVocabulary) -> dict[str, Any]:
    """Return a tokenizer.json of SentencePiece's BPE. Raises ``model_malformed`` without scores."""
    keys = vocabulary.keys
    if not vocabulary.scores:
        raise keys.malformed("tokenizer.ggml.scores", None, "a list of numbers")
    if keys.text("tokenizer.ggml.pre", "default") not in ("default", "llama-spm"):
        named = keys.text("tokenizer.ggml.pre")
        raise unsupported(no_tokenizer(f"of SentencePiece with the pre-tokenizer {named!r:.40}"))
    prefix = vocabulary.switch("add_space_prefix") is not False
    ids = {token.replace(" ", _SPACE) if _is_spaces(token) else token: id for token, id in vocabulary.ids.items()}
    unknown = next((token for token, id in vocabulary.ids.items() if vocabulary.kinds[id] == UNKNOWN), None)
    has_bytes = any(kind == BYTE for kind in vocabulary.kinds)
    merges = vocabulary.merges or merges_by_score(token_scores(vocabulary), ids)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefix else [replace]
    decoder: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, rstrip=keys.architecture == "phi3", spaces=not prefix),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": _bpe(ids, merges, unknown=unknown, byte_fallback=has_bytes),
    }


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


def _bpe(
    ids: Mapping[str, int],
    merges: list[tuple[str, str]],
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": dict(ids),
        "merges": [list(pair) for pair in merges],
    }


def _added_tokens(vocabulary: GGUFVocabulary, rstrip: bool, spaces: bool) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split: control tokens, and those of the user.

    rstrip  whether control tokens include white space after them, as in Phi-3.
    spaces  whether tokens of spaces, which the file holds as spaces, are found in the normalized text.
    """
    added = []
    for token, id in vocabulary.ids.items():
        kind = vocabulary.kinds[id]
        if not token or kind not in (CONTROL, USER_DEFINED, UNKNOWN):
            continue
        normalized = spaces and kind == USER_DEFINED and _is_spaces(token)
        added.append(
            {
                "id": id,
                "content": token.replace(" ", _SPACE) if normalized else token,
                "single_word": False,
                "lstrip": False,
                "rstrip": rstrip and kind != UNKNOWN and token not in _KEEPS_SPACE,
                "normalized": normalized,
                "special": kind != USER_DEFINED,
            }
        )
    return sorted(added, key=lambda each: each["id"])


def _post_processor(vocabulary: GGUFVocabulary, bos: bool, eos: bool, own: Any) -> Any:
    """Return the post-processor that adds bos and eos; ``own`` if there is none to add."""
    ends = [(vocabulary.special(name), name) for name, adds in (("bos", bos), ("eos", eos)) if adds]
    known = {name: id for id, name in ends if id is not None}
    if not known:
        return own
    tokens = {name: vocabulary.tokens[id] for name, id in known.items()}

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": kind}}]
        if "bos" in tokens:
            parts.insert(0, {"SpecialToken": {"id": tokens["bos"], "type_id": kind}})
        if "eos" in tokens:
            parts.append({"SpecialToken": {"id": tokens["eos"], "type_id": kind}})
        return parts

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [known[name]], "tokens": [token]} for name, token in tokens.items()
        },
    }
    return template if own is None else {"type": "Sequence", "processors": [own, template]}


# --- tokenizer_config.json and generation_config.json -----------------------------------------------------------------


def _config(vocabulary: GGUFVocabulary, templates: str | list[dict[str, str]] | None) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    named = {hf: vocabulary.special(name) for name, hf in SPECIAL.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{hf: vocabulary.tokens[id] for hf, id in named.items() if id is not None},
    }
    return config | ({"chat_template": templates} if templates else {})


def _sampling(keys: Metadata) -> dict[str, Any]:
    """Return the sampling values of the file, under the names of generation_config.json."""
    prefix = "general.sampling."
    found = {key.removeprefix(prefix): value for key, value in keys.values.items() if key.startswith(prefix)}
    return {SAMPLING.get(name, name): value for name, value in found.items()}
