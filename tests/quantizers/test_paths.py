"""Wrong paths are refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiakq.arguments.quantize import QuantizeArguments
from aiakq.errors import AiakqError
from aiakq.quantizers.paths import check_paths


@pytest.mark.parametrize(
    ("given", "id"),
    [
        ({"input": "./nowhere"}, "model_missing"),
        ({"token_ids": "ids.txt"}, "calibration"),
        ({"token_ids": "."}, "calibration"),
        ({"lora": "nowhere"}, "adapter_missing"),
        ({"calibration": "some.txt"}, "calibration"),
        ({"calibration": "/nowhere/text"}, "calibration"),
        ({"eval_text": "some.txt"}, "evaluation_text"),
    ],
)
def test_missing_paths_are_refused(tmp_path, monkeypatch, given, id):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AiakqError) as caught:
        check_paths(QuantizeArguments(**{"input": str(tmp_path), "output": "out", "method": "awq", **given}))
    assert caught.value.id == id


@pytest.mark.parametrize("calibration", [None, "org/name", "org/name:config:train", "wikitext,org/other"])
def test_names_of_data_sets_are_left_to_their_hub(tmp_path, calibration):
    check_paths(QuantizeArguments(input=str(tmp_path), output="out", method="awq", calibration=calibration))


def test_nothing_heavy_is_imported():
    code = "import sys, aiakq.quantizers.paths; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
