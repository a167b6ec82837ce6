"""SpeculationConfig: how tokens are guessed. Standard library only, like the scheduler's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import checked_value, rows_of
from aiakq.arguments.engine import SpeculationArguments
from aiakq.errors import error

_ROWS = {row.name: row for row in rows_of(SpeculationArguments, "scheduling")}
NGRAM = "ngram"
#: Rows of logits in a step up to which guesses are worth their time: a CPU reads the weights once for so many.
_CPU_ROWS, _GPU_ROWS = 8, 64
#: Running sequences from which on nothing is guessed, unless it is said.
_CPU_BATCH, _GPU_BATCH = 5, 33

#: The arguments that mean the same as a key of --speculative-config, and bound its value.
_FLAGS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
}


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Tokens are guessed by looking up what followed the same n-gram before.

    num_speculative_tokens  guesses of a sequence in a step, at most.
    prompt_lookup_max, prompt_lookup_min  lengths of the n-grams.
    disable_by_batch_size   running sequences from which on nothing is guessed.
    max_model_len           tokens of a sequence up to which its next ones are guessed.
    max_rows                rows of logits in a step with guesses.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    disable_by_batch_size: int = _CPU_BATCH
    max_model_len: int = 1 << 60
    max_rows: int = _CPU_ROWS

    @staticmethod
    def from_args(args: Mapping[str, Any], on_cpu: bool, is_recurrent: bool) -> SpeculationConfig | None:
        """None without speculation. Raises ``bad_option`` and ``option_conflict``."""
        given = _given(args)
        if not given and args["speculative_config"] is None:
            return None
        method, model = given.pop("method", None), given.pop("model", None)
        if (
            method not in (None, NGRAM)
            or model not in (None, f"[{NGRAM}]", NGRAM)
            or (method is None and model is None)
        ):
            raise error(
                "bad_option",
                option="--speculative-model" if args["speculative_config"] is None else "--speculative-config",
                value=model if method in (None, "draft_model") else method,
                expected=f"prompt lookup, which is [{NGRAM}], or the method {NGRAM}",
                hint="Models that draft are not supported.",
            )
        stages = args["pipeline_parallel_size"]
        for is_there, other, reason, hint in (
            (
                stages > 1,
                f"--pipeline-parallel-size {stages}",
                "stages work on other sequences meanwhile",
                "Use --tensor-parallel-size.",
            ),
            (
                bool(args["async_scheduling"]),
                "--async-scheduling",
                "guesses need the tokens before them",
                "Leave it out.",
            ),
            (
                is_recurrent,
                "a model with recurrent layers",
                "their states cannot be taken back",
                "Leave out the options of speculative decoding.",
            ),
        ):
            if is_there:
                raise error("option_conflict", option="speculative decoding", other=other, reason=reason, hint=hint)
        config = SpeculationConfig(
            **{
                "disable_by_batch_size": _CPU_BATCH if on_cpu else _GPU_BATCH,
                "max_rows": _CPU_ROWS if on_cpu else _GPU_ROWS,
                **given,
            }
        )
        if config.prompt_lookup_min > config.prompt_lookup_max:
            value, expected = config.prompt_lookup_min, f"at most prompt_lookup_max, {config.prompt_lookup_max}"
            raise error("bad_option", option="prompt_lookup_min", value=value, expected=expected, hint="")
        return config


def _given(args: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are set. Raises ``bad_option`` and ``option_conflict``."""
    flags = {key: args[name] for name, key in _FLAGS.items() if args[name] is not None}
    config, option = args["speculative_config"], "--speculative-config"
    if config is None:
        return flags
    if flags:
        name = next(name for name in _FLAGS if args[name] is not None).replace("_", "-")
        reason = "both say how tokens are guessed"
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
