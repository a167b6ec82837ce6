"""LongRoPE: texts within the original context have other rotary factors than longer ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError

ORIGINAL = 48
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + index / 16 for index in range(16)],
    "long_factor": [2.0 + index for index in range(16)],
}
PROMPT = [3 + 7 * index % 300 for index in range(40)]
SHORT, LONG = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (8, 9))


def loaded(tiny_model: Any, **arguments: Any) -> LLM:
    folder: Path = tiny_model("Phi3ForCausalLM", original_max_position_embeddings=ORIGINAL, rope_parameters=ROPE)
    return LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=33, **arguments)


def answer(llm: LLM, *params: SamplingParams) -> list[tuple[list[int], int]]:
    """Tokens of the prompt with each of ``params``, in one batch, and how many tokens of it were cached."""
    prompts = [{"prompt_token_ids": PROMPT} for _ in params]
    outputs = llm.generate(prompts, list(params), use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]


def test_short_and_long_texts_have_their_own_factors_and_pages(tiny_model: Any) -> None:
    llm = loaded(tiny_model)
    [(short, _)], [(long, cached)] = answer(llm, SHORT), answer(llm, LONG)
    assert cached == 0 and long[:8] != short
    assert answer(llm, SHORT, LONG) == [(short, 32), (long, 32)]
    # Each is what it is alone, also operation by operation, and with drafts.
    assert answer(loaded(tiny_model, enforce_eager=True), LONG, SHORT) == [(long, 0), (short, 0)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    both = answer(loaded(tiny_model, speculative_config=drafts, max_num_batched_tokens=16), SHORT, LONG)
    assert [tokens for tokens, _ in both] == [short, long]


def test_within_the_original_context_all_texts_are_short(tiny_model: Any) -> None:
    llm = loaded(tiny_model)
    folder = tiny_model("Phi3ForCausalLM", original_max_position_embeddings=ORIGINAL, rope_parameters=ROPE)
    limited = LLM(str(folder), dtype="float32", max_model_len=ORIGINAL, num_gpu_blocks_override=33)
    assert answer(limited, SHORT) == answer(llm, SHORT)


def test_transformers_class_is_refused_beyond_it(tiny_model: Any) -> None:
    with pytest.raises(AiakqError, match=f"depend on the longest text of a batch .*--max-model-len {ORIGINAL}"):
        loaded(tiny_model, model_impl="transformers")
