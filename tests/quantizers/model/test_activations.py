"""Activations of calibration batches while blocks compute them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from aiakq.quantizers.model.activations import Activations


def test_a_caller_that_ends_early_keeps_its_gradients() -> None:
    """The mode of a thread outlives a generator that is never finished."""
    one: Any = SimpleNamespace(others=(), device=torch.device("cpu"))
    modes = Activations.spread(one, nn.Identity(), range(2), lambda *_: torch.is_inference_mode_enabled())
    assert next(modes) == (0, True)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
