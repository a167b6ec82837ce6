"""llm-compressor: a recipe of its modifiers on a CPU.

``recipe`` in the request is a list of [modifier, arguments].
"""

from __future__ import annotations

from typing import Any

import datasets
import job
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant.base import SpinQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer

MODIFIERS = {
    "awq": AWQModifier,
    "gptq": GPTQModifier,
    "rounding": QuantizationModifier,
    "smoothquant": SmoothQuantModifier,
    "spinquant": SpinQuantModifier,
}

# AWQModifier pins calibration inputs for transfers to a GPU even without one; torch then raises
# "Cannot access accelerator device when none is available".
if not torch.accelerator.is_available():
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None


def quantize(request: dict[str, Any]) -> None:
    samples = job.calibration(request)
    rows = {"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]}
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    oneshot(
        model=model,
        dataset=datasets.Dataset.from_dict(rows),
        recipe=[MODIFIERS[name](**arguments) for name, arguments in request["recipe"]],
        num_calibration_samples=len(samples),
        max_seq_length=max(map(len, samples)),
        batch_size=8,
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(request["output"], save_compressed=True)
    AutoTokenizer.from_pretrained(request["model"]).save_pretrained(request["output"])


if __name__ == "__main__":
    job.run(("llmcompressor", "compressed-tensors", "torch", "transformers"), quantize)
