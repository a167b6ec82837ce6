"""AutoRound: rounding tuned by signed gradients. ``config`` in the request goes to AutoRound.

``mixed`` are arguments of its AutoScheme, which chooses the width of every layer and takes the samples as text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import job
import torch
from auto_round import AutoRound, AutoScheme
from transformers import AutoModelForCausalLM, AutoTokenizer


def quantize(request: dict[str, Any]) -> None:
    samples = torch.tensor(job.calibration(request))
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    config, dataset = dict(request["config"]), list(samples.split(8))
    if request.get("mixed"):
        dataset = request["output"] + ".samples.json"
        texts = [{"text": tokenizer.decode(sample, skip_special_tokens=True)} for sample in samples]
        Path(dataset).write_text(json.dumps(texts))
        config["scheme"] = AutoScheme(**request["mixed"], dataset=dataset)
    rounder = AutoRound(
        model,
        tokenizer=tokenizer,
        dataset=dataset,
        nsamples=samples.shape[0],
        seqlen=samples.shape[1],
        device_map=job.device(),
        **config,
    )
    # It saves into a folder inside the one it is given, named after the model and the scheme.
    _, folders = rounder.quantize_and_save(request["output"] + ".parts", format=request["format"])
    shutil.move(folders if isinstance(folders, str) else folders[0], request["output"])
    shutil.rmtree(request["output"] + ".parts", ignore_errors=True)


if __name__ == "__main__":
    job.run(("auto-round", "torch", "transformers"), quantize)
