"""The file of folded scales: what is written is read, and what is no such file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiakq.errors import AiakqError
from aiakq.formats.folded_scales import LinearScales, read_scales, records_scales, tensors_of
from aiakq.formats.model_folder import FOLDED_SCALES as FILE
from aiakq.formats.model_folder import FOLDED_SCALES_KEY as KEY
from aiakq.formats.safetensors_file import write_file

CONFIG = {"aiakq": {KEY: FILE}}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / FILE).parent.mkdir()
    return tmp_path


def test_factors_are_read_as_they_were_written(folder):
    columns, rows = {"o": torch.rand(4) + 0.1, "v": torch.rand(3) + 0.1}, {"v": torch.rand(2) + 0.1}
    write_file(folder / FILE, dict(tensors_of(columns, rows, "layers.0")))
    found = read_scales(folder, CONFIG)
    assert found.keys() == {"layers.0.o", "layers.0.v"}
    assert torch.equal(found["layers.0.o"].columns, columns["o"]) and found["layers.0.o"].rows is None
    assert torch.equal(found["layers.0.v"].columns, columns["v"]) and torch.equal(found["layers.0.v"].rows, rows["v"])


def test_a_checkpoint_without_folds_has_an_empty_file(folder):
    write_file(folder / FILE, {})
    assert read_scales(folder, CONFIG) == {}


@pytest.mark.parametrize("config", [{}, {"aiakq": None}, {"aiakq": {}}, {"aiakq": {KEY: "../other.safetensors"}}])
def test_other_checkpoints_record_nothing(config, folder):
    assert not records_scales(config) and read_scales(folder, config) == {}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x.columns": torch.tensor([1.0, 0.0])}, "not positive"),
        ({"x.columns": torch.tensor([1.0, float("inf")])}, "not positive"),
        ({"x.rows": torch.tensor([float("nan")])}, "not positive"),
        ({"x.rows": torch.ones(2, dtype=torch.float16)}, "x.rows is F16"),
        ({"x.columns": torch.ones(2, 2)}, r"F32 \[2, 2\]"),
        ({"x.weight": torch.ones(2)}, "x.weight is"),
    ],
)
def test_another_file_is_refused(tensors, reason, folder):
    save_file(tensors, folder / FILE)
    with pytest.raises(AiakqError, match=reason) as caught:
        read_scales(folder, CONFIG)
    assert caught.value.id == "model_malformed"


def test_a_missing_file_and_one_elsewhere_are_refused(folder, tmp_path_factory):
    with pytest.raises(AiakqError, match="config.json names") as caught:
        read_scales(folder, CONFIG)
    assert caught.value.id == "model_incomplete"
    elsewhere = tmp_path_factory.mktemp("other") / "file"
    write_file(elsewhere, {"x.rows": torch.ones(2)})
    (folder / FILE).symlink_to(elsewhere)
    with pytest.raises(AiakqError) as caught:
        read_scales(folder, CONFIG)
    assert caught.value.id == "path_outside_model"


def test_sizes_are_those_of_the_layer():
    scales = LinearScales(torch.ones(4), torch.ones(2))
    scales.check("x", 2, 4)
    for n, k in ((3, 4), (2, 5)):
        with pytest.raises(AiakqError, match="factors for the"):
            scales.check("x", n, k)
