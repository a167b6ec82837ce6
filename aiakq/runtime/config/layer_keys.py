"""Keys of config.json that list layers, in the form that all families share: ``layer_types`` and their number."""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.errors import error
from aiakq.formats.config_values import SIZE, malformed, read_value
from aiakq.runtime.config.gemma3n import gemma3n_layers
from aiakq.runtime.config.gemma4 import gemma4_layers
from aiakq.runtime.config.recurrent_families import PATTERN, kimi_layers, recurrent_gemma_layers


def with_layers(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``raw`` with the layers of Kimi Linear, which are in an object, of RecurrentGemma, which repeats some, of
    Gemma 4, of which the last always has
    full attention, of Gemma 3n, which have MLPs of their own, or of Nemotron-H, whose number follows from their list or
    their pattern of letters.

    Raises ``model_malformed`` and ``config_key_unsupported``.
    """
    if raw.get("model_type") == "kimi_linear":
        return kimi_layers(raw)
    if raw.get("model_type") == "mimo_v2_flash" and raw.get("layer_types") is None:
        layers = min(read_value(raw, SIZE, "num_hidden_layers"), 10_000)
        full = ["full_attention" if layer == 0 or layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
        return {**raw, "layer_types": full}
    if raw.get("model_type") == "recurrent_gemma":
        return recurrent_gemma_layers(raw)
    if raw.get("model_type") == "gemma4_text":
        return gemma4_layers(raw)
    if raw.get("model_type") == "gemma3n_text":
        return gemma3n_layers(raw)
    if raw.get("model_type") != "nemotron_h":
        return raw
    kinds, pattern = raw.get("layer_types"), raw.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        if not PATTERN.keys() >= set(pattern) or not pattern:
            raise malformed("hybrid_override_pattern", pattern, f"letters of {''.join(PATTERN)}")
        kinds = [PATTERN[letter] for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        raise malformed("layers_block_type", kinds, "a list of names")
    if raw.get("num_hidden_layers") not in (None, len(kinds)):
        reason = f"{len(kinds)} kinds of layers are listed, but num_hidden_layers is {raw['num_hidden_layers']!r:.64}"
        raise error("model_malformed", file="config.json", reason=reason)
    return {**raw, "layer_types": kinds, "num_hidden_layers": len(kinds)}
