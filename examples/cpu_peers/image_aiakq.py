"""Measure the time from a chat with an image to its first token, with aiakq's LLM."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from aiakq.system.threads import spin_briefly

spin_briefly(os.environ)

import torch  # noqa: E402

from aiakq import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """``image_aiakq.py REQUEST RESULT``: the request has ``model`` (a folder), ``images`` (files), ``text`` and
    ``threads``; the first image is a warm-up.
    """
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(request["threads"])
    llm = LLM(
        **{"model": request["model"], "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 1},
        **{"max_num_batched_tokens": 2048, "num_gpu_blocks_override": 160},
    )
    first_token = []
    for file in request["images"]:
        parts = [
            {"type": "image_url", "image_url": {"url": _data_url(file)}},
            {"type": "text", "text": request["text"]},
        ]
        began = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        llm.chat([{"role": "user", "content": parts}], sampling, use_tqdm=False)
        first_token.append(time.perf_counter() - began)
    result = {"first_token": first_token[1:], "facts": dict(llm.engine.facts)}
    Path(sys.argv[2]).write_text(json.dumps(result))


def _data_url(file: str) -> str:
    import base64

    return "data:image/png;base64," + base64.b64encode(Path(file).read_bytes()).decode()


if __name__ == "__main__":
    main()
