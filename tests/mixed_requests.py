"""Requests with every sampling parameter, and their complete outputs."""

from __future__ import annotations

import random
from dataclasses import replace

from aiakq import LLM, SamplingParams


def ban_last(outputs, logits):
    """A logits processor that looks at the last token."""
    if outputs:
        logits[outputs[-1]] = float("-inf")
    return logits


#: Tokens of the letters a to h of the tiny models: with few tokens, words and stop strings come up.
LETTERS = list(range(67, 75))
#: Sampling parameters, most of which depend on previous tokens.
WISHES = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 3, "logprobs": 1, "logprob_token_ids": [5, 70, 319]},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "n": 3},
    {"temperature": 1.2, "seed": 5, "top_k": 9, "min_p": 0.01, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {
        "temperature": 1.0,
        "seed": 7,
        "presence_penalty": 0.5,
        "stop_token_ids": list(range(0, 320, 3)),
        "min_tokens": 6,
        "max_tokens": 12,
    },
    {"temperature": 1.0, "seed": 8, "stop_token_ids": list(range(0, 320, 4))},
    {"temperature": 0, "logits_processors": [ban_last]},
    {"temperature": 0, "max_tokens": None, "repetition_detection": {"max_pattern_size": 3, "min_count": 30}},
    {"temperature": 0, "logit_bias": {5: 4.0, 40: 3.0, 41: -100.0}, "frequency_penalty": 1.5, "max_tokens": 12},
    {
        "temperature": 1.1,
        "seed": 9,
        "n": 2,
        "best_of": 3,
        "logit_bias": {70: 1.5},
        "logprobs": 1,
        "prompt_logprobs": 1,
        "allowed_token_ids": list(range(20, 120)),
        "ignore_eos": True,
        "max_tokens": 11,
    },
    {
        "temperature": 1.0,
        "seed": 10,
        "bad_words": ["a", "bc", "hgf"],
        "allowed_token_ids": LETTERS,
        "logprobs": 3,
        "max_tokens": 14,
    },
    {
        "temperature": 1.0,
        "seed": 11,
        "n": 2,
        "stop": ["ccf", "gdd", "hgf"],
        "include_stop_str_in_output": True,
        "allowed_token_ids": LETTERS,
        "min_tokens": 3,
        "logprobs": 0,
        "max_tokens": 30,
    },
    {"temperature": 0.9, "seed": 13, "stop": ["dd", "b"], "allowed_token_ids": LETTERS, "max_tokens": 30},
    {
        "temperature": 1.0,
        "seed": 12,
        "structured_outputs": {"regex": "([a-e]{2}x)+[a-e]{3}"},
        "logprobs": 1,
        "max_tokens": 24,
    },
]
#: The first ones are used twice, with other lengths and prompts.
NUM_REQUESTS = 28


def requests(vocab_size: int) -> tuple[list[dict], list[SamplingParams], list[int]]:
    draw = random.Random(5)
    shared = [draw.randrange(3, vocab_size) for _ in range(37)]
    prompts = []
    for index in range(NUM_REQUESTS):
        own = [draw.randrange(3, vocab_size) for _ in range(draw.choice([1, 2, 7, 16, 17, 50]))]
        prompts.append({"prompt_token_ids": shared + own if index % 3 == 0 else own})
    params = [SamplingParams(**({"max_tokens": 1 + n % 14} | WISHES[n % len(WISHES)])) for n in range(NUM_REQUESTS)]
    return prompts, params, [draw.randrange(3) for _ in prompts]


def answers(llm: LLM, functions: bool = True) -> list:
    """Return the outputs of every request, without the numbers of preemptions and cached tokens.

    functions  whether to use logits processors.
    """
    prompts, params, priorities = requests(320)
    if not functions:
        params = [replace(one, logits_processors=None) for one in params]
    results = llm.generate(
        prompts, params, use_tqdm=False, priority=priorities if llm.engine.limits.by_priority else None
    )
    llm.engine.check()
    assert llm.engine.stats.num_free_pages == llm.engine.stats.num_pages
    assert not llm.engine.has_work()
    return [(result.outputs, result.prompt_logprobs, result.error) for result in results]
