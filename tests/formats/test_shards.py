"""Files of weights under other names, in folders of the model, or with dtypes that are not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import INDEX


@pytest.fixture
def folder(empty_model: Path, write_weights) -> Path:
    """A model in two shards with an index."""
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    write_weights(empty_model, names, INDEX)
    return empty_model


def test_shards_may_be_in_folders_of_the_model(folder: Path, refused) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / "weights").mkdir()
    for file in set(index["weight_map"].values()):
        (folder / file).rename(folder / "weights" / file)
    names = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.remarks == [] and torch.equal(checkpoint.tensor("a.weight"), torch.ones(2, 3))
    (folder / "weights").rename(folder.parent / "elsewhere")
    (folder / "weights").symlink_to("../elsewhere")
    assert refused(folder).id == "path_outside_model"


def test_the_index_of_a_variant_is_read(folder: Path, refused) -> None:
    index = json.loads((folder / INDEX).read_text())
    for file in set(index["weight_map"].values()):
        (folder / file).rename(folder / file.replace("model-", "model.fp16-"))
    names = {name: file.replace("model-", "model.fp16-") for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.fp16.json").write_text(json.dumps({"weight_map": names}))
    (folder / INDEX).unlink()
    assert Checkpoint.open(folder).remarks == []
    (folder / "model.fp16-00002-of-00002.safetensors").unlink()
    assert "model.fp16-00002-of-00002.safetensors of its index is missing" in str(refused(folder))


@pytest.mark.parametrize("dtype", ["C64", "F8_E4M3FNUZ", "F4"])
def test_a_dtype_that_is_not_read_is_not_called_damage(folder: Path, dtype: str, refused) -> None:
    header = json.dumps({"a.weight": {"dtype": dtype, "shape": [1], "data_offsets": [0, 8]}}).encode()
    file = "model-00001-of-00002.safetensors"
    (folder / file).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    problem = refused(folder)
    assert problem.id == "unsupported" and "damaged" not in str(problem)
    assert f"The dtype {dtype} of the tensor a.weight in {file}" in str(problem)


@pytest.mark.parametrize("prefix", ["./", ".//", "sub/../", "{folder}/"])
def test_an_index_may_name_its_shards_by_path(folder: Path, prefix: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    names = {name: prefix.format(folder=folder) + file for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.inventory) == set(names) and checkpoint.remarks == []


ONES, TWOS = torch.ones(2, 3), torch.full((2, 3), 2.0)
FP16_SHARDS = {"a.weight": "pytorch_model.fp16-00001-of-00002.bin", "b.weight": "pytorch_model.fp16-00002-of-00002.bin"}


def test_the_only_variant_in_files_of_torch_is_read(empty_model: Path, write_weights, refused) -> None:
    write_weights(empty_model, FP16_SHARDS, "pytorch_model.bin.index.fp16.json", 2.0)
    checkpoint = Checkpoint.open(empty_model)
    assert set(checkpoint.inventory) == set(FP16_SHARDS) and torch.equal(checkpoint.tensor("b.weight"), TWOS)
    (empty_model / FP16_SHARDS["b.weight"]).unlink()
    assert f"{FP16_SHARDS['b.weight']} of its index is missing" in str(refused(empty_model))


@pytest.mark.parametrize("file", ["pytorch_model.fp16.bin", "model.bf16.safetensors"])
def test_the_only_file_of_a_variant_is_read(empty_model: Path, write_weights, file: str) -> None:
    write_weights(empty_model, {"a.weight": file}, value=2.0)
    assert torch.equal(Checkpoint.open(empty_model).tensor("a.weight"), TWOS)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("variant", ["model.fp16.safetensors", "model.safetensors.index.fp16.json"])
def test_weights_without_a_variant_precede_those_of_one_in_another_kind_of_file(
    empty_model: Path, write_weights, sharded: bool, variant: str
) -> None:
    """As in transformers, which reads a variant only if asked for it."""
    file = "model.fp16.safetensors"
    write_weights(empty_model, {"a.weight": file}, variant if variant != file else "")
    if sharded:
        names = {"a.weight": "pytorch_model-00001-of-00001.bin"}
        write_weights(empty_model, names, "pytorch_model.bin.index.json", 2.0)
    else:
        write_weights(empty_model, {"a.weight": "pytorch_model.bin"}, value=2.0)
    assert torch.equal(Checkpoint.open(empty_model).tensor("a.weight"), TWOS)
    assert torch.equal(Checkpoint.open(empty_model, weights="safetensors").tensor("a.weight"), ONES)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("indexed", [False, True])
def test_several_variants_and_no_other_weights_are_refused_with_their_names(
    empty_model: Path, write_weights, kind: str, indexed: bool, refused
) -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    for variant in ("fp16", "fp32"):
        index = f"{stem}.{kind}.index.{variant}.json" if indexed else ""
        write_weights(empty_model, {"a.weight": f"{stem}.{variant}.{kind}"}, index)
    problem = refused(empty_model)
    assert problem.id == "model_incomplete" and "--ignore-patterns" in str(problem)
    assert all(f"{stem}.{variant}.{kind}" in str(problem) for variant in ("fp16", "fp32"))
    assert Checkpoint.open(empty_model, ignore=["*fp32*"]).inventory


def test_a_variant_next_to_other_weights_is_not_read(folder: Path) -> None:
    save_file({"a.weight": TWOS}, folder / "model.fp16.safetensors")
    assert torch.equal(Checkpoint.open(folder).tensor("a.weight"), ONES)
