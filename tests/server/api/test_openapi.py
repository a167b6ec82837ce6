"""/openapi.json agrees with the server. tests/server/api_description.py goes further, with schemathesis."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

SCRIPT = Path(__file__).parents[1] / "api_description.py"


@pytest.fixture(scope="module")
def description(server):
    import httpx

    return httpx.get(f"{server.url}/openapi.json", trust_env=False).json()


def body_of(description, path: str) -> dict:
    return description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def branch(schema: dict, kind: str) -> dict:
    return next(one for one in schema.get("anyOf", [schema]) if one.get("type") == kind)


GOOD = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}
#: Routes of other APIs, whose events have names.
NAMED = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", [*GOOD, *NAMED])
def test_documented_bounds_are_the_bounds_that_are_checked(http, description, path):
    """A value at each bound is not out of range, the next one is."""
    bounded, good = 0, (GOOD | NAMED)[path] | ({"logprobs": True} if "chat" in path else {})
    for name, schema in body_of(description, path)["properties"].items():
        for kind, step in (("integer", 1), ("number", 1e-3)):
            found = [one for one in schema.get("anyOf", [schema]) if one.get("type") == kind and "maximum" in one]
            for one in found:
                low = one.get("minimum", one.get("exclusiveMinimum"))
                bounded += 1
                for value in (low - step, one["maximum"] + step):
                    failure = http.post(path, json=good | {name: value}).json()["error"]
                    if path == "/v1/messages":  # whose errors have neither
                        assert failure["message"].startswith(f"{name} is "), (name, value, failure)
                        continue
                    assert failure["param"] == name, (name, value, failure)
                    assert failure["code"] in ("value_out_of_range", "context_length_exceeded"), (name, value, failure)
    assert bounded >= (12 if path in GOOD else 8)


@pytest.mark.parametrize("path", [*GOOD, "/v1/responses", "/tokenize", "/detokenize"])
def test_documented_fields_are_the_fields_that_are_accepted(http, description, path):
    """A field that the description names is not refused as unknown."""
    schema = body_of(description, path)
    for one in schema.get("anyOf", [schema]):
        assert one["additionalProperties"] is True
        for name in one["properties"]:
            answer = http.post(path, json={"no_such_field": 1, name: None})
            assert answer.json()["error"]["param"] != name or answer.json()["error"]["code"] != "unknown_field", name


@pytest.mark.parametrize("path", [*GOOD, *NAMED])
def test_unsupported_fields_accept_only_their_neutral_values(http, description, path):
    good = (GOOD | NAMED)[path]
    for name, schema in body_of(description, path)["properties"].items():
        if "enum" in schema and schema.get("description", "").startswith("Nothing else"):
            for value in schema["enum"]:
                assert http.post(path, json=good | {name: value}).status_code == 200, (name, value)
            failure = http.post(path, json=good | {name: "something"}).json()["error"]
            assert failure["message"].startswith(f"{name} is not supported")
            assert failure.get("code", "unsupported_parameter") == "unsupported_parameter"


@pytest.mark.parametrize("path", NAMED)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_other_apis_have_the_documented_schema(http, description, path, stream):
    content = description["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content["application/json"]["schema"]
    if stream:
        schema = content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"]
    answer = http.post(path, json=NAMED[path] | {"stream": stream})
    values = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")] if stream else [answer.text]
    assert values
    for value in values:
        jsonschema.validate(json.loads(value), schema | {"components": description["components"]})


def test_neutral_values_are_compared_with_their_types(http):
    """Values that ask for nothing are compared with their types."""
    for field in ({"length_penalty": True}, {"use_beam_search": 0}):
        answer = http.post("/v1/completions", json=GOOD["/v1/completions"] | field)
        assert answer.json()["error"]["code"] == "unsupported_parameter", field


def test_keys_of_logit_bias_have_one_spelling(http):
    """Keys of logit_bias are token ids as they are written, so that no two of them name one token."""
    for key in ("05", "+5", " 5", "5_0", "\u0665", "5.0", ""):
        answer = http.post("/v1/completions", json=GOOD["/v1/completions"] | {"logit_bias": {key: 1}})
        assert answer.json()["error"]["code"] == "invalid_type", key
    assert http.post("/v1/completions", json=GOOD["/v1/completions"] | {"logit_bias": {"5": 1, "0": -1}}).is_success


def test_every_route_documents_its_errors(description):
    for path, operations in description["paths"].items():
        for operation in operations.values():
            assert {"200", "400", "403", "408", "421", "431", "500", "503"} <= set(operation["responses"]), path
            assert not operation.get("security"), "this server asks for no key"
            if "requestBody" in operation:
                assert {"404", "413", "415"} <= set(operation["responses"]), path
    names = [one["operationId"] for operations in description["paths"].values() for one in operations.values()]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("path", GOOD)
def test_streamed_events_have_the_documented_schema(http, description, path):
    """The data of every event but [DONE] has the required fields of the documented chunk, and no others."""
    documented = description["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    data = documented["properties"]["data"]
    assert data["contentMediaType"] == "application/json"
    schemas = description["components"]["schemas"]
    chunk, failure = (schemas[one["$ref"].rpartition("/")[2]] for one in data["contentSchema"]["anyOf"])
    assert "error" in failure["properties"]
    choice = schemas[chunk["properties"]["choices"]["items"]["$ref"].rpartition("/")[2]]
    answer = http.post(path, json=GOOD[path] | {"stream": True, "return_token_ids": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events
    for event in events:
        for found, schema in ((event, chunk), *((each, choice) for each in event["choices"])):
            assert set(schema["required"]) <= set(found) <= set(schema["properties"]), found


def test_a_server_with_keys_documents_its_security_scheme(start_server):
    import httpx

    with start_server(api_key=["k"]) as server:
        answer = httpx.get(f"{server.url}/openapi.json", headers={"authorization": "Bearer k"}, trust_env=False)
        paths = answer.json()["paths"]
        assert answer.json()["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        assert paths["/v1/completions"]["post"]["security"] and "401" in paths["/v1/completions"]["post"]["responses"]
        assert "security" not in paths["/health"]["get"] and "401" not in paths["/health"]["get"]["responses"]


def test_api_description_reports_missing_schemathesis():
    words = [sys.executable, str(SCRIPT), "--schemathesis", "no-such-program"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1
