"""Weights of random codes, and comparisons for tests of formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.types import QWeight


def _random_weight(scheme: str, group: int = 32, zeros: bool = False, n: int = 64, k: int = 96) -> QWeight:
    bits = int(scheme[1])
    make = torch.Generator().manual_seed(0)
    groups = -(-k // group)
    return QWeight(
        scheme=scheme,
        codes=torch.randint(0, 2**bits, (n, k), generator=make).to(torch.uint8),
        scales=(torch.rand(n, groups, generator=make) - 0.3).half(),
        zeros=torch.randint(1, 2**bits, (n, groups), generator=make).to(torch.uint8) if zeros else None,
        bias=torch.randn(n, generator=make).half(),
        group_size=group,
    )


def _same_weight(a: QWeight, b: QWeight) -> None:
    assert (a.scheme, a.group_size) == (b.scheme, b.group_size)
    for field in ("codes", "scales", "zeros", "perm", "bias", "input_scale"):
        left, right = getattr(a, field), getattr(b, field)
        assert (left is None) == (right is None), field
        if left is not None:
            assert torch.equal(left.to(torch.float64), right.to(torch.float64)), field


def _as_words(tensor: torch.Tensor) -> list[str]:
    return [f"{value & 0xFFFFFFFF:08x}" for value in tensor.reshape(-1).tolist()]


def _write_weights(folder: Path, files: Mapping[str, str], index: str = "", value: float = 1.0) -> None:
    """Write tensors [2, 3] of one value to files of torch or safetensors, by their names, and an index of them."""
    for file in set(files.values()):
        tensors = {name: torch.full((2, 3), value) for name, each in files.items() if each == file}
        (save_file if file.endswith(".safetensors") else torch.save)(tensors, folder / file)
    if index:
        (folder / index).write_text(json.dumps({"weight_map": files}))


def _refused(folder: Path) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture(scope="session")
def write_weights() -> Callable[..., None]:
    """``write_weights(folder, {tensor: file}, index, value)`` writes them."""
    return _write_weights


@pytest.fixture
def empty_model(tmp_path: Path) -> Path:
    """A folder with an empty config.json."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def random_weight() -> Callable[..., QWeight]:
    """``random_weight(scheme, group, zeros, n, k)`` -> a weight with a bias, always the same one."""
    return _random_weight


@pytest.fixture(scope="session")
def same_weight() -> Callable[[QWeight, QWeight], None]:
    """``same_weight(a, b)`` asserts that they are equal number by number."""
    return _same_weight


@pytest.fixture(scope="session")
def as_words() -> Callable[[torch.Tensor], list[str]]:
    """``as_words(tensor)`` -> its int32 numbers in hexadecimal digits."""
    return _as_words


@pytest.fixture(scope="session")
def refused() -> Callable[[Path], AiakqError]:
    """``refused(folder)`` -> the error of one line that opening it as a checkpoint raises."""
    return _refused
