"""Compare suffix decoding with n-gram lookup on requests that resemble earlier ones.

    python examples/suffix_decoding.py MODEL [--requests 8] [--rounds 3] [--tokens 160] [--temperature 0 0.4]

Passages of the held-out text are continued one after the other, in several rounds with different seeds, as agents or
self-consistency do. N-gram lookup uses the request alone, suffix decoding also the outputs of earlier rounds. The
script asserts that the outputs are equal.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from aiakq import LLM, SamplingParams

TEXT = Path(__file__).resolve().parent / "heldout.txt"
METHODS = ("none", "ngram", "suffix")


def measure(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[dict[str, float], list[list[int]]]:
    """Run requests one after the other; return tokens per second and per step, acceptance, and the outputs."""
    before, started = llm.engine.stats, time.perf_counter()
    outputs = [
        list(llm.generate(prompt, one, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    seconds, after = time.perf_counter() - started, llm.engine.stats
    tokens = sum(map(len, outputs))
    found = {
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / (after.steps - before.steps),
        "draft_tokens": after.drafts.drafts - before.drafts.drafts,
        "accepted": after.drafts.accepted - before.drafts.accepted,
    }
    return found, outputs


def main() -> None:
    """Run the command line; print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.4])
    parser.add_argument("--drafts", type=int, default=7, help="draft tokens in a step, at most")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    words, chosen = TEXT.read_text().split(), random.Random(5)
    starts = [chosen.randrange(len(words) - 100) for _ in range(given.requests)]
    prompts = [" ".join(words[start : start + 60]) for start in starts]
    rows: list[dict[str, Any]] = []
    for temperature in given.temperature:
        expected: list[list[list[int]]] = []
        for method in METHODS:
            config = None if method == "none" else {"method": method, "num_speculative_tokens": given.drafts}
            llm = LLM(given.model, dtype=given.dtype, speculative_config=config)
            llm.generate(prompts[0], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
            for number in range(given.rounds):
                params = [
                    SamplingParams(
                        temperature=temperature, seed=1000 * number + at, max_tokens=given.tokens, ignore_eos=True
                    )
                    for at in range(given.requests)
                ]
                found, outputs = measure(llm, prompts, params)
                if method == "none":
                    expected.append(outputs)
                assert outputs == expected[number], "draft tokens changed the output"
                rows.append({"temperature": temperature, "method": method, "round": number + 1, **found})
    print(json.dumps({"model": given.model, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
