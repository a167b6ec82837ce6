"""Every module that implements an operation has the functions of the operation's protocol; and which are asked."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.selection import BACKENDS, select
from aiakq.kernels.types import NormProblem


def protocol(operation: str) -> dict[str, list[str]]:
    """Function -> its parameters."""
    module = importlib.import_module(f"aiakq.kernels.ops.{operation}")
    [found] = [value for name, value in vars(module).items() if name.endswith("Kernel") and name != "Kernel"]
    return {
        name: [each for each in inspect.signature(function).parameters if each != "self"]
        for name, function in vars(found).items()
        if not name.startswith("_") and inspect.isfunction(function)
    }


@pytest.mark.parametrize("operation", REGISTRIES)
def test_modules_have_the_functions_of_their_protocol(operation):
    registry, functions = REGISTRIES[operation], protocol(operation)
    assert "prepare" in functions
    for name in registry:
        module = registry.load(name)
        for function, parameters in functions.items():
            assert list(inspect.signature(getattr(module, function)).parameters) == parameters, (name, function)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_only_the_backend_of_the_device_is_asked(device, monkeypatch):
    asked = []
    for name, backend in list(BACKENDS.items()):
        refusing = type("Refusing", (), {"names": backend.names})()
        refusing.unsupported = lambda problem, name=name: asked.append(name) or "it is switched off"
        monkeypatch.setitem(BACKENDS, name, refusing)
    selection, _ = select(REGISTRIES["norm"], NormProblem("rms", 8, torch.float16, device))
    assert selection.name == "torch" and asked == [device] * (device in BACKENDS)
    names = {"cpu": "cpu", "cuda": "triton"}
    assert selection.passed_over == tuple((names[each], "it is switched off") for each in asked)
