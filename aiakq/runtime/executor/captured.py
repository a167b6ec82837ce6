"""Captured steps: a model's step prepared once and run again with other inputs, without Python in between."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.recording import RecordingError
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.executor.cpu_program import Bounds, Program
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs, sizes
from aiakq.runtime.layers.attention import LayerCache
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.decoder import Decoder, Model, ModelInput, StageOutput

#: Operations that can be recorded on a CPU where they are native, and not at all on a GPU: those of recurrent layers.
NATIVE_ONLY = ("convolution", "recurrence", "gated_norm")
#: Products of LoRA adapters, whose rows are others in every step, can be recorded where a table says which.
WITH_TABLES = {"cpu": {"cpu"}, "cuda": {"triton"}}


class CapturedStep(Protocol):
    """A step that can be run again."""

    def accepts(self, step: ModelInput) -> bool:
        """Whether ``step`` has a shape that was captured."""

    def __call__(self, step: ModelInput) -> Tensor | StageOutput:
        """Logits [R, V] float32 of ``step.logit_rows`` or hidden states, as Model.forward; the next call writes over
        them.
        """

    def describe(self) -> str:
        """What was captured, for the start-up table."""


def capture_step(
    model: Model, caches: list[LayerCache], bounds: Bounds, page_size: int, options: CompilationConfig
) -> tuple[CapturedStep | None, str]:
    """The captured step of ``model``, all of it on a CPU, decoding on a GPU, and how steps run, in words; None where it
    cannot be captured or must not be.
    """
    if options.enforce_eager:
        return None, "operation by operation"
    step, reason = _captured(model, caches, bounds, page_size, options)
    return step, f"operation by operation ({reason})" if step is None else step.describe()


def _captured(
    model: Model, caches: list[LayerCache], bounds: Bounds, page_size: int, options: CompilationConfig
) -> tuple[CapturedStep | None, str]:
    """The captured step, or None and why it cannot be captured."""
    if not isinstance(model, Decoder):
        return None, "the model is transformers'"
    device = caches[0][0].device
    native = {"cpu"} if device.type == "cpu" else set()
    for operation in NATIVE_ONLY:
        if others := model.ops.selected(operation) - native:
            return None, f"{operation} is of {', '.join(sorted(others))}"
    if others := model.ops.selected("lora") - WITH_TABLES.get(device.type, set()):
        return None, f"lora is of {', '.join(sorted(others))}"
    if device.type == "cuda":
        if model.config.head is not None:
            return None, "nothing is decoded"
        if not (model.stage.is_first and model.stage.is_last):
            return None, "it is one of several stages"
        if model.takes_hidden:
            return None, "it reads the hidden states of another model"
        if any(isinstance(block.mlp, SparseMLP) for block in model.blocks):
            return None, "experts are chosen on the host"
        if model.ops.selected("attention") - {"triton"}:  # a rank without heads has none
            return None, "attention is torch's"
        length = min(bounds.length, options.max_seq_len_to_capture or bounds.length)
        return DecodeGraphs(model, caches, sizes(bounds.rows, options), length, page_size, device), ""
    if library.unavailable() is not None:
        return None, "no native library"
    others = model.ops.of_packages()
    if others:
        # What they compute outside torch would be missing from the recording without a sign.
        return None, f"{', '.join(sorted(others))} of another package is not native"
    try:
        with torch.inference_mode():
            return Program(model, caches, bounds), ""
    except RecordingError as problem:
        return None, str(problem)
