"""AdapterConfig: the fields of PEFT's ``adapter_config.json`` that determine what a LoRA adapter computes.

Every field that changes the result is applied or refused by name; an unknown field, which a later PEFT may write, is
refused unless it is null, false or empty; zero may be a setting like any other number. The adapted modules are those
that have tensors; the config must select each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.config_values import SWITCH
from aiakq.patterns import match_regex
from aiakq.runtime.lora.target_modules import TargetModules, parse_targets, pattern_refusal

#: Name and largest size of the file.
CONFIG, MAX_CONFIG_BYTES = "adapter_config.json", 1 << 20
#: Fields that do not affect a trained adapter. ``fan_in_fan_out`` is how the base weight is stored; A and B do not
#: depend on it.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
        *("fan_in_fan_out", "inference_mode", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "task_type"),
    }
)
_READ = frozenset({"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"}) | {
    *("lora_bias", "bias", "init_lora_weights", "modules_to_save"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
#: Why other fields are refused.
_REFUSED = {
    "alora_invocation_tokens": "an activated adapter begins in the middle of a prompt",
    "arrow_config": "it routes every token to adapters of its own",
    "kasa_config": "it changes the weights of the base model",
    "layer_replication": "it makes layers that the base model does not have",
    "loftq_config": "it changes the weights of the base model",
    "megatron_config": "its layers are Megatron's",
    "monteclora_config": "its weights are random",
    "target_parameters": "it adapts parameters of fused experts, which are not linear layers",
    "trainable_token_indices": "it replaces rows of the embedding",
    "use_bdlora": "its matrices are block-diagonal",
    "use_qalora": "it averages inputs by groups",
    "velora_config": "it is another product",
}
#: Switches among them, for which 0 is false.
_SWITCHES = ("use_bdlora", "use_qalora")
#: Initializations of an adapter that do not change the weights of its base model.
_INITIALIZATIONS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
_RANK = Constraint(type=int, low=1, high=2**20 - 1, expected="a positive integer")
_ALPHA = Constraint(type=float, low=1 - 2.0**40, high=2.0**40 - 1, expected="a finite number")
_RANKS = Constraint(
    type=dict, most=4096, entries=_RANK, expected="an object of at most 4096 names and positive integers"
)
_ALPHAS = Constraint(type=dict, most=4096, entries=_ALPHA, expected="an object of at most 4096 names and numbers")
#: Characters of regular expressions, without the dot, which also separates the parts of a name.
_SPECIAL = re.compile(r"[^\w.]")


@dataclass(frozen=True)
class AdapterConfig:
    """The fields that change the result.

    rank, alpha     of modules that no pattern matches.
    rank_pattern, alpha_pattern  pairs of a regular expression, matched with the end of a module name, and the rank or
                    alpha of the module; the first match counts.
    rank_stabilized whether the scale is alpha over the square root of the rank (rsLoRA) instead of over the rank.
    lora_bias, dora whether B has a bias; whether rows are scaled to a magnitude (DoRA, arXiv:2402.09353).
    targets         which modules are selected for adaptation.
    base_model      name of the model that the adapter was trained on, for messages only.
    adapter         how errors call the adapter.
    """

    rank: int = 8
    alpha: float = 8
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    rank_stabilized: bool = False
    lora_bias: bool = False
    dora: bool = False
    targets: TargetModules = TargetModules()
    base_model: str = ""
    adapter: str = ""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module. Raises ``adapter_pattern`` for a pattern that cannot be matched."""
        return int(self._first("rank_pattern", self.rank_pattern, module, self.rank))

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of B(Ax) in a module of this rank. Raises ``adapter_pattern``."""
        alpha = self._first("alpha_pattern", self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _first(self, field: str, pattern: tuple[tuple[str, float], ...], module: str, default: float) -> float:
        """Return the number of the first key that matches ``module``, as get_pattern_key of PEFT does."""
        for key, number in pattern:
            refused = pattern_refusal(self.adapter, field, key)
            if _may_match(key, module) and match_regex(rf"(.*\.)?({key})$", module, refused) is not None:
                return number
        return default


def parse_config(values: Mapping[str, object], adapter: str) -> AdapterConfig:
    """Validate the contents of adapter_config.json; messages call the adapter ``adapter``.

    Raises ``adapter_unsupported``, ``adapter_malformed``.
    """

    def unsupported(field: str, reason: str) -> AiakqError:
        return error("adapter_unsupported", adapter=adapter, field=f"{field} = {values[field]!r:.60}", reason=reason)

    if values.get("peft_type") != "LORA":
        reason = f"its peft_type is {values.get('peft_type')!r:.40}, not LORA"
        raise error("adapter_malformed", adapter=adapter, reason=reason)
    for field, value in values.items():
        if field not in _WITHOUT_EFFECT | _READ and not _is_off(field, value):
            raise unsupported(f"{field:.60}" if field in _REFUSED else field, _REFUSED.get(field, "it is not known"))
    if values.get("bias", "none") != "none":
        raise unsupported("bias", "it replaces biases of the base model")
    if values.get("modules_to_save"):
        raise unsupported("modules_to_save", "it replaces whole layers of the base model")
    initialization = values.get("init_lora_weights", True)
    if str(initialization).lower() not in _INITIALIZATIONS:
        reason = "it changes the weights of the base model, unless PEFT saves the adapter converted"
        raise unsupported("init_lora_weights", reason)

    def bad(field: str, expected: str) -> AiakqError:
        reason = f"{field} in adapter_config.json is {values.get(field)!r:.60}, not {expected}"
        return error("adapter_malformed", adapter=adapter, reason=reason)

    def read(field: str, constraint: Constraint, default: object) -> Any:
        value = values.get(field)
        refused = None if value is None else constraint.refusal(value)
        if refused is not None:
            raise bad(field, constraint.expected or refused.expected)
        return default if value is None else value

    base = values.get("base_model_name_or_path")
    config = AdapterConfig(
        rank=read("r", _RANK, 8),
        alpha=float(read("lora_alpha", _ALPHA, 8)),
        rank_pattern=tuple(read("rank_pattern", _RANKS, {}).items()),
        alpha_pattern=tuple((key, float(value)) for key, value in read("alpha_pattern", _ALPHAS, {}).items()),
        rank_stabilized=read("use_rslora", SWITCH, False),
        lora_bias=read("lora_bias", SWITCH, False),
        dora=read("use_dora", SWITCH, False),
        targets=parse_targets(values, adapter, bad),
        base_model=base[:200] if isinstance(base, str) else "",
        adapter=adapter,
    )
    if config.dora and config.lora_bias:
        raise unsupported("lora_bias", "PEFT has no DoRA with it")
    return config


def _is_off(field: str, value: object) -> bool:
    """Whether a field that is not applied says that nothing is to be done."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return field in _SWITCHES and value == 0
    return value in (None, False, [], {}, "")


def _may_match(key: str, module: str) -> bool:
    """Whether a key may match: a name without special characters does so with its last part only."""
    return _SPECIAL.search(key) is not None or module.endswith(key.rpartition(".")[2])
