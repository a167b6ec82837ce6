"""Records: valid JSON whatever was measured, whole files, the environment they depend on."""

from __future__ import annotations

import json
import math
import os
import stat

import pytest

import aiakq
from aiakq.bench import latency, serve, throughput
from aiakq.errors import AiakqError
from aiakq.records import SCHEMA_VERSION, Record, environment, to_json, write_json


def test_document_holds_only_finite_numbers():
    metrics = {"a": math.nan, "b": {"c": [math.inf, 1.5]}, "d": (1, 2)}
    record = Record("serve", 7, {"request_rate": math.inf}, metrics, {}, ("careful",))
    document = json.loads(to_json(record.document()))
    assert document["schema_version"] == SCHEMA_VERSION
    assert (document["kind"], document["seed"], document["warnings"]) == ("serve", 7, ["careful"])
    assert document["a"] is None
    assert document["b"] == {"c": [None, 1.5]}
    assert document["config"] == {"request_rate": "inf"}


@pytest.mark.parametrize("module", [latency, throughput, serve], ids=lambda module: module.__name__)
def test_template_is_a_document_with_every_number_missing_or_zero(module):
    document = json.loads(to_json(module.template()))
    assert document["tpot_ms"]["p50"] is None
    assert document["prefix_cache"]["hit_rate"] is None


def test_write_json_is_all_or_nothing(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(ValueError):
        write_json({"x": math.nan}, path)
    assert path.read_text() == "old"
    write_json({"x": 1}, path)
    assert json.loads(path.read_text()) == {"x": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_written_file_has_the_mode_of_any_other(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    write_json({}, tmp_path / "result.json")
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_write_json_into_a_missing_folder_is_an_error_with_the_path(tmp_path):
    with pytest.raises(AiakqError) as caught:
        write_json({}, tmp_path / "none" / "result.json")
    assert caught.value.id == "output_failed" and "none" in str(caught.value)


def test_environment_names_versions_and_device():
    found = environment("cpu", threads=1)
    assert found["aiakq"] == aiakq.__version__
    assert found["torch"] and found["device"] == "cpu" and found["device_name"] and found["threads"] == 1
    assert environment()["device_name"] is None
