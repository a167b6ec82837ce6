"""Every family against files of llama.cpp's converter: the config and each tensor are those that were converted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gguf_files import FAMILIES, floats, originals, read_as, unpacked

from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model import FAMILIES as TABLES
from aiakq.formats.gguf_model import config_of, tensor_names
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.runtime.config.model import ModelConfig

#: What the converter leaves out of files, or replaces, and the value that is used instead.
LOST: dict[str, dict[str, Any]] = {
    "bloom": dict.fromkeys(("max_position", "context", "num_positions"), 192),
    "deepseek2": {"rope": "mscale"},
    "deepseek3": {"rope": "mscale"},
    "gemma3": {"layer_kinds": ("sliding_attention",) * 4, "sliding_windows": (24,) * 4},
    "starcoder2": {"sliding_windows": (4096,) * 2},
}


def read(family: str, folder) -> tuple[GGUFFile, Metadata, dict[str, Any]]:
    file = GGUFFile.open(unpacked(family, folder))
    keys = Metadata(file.metadata, file.path.name)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return file, keys, config_of(keys, shapes, lambda name: floats(file, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_that_were_converted(family, tmp_path):
    file, keys, config = read(family, tmp_path)
    wanted = read_as(family)
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    sources = tensor_names(config, keys, shapes)
    assert {name: source.shape(shapes) for name, source in sources.items()} == expected
    for name, source in sources.items():
        torch.testing.assert_close(source.read(lambda stored: floats(file, stored)), wanted[name], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_which_was_converted(family, tmp_path):
    _, _, config = read(family, tmp_path)
    found, expected = ModelConfig.from_hf(config), ModelConfig.from_hf(originals()[family]["config"])
    lost = LOST.get(family, {})
    for field in dataclasses.fields(expected):
        value, wanted = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "rope":
            kept = {"mscale"} if "rope" in lost else set()
            assert _rope(value, kept) == _rope(wanted, kept)
        elif field.name != "raw":
            assert value == lost.get(field.name, wanted), field.name


def _rope(rope: Any, left_out: set[str]) -> dict[str, Any]:
    """Return rotary parameters without those that have their default values."""
    defaults = {"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        name: _rope(value, left_out) if isinstance(value, dict) else value
        for name, value in rope.items()
        if name not in left_out and defaults.get(name) != value
    }


def test_every_family_has_a_file():
    alike = {"qwen", "baichuan", "internlm2", "xverse", "minicpm", "exaone", "chatglm"}  # of the tables of another one
    assert set(TABLES) - alike == set(FAMILIES) - {"mixtral", "falcon40", "olmo3", "deepseek3"}
