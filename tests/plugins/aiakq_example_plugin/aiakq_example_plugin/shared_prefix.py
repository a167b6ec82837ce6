"""A bench workload. Prompts whose first half is the same, like requests with one system prompt."""

from __future__ import annotations

from aiakq.bench.workload import NUM_PROMPTS, Workload, WorkloadRequest, known_size, random_requests


class SharedPrefix(Workload):
    """Random prompts of --input-len token ids, half of them shared by all."""

    fresh_prompts = False  # hits in the prefix cache are the point

    def requests(self, vocab_size: int | None) -> list[WorkloadRequest]:
        """See Workload."""
        count = NUM_PROMPTS if self.options.num_prompts is None else self.options.num_prompts
        shared = self.options.input_len // 2
        size = known_size(vocab_size)
        (prefix,) = random_requests(1, shared, 1, size, self.rng)
        rest = random_requests(count, self.options.input_len - shared, self.options.output_len, size, self.rng)
        return [WorkloadRequest([*prefix.prompt, *request.prompt], request.output_len) for request in rest]
