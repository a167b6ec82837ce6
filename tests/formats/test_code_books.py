"""AQLM and SqueezeLLM: code books decoded at load, compared with their definitions written out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats import aqlm, quantization_config, squeezellm
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint

AQLM = {"quant_method": "aqlm", "in_group_size": 4, "out_group_size": 2, "num_codebooks": 2, "nbits_per_codebook": 8}
SQUEEZE = {"quant_method": "squeezellm", "wbits": 4}


def books(bits: int = 8, dtype: torch.dtype = torch.int8) -> dict[str, Tensor]:
    """3 x 5 groups of 2 outputs and 4 inputs, two code books."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 5, 2), generator=generator)
    return {
        "codes": codes.to(dtype),
        "codebooks": torch.randn(2, 2**bits, 2, 4, generator=generator).half(),
        "scales": torch.rand(3, 1, 1, 1, generator=generator).half(),
        "bias": torch.randn(6, generator=generator).half(),
    }


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.int8), (12, torch.int16), (5, torch.int8)])
def test_aqlm_sums_vectors_and_scales_them(bits: int, dtype: torch.dtype) -> None:
    tensors = books(bits, dtype)
    weight = aqlm.read(tensors, quantization_config.read({**AQLM, "nbits_per_codebook": bits}))
    assert (weight.n, weight.k) == (6, 20) and "code books" in weight.reason
    for n in range(6):
        for k in range(20):
            codes = tensors["codes"][n // 2, k // 4].tolist()
            first, second = (float(tensors["codebooks"][c, codes[c] % 2**bits, n % 2, k % 4]) for c in range(2))
            assert weight.values[n, k] == torch.tensor(first + second) * tensors["scales"][n // 2, 0, 0, 0].float()
    assert weight.bias is tensors["bias"]


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": torch.zeros(3, 5, 1, dtype=torch.int8)},
        {"codes": torch.zeros(3, 5, 2)},
        {"codebooks": torch.zeros(2, 100, 2, 4)},
        {"codebooks": torch.full((2, 256, 2, 4), torch.nan)},
        {"scales": torch.ones(3, 1)},
        {"scales": torch.ones(4, 1, 1, 1)},
        {"codebooks": torch.zeros(2, 512, 2, 4)},
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_aqlm_is_refused(changes: dict[str, Tensor]) -> None:
    with pytest.raises(AiakqError) as caught:
        aqlm.read({**books(), **changes}, quantization_config.read(AQLM))
    assert caught.value.id in ("tensor_mismatch", "not_finite")


@pytest.mark.parametrize(
    "config",
    [AQLM | {"num_codebooks": 0}, AQLM | {"nbits_per_codebook": 40}, AQLM | {"more": 1}, SQUEEZE | {"wbits": 2}],
    ids=str,
)
def test_other_configs_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported"


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [K, N] -> [K*b/32, N] int32, bit by bit."""
    words = torch.zeros(codes.shape[0] * bits // 32, codes.shape[1], dtype=torch.int64)
    for k, row in enumerate(codes.tolist()):
        for n, code in enumerate(row):
            for bit in range(bits):
                place = k * bits + bit
                words[place // 32, n] |= ((code >> bit) & 1) << (place % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def squeezed(bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a linear of 3 x 64, and its weight."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (64, 3), generator=generator)
    table = torch.randn(3, 2**bits, generator=generator)
    sparse = {
        "rows": torch.tensor([0, 2, 2, 3], dtype=torch.int32),
        "cols": torch.tensor([5, 63, 0], dtype=torch.int32),
        "vals": torch.tensor([1.5, -2.0, 3.0]),
        "startrows": torch.zeros(128, dtype=torch.int32),
    }
    weight = torch.stack([table[n, codes[:, n]] for n in range(3)])
    for n, k, value in ((0, 5, 1.5), (0, 63, -2.0), (2, 0, 3.0)):
        weight[n, k] += value
    return {"qweight": packed(codes, bits), "lookup_table": table, **sparse}, weight


@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm_looks_up_a_table_and_adds_what_is_sparse(bits: int) -> None:
    tensors, expected = squeezed(bits)
    weight = squeezellm.read(tensors, quantization_config.read({"quant_method": "squeezellm", "wbits": bits}))
    assert torch.equal(weight.values, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"lookup_table": torch.zeros(3, 8)},
        {"lookup_table": torch.full((3, 16), torch.inf)},
        {"rows": torch.tensor([0, 2, 1, 3])},
        {"rows": torch.tensor([0, 2, 2, 4])},
        {"cols": torch.tensor([5, 64, 0])},
        {"cols": torch.tensor([-1, 3, 0])},
        {"vals": torch.ones(2)},
        {"full_rows": torch.ones(64, 1)},
        {"qweight": torch.zeros(8, 3)},
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_squeezellm_is_refused(changes: dict[str, Tensor]) -> None:
    with pytest.raises(AiakqError) as caught:
        squeezellm.read({**squeezed(4)[0], **changes}, quantization_config.read(SQUEEZE))
    assert caught.value.id in ("tensor_mismatch", "not_finite", "format_unsupported")


def aqlm_tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "codes": torch.randint(-128, 128, (n // 2, k // 4, 2), generator=generator).to(torch.int8),
        "codebooks": torch.randn(2, 256, 2, 4, generator=generator) / 16,
        "scales": torch.rand(n // 2, 1, 1, 1, generator=generator),
    }


def squeeze_tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    words = torch.randint(-(2**31), 2**31, (k // 8, n), generator=generator).to(torch.int32)
    return {"qweight": words, "lookup_table": torch.randn(n, 16, generator=generator) / 16}


@pytest.mark.parametrize(
    ("config", "make", "module"),
    [(AQLM, aqlm_tensors, aqlm), (SQUEEZE, squeeze_tensors, squeezellm)],
    ids=["aqlm", "lut"],
)
def test_a_model_computes_with_its_decoded_weights(tmp_path: Path, config: Any, make: Any, module: Any) -> None:
    """Beside the same model with the decoded weights as its own; the start-up table says why they are decoded."""
    source = Path(__file__).parent / "fixtures" / "ao-int8"
    stored = load_file(source / "model.safetensors")
    generator, spec = torch.Generator().manual_seed(5), quantization_config.read(config)
    coded, plain = {}, {}
    for name, tensor in stored.items():
        base, _, suffix = name.partition("._weight_")
        if suffix == "qdata":
            tensors = make(*tensor.shape, generator)
            coded |= {f"{base}.{part}": value for part, value in tensors.items()}
            plain[f"{base}.weight"] = module.read(tensors, spec).values
        elif not suffix:
            coded[name] = plain[name] = tensor.float()
    results = []
    for folder, tensors, quantization in ((tmp_path / "coded", coded, config), (tmp_path / "plain", plain, None)):
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        document = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(document))
        save_file(tensors, folder / "model.safetensors")
        settings = EngineConfig.from_args({"model": str(folder), "dtype": "float32", "device": "cpu"})
        model, facts = load_model(settings)
        results.append(ScoringModel(model, settings).logits(torch.arange(8)[None])[0])
        assert ("decoded at load" in str(facts)) == (quantization is not None)
    torch.testing.assert_close(*results)
    assert not inspect_checkpoint(str(tmp_path / "coded")).differences
