"""Eagle3Config: the config.json of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), in the published spellings: that
of the authors, which SGLang, SpecForge and vLLM share, and that of the speculators library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.runtime.config.hf_config import read_config
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.speculation_methods import check_supported

#: Settings of later variants, which change what the head computes.
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head.

    model                 its decoder layer, as a model of one layer with the vocabulary of the target model.
    draft_vocab_size      tokens that it can propose.
    target_hidden_size    width of the target model's hidden states.
    aux_layers            layers of the target model whose input the head reads, ascending; None: 2, the middle one and
                          the last but two.
    norm_before_residual  whether the residual of the decoder layer starts behind the norm of the hidden states.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool

    @staticmethod
    def from_folder(path: Path) -> Eagle3Config:
        """Raises ``model_malformed``, ``unsupported`` and what ``ModelConfig.from_hf`` raises."""
        raw = read_config(path, "config.json")
        layer, nested = _object(raw, "transformer_layer_config"), _object(raw, "eagle_config")
        for name in _VARIANTS:
            if raw.get(name) or nested.get(name):
                hint = "Take a head without it; docs/speculation.md names those that work."
                raise error("unsupported", what=f"An EAGLE-3 head with {name}", hint=hint)
        if nested.get("use_aux_hidden_state") is False:
            hint = "Take a head that reads the hidden states of three layers."
            raise error("unsupported", what="An EAGLE-3 head without auxiliary hidden states", hint=hint)
        if raw.get("quantization_config") or layer.get("quantization_config"):
            hint = "Take the head in 16 bits: it is one layer."
            raise error("unsupported", what="A quantized EAGLE-3 head", hint=hint)
        # Some published configs are copies of the target's, with its number of layers.
        model = ModelConfig.from_hf({**raw, **layer, "architectures": raw.get("architectures"), "num_hidden_layers": 1})
        return Eagle3Config(
            model=model,
            draft_vocab_size=_number(raw, "draft_vocab_size", model.vocab_size),
            target_hidden_size=_number(raw, "target_hidden_size", model.hidden_size),
            aux_layers=_aux_layers(raw, nested),
            norm_before_residual=bool(raw.get("norm_before_residual", bool(layer))),
        )

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The auxiliary layers in a target model of ``num_layers``. Raises ``option_conflict``."""
        layers = self.aux_layers or (2, num_layers // 2, num_layers - 3)
        if not all(0 <= layer <= num_layers for layer in layers) or sorted(set(layers)) != list(layers):
            raise error(
                "option_conflict",
                option="--speculative-model",
                other="this model",
                reason=f"the head reads the layers {', '.join(map(str, layers))} of {num_layers}",
                hint="Take a head that was trained for this model.",
            )
        return layers


def is_eagle3(path: Path) -> bool:
    """Whether the folder at ``path`` holds an EAGLE-3 head. Raises ``unsupported`` for heads of another kind."""
    raw = read_config(path, "config.json")
    names = raw.get("architectures")
    names_of_kind = [
        raw.get("model_type"),
        raw.get("speculators_model_type"),
        *(names if isinstance(names, list) else ()),
    ]
    if "draft_vocab_size" in raw or any("eagle3" in str(word).lower() for word in names_of_kind):
        return True
    for word in names_of_kind:
        check_supported(str(word))
    return False


def _aux_layers(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that the config names: by their input in its own key, by their output in ``eagle_config``."""
    name = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = raw.get(name), nested.get(name)
    layers = inputs or outputs
    if not layers:
        return None
    if not isinstance(layers, list) or len(layers) != 3 or not all(type(layer) is int for layer in layers):
        raise error("model_malformed", file="config.json", reason=f"{name} is {layers!r:.64}")
    return tuple(layer + (not inputs) for layer in layers)


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 2**31:
        raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
    return value
