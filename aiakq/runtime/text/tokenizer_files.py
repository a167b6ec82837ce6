"""What is wrong with the files of a tokenizer, in words: transformers names neither the file nor a remedy."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.mistral.choice import tokenizer_file
from aiakq.formats.model_folder import open_file, read_file, read_json, template_files, vocabulary_files
from aiakq.runtime.protocol.media import ARCHITECTURES

#: Any of these may be all that a tokenizer has.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
#: Files that transformers reads as UTF-8, besides templates.
_TEXTS = (*_JSON, "chat_template.json", "vocab.txt", "merges.txt")
_MARKED = "it begins with a byte order mark, which transformers does not read; save it without one"
_NOT_TEXT = "it is not UTF-8 text; save it in this encoding"
#: What a file in another encoding begins with.
_OTHER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: The template of a processor, in older models with images or audio.
_PROCESSOR_TEMPLATE = "chat_template.json"


_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    *("image_token", "audio_token", "video_token"),
)
_SWITCHES = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens"),
    *("do_lower_case", "legacy", "use_default_system_prompt", "spaces_between_special_tokens"),
)


def check_settings(folder: Path) -> None:
    """Raise ``model_malformed`` for a key of the tokenizer's settings that has a value of the wrong type.

    transformers does not check them, and fails later, in whatever first uses the value.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "added_tokens.json"):
        if not (folder / name).is_file():
            continue
        for key, value in read_json(folder / name, name).items():
            expected = _ID if name == "added_tokens.json" else _EXPECTED.get(key)
            if expected is None or (value is None and expected not in (_ID, _EXPECTED["added_tokens_decoder"])):
                continue
            description, accepts = expected
            if not accepts(value):
                reason = f"{key[:64]!r} is {value!r:.64}, not {description}"
                raise error("model_malformed", file=str(folder / name), reason=reason)


def check_encoding(folder: Path) -> None:
    """Raise ``model_malformed`` for a text file of the tokenizer that begins with a byte order mark.

    transformers does not read it in JSON, and makes it a part of the first token of a vocabulary. Templates are used
    without it.
    """
    for name in _TEXTS:
        if not (folder / name).is_file():
            continue
        with open_file(folder, name) as stream:
            start = stream.read(len(codecs.BOM_UTF8))
        if start == codecs.BOM_UTF8:
            raise error("model_malformed", file=str(folder / name), reason=_MARKED)
        if start.startswith(_OTHER_MARKS):
            raise error("model_malformed", file=str(folder / name), reason=_NOT_TEXT)


def unused_template(folder: Path, used: object) -> str:
    """Return a sentence about a template of the model that differs from the ``used`` one and is not used, or "".

    As in transformers, chat_template.json is for processors of images and audio: a tokenizer has the template of
    tokenizer_config.json, chat_template.jinja and additional_chat_templates/.
    """
    if not (folder / _PROCESSOR_TEMPLATE).is_file():
        return ""
    template = read_json(folder / _PROCESSOR_TEMPLATE, _PROCESSOR_TEMPLATE).get("chat_template")
    given = template if isinstance(template, list) else []
    named = {each["name"]: each["template"] for each in given} if given else template
    if named in (None, "", used):
        return ""
    return (
        f"The chat template in {_PROCESSOR_TEMPLATE} is not used: as in transformers, it is for images and audio only."
    )


def wrong_encodings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the text files of a tokenizer that transformers cannot read, each with the reason."""
    for name in (*_TEXTS, "config.json", "chat_template.jinja", *template_files(folder)):
        if not (folder / name).is_file():
            continue
        content = read_file(folder, name)
        if content.startswith(codecs.BOM_UTF8) and not name.endswith(".jinja"):
            yield name, _MARKED
        try:
            content.decode()
        except UnicodeDecodeError:
            yield name, _NOT_TEXT


def read_settings(folder: Path) -> dict[str, object]:
    """Return the keys and values of the tokenizer's settings, which ``check_settings`` has accepted."""
    names = ("special_tokens_map.json", "tokenizer_config.json")
    return {
        key: value
        for name in names
        if (folder / name).is_file()
        for key, value in read_json(folder / name, name).items()
    }


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: object) -> bool:
    """Whether ``value`` is a template, or a list or dictionary of named ones."""
    if isinstance(value, dict):
        return all(isinstance(each, str) for each in value.values())
    named = value if isinstance(value, list) else []
    are_named = all(isinstance(each, dict) and _are_strings(each.get("name"), each.get("template")) for each in named)
    return isinstance(value, str) or (bool(named) and are_named)


def _are_strings(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_added_tokens(value: object) -> bool:
    """Whether ``value`` maps ids, as text, to tokens with a content and flags."""
    return isinstance(value, dict) and all(
        id.isdecimal()
        and isinstance(token, dict)
        and _is_token(token)
        and all(isinstance(flag, bool) for name, flag in token.items() if name in _TOKEN_FLAGS)
        for id, token in value.items()
    )


def _are_tokens(value: object) -> bool:
    return isinstance(value, (list, dict)) and all(map(_is_token, value if isinstance(value, list) else value.values()))


_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
_ID: tuple[str, Callable[[object], bool]] = ("a token id", _is_id)
#: Key -> what its value has to be, besides null.
_EXPECTED: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(_TOKENS, ("a token", _is_token)),
    **dict.fromkeys(_SWITCHES, ("true or false", lambda value: isinstance(value, bool))),
    "chat_template": ("a template, or a list of objects with name and template", _is_template),
    "additional_special_tokens": ("a list of tokens", _are_tokens),
    "extra_special_tokens": ("a list of tokens, or an object of them", _are_tokens),
    "added_tokens_decoder": ("an object of ids and tokens", _are_added_tokens),
    "model_max_length": ("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)),
    "tokenizer_class": ("the name of a class", lambda value: isinstance(value, str)),
    "padding_side": ("left or right", lambda value: value in ("left", "right")),
    "truncation_side": ("left or right", lambda value: value in ("left", "right")),
}


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder has files of a tokenizer."""
    if any((folder / name).is_file() for name in (*_VOCABULARIES, "tokenizer_config.json")):
        return True
    return bool(vocabulary_files(folder)) or tokenizer_file(folder) is not None


#: Keys that transformers adds to a tokenizer's configuration, with the location of its files.
LOCAL_CONFIG = frozenset(
    {
        *("vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "name_or_path"),
        *("is_local", "local_files_only", "backend", "files_loaded"),
    }
)


def plain_value(value: object) -> Any:
    """Return ``value`` as JSON values, with added tokens as their text."""
    if isinstance(value, dict):
        return {str(name): plain_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(each) for each in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return getattr(value, "content", str(value))


def image_template(folder: Path) -> str | None:
    """Return the template of a processor in chat_template.json for a model whose images are read; None without one."""
    if not ((folder / _PROCESSOR_TEMPLATE).is_file() and (folder / "config.json").is_file()):
        return None
    if not set(ARCHITECTURES["image"]).intersection(
        read_json(folder / "config.json", "config.json").get("architectures") or ()
    ):
        return None
    template = read_json(folder / _PROCESSOR_TEMPLATE, _PROCESSOR_TEMPLATE).get("chat_template")
    return template if isinstance(template, str) else None


def names_its_class(folder: Path) -> bool:
    """Whether the tokenizer's files name their transformers class."""
    try:
        config = read_json(folder / "tokenizer_config.json", "tokenizer_config.json")
    except AiakqError:
        return False
    named = isinstance(config.get("tokenizer_class"), str)
    return named and "auto_map" not in config and (folder / "config.json").is_file()


def config_of_any_model(folder: Path) -> object:
    """Return a config with the model type, which suffices for transformers if the tokenizer names its class.

    The model's own config class would import torch's compiler and image and video libraries, which takes seconds and
    150 MB in each process.
    """
    from transformers.configuration_utils import PreTrainedConfig

    config: Any = PreTrainedConfig()
    config._name_or_path = str(folder)
    config.model_type = read_json(folder / "config.json", "config.json").get("model_type") or ""
    return config
