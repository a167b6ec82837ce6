"""Rotary settings of arguments: what they change in config.json, and of which models they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.config.hf_config import model_config


@pytest.fixture
def changed(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``changed(name, architecture, **changes)`` -> the config.json of a tiny model with other values, alone."""

    def make(name: str, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        config = json.loads((tiny_model(architecture) / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return make


def refusal(folder: Path, **arguments: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        model_config(folder, EngineArguments(model=str(folder), **arguments))
    return caught.value


@pytest.mark.parametrize(
    "family",
    ["OPT", "KimiLinear", "NemotronH", "GraniteMoeHybrid", "OlmoHybrid", "Jamba", "Bloom", "GPTJ", "Lfm3", "Falcon"],
)
def test_rotary_settings_that_a_model_does_not_compute_with_are_refused(
    family: str, changed: Callable[..., Path]
) -> None:
    folder = changed("model", f"{family}ForCausalLM", **({"alibi": True} if family == "Falcon" else {}))
    if family == "Lfm3":
        folder = changed("defaults", f"{family}ForCausalLM", rope_parameters=None)
    reason = "kinds of layers differ" if family == "Lfm3" else "has no rotary parameters"
    for option in ({"rope_theta": 77.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        problem = refusal(folder, **option)
        assert problem.id == "bad_option" and reason in str(problem)


def test_rotary_settings_that_a_class_of_transformers_does_not_read_are_refused(changed: Callable[..., Path]) -> None:
    learned = changed("learned", model_type="xglm", architectures=["XGLMForCausalLM"])
    assert "has no rotary parameters" in str(refusal(learned, rope_theta=5.0))
    changes = {"model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"], "rope_parameters": None}
    assert "kinds of layers differ" in str(refusal(changed("kinds", **changes), rope_theta=5.0))


def test_rotary_settings_are_those_of_the_text_part(changed: Callable[..., Path]) -> None:
    text = json.loads((changed("text") / "config.json").read_text())
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e4}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "rope_parameters": None}
    folder = changed("outer", **outer, text_config=text)
    inside = model_config(folder, EngineArguments(model=str(folder), rope_theta=77.0))["text_config"]
    assert isinstance(inside, dict) and inside["rope_parameters"]["rope_theta"] == 77.0
