"""Weights that cannot fit are refused with the numbers, before any of them is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from aiakq.errors import RESOURCES, AiakqError
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader import memory_check
from aiakq.runtime.loader.memory_check import check_weights_fit, weight_bytes


@pytest.fixture
def large(example_model, tmp_path) -> Path:
    """The config of a model of 70 B parameters, and no weights."""
    shutil.copytree(example_model, tmp_path / "large", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "large" / "config.json"
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return path.parent


def test_the_estimate_is_not_above_the_file(example_model):
    config = EngineConfig.from_args({"model": str(example_model)})
    size = (example_model / "model.safetensors").stat().st_size
    assert 0.95 * size < weight_bytes(config) <= size


def test_weights_above_free_memory_are_refused_and_ranks_share_them(example_model, monkeypatch):
    config = EngineConfig.from_args({"model": str(example_model)})
    monkeypatch.setattr(memory_check, "free_memory", lambda device: 1 << 20)
    with pytest.raises(AiakqError) as caught:
        check_weights_fit(config)
    assert caught.value.id == "weights_too_large" and caught.value.exit_code == RESOURCES
    assert "0.0 GiB are free on this machine" in str(caught.value) and "aiakq quantize" in str(caught.value)
    monkeypatch.setattr(memory_check, "free_memory", lambda device: weight_bytes(config))
    check_weights_fit(config)


def test_random_weights_are_counted_from_the_shapes(large):
    config = EngineConfig.from_args({"model": str(large), "load_format": "dummy"})
    assert 120 * 2**30 < weight_bytes(config) < 300 * 2**30
    with pytest.raises(AiakqError) as caught:
        check_weights_fit(config)
    assert caught.value.id == "weights_too_large"
