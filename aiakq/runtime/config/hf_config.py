"""config.json and generation_config.json, with overrides from arguments applied."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.constraints import Constraint
from aiakq.errors import AiakqError, error
from aiakq.formats.hub import resolve_model
from aiakq.formats.model_folder import first_architecture, read_json
from aiakq.runtime.config.config_function import changes_by
from aiakq.runtime.config.families import FAMILIES
from aiakq.runtime.config.generation_keys import APPLIED, SAMPLING, describe, not_applied, of_model_config
from aiakq.runtime.config.known_keys import ROTARY, model_type_of
from aiakq.runtime.config.rope import differs_by_kind, is_rotary
from aiakq.runtime.protocol.grammar import GrammarDefaults
from aiakq.runtime.protocol.sampling_params import PARAMETERS
from aiakq.system.user_path import user_path

logger = logging.getLogger("aiakq.runtime")

#: Rotary parameters that do not belong to scaling, and scaling types that do not extend the context.
_NO_SCALING = frozenset({"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
_SAME_CONTEXT = frozenset({"default", "llama3", "longrope"})
#: Generation values that are integers, or lists of them.
_INTEGERS = frozenset({"top_k", "max_new_tokens", "eos_token_id"})
#: What generation values may be.
_VALUES = {
    **{
        name: replace(PARAMETERS[name], expected=f"{PARAMETERS[name].kind}: {PARAMETERS[name].expected}")
        for name in SAMPLING
    },
    "max_new_tokens": Constraint(type=int, low=1, expected="a number of tokens, 1 or more"),
    "eos_token_id": Constraint(
        type=int, also=(list,), entries=Constraint(type=int), expected="a token id or a list of token ids"
    ),
}
#: What a server can do, besides a correction of the file, about a value that no request could have.
_OTHERWISE = ", override the value with --override-generation-config, or ignore the file with --generation-config vllm"


def read_config(path: Path, name: str, missing_ok: bool = False) -> dict[str, object]:
    """Read a JSON file of a model folder. Raises ``model_incomplete`` or ``model_malformed``."""
    if not (path / name).exists():
        if missing_ok:
            return {}
        raise error("model_incomplete", path=path, missing=f"{name} is missing")
    return read_json(path / name, name)


def model_config(folder: Path, args: EngineArguments) -> dict[str, object]:
    """Read config.json in ``folder`` or --hf-config-path, and apply --hf-overrides and --rope-*.

    Raises ``bad_option`` and what reading it raises.
    """
    raw, replaced = _unchanged_config(folder, args), dict(args.hf_overrides or {})
    # Configs of transformers 5 have these two inside rope_parameters.
    scaling = args.rope_scaling or replaced.pop("rope_scaling", None)
    theta = args.rope_theta or replaced.pop("rope_theta", None)
    raw |= replaced
    if scaling is None and theta is None:
        return raw
    text = raw.get("text_config")
    if isinstance(text, Mapping):
        return {**raw, "text_config": _rotated(dict(text), scaling, theta)}
    return _rotated(raw, scaling, theta)


def _rotated(raw: dict[str, object], scaling: Any, theta: object) -> dict[str, object]:
    """Return the config ``raw`` of a language model with other rotary parameters. Raises ``bad_option``."""
    option, value = ("--rope-theta", theta) if scaling is None else ("--rope-scaling", scaling)
    kind, parameters = model_type_of(raw, first_architecture(raw)), raw.get("rope_parameters")
    own = parameters or {} if kind in FAMILIES else _parameters_of_class(kind, raw)
    if own is None or not is_rotary({**raw, "model_type": kind}):
        raise _bad(option, value, "left out: this model has no rotary parameters")
    if differs_by_kind({"model_type": kind, "rope_parameters": own}):
        raise _bad(option, value, "left out: kinds of layers differ here, see rope_parameters in --hf-overrides")
    if scaling is not None:
        if not isinstance(scaling, dict):
            raise _bad("--hf-overrides", scaling, "an object where rope_scaling is one")
        raw, scaling = _with_longer_context(raw, scaling)
    if isinstance(parameters, dict):
        # A new scaling replaces the old one completely; other rotary parameters are kept.
        kept = {name: value for name, value in parameters.items() if scaling is None or name in _NO_SCALING}
        raw["rope_parameters"] = {**kept, **(scaling or {}), **({} if theta is None else {"rope_theta": theta})}
        raw.pop("rope_scaling", None)  # some files have both
        if theta is not None:
            raw.pop("rope_theta", None)
    else:
        raw |= {} if scaling is None else {"rope_scaling": scaling}
        raw |= {} if theta is None else {"rope_theta": theta}
    return raw


def _parameters_of_class(kind: str, raw: Mapping[str, object]) -> object:
    """Return the ``rope_parameters`` of ``raw``, or else of transformers' class for ``kind``; None if that has none."""
    from transformers import CONFIG_MAPPING  # imported late, because it takes seconds

    stated = raw.get("rope_parameters") or {}
    if kind not in CONFIG_MAPPING:
        return stated
    others = {name: value for name, value in raw.items() if name not in ROTARY}
    try:
        usual = getattr(CONFIG_MAPPING[kind].from_dict(others), "rope_parameters", None)
        return usual and (stated or usual)
    except Exception:  # values that the class rejects: they are refused when the model is built
        return stated


def with_overrides_as_values(args: EngineArguments, folder: Path) -> EngineArguments:
    """Return ``args`` with the values that a function given as ``hf_overrides`` changes instead of the function, which
    no other process could be sent. Raises as ``model_config``.
    """
    function: object = args.hf_overrides
    if not callable(function):
        return args
    return replace(args, hf_overrides=changes_by(function, _unchanged_config(folder, args)))


def _unchanged_config(folder: Path, args: EngineArguments) -> dict[str, object]:
    """Read config.json in ``folder`` or --hf-config-path."""
    if args.hf_config_path:
        folder = resolve_model(args.hf_config_path, None, args.download_dir, weights="none", token=args.hf_token)
    return read_config(folder, "config.json")


def _with_longer_context(
    raw: dict[str, object], scaling: Mapping[str, Any]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return ``raw`` with the context length multiplied by the factor of ``scaling``, and the completed ``scaling``.

    ``rope_type`` and ``original_max_position_embeddings`` are filled in. Raises ``bad_option``.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    trained = scaling.get("original_max_position_embeddings") or next((raw[n] for n in names if raw.get(n)), 2048)
    factor = scaling.get("factor", 1.0)
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (trained, factor))
    if not numbers or not 1 <= factor <= 1024:
        raise _bad("--rope-scaling", dict(scaling), "an object with a factor of 1 to 1024")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    # The length from which dynamic scaling grows is not stored in config.json; transformers uses the context length.
    scaled = {**scaling, "rope_type": kind, "original_max_position_embeddings": trained}
    if kind == "dynamic":
        scaled["grows_from"] = trained
    return raw if kind in _SAME_CONTEXT else raw | {"max_position_embeddings": int(trained * factor)}, scaled


def generation_config(folder: Path, args: EngineArguments, raw: Mapping[str, object]) -> dict[str, Any]:
    """Return the contents of generation_config.json, after --generation-config and its override.

    The EOS tokens are the model's, unless a folder is given. Without the file, config.json ``raw`` may have the values,
    as in old checkpoints. Raises ``bad_option``.
    """
    source = args.generation_config
    if source in ("auto", "vllm"):
        config = _own_generation_config(folder) or of_model_config(raw)
        if source == "vllm":
            config = {name: value for name, value in config.items() if name == "eos_token_id"}
    elif not (user_path(source) / "generation_config.json").is_file():
        raise _bad("--generation-config", source, "auto, vllm or a folder with a generation_config.json")
    else:
        config = read_config(user_path(source), "generation_config.json")
    over = args.override_generation_config or {}
    unknown = [name for name in over if name not in APPLIED]
    if unknown:
        raise _bad("--override-generation-config", unknown[0], "one of " + ", ".join(APPLIED))
    over = {name: _checked(name, value, None) for name, value in over.items()}
    for name in APPLIED:
        if name in config and name not in over:
            config[name] = _checked(name, config[name], "generation_config.json")
    return {name: value for name, value in (config | over).items() if value is not None}


def check_generation_config(folder: Path, raw: Mapping[str, object]) -> None:
    """Raise ``generation_config`` if ``generation_config.json`` of ``folder``, or config.json ``raw``, has a value that
    ends the start of a server.
    """
    config = _own_generation_config(folder) or of_model_config(raw)
    for file, values in (("generation_config.json", config), ("config.json", raw)):
        for name in APPLIED if values is config else ("eos_token_id",):
            _checked(name, values.get(name), file, otherwise="")


def _checked(name: str, value: object, file: str | None, otherwise: str = _OTHERWISE) -> object:
    """Return a default value of requests; whole numbers of JSON such as 2.0 become integers where one is expected.

    Raises ``generation_config`` for a value that no request could have, or ``bad_option`` if it is not of a file.
    """
    if value is None:
        return None
    if name in _INTEGERS:
        value = [_whole(each) for each in value] if isinstance(value, list) else _whole(value)
    constraint = _VALUES[name]
    if constraint.refusal(value) is None:
        return value
    if file is None:
        raise _bad("--override-generation-config", f"{name}: {value!r:.64}", str(constraint.expected))
    fields = {"key": name, "value": f"{value!r:.64}", "allowed": constraint.expected, "otherwise": otherwise}
    raise error("generation_config", file=file, **fields)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _own_generation_config(folder: Path) -> dict[str, object]:
    """Return the model's generation_config.json; without one, or if it is empty or damaged, {}, as in transformers."""
    try:
        return read_config(folder, "generation_config.json", missing_ok=True)
    except AiakqError as problem:
        if not str(problem.fields.get("reason")).startswith(("it is not JSON", "it is not a JSON object")):
            raise
        logger.warning("generation_config.json is ignored: %s", problem.fields["reason"])
        return {}


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of every request, from generation_config.json and arguments.

    sampling        default values of SamplingParams.
    max_new_tokens  limit on generated tokens of every request; None for no limit.
    grammars        defaults of structured output.
    remark          which keys of the file are not applied; empty if none.
    """

    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    max_new_tokens: int | None
    grammars: GrammarDefaults = GrammarDefaults()
    remark: str = ""

    @staticmethod
    def from_args(
        folder: Path,
        args: EngineArguments,
        raw: Mapping[str, object],
        vocab_size: int,
        others: Collection[str] = (),
    ) -> GenerationConfig:
        """Create it from the model folder, --generation-config and its override; ``raw`` is config.json, and
        ``others`` are keys of the file that something else reads.

        Logs a warning for end-of-sequence tokens beyond the vocabulary, which are left out. Raises ``bad_option``,
        ``generation_config`` and what reading the files raises.
        """
        values = generation_config(folder, args, raw)
        models_own = _checked("eos_token_id", raw.get("eos_token_id"), "config.json")
        eos_token_ids = _known_ids("the generation config", values.get("eos_token_id"), vocab_size)
        if not eos_token_ids:
            eos_token_ids = _known_ids("config.json", models_own, vocab_size)
        sampling = {name: values[name] for name in SAMPLING if name in values}
        grammars = GrammarDefaults.from_args(args.structured_outputs_config or {})
        unapplied = not_applied({key: value for key, value in values.items() if key not in others})
        remark = describe(unapplied) if unapplied else ""
        return GenerationConfig(eos_token_ids, sampling, values.get("max_new_tokens"), grammars, remark)


def _known_ids(source: str, ids: object, vocab_size: int) -> tuple[int, ...]:
    """Return the distinct end-of-sequence tokens that the model can generate, and warn about others."""
    given = dict.fromkeys(ids if isinstance(ids, list) else [] if ids is None else [ids])
    unknown = [id for id in given if not 0 <= id < vocab_size]
    if unknown:
        shown = ", ".join(map(str, unknown[:8]))
        message = "eos_token_id %s of %s is left out: the model's vocabulary has the ids 0 to %d"
        logger.warning(message, shown, source, vocab_size - 1)
    return tuple(id for id in given if id not in unknown)


def _bad(option: str, value: object, expected: str) -> AiakqError:
    return error("bad_option", option=option, value=value, expected=expected, hint="See docs/arguments.md.")
