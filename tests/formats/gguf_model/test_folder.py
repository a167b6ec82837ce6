"""The model folder of a GGUF file: which file is meant, what is made from it, and who may name files."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from gguf_files import original, originals, unpacked

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.gguf.choice import MARK, choose_file, gguf_of, quantization_label
from aiakq.formats.gguf_model.folder import gguf_folder
from aiakq.formats.hub import check_model_name, resolve_model
from aiakq.formats.made_folder import model_path
from aiakq.runtime.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_becomes_a_folder_once(tmp_path):
    file = unpacked("llama", tmp_path)
    check_model_name(str(file))
    folder = resolve_model(str(file))
    written = (folder / MARK).stat().st_mtime_ns
    assert resolve_model(str(file)) == folder and (folder / MARK).stat().st_mtime_ns == written
    assert gguf_of(folder) == file.resolve()
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json", "generation_config.json"}
    os.utime(file, ns=(1, 1))  # another version of the file
    assert resolve_model(str(file)) != folder


def test_the_checkpoint_of_a_folder_is_the_file(tmp_path):
    checkpoint = Checkpoint.open(gguf_folder(unpacked("mixtral", tmp_path)))
    shapes = originals()["mixtral"]["shapes"]
    assert checkpoint.inventory.keys() == shapes.keys() and checkpoint.spec is None
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.block_sparse_moe.experts.2.w3.weight"):
        assert torch.equal(checkpoint.tensor(name).float(), original(name, tuple(shapes[name])))


def test_only_a_folder_in_the_cache_names_a_file(tmp_path):
    made = gguf_folder(unpacked("llama", tmp_path))
    copied = shutil.copytree(made, tmp_path / "copied")
    assert gguf_of(copied) is None
    with pytest.raises(AiakqError, match="safetensors"):
        Checkpoint.open(copied)


def test_a_folder_with_one_file_is_that_file(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    file = unpacked("llama", folder)
    assert gguf_of(resolve_model(str(folder))) == file
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == folder
    assert gguf_of(resolve_model(str(folder), weights="gguf")) == file


def test_the_quantization_selects_a_file_of_a_folder(tmp_path):
    file = unpacked("llama", tmp_path)
    for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"):
        shutil.copy(file, tmp_path / name)
    file.unlink()
    assert gguf_of(resolve_model(f"{tmp_path}:q8_0")).name == "tiny-Q8_0.gguf"
    for name, said in ((str(tmp_path), "2 GGUF files"), (f"{tmp_path}:Q5_K_M", "no GGUF file that is Q5_K_M")):
        with pytest.raises(AiakqError) as refused:
            resolve_model(name)
        assert refused.value.id == "gguf_choice" and said in str(refused.value) and "Q4_K_M, Q8_0" in str(refused.value)
    with pytest.raises(AiakqError, match="leave out"):
        resolve_model(f"{tmp_path}/tiny-Q8_0.gguf:Q8_0")


def test_all_parts_of_a_file_are_chosen_and_others_are_no_models():
    names = [
        *("mmproj-model-f16.gguf", "imatrix.dat", "a.imatrix.gguf", "README.md", "UD-Q4_K_XL/a-UD-Q4_K_XL.gguf"),
        *("Q8_0/a-Q8_0-00002-of-00002.gguf", "Q8_0/a-Q8_0-00001-of-00002.gguf", "a-Q4_K_M.gguf"),
    ]
    assert choose_file(names, "Q8_0", "org/a") == sorted(names[5:7])
    assert choose_file(names, "q4_k_m", "org/a") == ["a-Q4_K_M.gguf"]
    assert choose_file(names, "UD-Q4_K_XL", "org/a") == ["UD-Q4_K_XL/a-UD-Q4_K_XL.gguf"]
    assert choose_file(names[:3] + names[-1:], "", "org/a") == ["a-Q4_K_M.gguf"]
    labels = {"a.Q6_K.gguf": "Q6_K", "b-iq3_xxs.gguf": "iq3_xxs", "c-F16-00001-of-00003.gguf": "F16", "d.gguf": "d"}
    assert {name: quantization_label(name) for name in labels} == labels


def test_an_unknown_tokenizer_is_refused_when_it_is_needed(tmp_path):
    file = unpacked("llama", tmp_path)
    content = file.read_bytes().replace(
        b"\x05\x00\x00\x00\x00\x00\x00\x00gpt-2", b"\x05\x00\x00\x00\x00\x00\x00\x00gpt-9"
    )
    file.write_bytes(content)
    folder = gguf_folder(file)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
    Checkpoint.open(folder)
    with pytest.raises(AiakqError, match=r"gpt-9.*--tokenizer"):
        Tokenizer.load(folder)


def test_a_model_is_called_by_its_file(tmp_path):
    file = unpacked("llama", tmp_path)
    folder = gguf_folder(file)
    assert model_path(folder) == Checkpoint.open(folder).named_path == file.resolve()
    assert model_path(tmp_path) == tmp_path
