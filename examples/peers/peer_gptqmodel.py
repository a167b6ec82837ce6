"""GPTQModel: GPTQ on a CPU. ``config`` in the request goes to its GPTQConfig; then its norms are tuned for
``norm_steps`` steps, if that is not 0.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import job

# With two cores it plans fewer threads than its loader requests, and stops with "Virtual pool
# 'model_loader:cpu' requests 2 workers but parent 'cpu' only has 1".
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

from gptqmodel import BACKEND, GPTQConfig, GPTQModel, NormConfig, extension


def quantize(request: dict[str, Any]) -> None:
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job.calibration(request)]
    model = GPTQModel.load(request["model"], GPTQConfig(device="cpu", **request["config"]))
    model.quantize(samples, batch_size=8)
    model.save(request["output"])
    if request["norm_steps"]:
        # Only a model that was loaded again can be tuned.
        parts = request["output"] + ".parts"
        shutil.move(request["output"], parts)
        model = GPTQModel.load(parts, backend=BACKEND.TORCH, device="cpu")
        model.requantize(samples, norm=NormConfig(teacher=request["model"], steps=request["norm_steps"]), batch_size=8)
        model.save(request["output"])
        shutil.rmtree(parts)


if __name__ == "__main__":
    extension.load("pack_block_cpu")  # compiled by the first process that loads it, which is not to be timed
    job.run(("gptqmodel", "torch", "transformers"), quantize)
