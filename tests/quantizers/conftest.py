"""Fixtures that quantize tiny models and compute with the outputs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.types import QWeight
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.rounding.integers import round_activations

FAMILIES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}
QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}


def _quantize(source: Path, output: Path, method: str, **fields: Any) -> Any:
    if method in ("awq", "gptq"):
        fields.setdefault("group_size", 32)
    return quantize_checkpoint(QuantizeOptions(str(source), str(output), method, **{**QUICK, **fields}))


def dense(weight: QWeight) -> Tensor:
    if weight.code_type is not None or weight.table is not None:
        codes = (
            weight.codes.view(weight.code_type).float() if weight.table is None else weight.table[weight.codes.long()]
        )
        return codes * weight.scales.float()[:, torch.arange(weight.k) // weight.group_size]
    zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
    group = torch.arange(weight.k) // weight.group_size
    return (weight.codes.float() - zeros.float()[:, group]) * weight.scales.float()[:, group]


def _round_floats(weight: QWeight, module: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = args[0]
    return (round_inputs(x.reshape(-1, x.shape[-1]), weight.input_scale, weight.rounding).view(x.shape),)


class Dequantized:
    """A quantized folder as a float32 transformers model, whose activations are rounded as it says."""

    def __init__(self, folder: Path) -> None:
        import transformers

        checkpoint = Checkpoint.open(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        state, own = {}, set()
        for prefix in checkpoint.quantized_linears() if checkpoint.spec else []:
            weight = checkpoint.read_linear(prefix)
            state[f"{prefix}.weight"] = dense(weight)
            if weight.bias is not None:
                state[f"{prefix}.bias"] = weight.bias.float()
            own.update(checkpoint.linear_tensors(prefix).values())
            if weight.scheme in ("fp8a8", "lut4a8", "lut4a4"):
                self.model.get_submodule(prefix).register_forward_pre_hook(partial(_round_floats, weight))
            if weight.scheme == "w8a8":
                self.model.get_submodule(prefix).register_forward_pre_hook(lambda _, args: round_activations(args[0]))
        state |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
        result = self.model.load_state_dict(state, strict=False)
        assert not result.unexpected_keys
        assert set(result.missing_keys) <= {"lm_head.weight"}
        self.model.tie_weights()

    def logits(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model(ids).logits


@pytest.fixture(scope="session")
def quick() -> dict[str, Any]:
    """Options under which a tiny model takes a second."""
    return QUICK


@pytest.fixture(scope="session")
def quantize() -> Callable[..., Any]:
    """``quantize(source, output, method, **options)`` -> the report of a run with quick options."""
    return _quantize


@pytest.fixture(scope="session")
def dequantized() -> Callable[[Path], Dequantized]:
    """``dequantized(folder)`` -> a model with ``logits(ids)``; its transformers model is ``model``."""
    return Dequantized


@pytest.fixture(scope="session")
def dense_weight() -> Callable[[QWeight], Tensor]:
    """``dense_weight(weight)``: the float32 weights [N, K] that a quantized linear stands for."""
    return dense


@pytest.fixture
def ids() -> Tensor:
    """Token ids [2, 48]."""
    return torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """``relative_error(found, wanted)``: the norm of the difference beside that of ``wanted``."""
    return lambda found, wanted: float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="session")
def quantized(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``quantized(family, method)`` -> (source, output, report), made once."""
    made: dict[tuple[str, str], Any] = {}

    def make(family: str, method: str) -> Any:
        if (family, method) not in made:
            source = tiny_model(FAMILIES[family])
            output = tmp_path_factory.mktemp("out") / f"{family}-{method}"
            made[family, method] = (source, output, _quantize(source, output, method))
        return made[family, method]

    return make
