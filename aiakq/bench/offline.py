"""The in-process engine that ``bench latency`` and ``bench throughput`` measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiakq.bench import workload
from aiakq.bench.drafts import draft_metrics, order
from aiakq.bench.workload import WorkloadRequest
from aiakq.errors import error
from aiakq.records import environment
from aiakq.runtime.engine.loop import timed_step
from aiakq.runtime.protocol.command import EnableDrafts
from aiakq.runtime.protocol.output import EngineStats

if TYPE_CHECKING:
    from aiakq.runtime.llm import LLM
    from aiakq.runtime.protocol.request_output import RequestOutput

#: Progress callback: stage, completed steps, total steps.
Progress = Callable[[str, int, int], None]


class MeasuredEngine:
    """An ``LLM`` with timed loading, whose counters are reported relative to ``reset_counts``.

    arguments  keyword arguments of ``LLM``, including ``model``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from aiakq.runtime.llm import LLM

        started = time.perf_counter()
        self.llm: LLM = LLM(**arguments)
        self.load_s = time.perf_counter() - started
        self._queries = self._hits = 0
        self._before = self.llm.engine.stats
        self._skipped_tokens = self._skipped_steps = 0

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.limits.vocab_size

    def check_speculates(self) -> None:
        """Raise ``usage`` if speculative decoding is not enabled, for --compare-speculation."""
        if self.llm.engine.scheduler.config.speculation is None:
            hint = "Example: --speculative-model '[ngram]' --compare-speculation"
            raise error("usage", reason="--compare-speculation needs speculative decoding.", hint=hint)

    def compare_drafts(
        self, requests: Sequence[WorkloadRequest], ignore_eos: bool, number: int
    ) -> tuple[float, list[RequestOutput], float]:
        """Run all requests with draft tokens and without, in the order of round ``number``, each time without anything
        that is known of earlier requests. Returns what ``generate`` returns with draft tokens, and the seconds without.
        """
        for with_drafts in order(number):
            self.llm.reset_prefix_cache()
            before = self.llm.engine.stats
            timed_step(self.llm.engine, [EnableDrafts(with_drafts)])
            if with_drafts:
                seconds, outputs = self.generate(requests, ignore_eos)
            else:
                without, _ = self.generate(requests, ignore_eos)
                self._exclude(before)
        timed_step(self.llm.engine, [EnableDrafts(True)])
        self.llm.reset_prefix_cache()
        return seconds, outputs, without

    def _exclude(self, before: EngineStats) -> None:
        """Exclude what happened since ``before`` from the counters."""
        stats = self.llm.engine.stats
        self._queries += stats.prefix_queries - before.prefix_queries
        self._hits += stats.prefix_hits - before.prefix_hits
        self._skipped_tokens += stats.generation_tokens - before.generation_tokens
        self._skipped_steps += stats.steps - before.steps

    def draft_use(self) -> dict[str, object]:
        """Return the metrics of draft tokens since ``reset_counts``; see ``draft_metrics``."""
        stats, before = self.llm.engine.stats, self._before
        now, old = stats.drafts, before.drafts
        by_position = [
            count - (old.by_position[at] if at < len(old.by_position) else 0)
            for at, count in enumerate(now.by_position)
        ]
        return draft_metrics(
            now.steps - old.steps,
            now.drafts - old.drafts,
            now.accepted - old.accepted,
            by_position,
            stats.generation_tokens - before.generation_tokens - self._skipped_tokens,
            stats.steps - before.steps - self._skipped_steps,
        )

    def generate(self, requests: Sequence[WorkloadRequest], ignore_eos: bool) -> tuple[float, list[RequestOutput]]:
        """Run all requests greedily. Returns the elapsed seconds, and the outputs in the order of ``requests``."""
        from aiakq.runtime.offline_prompts import Prompt
        from aiakq.runtime.protocol.sampling_params import SamplingParams

        prompts: list[Prompt] = [
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

    def reset_counts(self) -> None:
        """Reset the counters of the prefix cache and draft tokens."""
        self._before = stats = self.llm.engine.stats
        self._skipped_tokens = self._skipped_steps = 0
        self._queries, self._hits = stats.prefix_queries, stats.prefix_hits

    def cache_use(self) -> dict[str, float | None]:
        """Return the numbers of prompt tokens looked up and found in the prefix cache since ``reset_counts``."""
        stats = self.llm.engine.stats
        queries, hits = stats.prefix_queries - self._queries, stats.prefix_hits - self._hits
        return {"queries": queries, "hits": hits, "hit_rate": workload.hit_rate(queries, hits)}

    def environment(self) -> dict[str, object]:
        """Return the environment of the run, with the engine's dtype, kernels and pages under ``engine``."""
        import torch

        found = environment(str(self.llm.config.device.device), torch.get_num_threads())
        return {**found, "engine": dict(self.llm.engine.facts)}
