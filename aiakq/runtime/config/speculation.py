"""SpeculationConfig: where draft tokens come from, and their limits. Standard library only, like the scheduler's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import checked_value, rows_of
from aiakq.arguments.engine import SpeculationArguments
from aiakq.errors import error

_ROWS = {row.name: row for row in rows_of(SpeculationArguments, "scheduling")}
NGRAM, DRAFT_MODEL = "ngram", "draft_model"

#: The argument that corresponds to each key of --speculative-config, and defines its range.
_FLAGS = {
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
}


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Draft tokens come from n-gram lookup in the sequence itself, or from a second model.

    method                  NGRAM or DRAFT_MODEL.
    model, quantization     the draft model, and its expected quantization method.
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

    @staticmethod
    def from_args(args: Mapping[str, Any], is_recurrent: bool) -> SpeculationConfig | None:
        """None without speculation. Raises ``bad_option`` and ``option_conflict``."""
        given = _given(args)
        if not given and args["speculative_config"] is None:
            return None
        given["method"] = _method(given, args)
        if given["method"] == NGRAM:
            given["model"] = None
        stages = args["pipeline_parallel_size"]
        for is_there, other, reason, hint in (
            (
                stages > 1 and given["method"] != NGRAM,
                f"--pipeline-parallel-size {stages}",
                "the first stage would wait for the draft model",
                "Use the method ngram, or --tensor-parallel-size.",
            ),
            (
                is_recurrent,
                "a model with recurrent layers",
                "their states cannot be rolled back",
                "Leave out the options of speculative decoding.",
            ),
        ):
            if is_there:
                raise error("option_conflict", option="speculative decoding", other=other, reason=reason, hint=hint)
        config = SpeculationConfig(**given)
        if config.prompt_lookup_min > config.prompt_lookup_max:
            value, expected = config.prompt_lookup_min, f"at most prompt_lookup_max, {config.prompt_lookup_max}"
            raise error("bad_option", option="prompt_lookup_min", value=value, expected=expected, hint="")
        return config


def _method(given: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    """The proposer's name. Raises ``bad_option``."""
    method, model = given.get("method"), given.get("model")
    names_ngram = model in (f"[{NGRAM}]", NGRAM)
    found = method or (NGRAM if names_ngram else DRAFT_MODEL)
    is_complete = model is None or names_ngram if found == NGRAM else model is not None and not names_ngram
    if found in (NGRAM, DRAFT_MODEL) and is_complete:
        return found
    as_json = args["speculative_config"] is not None
    raise error(
        "bad_option",
        option="--speculative-config" if as_json else "--speculative-model",
        value=method if as_json else model,
        expected=f"the method {NGRAM}, or {DRAFT_MODEL} with a model" if as_json else f"[{NGRAM}] or a model",
        hint="EAGLE, Medusa and MTP heads are not supported." if method not in (None, DRAFT_MODEL) else "",
    )


def _given(args: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are set. Raises ``bad_option`` and ``option_conflict``."""
    flags = {key: args[name] for name, key in _FLAGS.items() if args[name] is not None}
    config, option = args["speculative_config"], "--speculative-config"
    if config is None:
        return flags
    if flags:
        name = next(name for name in _FLAGS if args[name] is not None).replace("_", "-")
        reason = "both configure speculative decoding"
        raise error("option_conflict", option=option, other=f"--{name}", reason=reason, hint="Give one of them.")
    rows = {key: _ROWS[name] for name, key in _FLAGS.items()}
    given = {key: value for key, value in config.items() if value is not None}
    for key, value in given.items():
        if key in rows:
            given[key] = checked_value(rows[key], value, f"{option} {key}")
        elif key != "method":
            expected = f"one of method, {', '.join(rows)}"
            raise error("bad_option", option=option, value=key, expected=expected, hint="")
    return given
