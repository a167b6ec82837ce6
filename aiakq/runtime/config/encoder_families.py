"""Encoders: their classes in transformers, the keys of config.json that they compute with, and one spelling of these.

The attention of an encoder reads the whole text in both directions, so it returns embeddings and scores, and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.runtime.config.family_keys import Family
from aiakq.runtime.config.published_encoders import published_gte, published_nomic

#: Suffixes of the classes around an encoder that are served: without a head, with that of the training, with labels.
_SUFFIXES = ("ForSequenceClassification", "ForMaskedLM", "ForPreTraining", "Model")
#: Class of an encoder without a head -> its model_type.
ENCODER_TYPES: Mapping[str, str] = {
    "BertModel": "bert",
    "RobertaModel": "roberta",
    "XLMRobertaModel": "xlm-roberta",
    "CamembertModel": "camembert",
    "DistilBertModel": "distilbert",
    "MPNetModel": "mpnet",
    "ModernBertModel": "modernbert",
    "NomicBertModel": "nomic_bert",
    "GteModel": "gte",
    "JinaBertModel": "jina_bert",
    "JinaEmbeddingsV3Model": "jina_embeddings_v3",
}
#: Classes around an encoder with other names: of ColBERT's authors, of PyLate's files in vLLM, and of GTE's authors.
_OTHER_NAMES = {
    **{"HF_ColBERT": "BertModel", "ColBERTModernBertModel": "ModernBertModel"},
    **{f"New{suffix}": "GteModel" for suffix in _SUFFIXES},
}
#: Families whose files have another model_type than that of transformers' class.
_STATED = {"jina_bert": "bert", "gte": "new"}
_SIZES = {"max_position_embeddings": 512, "intermediate_size": 3072, "layer_norm_eps": 1e-12}
_BERT: dict[str, Any] = {**_SIZES, "hidden_act": "gelu", "type_vocab_size": 2, "pad_token_id": 0}
_ROBERTA: dict[str, Any] = {**_BERT, "pad_token_id": 1}
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "use_bidirectional_attention": (True,),
    "is_causal": (False,),
}
_UNREAD = frozenset({"tie_word_embeddings", "directionality", "classifiers_size"})


def _family(defaults: Mapping[str, Any], rotary: bool = False, **others: Any) -> Family:
    unread = _UNREAD | others.pop("unread", frozenset())
    fixed = {**_FIXED, **others.pop("fixed", {})}
    return Family(defaults, unread=frozenset(unread), fixed=fixed, rotary=rotary, **others)


#: model_type -> keys.
ENCODER_FAMILIES: Mapping[str, Family] = {
    "bert": _family(_BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _family(_ROBERTA, unread=frozenset({"use_flash_attn"}))),
    "distilbert": _family(
        {"max_position_embeddings": 512, "intermediate_size": 3072, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
        unread=frozenset({"sinusoidal_pos_embds", "tie_weights_"}),
    ),
    "mpnet": _family(
        {**_SIZES, "hidden_act": "gelu", "pad_token_id": 1, "relative_attention_num_buckets": 32},
        fixed={"relative_attention_num_buckets": (32,)},
    ),
    "modernbert": _family(
        {
            "hidden_activation": "gelu",
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "norm_bias": False,
            "attention_bias": False,
            "mlp_bias": False,
            "layer_types": None,
            "sliding_window": 64,
            "classifier_pooling": "cls",
            "classifier_bias": False,
            "classifier_activation": "gelu",
        },
        rotary=True,
        fixed={"classifier_pooling": ("cls", "mean")},
        unread=frozenset(
            {"decoder_bias", "deterministic_flash_attn", "sparse_prediction", "reference_compile"}
            | {"sparse_pred_ignore_index", "repad_logits_with_grad", "compiled_mlp"}
        ),
    ),
    "nomic_bert": _family(
        {**_BERT, "max_position_embeddings": 2048, "hidden_act": "silu", "head_dim": None}, rotary=True
    ),
    "jina_bert": _family(
        {**_BERT, "feed_forward_type": "original"},
        fixed={"position_embedding_type": ("alibi",), "feed_forward_type": ("geglu", "reglu"), "emb_pooler": ("mean",)},
        unread=frozenset({"attn_implementation", "model_max_length"}),
    ),
    "jina_embeddings_v3": _family(
        {
            **_ROBERTA,
            "max_position_embeddings": 8194,
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-5,
            "type_vocab_size": 1,
        },
        rotary=True,
    ),
    "gte": _family({**_BERT, "max_position_embeddings": 8192, "type_vocab_size": 1, "head_dim": None}, rotary=True),
}


def encoder_of(architecture: str) -> str | None:
    """Return the class of the encoder in a class of config.json, without its head; None if there is none."""
    if architecture in _OTHER_NAMES:
        return _OTHER_NAMES[architecture]
    for suffix in _SUFFIXES:
        if architecture.endswith(suffix):
            base = f"{architecture.removesuffix(suffix)}Model"
            return base if base in ENCODER_TYPES else None
    return None


def extra_positions(raw: Mapping[str, Any]) -> int:
    """Return the rows of the table of positions before that of the first token; ``raw`` is of ``encoder_config``,
    or of transformers.

    RoBERTa counts positions from the id of the padding token on, which has a position itself.
    """
    kind, pad = raw.get("model_type"), raw.get("pad_token_id")
    if kind not in _PADDED:
        return 0
    return 2 if pad is None or kind == "mpnet" else int(pad) + 1


def encoder_config(raw: Mapping[str, object], base: str) -> dict[str, Any]:
    """Return config.json ``raw`` of the encoder ``base`` with one spelling of its keys; its own result is unchanged.

    Raises ``config_key_unsupported``, ``model_malformed``, and ``unsupported`` for the code of another class.
    """
    kind = ENCODER_TYPES[base]
    stated = raw.get("model_type") or kind
    if stated not in (kind, _STATED.get(kind)):
        reason = f"architectures names an encoder of the family {kind}"
        raise error("config_key_unsupported", key="model_type", value=f"{stated!r:.64}", reason=reason)
    config = {**raw, "architectures": [base], "model_type": kind}
    if kind in _SPELLINGS:
        try:
            config = _SPELLINGS[kind](config)
        except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as problem:
            raise _malformed(f"{type(problem).__name__}: {problem}"[:200]) from problem
    return config


def _distilbert(config: dict[str, Any]) -> dict[str, Any]:
    names = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {"hidden_dim": "intermediate_size", "activation": "hidden_act"}
    for alias, name in names.items():
        if alias in config:
            config[name] = config.pop(alias)
    return {**config, "layer_norm_eps": 1e-12}


def _roberta(config: dict[str, Any]) -> dict[str, Any]:
    pad, rows = config.get("pad_token_id"), config.get("max_position_embeddings", 512)
    pad = 1 if pad is None or config["model_type"] == "mpnet" else pad
    if type(pad) is not int or type(rows) is not int or not 0 <= pad < rows - 1:
        raise _malformed(f"pad_token_id {pad!r:.64} leaves none of the {rows!r:.64} positions")
    return {**config, "pad_token_id": pad}


def _modernbert(config: dict[str, Any]) -> dict[str, Any]:
    """Kinds of layers, their window (tokens on each side) and rotary parameters, in the spelling of transformers 5."""
    layers, every = config.get("num_hidden_layers", 0), config.pop("global_attn_every_n_layers", 3)
    local, theta = config.pop("local_attention", None), {"full_attention": 160000.0, "sliding_attention": 10000.0}
    if local is None:
        local = 2 * config.get("sliding_window", 64)
    if type(layers) is not int or type(every) is not int or type(local) is not int or every < 1 or local < 2:
        raise _malformed("num_hidden_layers, global_attn_every_n_layers or local_attention is no positive integer")
    theta["full_attention"] = config.pop("global_rope_theta", None) or theta["full_attention"]
    theta["sliding_attention"] = config.pop("local_rope_theta", None) or theta["sliding_attention"]
    given, scaling = config.pop("rope_parameters", None) or {}, config.pop("rope_scaling", None) or {}
    config["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": base, **scaling, **(given.get(kind) or {})}
        for kind, base in theta.items()
    }
    for key in ("layer_norm_eps", "position_embedding_type"):  # which transformers does not read
        config.pop(key, None)
    if config.get("layer_types") is None:
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer % every != 0] for layer in range(min(layers, 10_000))]
    return {**config, "sliding_window": local // 2}


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in the base of the rotary frequencies, which transformers leaves out of files."""
    kind = config["model_type"]
    if config.get("auto_map"):
        if kind not in _PUBLISHED:
            hint = "Files of transformers' own class have no auto_map; aiakq computes with those only."
            raise error("unsupported", what=f"An encoder with Python code of its own ({kind})", hint=hint)
        config = _PUBLISHED[kind](config)
    given = dict(config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {})
    base = config.pop("rope_theta", None) or _THETAS[kind]
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": base, **given}}


def _jina_bert(config: dict[str, Any]) -> dict[str, Any]:
    """Positions are learned in a file that does not say otherwise."""
    return {**config, "position_embedding_type": config.get("position_embedding_type") or "absolute"}


#: Families whose tensors have the same names in the files of their authors -> one spelling of their keys.
_PUBLISHED = {"nomic_bert": published_nomic, "gte": published_gte}
#: Base of the rotary frequencies of files without one.
_THETAS = {"nomic_bert": 1000.0, "gte": 160_000.0, "jina_embeddings_v3": 20_000.0}
_PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet")
_SPELLINGS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(_PADDED, _roberta),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "jina_bert": _jina_bert,
    **dict.fromkeys(_THETAS, _rotary),
}


def _malformed(reason: str) -> AiakqError:
    return error("model_malformed", file="config.json", reason=reason)
