"""Random weights in every layout come back bit for bit; random damage ends in an entry of the error registry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.decoded_weight import DecodedWeight
from aiakq.kernels.types import QWeight
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models import ARCHITECTURES
from aiakq.spec import QuantSpec
from tests.format_names import INTEGERS

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json") if "quantization_config" in path.read_text())
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


# --- write, then read ------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, QWeight]:
    format = draw(st.sampled_from(INTEGERS))
    bits = 4 if format.startswith("awq") else draw(st.sampled_from([2, 3, 4, 8]))
    group = draw(st.sampled_from([32, 64, 128]))
    k = group * draw(st.integers(1, 5)) * (2 if group == 32 else 1)
    n = 32 * draw(st.integers(1, 4))
    if format == "compressed-tensors":
        n = draw(st.integers(1, 70))
    channel = draw(st.booleans())
    groups = 1 if channel else k // group
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    zeros = draw(st.booleans())
    lowest = 1 if format == "gptq" else 0
    signs = 1 if draw(st.booleans()) else torch.randint(0, 2, (n, groups), generator=make) * 2 - 1
    return format, QWeight(
        f"w{bits}a16",
        torch.randint(0, 2**bits, (n, k), generator=make).to(torch.uint8),
        ((torch.rand(n, groups, generator=make) + 0.01) * signs).half(),
        torch.randint(lowest, 2**bits, (n, groups), generator=make).to(torch.uint8) if zeros else None,
        bias=torch.randn(n, generator=make).half() if draw(st.booleans()) else None,
        group_size=k if channel else group,
    )


@quick
@given(cases())
def test_write_then_read_is_bit_exact(case: tuple[str, QWeight]) -> None:
    format, weight = case
    half = 2 ** (weight.bits - 1)
    if weight.zeros is not None and bool((weight.zeros == half).all()):
        weight.zeros = None
    group = -1 if weight.group_size == weight.k else weight.group_size
    spec = QuantSpec("gptq", format, weight.bits, group, symmetric=weight.zeros is None)
    module = formats.load(format)
    read = module.read(
        module.write(weight, spec, torch.float16), quantization_config.read(quantization_config.write(spec)), "x"
    )
    assert (read.scheme, read.group_size) == (weight.scheme, weight.group_size)
    for name in ("codes", "scales", "zeros", "perm", "bias"):
        left, right = getattr(read, name), getattr(weight, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


# --- damage ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 2**40),
        st.sampled_from([0, 1, 4, 5, 8, 32, 64, -1, 2**63]),
        st.floats(),
        st.sampled_from(
            ["", "gptq", "gemm", "marlin", "re:(a+)+$", "re:(", "Linear", "lm_head", "int", "\n", "x" * 300]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["bits", "weights", "Linear", "re:[", "+:.*"]), inner, max_size=3),
    ),
    max_leaves=4,
)


def paths(value: Any, at: tuple = ()) -> list[tuple]:
    """Every place inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*at, key) for key, _ in inside] + [path for key, each in inside for path in paths(each, (*at, key))]


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with one or two places removed or replaced."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        *way, last = draw(st.sampled_from(paths(value) or [("x",)]))
        place = value
        for key in way:
            place = place[key]
        if isinstance(place, dict) and draw(st.booleans()):
            place.pop(last, None)
        else:
            place[last] = draw(json_values)
    return value


def config_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


@quick
@given(st.data(), st.sampled_from(NAMES))
def test_damaged_quantization_configs(data: st.DataObject, name: str) -> None:
    config = data.draw(changed(config_of(name)["quantization_config"]))
    try:
        spec = quantization_config.read(config)
        for layer in ("lm_head", "model.layers.0.mlp.down_proj"):
            own = spec.for_layer(layer)
            assert own is None or (1 <= own.bits <= 8 and (own.group_size == -1 or own.group_size > 0))
        spec.describe()
        quantization_config.write(spec)
    except AiakqError as problem:
        assert "\n" not in str(problem)


def prepared(folder: str) -> None:
    """Everything that happens to a config before weights are read."""
    config = EngineConfig.from_args({"model": folder, "device": "cpu"})
    if config.model.architecture in ARCHITECTURES:
        check_inventory(config.model, Checkpoint.open(folder))


@quick
@given(st.data(), st.sampled_from(NAMES))
def test_damaged_configs_of_whole_models(tmp_path: Path, data: st.DataObject, name: str) -> None:
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FIXTURES / name, folder)
    config = data.draw(changed(config_of(name)))
    (folder / "config.json").write_text(json.dumps(config))
    for action in (
        lambda: inspect_checkpoint(str(folder), device="cpu"),
        lambda: prepared(str(folder)),
    ):
        try:
            action()
        except AiakqError:
            pass


@quick
@given(st.data(), st.sampled_from(NAMES))
def test_damaged_headers(tmp_path: Path, data: st.DataObject, name: str) -> None:
    """The JSON header of a real file with one place changed, or a few bytes of the file."""
    content = bytearray((FIXTURES / name / "model.safetensors").read_bytes())
    length = int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        raw = json.dumps(data.draw(changed(json.loads(content[8 : 8 + length])))).encode()
        content[: 8 + length] = len(raw).to_bytes(8, "little") + raw
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, length + 8))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(content)
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    try:
        checkpoint = Checkpoint.open(tmp_path)
        inspect_checkpoint(str(tmp_path), device="cpu")
        for linear in checkpoint.quantized_linears():
            checkpoint.read_linear(linear)
    except AiakqError as problem:
        assert "\n" not in problem.message


@pytest.fixture(scope="module")
def linears() -> dict[str, dict[str, torch.Tensor]]:
    def of_first(name: str) -> dict[str, torch.Tensor]:
        prefix = "transformer.h.0.attn.c_attn." if "gpt2" in name else "model.layers.0.self_attn.k_proj."
        tensors = load_file(FIXTURES / name / "model.safetensors")
        return {full.removeprefix(prefix): each for full, each in tensors.items() if full.startswith(prefix)}

    return {name: of_first(name) for name in NAMES}


@quick
@given(st.data(), st.sampled_from(NAMES))
def test_damaged_tensors(tmp_path: Path, linears: Any, data: st.DataObject, name: str) -> None:
    """One or two tensors of a linear with another shape, dtype or numbers."""
    tensors = dict(linears[name])
    for _ in range(data.draw(st.integers(1, 2))):
        suffix = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors[suffix]
        kind = data.draw(st.sampled_from(["drop", "cut", "turn", "flat", "dtype", "value", "empty", "stretch"]))
        if kind == "drop":
            del tensors[suffix]
            break
        if kind == "cut" and tensor.numel():
            tensor = tensor.narrow(data.draw(st.integers(0, tensor.dim() - 1)), 0, 1) if tensor.dim() else tensor
        elif kind == "turn" and tensor.dim() == 2:
            tensor = tensor.T
        elif kind == "flat":
            tensor = tensor.reshape(-1)
        elif kind == "dtype":
            tensor = tensor.to(data.draw(st.sampled_from([torch.float32, torch.int64, torch.int8, torch.bool])))
        elif kind == "value" and tensor.numel():
            tensor = tensor.contiguous().clone()
            values = (
                [float("nan"), float("inf"), 0.0] if tensor.is_floating_point() else [-1, 0, 1, 2**31 - 1, -(2**31)]
            )
            at = data.draw(st.integers(0, tensor.numel() - 1))
            value = torch.tensor(data.draw(st.sampled_from(values))).to(tensor.dtype)
            tensor.view(-1)[at] = value
        elif kind == "empty" and tensor.dim():
            tensor = tensor[:0]
        elif kind == "stretch" and tensor.dim():
            tensor = torch.cat((tensor, tensor))
        tensors[suffix] = tensor
    save_file(
        {f"x.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    config = {"quantization_config": config_of(name)["quantization_config"], "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        inspect_checkpoint(str(tmp_path), device="cpu")
        weight = Checkpoint.open(tmp_path).read_linear("x")
    except AiakqError as problem:
        assert "\n" not in str(problem)
    else:
        if isinstance(weight, DecodedWeight):
            assert bool(torch.isfinite(weight.values).all())
            return
        assert bool(torch.isfinite(weight.scales).all()) and int(weight.codes.max()) < 2**weight.bits
        assert weight.scales.shape == (weight.n, -(-weight.k // weight.group_size))
        assert weight.perm is None or sorted(weight.perm.tolist()) == list(range(weight.k))
