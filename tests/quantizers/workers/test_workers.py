"""Several workers: the bytes of one, whatever the method; a lost worker ends the run by name and leaves nothing."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: 6144 tokens in eight batches, so that some of them are not in the sample that every worker has.
MANY = {"samples": 96, "seqlen": 64}


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("weight_only_int8", {}),
        ("smooth_quant", {}),
        ("awq", {}),
        ("gptq", {}),
        ("gptq", {"gptaq": True, "awq_scaling": True}),
        ("smooth_quant", {"smooth_alpha": "auto", "activation_scales": "tensor", "gptq": True}),
    ],
    ids=["int8", "smooth_quant", "awq", "gptq", "gptaq", "static"],
)
def test_the_bytes_are_those_of_one_worker(
    method: str, fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tiny_model("LlamaForCausalLM")
    reports = {}
    for workers in (1, 2, 3):
        out = tmp_path / str(workers)
        reports[workers] = quantize(source, out, method, workers=workers, **MANY, **fields)
    assert digest(tmp_path / "1") == digest(tmp_path / "2") == digest(tmp_path / "3")
    assert reports[1].layers == reports[2].layers == reports[3].layers
    assert reports[1].warnings == reports[3].warnings
