"""params.json of a model in Mistral's format, as config.json of the model in Hugging Face's.

What the keys mean is what mistral-inference (mistral_inference/args.py) and vLLM
(vllm/transformers_utils/configs/mistral.py) do with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import COUNT, OBJECT, SIZE, SWITCH

PARAMS = "params.json"
_NUMBER = Constraint(type=float, above=0, high=1e12, expected="a number above 0")
_BASE = Constraint(type=float, low=1, high=1e12, expected="a number from 1 on")
_WORD = Constraint(type=str, expected="a word")
#: Positions of a model that does not say it, as in vLLM.
_POSITIONS = 128_000
#: Rotary base of a model that does not say it: that of Mistral 7B v0.1, the only one with a window and without a base.
_FIRST_BASE = 10_000.0
#: Keys of attention with compressed keys and values, as in Mistral Large 3.
_COMPRESSED = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
#: Keys of encoders beside the text model.
_ENCODERS = ("vision_encoder", "multimodal", "audio_encoder", "whisper_model_args")
#: Keys that change nothing here: sizes of buffers of mistral-inference, and the dtype of the files, which tensors tell.
_UNUSED = ("max_batch_size", "dtype", "param_dtype")


def unsupported(reason: str) -> AiakqError:
    """Return a ``mistral_unsupported`` error."""
    return error("mistral_unsupported", reason=reason)


class Params:
    """The keys of a params.json, or of an object in it, each of which has to be read.

    values  key -> value; null is as good as missing.
    where   the key of the object, followed by a dot; empty for the file.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where
        self._read: set[str] = set()

    def get(self, key: str, constraint: Constraint, default: object = ...) -> Any:
        """Return a value. Raises ``model_malformed`` if ``constraint`` refuses it, or without one and a default."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if (refused := constraint.refusal(value)) is not None:
            raise self.malformed(key, refused.expected)
        return value

    def raw(self, key: str) -> Any:
        """Return a value of any type, or None."""
        self._read.add(key)
        return self.values.get(key)

    def part(self, key: str) -> Params | None:
        """Return an object; None if it is missing or empty. Raises ``model_malformed``."""
        value = self.get(key, OBJECT, None)
        return Params(value, f"{self.where}{key}.") if value else None

    def fixed(self, key: str, *allowed: object) -> None:
        """Raise ``mistral_unsupported`` unless the key is missing or has one of the values ``allowed``."""
        value = self.raw(key)
        if value is not None and value not in allowed:
            raise unsupported(f"{self.where}{key} is {value!r:.60}, which aiakq does not compute")

    def malformed(self, key: str, expected: str) -> AiakqError:
        """Return ``model_malformed`` for a key."""
        value = self.values.get(key)
        found = "missing" if value is None else f"{value!r:.64}"
        return error("model_malformed", file=PARAMS, reason=f"{self.where}{key} is {found}, not {expected}")

    def check_all_read(self) -> None:
        """Raise ``mistral_unsupported`` for a key that nothing read, by name."""
        for key, value in self.values.items():
            if key not in self._read:
                raise unsupported(
                    f"{PARAMS} has the key '{self.where}{key:.64}' ({value!r:.60}), which may change results"
                )


def config_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json of the model would say, without a quantization_config.

    Raises ``model_malformed``, and ``mistral_unsupported`` for what cannot be computed exactly, or an unknown key.
    """
    params = Params(values)
    _check_kind(params)
    layers = params.get("n_layers", SIZE)
    heads, kv_heads, head_dim = _heads(params)
    positions = params.get("max_position_embeddings", SIZE, None)
    longest = params.get("max_seq_len", SIZE, None)
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": params.get("dim", SIZE),
        "intermediate_size": params.get("hidden_dim", SIZE),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(params.get("norm_eps", _NUMBER)),
        "vocab_size": params.get("vocab_size", SIZE),
        "tie_word_embeddings": params.get("tied_embeddings", SWITCH, False),
        "max_position_embeddings": positions or longest or _POSITIONS,
    }
    window, kinds = _windows(params, layers)
    config |= _experts(params, window)
    config["rope_parameters"] = rope = _rope(params, window, kinds)
    if kinds is not None:
        config |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "layer_types": kinds}
    if "llama_4_scaling_beta" in rope:
        if kinds is not None or "num_local_experts" in config:
            raise unsupported("llama_4_scaling together with moe or with windows that differ from layer to layer")
        config |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    params.raw("quantization")  # read by tensors.py
    for key in _UNUSED:
        params.raw(key)
    params.check_all_read()
    return config | {"sliding_window": window}


def _heads(params: Params) -> tuple[int, int, int]:
    """Return the numbers of heads and of key-value heads, and the size of a head. Raises ``model_malformed``."""
    heads, dim = params.get("n_heads", SIZE), params.get("dim", SIZE)
    kv_heads, head_dim = params.get("n_kv_heads", SIZE, heads), params.get("head_dim", SIZE, None)
    if heads % kv_heads:
        raise params.malformed("n_heads", f"a multiple of n_kv_heads, {kv_heads}")
    if head_dim is None and dim % heads:
        raise params.malformed("n_heads", f"a divisor of dim, {dim}, without a head_dim")
    return heads, kv_heads, head_dim or dim // heads


def _check_kind(params: Params) -> None:
    """Raise ``mistral_unsupported`` for models that are no text transformer with ordinary attention."""
    for key in _ENCODERS:
        if params.raw(key):
            raise unsupported(f"the model has {key}, and only models of text are read from this format")
    for key in _COMPRESSED:
        if params.raw(key):
            raise unsupported(f"its attention compresses keys and values ({key})")
    params.fixed("model_type", "transformer")
    params.fixed("activation", "silu")
    params.fixed("causal", True)
    params.fixed("use_biases", False)
    params.fixed("lora", {})


def _windows(params: Params, layers: int) -> tuple[int | None, list[str] | None]:
    """Return the window of attention, and the kind of each layer if only some have it."""
    window = params.raw("sliding_window")
    if not isinstance(window, list):
        return params.get("sliding_window", SIZE, None), None
    given = [size for size in window if size is not None]
    is_pattern = window and layers % len(window) == 0 and all(SIZE.refusal(size) is None for size in given)
    if not is_pattern or len(sizes := set(given)) > 1:
        raise params.malformed("sliding_window", "a window, or a list of one window and null that repeats")
    size = next(iter(sizes), None)
    if size is None or None not in window:
        return size, None
    repeated = window * (layers // len(window))
    return size, ["full_attention" if each is None else "sliding_attention" for each in repeated]


def _experts(params: Params, window: int | None) -> dict[str, Any]:
    """Return what config.json says of a mixture of experts, Mixtral's; nothing for other models."""
    moe = params.part("moe")
    if moe is None:
        return {}
    if moe.get("num_shared_experts", COUNT, 0) or moe.raw("first_k_dense_replace"):
        raise unsupported("a mixture with shared experts (moe.num_shared_experts)")
    moe.fixed("route_every_n", 1)
    found = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": moe.get("num_experts", SIZE),
        "num_experts_per_tok": moe.get("num_experts_per_tok", SIZE),
    }
    moe.check_all_read()
    return found


def _rope(params: Params, window: int | None, kinds: list[str] | None) -> dict[str, Any]:
    """Return rope_parameters, with YaRN and the scaling of queries by their position, if there is any."""
    theta = params.get("rope_theta", _BASE, _FIRST_BASE if window and kinds is None else None)
    if theta is None:
        raise unsupported(f"{PARAMS} has no rope_theta, for which programs assume different numbers; add it")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
    yarn, scaling = params.part("yarn"), params.part("llama_4_scaling")
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": float(yarn.get("factor", _NUMBER)),
            "original_max_position_embeddings": yarn.get("original_max_position_embeddings", SIZE),
            "beta_fast": float(yarn.get("beta", _NUMBER, 32.0)),
            "beta_slow": float(yarn.get("alpha", _NUMBER, 1.0)),
        }
        if not yarn.get("apply_scale", SWITCH, True):
            rope["attention_factor"] = 1.0
        yarn.check_all_read()
    if scaling is not None:
        original = scaling.get("original_max_position_embeddings", SIZE)
        if rope.get("original_max_position_embeddings") != original:
            raise unsupported("llama_4_scaling without yarn of the same original_max_position_embeddings")
        rope["llama_4_scaling_beta"] = float(scaling.get("beta", _NUMBER))
        scaling.check_all_read()
    return rope
