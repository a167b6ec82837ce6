"""Files named by arguments are checked before a process is started or a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.server.start_checks import check_named_files


def refusal(**arguments: Any) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        check_named_files(checked({"model": "m", **arguments}, server=True))
    assert "\n" not in str(caught.value)
    return caught.value


def adapter(folder: Path, **fields: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ({"lora_modules": ["a=/nowhere"]}, "option_conflict", "--lora-modules"),
        ({"lora_root": "/tmp"}, "option_conflict", "--enable-lora"),
        ({"enable_lora": True, "lora_modules": ["m=/nowhere"]}, "bad_option", "a name of its own"),
        ({"enable_lora": True, "lora_modules": ["a={good}", "a={good}"]}, "bad_option", "a name of its own"),
        (
            {"enable_lora": True, "lora_modules": ['{"name": "a", "path": "/x", "base_model_name": "other"}']},
            "bad_option",
            "an adapter of m",
        ),
    ],
)
def test_adapters_that_cannot_be_served_are_named_before_the_model_is_loaded(tmp_path, arguments, code, named):
    good = adapter(tmp_path / "good")
    modules = [module.replace("{good}", good) for module in arguments.get("lora_modules", ())]
    problem = refusal(**arguments | ({"lora_modules": modules} if modules else {}))
    assert problem.id == code and named in str(problem)


def test_a_missing_adapter_is_named_before_the_model_is_loaded(tmp_path):
    good = adapter(tmp_path / "good")
    for path in (tmp_path / "nothing", tmp_path / ("x" * 300), tmp_path, tmp_path / "good" / "adapter_config.json"):
        modules = [f"a={good}", json.dumps({"name": "b", "path": str(path)})]
        problem = refusal(enable_lora=True, lora_modules=modules)
        assert problem.id == "adapter_missing" and str(path) in str(problem)


def test_an_adapter_that_is_not_supported_is_named_before_the_model_is_loaded(tmp_path):
    path = adapter(tmp_path / "a", modules_to_save=["lm_head"])
    problem = refusal(enable_lora=True, lora_modules=[f"a={path}"])
    assert problem.id == "adapter_unsupported" and "modules_to_save" in str(problem)
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    assert refusal(enable_lora=True, lora_modules=[f"a={path}"]).id == "adapter_malformed"


@pytest.mark.parametrize("name", ["ssl_certfile", "chat_template", "tokenizer_extension_path", "lora_root"])
def test_a_missing_file_is_named_with_its_option(name, tmp_path):
    problem = refusal(**{name: str(tmp_path / "nothing"), "enable_lora": True})
    assert problem.id == "bad_option" and f"--{name.replace('_', '-')}" in str(problem)
