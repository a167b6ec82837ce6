"""Greedy fp32 tokens: however requests are batched, cut and interrupted, they are those of transformers.generate.

Every record between engine and executor is encoded and decoded, as if the model were in another process.
"""

from __future__ import annotations

import random

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.runtime.models import ARCHITECTURES

NUM_PROMPTS = 32
NEW_TOKENS = 16
#: One for each way of computing: positions, windows, chunks, caps, sinks, latents, an index, states, experts, parallel
#: blocks, fallback. Other families differ only within the model, and run in FEW_MODES.
EVERY_MODE = {
    "LlamaForCausalLM", "MistralForCausalLM", "OPTForCausalLM", "Gemma3ForCausalLM", "Gemma2ForCausalLM",
    "GptOssForCausalLM", "Llama4ForCausalLM", "Qwen2MoeForCausalLM", "CohereForCausalLM", "BloomForCausalLM",
    "DeepseekV3ForCausalLM", "Lfm2ForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM", "GPTNeoXForCausalLM",
    "GlmMoeDsaForCausalLM",
}  # fmt: skip
FEW_MODES = ("preempted", "odd_pages")


def _prompts(vocab_size: int) -> list[list[int]]:
    """Lengths 1 to 90; a quarter of the prompts share a prefix."""
    draw = random.Random(7)
    shared = [draw.randrange(3, vocab_size) for _ in range(40)]
    prompts = []
    for index in range(NUM_PROMPTS):
        own = [draw.randrange(3, vocab_size) for _ in range(draw.choice([1, 2, 3, 7, 16, 17, 50]))]
        prompts.append(shared + own if index % 4 == 0 else own)
    return prompts


def _transformers_tokens(folder, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of every prompt; prompts of one length are one batch, and no position is computed twice."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[number] for number in numbers])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2
        )
        answers |= zip(numbers, _until_end(out[:, length:].tolist(), model.generation_config.eos_token_id), strict=True)
    return [answers[number] for number in range(len(prompts))]


def _until_end(rows: list[list[int]], end: int | list[int] | None) -> list[list[int]]:
    """Return the rows without padding after their end token, as generate returns a single row."""
    ends = {end} if isinstance(end, int) else set(end or ())
    return [row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))] for row in rows]


def _ours(change, folder, prompts: list[list[int]], **arguments) -> tuple[list[list[int]], LLM]:
    llm = change(LLM(str(folder), **{"dtype": "float32", "max_model_len": 128, **arguments}))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [result.outputs[0].token_ids for result in results], llm


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "GPTNeoXForCausalLM"])
def test_greedy_tokens_match_transformers(architecture, tiny_model, engine_modes, behind_bytes, rank_arguments):
    if rank_arguments and architecture not in ARCHITECTURES:
        pytest.skip("models that run through transformers are not distributed")
    folder = tiny_model(architecture)
    prompts = _prompts(320)
    expected = _transformers_tokens(folder, prompts)
    for mode, given in engine_modes.items():
        if mode not in FEW_MODES and architecture not in EVERY_MODE:
            continue
        if given.get("async_scheduling") and "pipeline_parallel_size" in rank_arguments:
            continue
        # The pages of recurrent layers are larger by default, and these prompts would not fill one.
        arguments = {"block_size": 16, **given, **rank_arguments}
        tokens, llm = _ours(behind_bytes, folder, prompts, **arguments)
        assert tokens == expected, mode
        llm.engine.check()
        assert llm.engine.stats.num_free_pages == llm.engine.stats.num_pages, mode
        if mode == "preempted":
            assert llm.engine.stats.preemptions > 0
        if mode == "preempted" and architecture in EVERY_MODE:
            as_objects, _ = _ours(lambda llm: llm, folder, prompts, **arguments)
            assert as_objects == expected, "records that are not encoded"
        if mode in ("batched", "odd_pages"):
            before = llm.engine.stats.prefix_hits
            params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
            again = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            assert [result.outputs[0].token_ids for result in again] == expected, f"{mode}, prefixes cached"
            assert llm.engine.stats.prefix_hits > before


def test_example_model_matches_transformers(example_model, heldout_text, engine_modes, behind_bytes, rank_arguments):
    from aiakq.runtime.text.tokenizer import Tokenizer

    words = heldout_text.split()
    tokenizer = Tokenizer.load(example_model)
    prompts = [tokenizer.encode(" ".join(words[at * 50 : at * 50 + 5 + at])) for at in range(NUM_PROMPTS)]
    expected = _transformers_tokens(example_model, prompts)
    for mode in ("batched", "one_at_a_time", "chunked", "preempted"):
        tokens, _ = _ours(behind_bytes, example_model, prompts, **engine_modes[mode], **rank_arguments)
        assert tokens == expected, mode


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_equal_bit_for_bit_whatever_the_batch(
    example_model, heldout_text, dtype, behind_bytes, rank_arguments
):
    """Stronger than equal tokens: the log-probabilities of a request do not change in the last bit."""
    llm = behind_bytes(LLM(str(example_model), dtype=dtype, enable_prefix_caching=False, **rank_arguments))
    words = heldout_text.split()
    prompts = [" ".join(words[at * 90 : at * 90 + 3 + 7 * at]) for at in range(9)]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, crowded in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == crowded.outputs[0].token_ids
        assert alone.outputs[0].logprobs == crowded.outputs[0].logprobs
