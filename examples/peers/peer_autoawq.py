"""AutoAWQ: AWQ on a CPU. ``config`` in the request goes to its quant_config."""

from __future__ import annotations

from typing import Any

import job
import torch
from awq import AutoAWQForCausalLM
from transformers import AutoTokenizer


def quantize(request: dict[str, Any]) -> None:
    samples = job.calibration(request)
    # In bfloat16, which it takes from the model, its packing gets one code in twelve wrong; float16 crawls on a CPU.
    model = AutoAWQForCausalLM.from_pretrained(request["model"], device_map="cpu", torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model.quantize(
        tokenizer,
        quant_config=request["config"],
        calib_data=samples,
        max_calib_samples=len(samples),
        max_calib_seq_len=max(map(len, samples)),
    )
    model.save_quantized(request["output"])
    tokenizer.save_pretrained(request["output"])


if __name__ == "__main__":
    job.run(("autoawq", "torch", "transformers"), quantize)
