"""Recipe files: the options of ``aiakq quantize`` in YAML, with transforms and a rounder by name.

    quant_type: gptq
    bits: 4
    transforms:
      - {name: awq, clip: false}
    rounder: {name: gptq, damp: 0.05}

The keys are those of ``--config`` files. ``transforms`` and ``rounder`` replace those of the method; without
``quant_type`` both are required, and ``activation_bits: 8`` also quantizes the activations. A JSON report is read as
the recipe it contains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import Argument, checked_value
from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS, QuantizeArguments
from aiakq.errors import AiakqError, error
from aiakq.formats.yaml_text import InvalidYaml, parse_yaml
from aiakq.quantizers import METHODS
from aiakq.quantizers.recipe import Component, Method, Recipe, load_rounder, load_transform
from aiakq.spec import canonical_method
from aiakq.system.files import read_named_text

_MAX_BYTES = 1 << 26
#: Options of a single run, which a recipe does not contain.
_OF_ONE_RUN = ("input", "output", "revision", "trust_remote_code", "overwrite", "resume", "recipe")
#: Options that do not affect the bytes of the output, and those that component parameters represent.
_NOT_REPEATED = (
    "device", "workers", "distributed_executor_backend", "activation_memory", "evaluate", "eval_text",
)  # fmt: skip
_OF_COMPONENTS = (
    "smooth_alpha", "act_order", "sweeps", "damp", "scale_search", "targets", "importance", "gptaq", "awq_scaling",
    "gptq",
)  # fmt: skip
#: Prefix of the name of a recipe without a method. No key of METHODS contains a colon.
_COMPOSED = "recipe:"
#: Options that a report always contains.
_ALWAYS = ("method", "samples", "seqlen", "seed")


@dataclass(frozen=True)
class RecipeFile:
    """A parsed recipe file.

    options  the options by field of QuantizeOptions, validated individually; always includes ``method``, which is
             "recipe:" and the components for a recipe without one.
    preset   the method with the file's components; ``has_rounder``: whether one of them is its rounder.
    """

    path: str
    options: Mapping[str, Any]
    preset: Method
    has_rounder: bool = False

    def located(self, problem: AiakqError, options: QuantizeArguments) -> AiakqError:
        """Return ``problem`` with the file and the keys named, if the offending values come from the file."""
        if problem.id not in ("bad_option", "option_conflict"):
            return problem
        fields = dict(problem.fields)
        for name in ("option", "other"):
            words = str(fields.get(name, "")).split(" ")
            for row in QUANTIZE_ARGUMENTS:
                same = row.name in self.options and self.options[row.name] == getattr(options, row.name)
                if same and row.flag == words[0].rstrip(","):
                    fields[name] = " ".join([row.key, *words[1:], "in", self.path])
        return error(problem.id, **fields)


def read_recipe(path: Path) -> RecipeFile:
    """Read the recipe in a YAML file or a report. Raises ``bad_option``, which names the file and the key."""
    recipe = _read(path)
    rows = {row.key: row for row in QUANTIZE_ARGUMENTS if row.name not in _OF_ONE_RUN}
    options: dict[str, object] = {}
    for key, value in recipe.items():
        if key in rows and value is not None:
            options[rows[key].name] = checked_value(rows[key], value, f"{key} in {path}")
        elif key not in rows and key not in ("transforms", "rounder"):
            raise _bad(f"The key {key!r} in {path}", key, "an option of a recipe", "docs/quantize.md lists them.")
    transforms = _transforms(recipe.get("transforms"), path)
    rounder = None if recipe.get("rounder") is None else _component(recipe["rounder"], "rounder", path)
    if rounder is not None:
        load_rounder(rounder, _labels(rounder, "rounder", path))
    return RecipeFile(str(path), *_preset(options, transforms, rounder, path), has_rounder=rounder is not None)


def recipe_document(options: QuantizeArguments, recipe: Recipe, activation_bits: int | None) -> dict[str, object]:
    """Return the recipe, as JSON values, that repeats a run of ``options`` byte for byte."""
    document: dict[str, object] = {}
    for row in QUANTIZE_ARGUMENTS:
        value = getattr(options, row.name)
        repeated = row.name not in (*_OF_ONE_RUN, *_NOT_REPEATED, *_OF_COMPONENTS)
        repeated = repeated or (row.name == "eval_text" and options.max_kl is not None)
        if repeated and (row.name in _ALWAYS or value != row.default):
            document[row.key] = list(value) if isinstance(value, tuple) else str(value) if Path in row.also else value
    method = _row("method").key
    if options.method.startswith(_COMPOSED):
        del document[method]
        document["activation_bits"] = activation_bits
    return document | recipe.document()


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, object]:
    hint = "Write a key per line, like bits: 4; docs/quantize.md has an example."

    def unreadable(reason: str) -> AiakqError:
        return _bad("--recipe", str(path), f"a readable recipe ({reason})", hint)

    text = read_named_text(path, _MAX_BYTES, unreadable)
    try:
        recipe = json.loads(text)["recipe"] if path.suffix == ".json" else parse_yaml(text)
    except InvalidYaml as problem:
        raise unreadable(str(problem)) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise unreadable("it is no report with a recipe") from None
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        raise unreadable("it holds no keys with values")
    names = {name: row.key for row in QUANTIZE_ARGUMENTS for name in row.keys}
    keys: dict[str, object] = {}
    for spelled, value in recipe.items():
        name = spelled.lstrip("-").replace("-", "_")
        key = names.get(name, name)
        if key in keys:
            raise unreadable(f"it sets {key} twice")
        keys[key] = value
    return keys


def _transforms(entries: object, path: Path) -> tuple[Component, ...] | None:
    if entries is None:
        return None
    if not isinstance(entries, list):
        raise _bad(f"transforms in {path}", entries, "a list")
    components = []
    for number, item in enumerate(entries, 1):
        component = _component(item, f"transforms[{number}]", path)
        load_transform(component, _labels(component, f"transforms[{number}]", path))
        components.append(component)
    return tuple(components)


def _component(entry: Any, key: str, path: Path) -> Component:
    if isinstance(entry, str):
        return Component(entry)
    named = isinstance(entry, dict) and isinstance(entry.get("name"), str) and all(isinstance(k, str) for k in entry)
    if not named:
        raise _bad(f"{key} in {path}", entry, "a name, or a mapping with a name and parameters")
    return Component(entry["name"], {name: value for name, value in entry.items() if name != "name"})


def _labels(component: Component, key: str, path: Path) -> dict[str, str]:
    return {"": f"{key} in {path}", **{name: f"{key}.{name} in {path}" for name in component.parameters}}


def _preset(
    options: dict[str, Any],
    transforms: tuple[Component, ...] | None,
    rounder: Component | None,
    path: Path,
) -> tuple[dict[str, object], Method]:
    """Return the options with their method, and that method with the components of the file."""
    key, activation_bits = f"{_row('method').key} in {path}", options.get("activation_bits")
    if "method" in options:
        name = canonical_method(options["method"])
        if name not in METHODS:
            raise _bad(key, name, "one of " + ", ".join(METHODS))
        base: Method = METHODS.load(name)
        widths = base.activation_choices or (base.activation_bits or 16,)
        if activation_bits is not None and activation_bits not in widths:
            raise _bad(f"activation_bits in {path}", activation_bits, f"possible with {name}", "Leave the method away.")
        return {**options, "method": name}, base.with_components(transforms, rounder)
    if rounder is None:
        raise _bad(key, None, "given, although there is no rounder", "Name a method, or a rounder and its transforms.")
    if activation_bits not in (None, 8):
        raise _bad(f"activation_bits in {path}", activation_bits, "8, or left away")
    components = (*(transforms or ()), rounder)
    name = _COMPOSED + "+".join(component.name for component in components)
    widths = load_rounder(rounder).bits
    return {**options, "method": name}, Method(
        summary=f"It was made with {' and '.join(component.name for component in components)}.",
        transforms=transforms or (),
        rounder=rounder,
        bits=(8,) if activation_bits else widths,
        group_size=-1 if activation_bits else 128,
        symmetric=(True,) if activation_bits else (True, False),
        activation_bits=activation_bits,
    )


def _row(name: str) -> Argument:
    return next(row for row in QUANTIZE_ARGUMENTS if row.name == name)


def _bad(option: str, value: object, expected: str, hint: str = "") -> AiakqError:
    return error("bad_option", option=option, value=value, expected=expected, hint=hint)
