"""ModelConfig: the dimensions of a model, normalized over the key names in config.json.

``ModelConfig.from_hf`` is the only place that knows how the keys of Hugging Face configs differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import SIZE, malformed, read_value
from aiakq.formats.model_folder import first_architecture
from aiakq.runtime.config.encoder_families import encoder_config, encoder_of, extra_positions
from aiakq.runtime.config.families import FAMILIES
from aiakq.runtime.config.gemma4 import cache_sources, heads_of_layers
from aiakq.runtime.config.known_keys import check_keys, completed, with_floats
from aiakq.runtime.config.layer_keys import with_layers
from aiakq.runtime.config.rope import GridRope, check_even, is_nested, longest_context, rope_parameters, rotated_layers
from aiakq.runtime.config.speech import decoder_config, is_speech
from aiakq.runtime.config.text_part import text_part

#: Maximum number of layers, ten times more than any model has: an untrusted config must not exhaust memory.
_MAX_LAYERS = 10_000
#: Aliases of kinds of layers.
_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
#: Kinds of layers with a recurrent state instead of keys and values.
_STATES = frozenset({"conv", "linear_attention"})
#: Kinds of layers with a recurrent state.
_RECURRENT = _STATES | {"hybrid"}
#: Model types without heads.
_WITHOUT_HEADS = frozenset({"mamba", "falcon_mamba"})
#: Kinds of layers that know no positions.
_WITHOUT_POSITIONS = _STATES | {"mlp", "moe"}

#: Keys of sizes in the configs of all kinds of models.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES = (
    *_LAYERS,
    *("hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads", "num_heads", "head_dim"),
    *("num_key_value_heads", "intermediate_size", "ffn_dim", "n_inner", "vocab_size", "num_local_experts"),
    *("num_experts", "moe_intermediate_size"),
)


def check_config(raw: Mapping[str, object], num_tensors: int) -> None:
    """Validate the sizes and keys of a config before transformers builds a model from it.

    Raises as ``check_sizes`` and ``check_keys``.
    """
    check_sizes(raw, num_tensors)
    check_keys(raw)


def check_sizes(raw: Mapping[str, object], num_tensors: int) -> None:
    """Validate the sizes of a config before transformers builds a model from it. Raises ``model_malformed``.

    num_tensors  number of tensors of the checkpoint, of which every layer needs at least one.
    """
    for name in _SIZES:
        value = raw.get(name)
        allowed = min(num_tensors, _MAX_LAYERS) if name in _LAYERS else 2**31 - 1
        minimum = 0 if "expert" in name or "moe" in name else 1  # 0 experts are allowed
        if type(value) is int and not minimum <= value <= allowed:
            reason = f"{name} is {value!r:.64}" + (f", with {num_tensors} tensors" if name in _LAYERS else "")
            raise error("model_malformed", file="config.json", reason=reason)
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        check_sizes({name: value for name, value in text.items() if name != "text_config"}, num_tensors)


@dataclass(frozen=True)
class OutputHead:
    """Output of a pooling model instead of logits: its last hidden states, or scores computed from them.

    num_labels    number of outputs of the score layer; 0 for hidden states.
    label_tokens  for models without a score layer: two tokens (negative, positive) whose difference of logits is the
                  score.
    projection    number of outputs of a layer ``linear`` over each hidden state (ColBERT); 0: there is none.
    """

    num_labels: int = 0
    label_tokens: tuple[int, int] | None = None
    projection: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder-only model, independent of the key names in config.json.

    max_position     max_position_embeddings, which learned positions and rotary scaling depend on.
    context          maximum length of a sequence, which YaRN extends; when serving, the requested max_model_len.
    num_positions    rows of position tables: fewer than ``context`` if the KV cache cannot hold such a sequence.
    grid             how tokens of images are rotated if they have positions in three dimensions.
    layer_kinds      kind of each layer: full_attention, sliding_attention, or another name of config.json.
    sliding_windows  per layer, the number of positions that a query attends to, or None for all.
    rope             rotary parameters (rope_type, rope_theta, ...), or kind of layer -> rotary parameters.
    raw              config.json, for settings of single families; for a multimodal model, its text part.
    head             output instead of logits; None for logits.
    stored_head      name of an output layer that is stored and used although config.json ties it to the embedding.
    layer_heads      layers whose heads are others -> their head_dim and num_kv_heads; see ``of_layer``.
    cache_sources    layers without keys and values of their own -> the layer whose keys and values they read.
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
    context: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    layer_kinds: tuple[str, ...]
    sliding_windows: tuple[int | None, ...]
    rope: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False)
    num_positions: int = 0
    grid: GridRope | None = None
    head: OutputHead | None = None
    stored_head: str = ""
    layer_heads: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    cache_sources: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def from_hf(raw: Mapping[str, object]) -> ModelConfig:
        """Create it from config.json.

        Raises ``model_malformed`` for invalid values, ``architecture_unsupported`` for missing ones.
        """
        try:
            config = with_floats(text_part(raw))
            base = encoder_of(first_architecture(config))
            if base is not None:
                return _encoder_config(encoder_config(config, base), base)
            if is_speech(first_architecture(config)):
                config = decoder_config(config)
            return _model_config(completed(config, first_architecture(config)))
        except (
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            OverflowError,
            ZeroDivisionError,
        ) as problem:
            # Config files are untrusted: any value may have any type.
            reason = f"{type(problem).__name__}: {problem}"
            raise error("model_malformed", file="config.json", reason=reason[:200]) from problem

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a recurrent state instead of keys and values."""
        return not _RECURRENT.isdisjoint(self.layer_kinds)

    @property
    def has_positions(self) -> bool:
        """Whether any layer depends on positions; if all are recurrent, sequences may have any length."""
        return not _WITHOUT_POSITIONS.issuperset(self.layer_kinds)

    @property
    def has_tied_head(self) -> bool:
        """Whether the output layer is tied to the embedding."""
        return self.tie_word_embeddings and self.head is None

    @property
    def short_context(self) -> int | None:
        """The longest text for which LongRoPE has another set of factors than for longer ones; None if all have one."""
        if self.rope.get("rope_type") != "longrope":
            return None
        original = int(self.rope.get("original_max_position_embeddings") or self.max_position)
        return original if original < self.context else None

    def of_layer(self, layer: int) -> ModelConfig:
        """Return the config with the head sizes of a layer."""
        if layer not in self.layer_heads:
            return self
        head_dim, num_kv_heads = self.layer_heads[layer]
        return replace(self, head_dim=head_dim, num_kv_heads=num_kv_heads)

    def rope_of(self, layer: int) -> tuple[str, Mapping[str, Any]]:
        """Return the kind of a layer, and the rotary parameters of that kind. Raises ``model_malformed``."""
        if not is_nested(self.rope):
            return "", self.rope
        kind = self.layer_kinds[layer]
        if kind not in self.rope:
            raise error("model_malformed", file="config.json", reason=f"rope_parameters has no {kind}")
        return kind, self.rope[kind]


def _encoder_config(raw: Mapping[str, object], base: str) -> ModelConfig:
    model = _model_config(completed(raw, base))
    positions = model.max_position - extra_positions(model.raw)
    return replace(model, max_position=positions, context=positions, num_positions=positions)


def _model_config(raw: Mapping[str, object]) -> ModelConfig:
    def number(*names: str, default: int | None = None) -> int:
        if default is None and all(raw.get(name) is None for name in names):
            raise _lacks(raw, names[0])
        return int(read_value(raw, SIZE, *names, default=default))

    architecture, raw = first_architecture(raw), with_layers(raw)
    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number(
        *("num_attention_heads", "n_head", "num_heads", "n_heads"),
        default=1 if raw.get("model_type") in _WITHOUT_HEADS else None,
    )
    layers = number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if layers > _MAX_LAYERS:
        raise error("model_malformed", file="config.json", reason=f"it claims {layers} layers")
    kv_heads = _kv_heads(raw, number("num_key_value_heads", "num_kv_heads", default=heads), heads)
    head_dim = number("head_dim", default=hidden // heads)
    divides = raw.get("head_dim") is not None or hidden % heads == 0
    if heads % kv_heads or not divides:
        shared = f"{kv_heads} key-value heads" if divides else f"hidden_size {hidden}"
        raise error("model_malformed", file="config.json", reason=f"{heads} attention heads cannot share {shared}")
    kinds, rope = _layer_kinds(raw, layers), rope_parameters(raw)
    check_even(raw, rope, head_dim)
    max_position = number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=_widest_mlp(raw, 4 * hidden),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        context=longest_context(rope, max_position),
        num_positions=longest_context(rope, max_position),
        norm_eps=_norm_eps(raw),
        activation=str(_first(raw, "hidden_activation", "hidden_act", "activation_function", "activation") or "silu"),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        layer_kinds=kinds,
        sliding_windows=_sliding_windows(raw, kinds),
        rope=rope,
        raw=raw,
        layer_heads=heads_of_layers(raw, heads),
        cache_sources=cache_sources(raw, kinds),
    )


def _widest_mlp(raw: Mapping[str, object], default: int) -> int:
    """Return the width of the MLP, or the largest one where every layer has its own (Gemma 3n)."""
    widths = raw.get("intermediate_size")
    if isinstance(widths, list) and widths:
        return max(int(read_value({"intermediate_size": each}, SIZE, "intermediate_size")) for each in widths)
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    return int(read_value(raw, SIZE, *names, default=default))


def _lacks(raw: Mapping[str, object], name: str) -> AiakqError:
    """Return the error for a config without a size that every supported architecture has."""
    architecture = first_architecture(raw)
    if architecture == "unnamed":
        return error("model_malformed", file="config.json", reason=f"{name} is missing")
    reason = f"its config.json has no {name}, which all supported ones have"
    if raw.get("auto_map"):
        reason = f"it brings its own Python code, and its config.json has no {name}"
    return error("architecture_unsupported", architecture=architecture[:80], reason=reason)


def _norm_eps(raw: Mapping[str, object]) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    return float(read_value(raw, _EPSILON, *names, default=1e-5))


def _first(raw: Mapping[str, object], *names: str) -> object:
    """Return the value of the first of ``names`` that is set."""
    return next((raw[name] for name in names if raw.get(name)), None)


_LAYER = Constraint(type=int, low=0)
_EPSILON = Constraint(type=float, above=0, high=math.nextafter(1, 0), expected="a number between 0 and 1")
#: Model types for which transformers always uses one key-value head per query head.
_UNSHARED_HEADS = frozenset({"bloom", "codegen", "gpt2", "gpt_neo", "gptj", "mpt", "opt", "xglm"})


def _kv_heads(raw: Mapping[str, object], stated: int, heads: int) -> int:
    """Return the number of KV heads, which GPT-BigCode and Falcon express by a flag for multi-query attention."""
    kind = raw.get("model_type")
    if kind in _UNSHARED_HEADS:
        return heads
    if kind == "gpt_bigcode":
        return 1 if raw.get("multi_query", True) else heads
    if kind == "falcon" and not raw.get("new_decoder_architecture"):
        return 1 if raw.get("multi_query", True) else heads
    return stated


def _layer_kinds(raw: Mapping[str, object], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer from ``layer_types``, or else from the family's pattern."""
    kinds, first = raw.get("layer_types"), read_value(raw, _LAYER, "max_window_layers", default=0)
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise malformed("layer_types", kinds, "a list of names")
    family = FAMILIES.get(str(raw.get("model_type")))
    is_exact = family is not None and "layer_types" in family.defaults
    if kinds is not None and (len(kinds) != layers if is_exact else 0 < len(kinds) < layers):
        reason = f"layer_types has {len(kinds)} entries, but the model has {layers} layers"
        raise error("model_malformed", file="config.json", reason=reason)
    if kinds:
        return _stated_kinds([_RENAMED.get(str(kind), str(kind)) for kind in kinds[:layers]], raw)
    implied = _implied_kinds(raw, layers)
    if implied:
        return implied
    if raw.get("sliding_window") is None or _window_is_off(raw):
        return ("full_attention",) * layers
    if raw.get("model_type") == "smollm3":
        return tuple("full_attention" if each else "sliding_attention" for each in rotated_layers(raw, layers))
    pattern = raw.get("sliding_window_pattern")
    if pattern is None and family is not None:
        pattern = family.period
    if isinstance(pattern, str):  # like LLLG
        pattern = len(pattern)
    pattern = read_value({"sliding_window_pattern": pattern}, SIZE, "sliding_window_pattern", default=None)
    # Qwen2 and Qwen3 have windows only from max_window_layers on.
    start = first if family is not None and "max_window_layers" in family.defaults else 0
    return tuple(
        "full_attention" if layer < start or (pattern and (layer + 1) % pattern == 0) else "sliding_attention"
        for layer in range(layers)
    )


def _stated_kinds(kinds: list[str], raw: Mapping[str, object]) -> tuple[str, ...]:
    """Return the kinds that ``layer_types`` lists. Raises ``config_key_unsupported`` for others than the family's."""
    name = str(raw.get("model_type"))
    family = FAMILIES.get(name)
    for kind in kinds:
        if family is not None and kind not in family.kinds | {"full_attention"}:
            reason = f"aiakq's {name} models have no such layers"
            raise error("config_key_unsupported", key="layer_types", value=f"{kind!r:.64}", reason=reason)
    if name == "llama4_text":
        rotated = rotated_layers(raw, len(kinds))
        if any(each != (kind == "chunked_attention") for each, kind in zip(rotated, kinds, strict=True)):
            reason = "no_rope_layers names other layers"
            raise error("config_key_unsupported", key="layer_types", value=f"{kinds!r:.64}", reason=reason)
    return tuple(kinds)


def _implied_kinds(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kinds implied by the config of a family with other keys for them; () for other families."""
    kind = raw.get("model_type")
    if kind == "gpt_neo":
        return _repeated_kinds(raw.get("attention_types") or [[["global", "local"], 12]], layers)
    if kind in ("mamba", "falcon_mamba", "mamba2", "granitemoehybrid"):
        return ("linear_attention",) * layers
    if kind == "falcon_h1":
        return ("hybrid",) * layers
    if kind == "bamba":
        attention = raw.get("attn_layer_indices") or ()
        return tuple("full_attention" if layer in attention else "linear_attention" for layer in range(layers))
    if kind == "jamba":
        period, offset = raw["attn_layer_period"], raw["attn_layer_offset"]
        return tuple("linear_attention" if layer % period != offset else "full_attention" for layer in range(layers))
    if kind == "zamba":
        period, offset = raw["attn_layer_period"], raw["attn_layer_offset"]
        implied = ["hybrid" if layer % period == offset else "linear_attention" for layer in range(max(layers - 3, 0))]
        return ("linear_attention", "linear_attention", "hybrid", *implied)[:layers]
    if kind == "olmo_hybrid":
        implied = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
        return (*implied[:-1], implied[-1] if layers > 3 else "full_attention")
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        every = raw.get("full_attention_interval") or 4
        return tuple("linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers))
    if kind == "minimax":
        return tuple("linear_attention" if layer % 2 else "full_attention" for layer in range(layers))
    if kind == "lfm3":
        cycle = ("conv", "conv", "full_attention", "conv", "sliding_attention")
        return tuple(cycle[layer % 4 or (4 if layer else 0)] for layer in range(layers))
    if kind == "lfm2_moe":
        raise error("model_malformed", file="config.json", reason="layer_types is missing")
    attention = raw.get("full_attn_idxs")
    if kind == "lfm2" and isinstance(attention, list):
        return tuple("full_attention" if layer in attention else "conv" for layer in range(layers))
    return ()


def _repeated_kinds(types: Any, layers: int) -> tuple[str, ...]:
    """Return the kinds that GPT-Neo's lists of kinds [names, times] stand for. Raises ``model_malformed``."""
    kinds = {"global": "full_attention", "local": "sliding_attention"}
    try:
        found = tuple(kinds[name] for names, times in types for name in list(names) * min(times, layers + 1))
    except (KeyError, TypeError, ValueError):
        raise malformed("attention_types", types, "a list of [names, times], where names are global or local") from None
    if len(found) != layers:
        reason = f"attention_types are those of another number of layers than {layers}"
        raise error("model_malformed", file="config.json", reason=reason)
    return found


def _window_is_off(raw: Mapping[str, object]) -> bool:
    """Whether ``use_sliding_window`` turns windows off. Raises ``config_key_unsupported`` for families without it."""
    if raw.get("use_sliding_window") is not False:
        return False
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None and "use_sliding_window" not in family.defaults.keys() | family.unread:
        if raw.get("sliding_window"):
            reason = f"sliding_window is {raw['sliding_window']!r:.64}, and transformers uses it nevertheless"
            raise error("config_key_unsupported", key="use_sliding_window", value=False, reason=reason)
        return False
    return True


def _sliding_windows(raw: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    window = raw.get("window_size" if raw.get("model_type") == "gpt_neo" else "sliding_window")
    if window is not None and (type(window) not in (int, bool) or not 0 <= window < 2**31 or window is True):
        raise malformed("sliding_window", window)
    is_off = _window_is_off(raw)
    if is_off and "sliding_attention" in (raw.get("layer_types") or ()):
        reason = "layer_types lists layers with a window"
        raise error("config_key_unsupported", key="use_sliding_window", value=False, reason=reason)
    if is_off or ("sliding_attention" not in kinds and not window):
        return (None,) * len(kinds)
    if not window and "sliding_attention" in kinds:
        raise malformed("sliding_window", window)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def length_limit(args: EngineArguments, model: ModelConfig, own_limit: int | None) -> int:
    """Return the maximum tokens of prompt plus output; with auto, memory may reduce it later. Raises ``bad_option``.

    own_limit  maximum length of the texts that an embedding model was trained for, or None.
    """
    limit, whose = model.context, "the model's own limit"
    hint = "The model was not trained for positions beyond it."
    windows = [window for window in model.sliding_windows if window is not None]
    if args.disable_sliding_window and windows and min(windows) < limit:
        limit, whose = min(windows), "the model's window"
        hint = "Without --disable-sliding-window, more is possible."
    max_model_len = args.max_model_len
    if max_model_len is None or max_model_len == "auto":
        return limit if own_limit is None else min(limit, own_limit)
    if max_model_len > limit and model.has_positions:
        expected = f"at most {limit}, {whose}"
        raise error("bad_option", option="--max-model-len", value=max_model_len, expected=expected, hint=hint)
    return max_model_len
