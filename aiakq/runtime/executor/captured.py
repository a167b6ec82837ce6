"""Captured steps: a step of the model recorded once and replayed with new inputs, without Python in between."""

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
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.encoders.encoder import EncoderModel
from aiakq.runtime.models.interface import Model, ModelInput, StageOutput
from aiakq.runtime.models.whisper import CrossDecoder

#: Operations that not every implementation computes in a way that can be recorded -> those that do, by device. Products
#: of LoRA need their rows, which differ in every step, from a table.
RECORDED: dict[str, dict[str, set[str]]] = {
    "convolution": {"cpu": {"cpu"}, "cuda": {"triton"}},
    "recurrence": {"cpu": {"cpu"}, "cuda": {"triton"}},
    "selective_scan": {"cpu": {"cpu"}, "cuda": {"triton"}},
    "gated_norm": {"cpu": {"cpu"}, "cuda": {"triton"}},
    "lora": {"cpu": {"cpu"}, "cuda": {"triton"}},
}


class CapturedStep(Protocol):
    """A step that can be replayed."""

    def accepts(self, step: ModelInput) -> bool:
        """Whether ``step`` can be replayed, given the captured sizes."""

    def __call__(self, step: ModelInput) -> Tensor | StageOutput:
        """Return the logits [R, V] float32 of ``step.logit_rows`` or hidden states, as Model.forward does.

        The next call overwrites the result.
        """

    def describe(self) -> str:
        """Return a description of the captured step for the start-up table."""


def capture_step(
    model: Model, caches: list[LayerCache], bounds: Bounds, page_size: int, options: CompilationConfig
) -> tuple[CapturedStep | None, str]:
    """Capture the step of ``model``: any step on a CPU, decoding steps on a GPU.

    Returns the captured step, or None if it cannot or must not be captured, and a description of how steps run.
    """
    if options.enforce_eager:
        return None, "operation by operation"
    step, reason = _captured(model, caches, bounds, page_size, options)
    return step, f"operation by operation ({reason})" if step is None else step.describe()


def _captured(
    model: Model, caches: list[LayerCache], bounds: Bounds, page_size: int, options: CompilationConfig
) -> tuple[CapturedStep | None, str]:
    """Return the captured step, or None and the reason why it cannot be captured."""
    if not isinstance(model, Decoder):
        return None, "the model runs through transformers"
    if isinstance(model, EncoderModel):
        return None, "attention over whole texts is computed by torch"
    if isinstance(model, CrossDecoder):
        return None, "each sequence reads the states of an encoder of its own"
    device = model.ops.device
    for operation, implementations in RECORDED.items():
        if unsupported := model.ops.selected(operation) - implementations.get(device.type, set()):
            return None, f"{operation} is implemented by {', '.join(sorted(unsupported))}"
    if device.type == "cuda":
        if model.config.head is not None:
            return None, "the model does not decode"
        if model.takes_hidden:
            return None, "it reads the hidden states of another model"
        reasons = [block.mlp.experts.host_reason for block in model.blocks if isinstance(block.mlp, SparseMLP)]
        if reason := next(filter(None, reasons), None):
            return None, f"the host reads which experts have rows: {reason}"
        if model.ops.selected("attention") - {"triton"}:  # empty on a rank without heads
            return None, "attention is implemented by torch"
        length = min(bounds.length, options.max_seq_len_to_capture or bounds.length)
        return DecodeGraphs(model, caches, sizes(bounds.rows, options), length, page_size, device), ""
    if library.unavailable() is not None:
        return None, "no native library"
    external = model.ops.of_packages()
    if external:
        # Their computations outside torch would silently be missing from the recording.
        return None, f"{', '.join(sorted(external))} of another package is not native"
    try:
        with torch.inference_mode():
            return Program(model, caches, bounds), ""
    except RecordingError as problem:
        return None, str(problem)
