"""The in-process engine that ``bench latency`` and ``bench throughput`` measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiakq.bench import workload
from aiakq.bench.workload import Request
from aiakq.records import environment

if TYPE_CHECKING:
    from aiakq.runtime.llm import LLM
    from aiakq.runtime.text.outputs import RequestOutput

#: ``(stage, done, total)``
Progress = Callable[[str, int, int], None]


class MeasuredEngine:
    """An ``LLM`` whose loading is timed and whose prefix-cache counters are read as differences.

    arguments  keywords of ``LLM``; ``model`` is one of them.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from aiakq.runtime.llm import LLM

        started = time.perf_counter()
        self.llm: LLM = LLM(**arguments)
        self.load_s = time.perf_counter() - started
        self._queries = self._hits = 0

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.limits.vocab_size

    def generate(self, requests: Sequence[Request], ignore_eos: bool) -> tuple[float, list[RequestOutput]]:
        """Run all requests greedily. Returns the seconds it took, and the outputs in the order of ``requests``."""
        from aiakq.runtime.sampling_params import SamplingParams

        prompts = [
            request.prompt if isinstance(request.prompt, str) else {"prompt_token_ids": request.prompt}
            for request in requests
        ]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=ignore_eos)
            for request in requests
        ]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    def reset_cache_counts(self) -> None:
        """Count the use of the prefix cache from now on."""
        stats = self.llm.engine.stats
        self._queries, self._hits = stats.prefix_queries, stats.prefix_hits

    def cache_use(self) -> dict[str, float | None]:
        """Prompt tokens looked up and found in the prefix cache since ``reset_cache_counts``."""
        stats = self.llm.engine.stats
        queries, hits = stats.prefix_queries - self._queries, stats.prefix_hits - self._hits
        return {"queries": queries, "hits": hits, "hit_rate": workload.hit_rate(queries, hits)}

    def environment(self) -> dict[str, Any]:
        """The environment of the run, with the engine's dtype, kernels and pages under ``engine``."""
        import torch

        found = environment(str(self.llm.config.device.device), torch.get_num_threads())
        return {**found, "engine": dict(self.llm.engine.facts)}
