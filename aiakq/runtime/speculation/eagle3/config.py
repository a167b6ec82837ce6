"""Eagle3Config: the config.json of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), in the published spellings: that
of the authors, which SGLang, SpecForge and vLLM share, and that of the speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import first_architecture
from aiakq.runtime.config.hf_config import read_config
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.speculation.methods import check_supported

#: Families whose layer is Llama's, with biases and head norms where there are tensors for them.
_FAMILIES = ("llama", "qwen2", "qwen3")
#: Files of tools that do not record in config.json how they quantized a model.
_QUANTIZED = ("hf_quant_config.json", "quantize_config.json")


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head.

    model                 its decoder layer, as a model of one layer with the vocabulary of the target model.
    draft_vocab_size      tokens that it can propose.
    target_hidden_size    width of the target model's hidden states.
    aux_layers            layers of the target model whose input the head reads, ascending; None: 2, the middle one and
                          the last but two.
    norm_before_residual  whether the residual of the decoder layer starts behind the norm of the hidden states.
    norm_before_fc        whether there is an RMS norm over the hidden states of all auxiliary layers side by side.
    fc_norm               whether there is an RMS norm for the hidden states of each auxiliary layer.
    norm_output           whether the head reads its own hidden states behind its last norm, instead of before it.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @staticmethod
    def from_folder(path: Path) -> Eagle3Config:
        """Raises ``model_malformed``, ``unsupported`` and what ``ModelConfig.from_hf`` raises."""
        raw = read_config(path, "config.json")
        layer, nested = _object(raw, "transformer_layer_config"), _object(raw, "eagle_config")
        _check_supported(path, raw, layer, nested)
        model = ModelConfig.from_hf(_layer_config(raw, layer))
        norm_before_fc, fc_norm, norm_output = (
            _switch(name, False, nested, raw) for name in ("norm_before_fc", "fc_norm", "norm_output")
        )
        if norm_before_fc and fc_norm:
            raise error("model_malformed", file="config.json", reason="norm_before_fc and fc_norm exclude each other")
        return Eagle3Config(
            model=model,
            draft_vocab_size=_number(raw, "draft_vocab_size", model.vocab_size),
            target_hidden_size=_number(raw, "target_hidden_size", model.hidden_size),
            aux_layers=_aux_layers(raw, nested),
            norm_before_residual=_switch("norm_before_residual", bool(layer), raw),
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )

    @property
    def num_aux_layers(self) -> int:
        """Number of auxiliary layers."""
        return 3 if self.aux_layers is None else len(self.aux_layers)

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The auxiliary layers in a target model of ``num_layers``. Raises ``option_conflict``."""
        layers = (2, num_layers // 2, num_layers - 3) if self.aux_layers is None else self.aux_layers
        if not all(0 <= layer <= num_layers for layer in layers) or sorted(set(layers)) != list(layers):
            raise error(
                "option_conflict",
                option="--speculative-model",
                other="this model",
                reason=f"the head reads the layers {', '.join(map(str, layers))} of {num_layers}",
                hint="Take a head that was trained for this model.",
            )
        return layers


def kind_of_head(path: Path) -> str | None:
    """eagle3 or eagle if the tensors are those of such a head, which some config.json do not say; else None."""
    inventory = Checkpoint.open(path).inventory
    if not {"fc.weight", "model.fc.weight"} & inventory.keys():
        return None
    return "eagle3" if any(name.endswith("hidden_norm.weight") for name in inventory) else "eagle"


def is_eagle3(path: Path) -> bool:
    """Whether the config.json at ``path`` is that of an EAGLE-3 head. Raises ``unsupported`` for other heads."""
    raw = read_config(path, "config.json")
    architectures, kind = raw.get("architectures"), raw.get("speculators_model_type")
    names = [raw.get("model_type"), kind, *(architectures if isinstance(architectures, list) else ())]
    for name in names:
        check_supported(str(name))
    if "medusa_num_heads" in raw:  # the authors' config.json names no architecture
        check_supported("medusa")
    if kind is not None and kind != "eagle3":
        raise unsupported_head(f"A speculator of the type {kind!r:.64}", "Take an EAGLE-3 head or a draft model.")
    return "draft_vocab_size" in raw or any("eagle3" in str(name).lower() for name in names)


def unsupported_head(what: str, hint: str = "Take a head without it.") -> AiakqError:
    """The error for a head that is not computed as its authors do."""
    return error("unsupported", what=what, hint=f"{hint} docs/speculation.md names those that work.")


def _check_supported(
    path: Path, raw: Mapping[str, object], layer: Mapping[str, object], nested: Mapping[str, object]
) -> None:
    """Raise ``unsupported`` for a head that is computed in another way than here."""
    for part in (raw, nested):
        if part.get("parallel_drafting"):
            raise unsupported_head("An EAGLE-3 head with parallel_drafting")
        if part.get("use_aux_hidden_state") is False:
            hint = "Take a head that reads the hidden states of several layers."
            raise unsupported_head("An EAGLE-3 head without auxiliary hidden states", hint)
    if raw.get("logit_scale") not in (None, 1, 1.0):
        raise unsupported_head("An EAGLE-3 head with logit_scale")
    is_recorded = any(part.get(key) for part in (raw, layer) for key in ("quantization_config", "compression_config"))
    if is_recorded or any((path / name).exists() for name in _QUANTIZED):
        raise quantized_head()
    num_layers = layer.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise unsupported_head(f"An EAGLE-3 head of {num_layers!r:.16} layers", "Take a head of one layer.")
    _check_family(raw, layer)


def quantized_head() -> AiakqError:
    """The error for a quantized head."""
    return unsupported_head("A quantized EAGLE-3 head", "Take the head in 16 bits: it is one layer.")


def _check_family(raw: Mapping[str, object], layer: Mapping[str, object]) -> None:
    """Raise ``unsupported`` if the head's decoder layer is not Llama's."""
    architecture = first_architecture(raw)
    family = str(layer.get("model_type", "qwen3")) if layer else architecture
    is_known = family in _FAMILIES if layer else any(name in family.lower() for name in (*_FAMILIES, "unnamed"))
    if not is_known:
        what = f"An EAGLE-3 head with a decoder layer of {family:.64}"
        raise unsupported_head(what, f"Take a head with a layer of {', '.join(_FAMILIES[:-1])} or {_FAMILIES[-1]}.")


def _layer_config(raw: Mapping[str, object], layer: Mapping[str, object]) -> dict[str, object]:
    """The config of the head's decoder layer as that of a model of one layer.

    The layer is Llama's, whatever family config.json names: it is often a copy of the target's config. Only
    ``layer_types`` say whether it has a sliding window.
    """
    config = {**raw, **layer, "architectures": raw.get("architectures"), "num_hidden_layers": 1, "model_type": "eagle3"}
    if not config.get("layer_types"):
        config["sliding_window"] = None
    return config


def _aux_layers(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that the config names: by their input in its own key, by their output in ``eagle_config``."""
    name = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = raw.get(name), nested.get(name)
    layers, count = inputs or outputs, raw.get("num_aux_hidden_states")
    if count is not None and count != len(layers or (0, 1, 2)):
        reason = f"num_aux_hidden_states is {count!r:.64}, and {name} is {layers!r:.64}"
        raise error("model_malformed", file="config.json", reason=reason)
    if not layers:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise error("model_malformed", file="config.json", reason=f"{name} is {layers!r:.64}")
    return tuple(layer + (not inputs) for layer in layers)


def _object(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
    return value


def _switch(name: str, default: bool, *parts: Mapping[str, object]) -> bool:
    """The setting ``name`` in the first of ``parts`` that has it."""
    value = next((part[name] for part in parts if part.get(name) is not None), default)
    if type(value) is not bool:
        raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
    return value


def _number(raw: Mapping[str, object], name: str, default: int) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 2**31:
        raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
    return value
