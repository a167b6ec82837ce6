"""The requests that load.py sends, and what each gets alone."""

from __future__ import annotations

import random
from typing import Any

from raw_http import MODEL

from aiakq import LLM, SamplingParams

TEXT = MODEL.parent / "heldout.txt"
#: Different requests; each is sent many times.
VARIANTS = 96


def variants() -> list[dict[str, Any]]:
    """Requests that differ: greedy and seeded, short and long, several choices, stop strings, shared beginnings."""
    draw = random.Random(3)
    words = TEXT.read_text(encoding="utf-8").split()
    shared = " ".join(words[:80])
    found = []
    for index in range(VARIANTS):
        at = draw.randrange(len(words) - 300)
        prompt = " ".join(words[at : at + draw.choice([2, 6, 25, 60])])
        request: dict[str, Any] = {
            "prompt": f"{shared} {prompt}" if index % 4 == 0 else prompt,
            "max_tokens": draw.choice([1, 4, 8, 16, 24]),
        }
        request |= {"temperature": 0.9, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0}
        if index % 5 == 0:
            request["stop"] = [" the", "."]
        if index % 7 == 1:
            request["n"] = 2
        found.append(request)
    return found


def answers_alone(requests: list[dict[str, Any]]) -> list[list[tuple[str, tuple[int, ...], str | None]]]:
    """(text, token ids, finish reason) of every choice of every request, one request at a time, in this process."""
    llm = LLM(
        model=str(MODEL), dtype="float32", max_num_seqs=2, enable_prefix_caching=False, num_gpu_blocks_override=129
    )
    answers = []
    for request in requests:
        params = SamplingParams(**{name: value for name, value in request.items() if name != "prompt"})
        outputs = llm.generate(request["prompt"], params, use_tqdm=False)[0].outputs
        answers.append([(one.text, tuple(one.token_ids), one.finish_reason) for one in outputs])
    return answers
