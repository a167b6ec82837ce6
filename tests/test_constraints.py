"""What a value may be is stated once: the command line, SamplingParams, requests, files and OpenAPI agree on it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import jsonschema
import pytest

from aiakq import SamplingParams
from aiakq.arguments.argument import argument, checked_value, rows_of
from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS
from aiakq.constraints import Constraint, Refusal, constraint_of, declarations, declare
from aiakq.errors import AiakqError
from aiakq.quantizers.rounders.gptq import Gptq
from aiakq.quantizers.transforms.smooth_quant import SmoothQuant
from aiakq.runtime.protocol.parameter import Checks
from aiakq.runtime.protocol.sampling_params import PARAMETERS
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.completions import CompletionRequest
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.openapi import request_schema
from aiakq.server.api.pooling.embeddings import EmbeddingRequest
from aiakq.server.api.request_model import parse_body

NAN, INFINITY = float("nan"), float("inf")
COUNT = Constraint(type=int, low=1, high=64)
SHARE = Constraint(type=float, above=0, high=1)
TEXT = Constraint(type=str, least=1, most=3, pattern="^[a-z]+$")


@pytest.mark.parametrize(
    ("constraint", "allowed", "refused"),
    [
        (COUNT, [1, 64], [0, 65, 1.0, True, "1", None, NAN, [1]]),
        (SHARE, [1, 1.0, 0.5, 5e-324], [0, 0.0, 1.01, NAN, INFINITY, True, "0.5", None]),
        (Constraint(type=float), [NAN, INFINITY, 1], [True, "1", None]),
        (Constraint(type=int, low=-1, excluded=(0,)), [-1, 1], [0, -2, False]),
        (Constraint(type=bool), [True, False], [0, 1, "true", None]),
        (Constraint(type=str, choices=("a", "b")), ["a"], ["A", "", 1, None]),
        (TEXT, ["a", "abc"], ["", "abcd", "A", "a\n", 1, None]),
        (Constraint(type=list, entries=TEXT, most=2), [[], ["a", "b"]], [["a"] * 3, ["A"], [1], "a", {"a": 1}]),
        (Constraint(type=str, also=(list,), entries=TEXT), ["a", ["a"]], ["A", ["A"], 1]),
        (Constraint(type=dict, entries=COUNT, names=TEXT), [{}, {"a": 1}], [{"A": 1}, {"a": 0}, {1: 1}, []]),
        (Constraint(type=float, also=(str,), automatic=True, low=0), ["auto", 1], ["AUTO", "1", -1]),
        (replace(COUNT, optional=True), [None, 1], [0]),
    ],
)
def test_values_are_allowed_or_refused_by_type_and_limits(constraint, allowed, refused):
    assert [value for value in allowed if constraint.refusal(value)] == []
    assert [value for value in refused if not constraint.refusal(value)] == []
    checks = Checks({"field": constraint})
    for value in allowed:
        checks.check({"field": value})
    for value in refused:
        with pytest.raises(AiakqError, match="field"):
            checks.check({"field": value})


@pytest.mark.parametrize(
    ("constraint", "value", "refusal"),
    [
        (COUNT, 65, Refusal(65, "at most 64")),
        (COUNT, "x", Refusal("x", "an integer", "an integer")),
        (SHARE, 0, Refusal(0, "above 0")),
        (replace(SHARE, expected="a share"), "x", Refusal("x", "a share", "a number")),
        (Constraint(type=int, low=0, high=2**31, expected="0 or more"), -1, Refusal(-1, "0 or more")),
        (Constraint(type=int, low=0, high=2**31, expected="0 or more"), 2**40, Refusal(2**40, "at most 2147483648")),
        (Constraint(type=list, least=1, most=2, noun="ids"), [1] * 9, Refusal("9 ids", "1 to 2")),
        (TEXT, "x" * 99, Refusal("x" * 64, "1 to 3")),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_is_expected(constraint, value, refusal):
    assert constraint.refusal(value) == refusal


@pytest.mark.parametrize("value", [1, 64, 0, 65, True, "1", None, 1.5, [1], {}])
def test_the_command_line_requests_and_json_schema_take_the_same_values(value):
    @dataclass
    class Options:
        size: int = argument(1, "Help.", low=1, high=64)

    (row,) = rows_of(Options)
    schema = row.schema()
    fits = not list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    assert schema == {"type": "integer", "minimum": 1, "maximum": 64}
    assert fits == (row.refusal(value) is None)
    if value is not None:
        try:
            assert checked_value(row, value) == value and fits
        except AiakqError:
            assert not fits or isinstance(value, str)


def numbers() -> list[str]:
    return [name for name, parameter in PARAMETERS.items() if parameter.high is not None]


@pytest.mark.parametrize("name", numbers())
def test_a_request_takes_the_numbers_that_its_schema_and_sampling_params_take(name):
    properties = request_schema(CompletionRequest)["properties"]
    bounds = next(branch for branch in properties[name]["anyOf"] if branch["type"] in ("integer", "number"))
    parameter = PARAMETERS[name]
    parameter = replace(parameter, high=parameter.http_maximum or parameter.high)
    step = 1 if parameter.type is int else 0.5
    low = parameter.above if parameter.low is None else parameter.low
    for value in (low - step, low, low + step, parameter.high, parameter.high + step):
        value = int(value) if parameter.type is int else float(value)
        fits = parameter.refusal(value) is None
        assert fits != bool(list(jsonschema.Draft202012Validator(bounds).iter_errors(value))), value
        offline = PARAMETERS[name].refusal(value) is None
        assert offline == is_accepted(lambda value=value: SamplingParams(**others(name, value)))
        body = json.dumps({"prompt": "a", **others(name, value)}).encode()
        assert fits == is_accepted(lambda body=body: taken(parse_body(CompletionRequest, body)))


def others(name: str, value: object) -> dict[str, object]:
    """The field, with what it needs."""
    return {name: value} | {"min_tokens": {"max_tokens": None}, "n": {"best_of": None}}.get(name, {})


def taken(request: CompletionRequest) -> None:
    request.check_combinations()
    request.sampling_params({})


def is_accepted(call) -> bool:
    try:
        call()
    except AiakqError as failure:
        return failure.fields.get("allowed", "").startswith("at most max_tokens")
    return True


def test_fields_of_other_apis_have_the_bounds_of_the_sampling_parameter():
    def bounds(model, *names):
        schema = request_schema(model)["properties"]
        for name in names[:-1]:
            schema = schema[name]["anyOf"][0]["properties"]
        schema = schema[names[-1]]
        return {key: value for key, value in schema.get("anyOf", [schema])[0].items() if "imum" in key}

    assert bounds(MessagesRequest, "max_tokens") == {"minimum": 0, "maximum": PARAMETERS["max_tokens"].high}
    budget = PARAMETERS["thinking_token_budget"]
    assert bounds(MessagesRequest, "thinking", "budget_tokens") == {"minimum": budget.low, "maximum": budget.high}
    assert bounds(ChatCompletionRequest, "max_completion_tokens") == bounds(ChatCompletionRequest, "max_tokens")
    kept = PARAMETERS["truncate_prompt_tokens"]
    assert bounds(EmbeddingRequest, "truncate_prompt_tokens") == {"minimum": kept.low, "maximum": kept.high}


def test_parameters_of_methods_have_the_limits_of_the_options_of_quantize():
    rows = {row.name: row for row in QUANTIZE_ARGUMENTS}
    options = {(SmoothQuant, "alpha"): "smooth_alpha"}
    own = {(Gptq, name) for name in ("alpha", "beta", "signed", "refit", "original_tokens", "enough_tokens")}
    for part in (Gptq, SmoothQuant):
        for field in fields(part):
            if (part, field.name) in own:
                continue
            row = rows[options.get((part, field.name), field.name)]
            constraint = constraint_of(field, Constraint)
            for limit in ("choices", "low", "high", "above", "automatic"):
                assert getattr(constraint, limit) == getattr(row, limit), (field.name, limit)


@pytest.mark.parametrize(("part", "values"), [(Gptq, {"damp": 5}), (Gptq, {"sweeps": -1}), (SmoothQuant, {"alpha": 2})])
def test_parameters_are_checked_however_a_method_is_made(part, values):
    with pytest.raises(ValueError, match=f"{next(iter(values))} is .*, which is not"):
        part(**values)


def test_a_declared_field_has_the_constraint_of_its_annotation_and_of_its_declaration():
    @dataclass(kw_only=True)
    class Fields:
        count: int | None = declare(None, "Help.", low=1)
        name: str = declare(..., "Help.")
        plain: int = 3

    found = declarations(Fields, Constraint)
    assert list(found) == ["count", "name"]
    assert vars(found["count"]) == vars(Constraint(type=int, optional=True, low=1, name="count", help="Help."))
    assert found["name"].required and not found["count"].required
