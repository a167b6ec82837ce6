"""SpeculationConfig: where draft tokens come from, and their limits. Standard library only, like the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import argument, checked_value, part_of, rows_of
from aiakq.arguments.engine import EngineArguments, SpeculationArguments
from aiakq.errors import error
from aiakq.runtime.speculation.methods import MTP, NGRAM, PROPOSERS, SUFFIX, resolve

_ROWS = {row.name: row for row in rows_of(SpeculationArguments, "scheduling")}

#: The argument that corresponds to each key of --speculative-config, and defines its range.
_FLAGS = {
    "spec_method": "method",
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
}


_MAX_TREE_DEPTH = 24


@dataclass(frozen=True, kw_only=True)
class SuffixKeys:
    """The keys of suffix decoding, with vLLM's names."""

    suffix_decoding_max_tree_depth: int = argument(
        _MAX_TREE_DEPTH, "Maximum number of tokens of a matched suffix and its continuation together.", low=2, high=1024
    )
    suffix_decoding_max_cached_requests: int = argument(
        10_000, "Maximum number of earlier outputs that are searched; 0: the sequence itself only.", low=0
    )
    suffix_decoding_max_spec_factor: float = argument(
        1.0, "Maximum number of draft tokens per matched token.", above=0, high=1024
    )
    suffix_decoding_min_token_prob: float = argument(
        0.1, "Minimum probability of a draft token, from the counts of what followed.", low=0, high=1
    )


_SUFFIX_ROWS = {row.name: row for row in rows_of(SuffixKeys, "scheduling")}


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig(SuffixKeys):
    """Where draft tokens come from, and how many there are.

    method                  a name of PROPOSERS.
    model, quantization     the draft model, which is the target for ``mtp``, and its expected quantization method.
    num_speculative_tokens  maximum number of draft tokens of a sequence in a step.
    prompt_lookup_max, prompt_lookup_min  longest and shortest n-gram that is looked up.
    disable_by_batch_size   no draft tokens while this many sequences run.
    max_model_len           longer sequences get no draft tokens.
    """

    method: str = NGRAM
    model: str | None = None
    quantization: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    disable_by_batch_size: int = 1 << 60
    max_model_len: int = 1 << 60

    def load_method(self) -> Any:
        """Return the method: a ``Proposer``, or a module if it needs a model. Raises ``plugin``."""
        return PROPOSERS.load(self.method)

    @staticmethod
    def from_args(args: EngineArguments, is_recurrent: bool) -> SpeculationConfig | None:
        """None without speculation. Raises ``bad_option`` and ``option_conflict``.

        is_recurrent  whether the model has recurrent layers, which need a state for every draft token.
        """
        values = _given(args)
        if not values and args.speculative_config is None:
            return None
        option = "--speculative-model" if args.speculative_config is None else "--speculative-config"
        values["method"], values["model"] = resolve(values.get("method"), values.get("model"), option)
        if values["method"] == MTP:  # what proposes is a part of the target's checkpoint
            if values["model"] not in (None, args.model):
                expected = f"{args.model}, or none: the layers for multi-token prediction are the target's own"
                raise error("bad_option", option=option, value=values["model"], expected=expected, hint="")
            values["model"] = args.model
        if values["method"] == SUFFIX and not is_recurrent:  # it proposes as many as the match is worth
            values.setdefault("num_speculative_tokens", values.get("suffix_decoding_max_tree_depth", _MAX_TREE_DEPTH))
        stages = args.pipeline_parallel_size
        if stages > 1 and values["model"] is not None:
            raise error(
                "option_conflict",
                option="speculative decoding",
                other=f"--pipeline-parallel-size {stages}",
                reason="the first stage would wait for the draft model",
                hint="Use a method without a model, or --tensor-parallel-size.",
            )
        config = SpeculationConfig(**values)
        if config.prompt_lookup_min > config.prompt_lookup_max:
            value, expected = config.prompt_lookup_min, f"at most prompt_lookup_max, {config.prompt_lookup_max}"
            raise error("bad_option", option="prompt_lookup_min", value=value, expected=expected, hint="")
        return config


def _given(args: EngineArguments) -> dict[str, Any]:
    """The keys that are set. Raises ``bad_option`` and ``option_conflict``."""
    named = {name: value for name, value in part_of(SpeculationArguments, args).items() if value is not None}
    flags = {key: named[name] for name, key in _FLAGS.items() if name in named}
    config, option = args.speculative_config, "--speculative-config"
    if config is None:
        return flags
    if flags:
        name = next(name for name in _FLAGS if name in named).replace("_", "-")
        reason = "both configure speculative decoding"
        raise error("option_conflict", option=option, other=f"--{name}", reason=reason, hint="Give one of them.")
    rows = {key: _ROWS[name] for name, key in _FLAGS.items() if key != "method"} | _SUFFIX_ROWS
    given = {key: value for key, value in config.items() if value is not None}
    for key, value in given.items():
        if key in rows:
            given[key] = checked_value(rows[key], value, f"{option} {key}")
        elif key != "method":
            expected = f"one of method, {', '.join(rows)}"
            raise error("bad_option", option=option, value=key, expected=expected, hint="")
    return given
