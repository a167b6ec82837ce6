"""Models that are loaded to score texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from aiakq.evaluation.scoring import load_for_scoring

MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"], ids=["native", "transformers"])
def test_the_files_of_a_model_that_is_scored_are_not_mapped(
    tiny_model: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    """A mapped file that another process truncates ends this one with SIGBUS."""
    source = tiny_model(architecture)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    model = load_for_scoring(tmp_path, device="cpu")
    assert str(weights) not in MAPS.read_text()
    del model
