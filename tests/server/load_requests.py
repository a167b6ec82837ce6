"""The requests that load_generator.py sends, and their expected outputs."""

from __future__ import annotations

import random
from typing import Any

from raw_http import MODEL

from aiakq import LLM, SamplingParams

TEXT = MODEL.parent / "heldout.txt"
#: Number of different requests; each is sent many times.
NUM_REQUESTS = 96


def requests() -> list[dict[str, Any]]:
    """Return different requests: greedy and seeded, short and long, n > 1, stop strings, shared prefixes."""
    rng = random.Random(3)
    words = TEXT.read_text(encoding="utf-8").split()
    shared = " ".join(words[:80])
    found = []
    for index in range(NUM_REQUESTS):
        at = rng.randrange(len(words) - 300)
        prompt = " ".join(words[at : at + rng.choice([2, 6, 25, 60])])
        request: dict[str, Any] = {
            "prompt": f"{shared} {prompt}" if index % 4 == 0 else prompt,
            "max_tokens": rng.choice([1, 4, 8, 16, 24]),
        }
        request |= {"temperature": 0.9, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0}
        if index % 5 == 0:
            request["stop"] = [" the", "."]
        if index % 7 == 1:
            request["n"] = 2
        found.append(request)
    return found


def expected_outputs(requests: list[dict[str, Any]]) -> list[list[tuple[str, tuple[int, ...], str | None]]]:
    """Return (text, token ids, finish reason) of every choice, of every request run alone in this process."""
    llm = LLM(
        model=str(MODEL), dtype="float32", max_num_seqs=2, enable_prefix_caching=False, num_gpu_blocks_override=129
    )
    expected = []
    for request in requests:
        params = SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})
        outputs = llm.generate(request["prompt"], params, use_tqdm=False)[0].outputs
        expected.append([(one.text, tuple(one.token_ids), one.finish_reason) for one in outputs])
    return expected
