"""What a decoding step launches on a GPU: kernels of Triton and operations of torch, counted where nothing runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from aiakq.kernels.selection import BACKENDS
from aiakq.kernels.types import AttentionContext
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor.kv_cache import fit_positions
from aiakq.runtime.models.interface import ModelInput

#: Operations of torch that launch nothing.
VIEWS = set(
    "view _unsafe_view _reshape_alias alias slice select split split_with_sizes chunk unbind t transpose permute detach"
    " unsqueeze expand flatten unflatten to lift_fresh empty new_empty empty_like empty_strided".split()
)


class Launches(TorchDispatchMode):
    """Counts operations of torch by name; kernels of Triton are counted by the fixture."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function._schema.name.removeprefix("aten::")
        result = function(*arguments, **(keywords or {}))
        tensors = [each for each in (result, *arguments[:1]) if isinstance(each, torch.Tensor)]
        if name not in VIEWS and all(tensor.numel() for tensor in tensors):
            self.counts[f"torch {name}"] += 1
        return result


@pytest.fixture
def launches(monkeypatch, tiny_model, tmp_path):
    """``launches(method)``: what a step of four sequences launches once, and in every layer."""
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cuda"])
    monkeypatch.setenv("AIAKQ_KERNELS", "triton,triton-fp8,triton-floats,triton-w8a8,torch")
    watched = Launches()

    def recorded(function, grid):
        return lambda *arguments, **options: watched.counts.update([function.__name__.removesuffix("_kernel")])

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "__getitem__", recorded, raising=False)

    def count(method, architecture, layers):
        folder = tiny_model(architecture, num_hidden_layers=layers)
        if method:
            settings = {"group_size": 32} if method == "gptq" else {}
            out, ids = tmp_path / f"{method}{layers}", tmp_path / "ids.txt"
            ids.write_text("\n".join(" ".join(str(3 + (7 * row + at) % 300) for at in range(32)) for row in range(8)))
            options = QuantizeOptions(
                str(folder), str(out), method, token_ids=ids, seqlen=32, evaluate=False, **settings
            )
            quantize_checkpoint(options)
            folder = out
        config = EngineConfig.from_args(
            {"model": str(folder), "dtype": "float16", "device": "cpu", "max_model_len": 64}
        )
        model, _ = load_model(fit_positions(config))
        numbers, whole = torch.arange(4), torch.ones(4, 2, dtype=torch.int32)
        context = AttentionContext(
            torch.arange(5, dtype=torch.int32), numbers.int() + 1, numbers, whole, 4, [0, 1, 2, 3, 4], [1, 2, 3, 4]
        )
        step = ModelInput(numbers, numbers, context, numbers)
        caches = model.new_caches(4, 16)
        watched.counts.clear()
        with torch.inference_mode(), watched:
            model.compute(step, caches)
        return Counter(watched.counts)

    def found(method, architecture="LlamaForCausalLM"):
        two, three = (count(method, architecture, layers) for layers in (2, 3))
        layer = three - two
        return two - layer - layer, layer

    return found


#: In every layer, whatever the weights: the residual is added by the norms, keys and values are written by the rotary
#: embedding, and programs that share a tile of a product add up in the same launch.
COMMON = {"norm": 2, "rotary": 1, "decode": 1, "combine": 1, "gate": 1}


@pytest.mark.parametrize(
    ("method", "products"),
    [("gptq", {"grouped": 4}), ("fp8", {"fp8": 4, "quantize_e4m3": 1}), ("", {"torch linear": 4})],
    ids=["W4A16", "FP8", "16 bits"],
)
def test_launches_of_a_layer(launches, method, products):
    once, layer = launches(method)
    assert layer == {**COMMON, **products}
    assert once["split"] == 1, "the splits are the same for all layers"
