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
def folder(tmp_path: Path) -> Path:
    """A model in two shards with an index."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    names = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2, 3)}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": names}))
    return path


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


@pytest.mark.parametrize("dtype", ["C64", "F8_E8M0", "F4"])
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
