"""TargetModules: which modules ``adapter_config.json`` selects for adaptation.

PEFT creates adapters for the modules that the config selects, and ignores tensors of other ones. The rules are those of
PEFT 0.21 (``check_target_module_exists`` in tuners/tuners_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.patterns import match_regex

_MAX_NAMES = 1 << 16
_MAX_LAYER_PATTERNS = 64
#: The value of target_modules that selects every linear layer except the output layer.
_ALL_LINEAR = "all-linear"
_OUTPUT_LAYERS = ("lm_head", "embed_out")
#: Target modules by model type if the config has none, as far as aiakq has the family; PEFT has no others.
DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "llama4", "mistral"), ("q_proj", "v_proj")),
    **dict.fromkeys(("gpt_neo", "gptj", "mixtral", "opt", "qwen2", "qwen3", "stablelm"), ("q_proj", "v_proj")),
    **dict.fromkeys(("bloom", "falcon"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}


def pattern_refusal(adapter: str, field: str, pattern: str) -> Callable[[str, str], AiakqError]:
    """Return a function that returns the error for ``pattern``, which is in ``field``; see ``match_regex``."""

    def refused(text: str, reason: str) -> AiakqError:
        return error("adapter_pattern", adapter=adapter, field=field, pattern=pattern[:60], reason=reason)

    return refused


@dataclass(frozen=True)
class _Names:
    """A list of module names, each of which also selects modules whose names end with it, or one regular expression."""

    names: frozenset[str] = frozenset()
    regex: str | None = None

    def match(self, module: str, adapter: str, field: str) -> bool:
        if self.regex is not None:
            refused = pattern_refusal(adapter, field, self.regex)
            return match_regex(rf"(?:{self.regex})\Z", module, refused) is not None
        parts = module.split(".")
        return any(".".join(parts[first:]) in self.names for first in range(len(parts)))


@dataclass(frozen=True)
class TargetModules:
    """The fields of the config that select modules.

    targets         None: the defaults of the model type; see ``DEFAULT_TARGETS``.
    layers          layer numbers to which ``targets`` is limited; None: all. Full module names are not limited.
    layer_patterns  regular expressions for what precedes the layer number in a module name; (): anything.
    adapter         how errors call the adapter.
    """

    targets: _Names | None = None
    excluded: _Names = _Names()
    layers: frozenset[int] | None = None
    layer_patterns: tuple[str, ...] = ()
    adapter: str = ""

    def deselecting_field(self, module: str, model_type: str) -> str | None:
        """Return the field because of which PEFT ignores the tensors of ``module``; None if the config selects it.

        Raises ``adapter_pattern`` for a regular expression that is malformed or too costly.
        """
        if self.excluded.match(module, self.adapter, "exclude_modules"):
            return "exclude_modules"
        targets = self.targets
        if targets is None:
            defaults = DEFAULT_TARGETS.get(model_type) or DEFAULT_TARGETS.get(model_type.removesuffix("_text"), ())
            targets = _Names(frozenset(defaults))
        if targets.regex is not None and targets.regex.lower() == _ALL_LINEAR:
            return "target_modules" if module.rpartition(".")[2] in _OUTPUT_LAYERS else None
        if not targets.match(module, self.adapter, "target_modules"):
            return "target_modules"
        is_limited = self.layers is not None and module not in targets.names
        return "layers_to_transform" if is_limited and self._layer(module) not in (self.layers or ()) else None

    def _layer(self, module: str) -> int | None:
        """Return the layer number in a module name as PEFT finds it."""
        regexes = {pattern: rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in self.layer_patterns}
        for pattern, regex in (regexes or {"": r".*?\.[^.]*\.(?P<idx>\d+)\."}).items():
            found = match_regex(regex, module, pattern_refusal(self.adapter, "layers_pattern", pattern))
            if found is not None:
                return None if found["idx"] is None else int(found["idx"])
        return None


def parse_targets(values: Mapping[str, Any], adapter: str, bad: Callable[[str, str], AiakqError]) -> TargetModules:
    """Read the fields of a config.

    adapter  how errors call the adapter.
    bad      returns the error for a field whose value is not what it should be.
    """

    def names(field: str) -> _Names:
        value = values.get(field)
        if isinstance(value, str):
            return _Names(regex=value) if value else _Names()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or len(value) > _MAX_NAMES:
            raise bad(field, f"a regular expression or a list of at most {_MAX_NAMES} names")
        return _Names(frozenset(value))

    targets = None if values.get("target_modules") is None else names("target_modules")
    excluded = names("exclude_modules") if values.get("exclude_modules") else _Names()
    layers, patterns = values.get("layers_to_transform"), values.get("layers_pattern")
    if targets is not None and targets.regex is not None:
        for field in ("layers_to_transform", "layers_pattern"):
            if values.get(field) is not None:
                raise bad(field, "null, although target_modules is a regular expression")
    if patterns and layers is None:
        raise bad("layers_pattern", "null, although layers_to_transform is")
    return TargetModules(targets, excluded, _layers(layers, bad), _layer_patterns(patterns, bad), adapter)


def _layers(value: object, bad: Callable[[str, str], AiakqError]) -> frozenset[int] | None:
    numbers = [value] if type(value) is int else value or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise bad("layers_to_transform", "a layer number or a list of them")
    return frozenset(numbers) if numbers else None


def _layer_patterns(value: Any, bad: Callable[[str, str], AiakqError]) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) and value else value or []
    is_list = isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
    if not is_list or len(patterns) > _MAX_LAYER_PATTERNS:
        raise bad("layers_pattern", f"a name or a list of at most {_MAX_LAYER_PATTERNS} names")
    return tuple(patterns)
