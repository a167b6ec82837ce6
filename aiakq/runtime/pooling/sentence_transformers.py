"""Reads the files of sentence-transformers: modules, pooling and maximum text length of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import read_file
from aiakq.runtime.protocol.text_prompts import TextPrompts

#: Supported pooling modes of sentence-transformers -> ours.
_KINDS = {
    **{"cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST", "max_tokens": "MAX"},
    **{"weightedmean_tokens": "WEIGHTEDMEAN", "mean_sqrt_len_tokens": "MEAN_SQRT_LEN"},
}
_MODES = {
    **{"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST", "max": "MAX", "weightedmean": "WEIGHTEDMEAN"},
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
}
SETTINGS = "config_sentence_transformers.json"
#: Supported activations of Dense modules.
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class DenseModule:
    """A linear layer with an activation, applied to pooled rows; ``path`` is its folder inside the model's.

    residual  whether its input is added to its output, through a linear layer if their sizes differ (PyLate).
    """

    path: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool = False


@dataclass(frozen=True)
class SentenceTransformer:
    """The modules of a sentence-transformers model.

    pooling     kind of pooling: LAST, CLS or one of ``REDUCTIONS``.
    normalize   whether embeddings are normalized to length 1.
    max_length  number of tokens that sentence-transformers truncates texts to; None for no limit.
    """

    pooling: str
    normalize: bool
    dense: tuple[DenseModule, ...] = ()
    max_length: int | None = None


@dataclass(frozen=True)
class CrossEncoder:
    """A sentence-transformers model that scores pairs of texts.

    activation  name of the class that turns its single score into a probability; None if not configured.
    max_length  maximum number of tokens of a pair; None for no limit.
    """

    activation: str | None = None
    max_length: int | None = None


def read_cross_encoder(folder: Path) -> CrossEncoder:
    """Read the sentence-transformers files of a model with labels in ``folder``.

    Raises ``unsupported`` for modules after the transformer, and ``model_malformed``.
    """
    names = [name for name, _ in listed_modules(folder)] if (folder / "modules.json").exists() else ["Transformer"]
    if names != ["Transformer"]:
        raise _unsupported(f"A model of labels of the modules {', '.join(names) or 'none'}")
    stated = read_object(folder, SETTINGS).get("activation_fn") if (folder / SETTINGS).exists() else None
    length = _max_length(folder, "sequence-classification", "logits")
    return CrossEncoder(None if stated is None else str(stated), length)


def read_modules(folder: Path) -> SentenceTransformer | None:
    """Read modules.json of the model in ``folder``; return None if there is none.

    Raises ``unsupported`` for modules that are not supported exactly, and ``model_malformed``.
    """
    if not (folder / "modules.json").exists():
        return None
    modules = listed_modules(folder)
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or modules[0][1] not in ("", "."):
        raise _unsupported(f"A model of the modules {', '.join(names) or 'none'}")
    _, pooling_path = modules[1]
    normalize, dense = False, []
    for name, path in modules[2:]:
        if normalize or name not in ("Dense", "Normalize"):
            raise _unsupported(f"The module {name} behind {'Normalize' if normalize else 'Pooling'}")
        if name == "Dense":
            dense.append(read_dense(folder, path))
        else:
            normalize = True
    return SentenceTransformer(
        _pooling(folder, pooling_path),
        normalize,
        tuple(dense),
        _max_length(folder, "feature-extraction", "last_hidden_state"),
    )


def read_prompts(folder: Path) -> TextPrompts:
    """Read the prompts of the model in ``folder``. Raises ``model_malformed``."""
    if not (folder / SETTINGS).exists():
        return TextPrompts()
    settings = read_object(folder, SETTINGS)
    named, default = settings.get("prompts"), settings.get("default_prompt_name")
    named = {} if named is None else named
    if not isinstance(named, dict) or not all(isinstance(text, str | None) for text in named.values()):
        raise _malformed(SETTINGS, "prompts is no object with texts")
    if default is not None and (not isinstance(default, str) or default not in named):
        raise _malformed(SETTINGS, f"default_prompt_name is {default!r:.64}, which prompts does not have")
    return TextPrompts({name: text or "" for name, text in named.items()}, default)


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the names and folders of the modules, in order. Raises ``model_malformed``."""
    modules = _json(folder, "modules.json")
    if not isinstance(modules, list):
        raise _malformed("modules.json", "it holds no list")
    return [_name_and_path(entry) for entry in modules]


def _name_and_path(entry: object) -> tuple[str, str]:
    """Return the last part of a module's type, such as Pooling, and its folder."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise _malformed("modules.json", "an entry has no type")
    path = entry.get("path", "")
    if not isinstance(path, str) or path.startswith("/") or ".." in Path(path).parts:
        raise _malformed("modules.json", f"the path {path!r:.64} is not one inside the model's folder")
    return entry["type"].rpartition(".")[2], path


def _pooling(folder: Path, path: str) -> str:
    """Return our kind of pooling for a Pooling module."""
    config = read_object(folder, f"{path}/config.json")
    if config.get("include_prompt", True) is not True:
        raise _unsupported("A Pooling module that leaves out prompts (include_prompt)")
    mode = config.get("pooling_mode")
    if mode is not None:
        mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
        if not isinstance(mode, str) or mode not in _MODES:
            raise _unsupported(f"The pooling_mode {mode!r:.64}")
        return _MODES[mode]
    modes = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value
    ]
    modes = modes or ["mean_tokens"]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise _unsupported(f"Pooling by {' and '.join(modes):.100}")
    return _KINDS[modes[0]]


def read_dense(folder: Path, path: str, of_tokens: bool = False) -> DenseModule:
    """Read a Dense module, of pooled rows or ``of_tokens``. Raises ``unsupported`` and ``model_malformed``."""
    file = f"{path}/config.json"
    config = read_object(folder, file)
    inputs, outputs = config.pop("in_features", None), config.pop("out_features", None)
    default = "torch.nn.modules.linear.Identity" if of_tokens else "torch.nn.modules.activation.Tanh"
    bias, function = config.pop("bias", True), config.pop("activation_function", default)
    if not all(type(size) is int and 0 < size < 2**20 for size in (inputs, outputs)) or type(bias) is not bool:
        raise _malformed(file, f"in_features, out_features and bias are {inputs!r:.20}, {outputs!r:.20}, {bias!r:.20}")
    activation = str(function).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise _unsupported(f"The activation {function!r:.64} of a Dense module")
    residual = of_tokens and config.pop("use_residual", False) is True
    for name, value in config.items():
        # module_input_name, module_output_name and use_residual
        if value not in (None, False, "token_embeddings" if of_tokens else "sentence_embedding"):
            raise _unsupported(f"A Dense module whose {name:.64} is {value!r:.64}")
    return DenseModule(path, inputs, outputs, bias, activation, residual)


def check_transformer(folder: Path) -> None:
    """Raise ``unsupported`` for a Transformer module that does not return the hidden states of plain texts."""
    _max_length(folder, "feature-extraction", "last_hidden_state")


def _max_length(folder: Path, task: str, output: str) -> int | None:
    """Return the number of tokens that sentence-transformers truncates texts to, if it is configured.

    task, output  expected transformer_task and model output. Raises ``unsupported`` for others.
    """
    name = "sentence_bert_config.json"
    config = read_object(folder, name) if (folder / name).exists() else {}
    if config.get("do_lower_case"):
        raise _unsupported("A tokenizer whose texts sentence-transformers makes lower-case first (do_lower_case)")
    if config.get("transformer_task", task) != task:
        raise _unsupported(f"The transformer_task {config['transformer_task']!r:.64}")
    modality = config.get("modality_config")
    text = modality.get("text") if isinstance(modality, dict) else None
    stated = text.get("method_output_name") if isinstance(text, dict) else None
    if stated not in (None, output):
        raise _unsupported(f"Pooling of the model's output {stated!r:.64}")
    length, key = config.get("max_seq_length"), "max_seq_length"
    if length is None and (folder / "tokenizer_config.json").exists():
        name, key = "tokenizer_config.json", "model_max_length"
        length = read_object(folder, name).get(key)
        if isinstance(length, (int, float)) and length >= 2**31:  # transformers' value for no limit
            length = None
    if length is not None and (type(length) is not int or length < 1):
        raise _malformed(name, f"{key} is {length!r:.64}")
    return length


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read an object from a JSON file of the folder. Raises ``model_malformed``."""
    value = _json(folder, name)
    if not isinstance(value, dict):
        raise _malformed(name, "it holds no object")
    return value


def _json(folder: Path, name: str) -> object:
    # Not relative to the subfolder, since links of the hub cache lead out of it.
    try:
        return json.loads(read_file(folder, name))
    except (ValueError, RecursionError) as problem:
        raise _malformed(name, str(problem)[:200]) from None


def _malformed(file: str, reason: str) -> AiakqError:
    return error("model_malformed", file=file, reason=reason)


def _unsupported(what: str) -> AiakqError:
    hint = "aiakq computes Transformer, Pooling of one mode, Dense and Normalize, in this order."
    return error("unsupported", what=what, hint=hint)
