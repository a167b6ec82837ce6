"""Measure aiakq's LLM, with sampling and detokenization."""

from __future__ import annotations

import os
import time
from typing import Any

from timing import run

from aiakq.system.threads import spin_briefly

spin_briefly(os.environ)

import torch  # noqa: E402
import transformers  # noqa: E402, F401  (imported before the clock starts, as in the other scripts)

from aiakq import LLM, SamplingParams  # noqa: E402


class Aiakq:
    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["threads"])
        # Enough pages for 16 sequences of 65 tokens, or one of 512.
        self.llm = LLM(
            model=request["model"],
            max_model_len=1024,
            max_num_seqs=16,
            num_gpu_blocks_override=96,
            enable_prefix_caching=False,
            **request["arguments"],
        )
        self.facts = dict(self.llm.engine.facts)

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        # The engine's clock is time.monotonic.
        shift = time.perf_counter() - time.monotonic()
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), outputs
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        first = max(found.first_token_time or 0.0 for found in metrics)
        return first + shift, max(found.last_token_time or 0.0 for found in metrics) + shift


if __name__ == "__main__":
    run(("torch", "transformers"), Aiakq)
