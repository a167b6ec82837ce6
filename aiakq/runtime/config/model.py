"""ModelConfig: the numbers of a model, whatever its config.json calls them.

``ModelConfig.from_hf`` is the one place that knows how the spellings of Hugging Face configs differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.errors import error

#: Ten times more than any model has. Config files are untrusted: what is kept per layer must not exhaust memory.
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder-only model, whatever its config.json calls them.

    sliding_windows  per layer: positions a query sees, or None for all.
    rope             the rotary parameters (rope_type, rope_theta, ...); empty for learned positions.
    raw              config.json as read, for what only one family needs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises ``model_malformed`` for absent or impossible values."""
        try:
            return _model_config(raw)
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            ZeroDivisionError,
        ) as problem:
            # Config files are untrusted: any value may be of any type.
            reason = f"{type(problem).__name__}: {problem}"
            raise error("model_malformed", file="config.json", reason=reason[:200]) from problem


def _model_config(raw: Mapping[str, Any]) -> ModelConfig:
    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = raw.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                    raise error("model_malformed", file="config.json", reason=f"{name} is {value!r:.64}")
                return value
        if default is None:
            raise error("model_malformed", file="config.json", reason=f"{names[0]} is missing")
        return default

    architecture = first_architecture(raw)
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "num_heads")
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    if layers > _MAX_LAYERS:
        raise error("model_malformed", file="config.json", reason=f"it claims {layers} layers")
    kv_heads = number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise error(
            "model_malformed",
            file="config.json",
            reason=f"{heads} attention heads cannot share {kv_heads} key-value heads",
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=number("head_dim", default=hidden // heads),
        max_position=number("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        norm_eps=float(raw.get("rms_norm_eps") or raw.get("layer_norm_eps") or 1e-5),
        activation=str(raw.get("hidden_act") or raw.get("activation_function") or "silu"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", architecture == "OPTForCausalLM")),
        sliding_windows=_sliding_windows(raw, layers),
        rope=_rope(raw),
        raw=raw,
    )


def first_architecture(raw: Mapping[str, Any]) -> str:
    """The class that a config.json names, ``unnamed`` if none. Raises ``model_malformed``."""
    names = raw.get("architectures") or ["unnamed"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise error("model_malformed", file="config.json", reason="architectures is no list of names")
    return names[0]


def _sliding_windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Per-layer windows: ``layer_types`` if given, else Qwen's ``use_sliding_window``, else one for all."""
    window = raw.get("sliding_window")
    if not window or raw.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if "use_sliding_window" in raw:  # Qwen2 and Qwen3: only from max_window_layers on
        first = raw.get("max_window_layers", 0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window,) * layers


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from the transformers 5 form (rope_parameters) or the older rope_theta + rope_scaling."""
    if raw.get("rope_parameters"):
        return dict(raw["rope_parameters"])
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_type": "default"}
    scaling = raw.get("rope_scaling")
    if scaling:
        rope.update(scaling)
        rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    return rope
