"""AutoRound: rounding tuned by signed gradients. ``config`` in the request goes to AutoRound."""

from __future__ import annotations

import shutil
from typing import Any

import job
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def quantize(request: dict[str, Any]) -> None:
    samples = torch.tensor(job.calibration(request))
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    rounder = AutoRound(
        model,
        tokenizer=tokenizer,
        dataset=list(samples.split(8)),
        nsamples=samples.shape[0],
        seqlen=samples.shape[1],
        device_map=job.device(),
        **request["config"],
    )
    # It saves into a folder inside the one it is given, named after the model and the scheme.
    _, folders = rounder.quantize_and_save(request["output"] + ".parts", format=request["format"])
    shutil.move(folders if isinstance(folders, str) else folders[0], request["output"])
    shutil.rmtree(request["output"] + ".parts", ignore_errors=True)


if __name__ == "__main__":
    job.run(("auto-round", "torch", "transformers"), quantize)
