"""bitsandbytes: blocks that are groups of rows, blocks that are not, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import bitsandbytes, quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
NF4 = quantization_config.read({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
INT8 = quantization_config.read({"quant_method": "bitsandbytes", "load_in_8bit": True})
STATE = "weight.quant_state.bitsandbytes__nf4"


def stored(n: int, k: int, **changes: Any) -> dict[str, Tensor]:
    """Codes 0, 1, 2, ... of which every second is in the low bits, and scales 1, 2, 3, ... of blocks of 64."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [n, k], **changes}
    codes = torch.arange(n * k) % 16
    return {
        "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": torch.arange(1.0, -(-n * k // 64) + 1),
        "weight.quant_map": torch.tensor(TABLES["nf4"]),
        STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


@pytest.mark.parametrize(("n", "k", "group"), [(4, 128, 64), (8, 32, 32), (4, 96, 32), (6, 40, None)])
def test_blocks_are_groups_of_rows_or_are_decoded(n: int, k: int, group: int | None) -> None:
    weight = bitsandbytes.read(stored(n, k), NF4)
    place = torch.arange(n * k)
    wanted = torch.tensor(TABLES["nf4"])[place % 16] * (place // 64 + 1)
    assert torch.equal(as_floats(weight), wanted.view(n, k))
    if group is None:
        assert isinstance(weight, DecodedWeight) and "end within rows" in weight.reason
    else:
        assert isinstance(weight, QWeight) and (weight.scheme, weight.group_size) == ("lut4a16", group)


@pytest.mark.parametrize(
    ("suffix", "value", "said"),
    [
        ("weight", torch.zeros(7, 1, dtype=torch.uint8), "weight has 7 bytes"),
        ("weight.absmax", torch.ones(3), "absmax has shape"),
        ("weight.absmax", torch.full((4,), torch.nan), "absmax"),
        ("weight.quant_map", torch.zeros(16), "quant_map is not that of nf4"),
        (STATE, torch.zeros(8, dtype=torch.uint8), "is not JSON"),
        (STATE, torch.tensor(list(b"[" * 4000), dtype=torch.uint8), "is not JSON"),
        (STATE, torch.zeros(5000, dtype=torch.uint8), "is not a short text"),
    ],
)
def test_damaged_tensors_are_named(suffix: str, value: Tensor, said: str) -> None:
    with pytest.raises(AiakqError, match=said):
        bitsandbytes.read({**stored(4, 64), suffix: value}, NF4)


@pytest.mark.parametrize(
    "changes",
    [
        {"blocksize": 0},
        {"blocksize": 63},
        {"shape": [4, -64]},
        {"shape": [True, 64]},
        {"shape": None},
        {"dtype": "os.system"},
        {"quant_type": "fp4"},
        {"nested_offset": "1"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_hostile_quant_state_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        bitsandbytes.read(stored(4, 64, **changes), NF4)
    assert caught.value.id == "tensor_mismatch"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"load_in_4bit": True, "load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        {"load_in_8bit": True, "llm_int8_threshold": "x"},
        {"load_in_8bit": True, "unknown": 1},
    ],
    ids=str,
)
def test_other_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read({"quant_method": "bitsandbytes", **config})
    assert caught.value.id == "format_unsupported"


def test_permuted_integers_are_refused() -> None:
    tensors = {"weight": torch.ones(4, 8, dtype=torch.int8), "SCB": torch.full((4,), 127.0)}
    assert torch.equal(as_floats(bitsandbytes.read(tensors, INT8)), torch.ones(4, 8))
    with pytest.raises(AiakqError, match="weight_format"):
        bitsandbytes.read({**tensors, "weight_format": torch.tensor(1, dtype=torch.uint8)}, INT8)
    with pytest.raises(AiakqError, match="the config says 4"):
        bitsandbytes.read(tensors, NF4)


def test_start_up_says_what_is_decoded_and_how_integers_are_computed() -> None:
    """In exact mode weights are rounded as bitsandbytes does; otherwise only those without groups are decoded."""

    def remarks(name: str, cpu_math: str) -> str:
        config = EngineConfig.from_args({"model": str(FIXTURES / name), "device": "cpu", "cpu_math": cpu_math})
        return load_model(config)[1]["linear layers"]

    assert "rounds them to bfloat16, and --cpu-math is exact" in remarks("bnb-nf4", "exact")
    assert "decoded" not in remarks("bnb-nf4", "fast")
    assert "MiB of floats: blocks of 64 weights end within rows of 100" in remarks("bnb-fp4", "fast")
    assert "do not depend on the batch" in remarks("bnb-int8", "fast")


def test_inspect_reads_the_shape_from_the_quant_state() -> None:
    layers = {layer.name: layer for layer in inspect_checkpoint(str(FIXTURES / "bnb-nf4-dq-bf16")).layers}
    layer = layers["model.layers.0.self_attn.k_proj"]
    assert (layer.scheme, layer.n, layer.k, layer.group_size) == ("lut4a16", 32, 64, 64)
    assert layers["model.layers.0.mlp.down_proj"].scheme == "w16"
    checkpoint = Checkpoint.open(FIXTURES / "bnb-nf4-dq-bf16")
    assert checkpoint.linear_tensors(layer.name)["weight.nested_absmax"].endswith("k_proj.weight.nested_absmax")
