"""Which keys of a multimodal checkpoint's files are understood, besides those of its language model.

transformers' classes compute images and audio, and drop keys that they do not know. Such a key may change the
arithmetic in the library that wrote it, so it is refused by name, unless it is known to make no difference. No torch.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import read_json
from aiakq.formats.quantization_config import CONFIG_KEYS
from aiakq.runtime.config import known_keys
from aiakq.runtime.config.multimodal import MultimodalConfig

if TYPE_CHECKING:
    from aiakq.runtime.text.tokenizer import Tokenizer

#: Keys of any part that say what it is.
_ALWAYS = frozenset({"architectures", "model_type", "dtype", "torch_dtype", "aiakq", "auto_map", *CONFIG_KEYS})
#: Keys of an encoder without effect -> why.
_ENCODER: Mapping[str, str] = {
    "max_image_size": "the image processor reads that of preprocessor_config.json",
    "size": "the image processor reads that of preprocessor_config.json",
    "tie_word_embeddings": "an encoder of images has no output layer",
    "vocab_size": "an encoder of images has no vocabulary",
    "projection_dim": "it is the width of a projection that only CLIP's and SigLIP's pairs of models have",
    "projector_hidden_act": "the projection has that of the model around the encoder",
    "num_image_tokens": "it follows from the sizes of the encoder",
    "use_base_siglip": "it names the encoder that the training began with",
    "is_composition": "it is a property of transformers' class",
    "*_token_id": "an encoder of images has no vocabulary",
    "video_*": "videos are refused then",
    "tokens_per_second": "videos are refused then",
}
#: Patterns of keys without effect in a language model that may have one in an encoder, such as num_register_tokens.
_DOUBTFUL = ("*_tokens", "*_token", "*kernel*", "*chunk_size*", "max_position", "*_ctx", "max_text_positions")
#: Keys of an encoder -> keys of transformers' class that mean the same; both have to have the same value.
_SAME: Mapping[str, str] = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
#: Keys of the top level without effect -> why.
_OUTER: Mapping[str, str] = {
    "image_seq_length": "it follows from the sizes of the encoder",
    "image_seq_len": "it follows from the sizes of the encoder",
    "video_*": "videos are refused then",
}
#: Keys of a processor without effect -> why.
HARMLESS_PROCESSOR_KEYS: Mapping[str, str] = {
    "processor_class": "it is a name",
    "_processor_class": "it is a name",
    "image_processor_type": "it is a name",
    "feature_extractor_type": "it is a name",
    "auto_map": "code of a checkpoint is not run for images",
    "_valid_processor_keys": "it lists names of arguments",
    "use_fast": "the implementation with Pillow is used everywhere",
    "image_processor": "an image processor has none inside",
}
#: The same of an image processor.
_PROCESSOR: Mapping[str, str] = {
    **HARMLESS_PROCESSOR_KEYS,
    "*video*": "it is the video processor's",
    "*fps*": "it is the video processor's",
    "*frames*": "it is the video processor's",
}
#: Arguments of image processors that are no user's choice: the encoder reads one layout of patches only.
_FIXED = frozenset(
    {
        *("return_tensors", "data_format", "input_data_format", "device", "disable_grouping", "image_seq_length"),
        *("patch_size", "merge_size", "temporal_patch_size"),
    }
)
#: Keys of processor_config.json that are arguments of a processor but not of images, or that config.json has, too.
_DERIVED = frozenset(
    {
        *("chat_template", "tokenizer", "tokenizer_class", "image_processor", "feature_extractor", "patch_size"),
        *("image_seq_len", "image_seq_length", "num_additional_image_tokens", "vision_feature_select_strategy"),
        *("spatial_merge_size", "num_image_tokens", "image_token", "image_token_id"),
    }
)
#: Those that name tokens between the placeholders, which are read.
TOKENS = frozenset({"image_break_token", "image_end_token"})


def refused_key(config: MultimodalConfig) -> str:
    """Return why the keys of config.json do not allow to compute media; "" if they do."""
    from transformers import CONFIG_MAPPING

    kind = str(config.raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return f"transformers has no model_type {kind!r:.64}"
    family, part = CONFIG_MAPPING[kind], config.part
    try:
        encoder = type(getattr(family.from_dict(dict(config.raw)), part))
    except Exception:  # transformers raises anything for invalid values; loading the encoder reports what remains
        encoder = type(getattr(family(), part))
    for key, value in config.raw.items():
        if not _is_known_outside(key, value, config.raw, family):
            return _refusal(key, value, f"transformers' {kind} models have no such key")
    inside = config.raw[part]
    for key, value in inside.items():
        if not _is_known_inside(key, value, inside, encoder):
            return _refusal(f"{part}.{key}", value, f"transformers' {encoder.model_type} models have no such key")
    return next(_unknown_rotary(inside, part), "")


def refused_video_key(config: MultimodalConfig) -> str:
    """Return why the keys of config.json do not allow to compute videos, although they do images; "" if they do."""
    from transformers import CONFIG_MAPPING

    family = CONFIG_MAPPING[str(config.raw["model_type"])]
    parts = (("", config.raw, family), ("vision_config.", config.raw["vision_config"], type(family().vision_config)))
    for place, values, kind in parts:
        for key, value in values.items():
            if _matches(key, ("video_*", "tokens_per_second")) and not _is_read(key, kind):
                return _refusal(f"{place}{key}", value, f"transformers' {kind.__name__} has no such key")
    return ""


def _refusal(key: str, value: object, reason: str) -> str:
    return (
        f"config.json has {key:.80} = {value!r:.64}, and {reason}; "
        "if it has no effect on the answers, remove it from the file"
    )


def _is_known_outside(key: str, value: object, raw: Mapping[str, Any], family: type) -> bool:
    """Whether a key of the top level is read, or makes no difference."""
    if key in _ALWAYS or _is_read(key, family) or is_effectless(key, value, _OUTER):
        return True
    # Versions of transformers have written the keys of the language model twice; those of text_config count.
    text = raw["text_config"]
    if key in known_keys.ROTARY:
        return key in text and text[key] == value
    return key in text or key in known_keys.SHAPES or key == "vocab_size"


def _is_known_inside(key: str, value: object, inside: Mapping[str, Any], encoder: type) -> bool:
    """Whether a key of an encoder's config is read, or makes no difference."""
    if key in _ALWAYS or _is_read(key, encoder):
        return True
    known = {**_known(encoder), **inside}
    heads = known.get("num_attention_heads")
    if key == "num_key_value_heads":  # transformers' encoders have as many
        return value == heads
    if key == "head_dim":
        return isinstance(value, int) and isinstance(heads, int) and value * heads == known.get("hidden_size")
    same = _SAME.get(key)
    if same is not None and same in _known(encoder):
        return bool(inside.get(same, _known(encoder)[same]) == value)
    return is_effectless(key, value, _ENCODER)


def is_effectless(key: str, value: object, listed: Mapping[str, str]) -> bool:
    """Whether a key makes no difference: it is among ``listed``, patterns, or one that nowhere has an effect."""
    if _matches(key, listed) or known_keys.is_off(key, value):
        return True
    return known_keys.without_effect(key) is not None and not _matches(key, _DOUBTFUL)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _unknown_rotary(inside: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yield the refusal of each key of an encoder's rotary parameters that no rotary embedding has."""
    for key in ("rope_parameters", "rope_scaling"):
        values = inside.get(key)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if name not in known_keys.ROTARY_PARAMETERS and not known_keys.is_off(name, value):
                yield _refusal(f"{part}.{key}.{name}", value, "rotary embeddings have no such key")


def _is_read(key: str, family: Any) -> bool:
    """Whether a class of configs has a key, or its model reads it nevertheless."""
    known = _known(family)
    if key in known or key in family.attribute_map or (key in known_keys.ROTARY and "rope_parameters" in known):
        return True
    name = re.escape(key)
    return re.search(rf"\bconfig\.{name}\b|\bconfig, [\"']{name}[\"']", _source_of_model(family)) is not None


@functools.cache
def _known(family: Any) -> Mapping[str, object]:
    return dict(vars(family()))


@functools.cache
def _source_of_model(family: type) -> str:
    """Return the source of the module with the models of a class of configs; empty without one."""
    spec = importlib.util.find_spec(family.__module__.replace(".configuration_", ".modeling_"))
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


def check_processor_keys(processor: Any, folder: str) -> None:
    """Raise ``processor_key_unsupported`` for a key of the processor's files that nothing reads and that may have an
    effect, and ``model_malformed`` if they are no objects.

    processor  transformers' image processor of ``folder``.
    """
    kind = type(processor)
    stated, _ = kind.get_image_processor_dict(folder, local_files_only=True)
    if not isinstance(stated, Mapping):
        raise error("model_malformed", file=f"the image processor in '{folder}'", reason="it is no object")
    known = kind.valid_kwargs.__annotations__
    for key, value in stated.items():
        if key not in known and not hasattr(kind, key) and not is_effectless(key, value, _PROCESSOR):
            raise _unread("the file of the image processor", key, value, kind)
    for key, value in processor_config(folder).items():
        if key not in _DERIVED | TOKENS and not is_effectless(key, value, _PROCESSOR):
            raise _unread("processor_config.json", key, value, kind)


def check_processor_arguments(
    processor: Any, given: Mapping[str, object], own: Iterable[str], also: frozenset[str] = frozenset()
) -> None:
    """Raise ``bad_option`` for an argument of ``--mm-processor-kwargs`` that the processor does not have, or that is
    set here.

    processor  transformers' image processor.
    own        arguments that the family sets.
    also       those that another processor has, for the remedy.
    """
    kind = type(processor)
    fixed = _FIXED | frozenset(own)
    allowed = sorted(kind.valid_kwargs.__annotations__.keys() - fixed)
    for key in given:
        if key not in allowed:
            what = "is set by the model" if key in fixed else f"is no argument of {kind.__name__}"
            hint = f"Remove it, or give one of {', '.join(sorted({*allowed, *also}))}."
            raise bad_processor_arguments(given, f"{key[:64]!r} {what}", hint)


def bad_processor_arguments(given: Mapping[str, object], reason: str, hint: str) -> AiakqError:
    """Return the error for arguments that the image processor does not take."""
    expected = f"what the image processor takes: {reason}"
    return error("bad_option", option="--mm-processor-kwargs", value=dict(given), expected=expected, hint=hint)


def _unread(file: str, key: str, value: object, kind: type) -> AiakqError:
    return error("processor_key_unsupported", file=file, key=key[:64], value=f"{value!r:.64}", kind=kind.__name__)


def processor_config(folder: str) -> dict[str, Any]:
    """Return the contents of processor_config.json; {} without one."""
    path = Path(folder, "processor_config.json")
    return read_json(path, path.name) if path.exists() else {}


def completed_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of transformers' class, which files leave out."""
    from transformers import CONFIG_MAPPING

    completed: dict[str, Any] = CONFIG_MAPPING[str(raw["model_type"])].from_dict(dict(raw)).to_dict()
    return completed


def special_token(tokenizer: Tokenizer, folder: str) -> Callable[[str, str], str]:
    """Return a function for tokens by name; processor_config.json names some, and the tokenizer's config others."""
    stated = processor_config(folder) if folder else {}

    def named(name: str, default: str) -> str:
        found = stated.get(name) if name in TOKENS else None
        found = found or getattr(getattr(tokenizer, "hf", None), name, None)
        return found if isinstance(found, str) else default

    return named
