"""The tensors of new files, against files of llama.cpp's converter: names, shapes and values."""

from __future__ import annotations

import pytest
import torch
from gguf_files import FAMILIES, floats, original, originals, read_as, unpacked

from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf_model import config_of, family_of
from aiakq.formats.gguf_model.keys import Metadata
from aiakq.formats.gguf_model.written import expert_parts, file_tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_and_values_of_the_converter(family, tmp_path):
    file = GGUFFile.open(unpacked(family, tmp_path))
    keys = Metadata(file.metadata, file.path.name)
    wanted = read_as(family)
    shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    stored = {name: tensor.shape for name, tensor in file.tensors.items()}
    config = config_of(keys, stored, lambda name: floats(file, name))
    made = file_tensors(family_of(keys), config, shapes)
    unread = ("rope_f", f"blk.{config.get('num_hidden_layers')}.")  # factors, and layers that predict further tokens
    expected = {name: shape for name, shape in stored.items() if not name.startswith(unread)}
    assert {name: tensor.shape for name, tensor in made.items()} == expected
    assert {part.name for tensor in made.values() for part in tensor.parts} == shapes.keys()
    for name, tensor in made.items():
        values = tensor.filled(lambda target: wanted[target])
        torch.testing.assert_close(values, floats(file, name), rtol=1e-6, atol=2e-7)


def test_experts_of_llama_4_are_parts_of_two_tensors():
    shapes = {name: tuple(shape) for name, shape in originals()["llama4"]["shapes"].items()}
    parts = expert_parts("llama4_text", {name: name for name in shapes}, shapes)
    wanted = read_as("llama4")
    assert parts and parts.keys() == wanted.keys() - shapes.keys()
    for name, part in parts.items():
        assert part.shape == tuple(wanted[name].shape)
        assert torch.equal(part.of(original(part.stored, shapes[part.stored])), wanted[name])
    assert not expert_parts("gpt_oss", {name: name for name in shapes}, shapes)
