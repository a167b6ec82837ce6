"""Tiny random models of many architectures: each is computed exactly, or refused in one sentence.

A share runs always; all of it with ``AIAKQ_EVERY_ARCHITECTURE=1 pytest tests/runtime/models/test_matrix.py``.
``make models`` writes what it finds to docs/models.md.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES, SIZES, VOCABULARY
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.hf.mimo import register_mimo
from aiakq.runtime.models import ARCHITECTURES
from aiakq.runtime.models.decoder import Decoder

LENGTHS = (1, 2, 3, 7, 16, 17, 50, 90, 60)
#: Nats; float32 sums in another order.
TOLERANCE = 1e-4
#: Run always: one natively computed, one through transformers, one refused.
SHARE = ("gemma2", "apertus", "rwkv")


@dataclass(frozen=True)
class Outcome:
    """The results of one architecture.

    runs        native, transformers, or refused.
    reason      why it is refused.
    difference  the largest one between log-probabilities of ours and of transformers, in nats.
    same        whether the same tokens follow when prefixes are cached and sequences are preempted.
    same_bits   whether log-probabilities do not change in the last bit then.
    page_bytes  of 16 tokens in a cache of 16 bits, with the states of recurrent layers at their end.
    """

    runs: str
    reason: str = ""
    difference: float = 0.0
    same: bool = True
    same_bits: bool = True
    page_bytes: int = 0

    @property
    def exact(self) -> bool:
        return self.runs != "refused" and self.difference < TOLERANCE and self.same


def prompts() -> list[list[int]]:
    """Random tokens; half of the longer prompts begin alike."""
    draw = random.Random(7)
    made = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [[*made[7][: len(each) - 5], *each[-5:]] if len(each) in (50, 60) else each for each in made]


def save(name: str, folder: Path, tokenizer: Any) -> None:
    """A random model of the case ``name`` with its tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    register_mimo()
    kind, config = CASES[name]
    keys = {key: value for key, value in {**SIZES, **config}.items() if value is not ...}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**keys), dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2 or (parameter.dim() > 2 and "conv" not in path):
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
            elif path.endswith("bias") and "dt_" not in path:
                parameter.normal_(0.0, 0.1)
            elif "norm" in path or "ln_" in path or path.endswith("correct_output_scale"):
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def of_transformers(folder: Path) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    from transformers import AutoModelForCausalLM

    # Its eager attention adds Falcon's ALiBi twice: to the scores, and in the mask.
    kind = "sdpa" if json.loads((folder / "config.json").read_text()).get("alibi") else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
    with torch.inference_mode():
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]


def load(folder: Path, **arguments: Any) -> LLM:
    """The model with exact arithmetic."""
    fixed = {"dtype": "float32", "max_model_len": 128, "cpu_math": "exact", "max_logprobs": -1}
    return LLM(str(folder), **{**fixed, "num_gpu_blocks_override": 257, "enable_prefix_caching": False, **arguments})


def log_probabilities(llm: LLM) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in each]) for each in rows]


def continued(llm: LLM) -> tuple[list[Any], list[Any]]:
    """Tokens that follow every prompt, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [output.token_ids for output in outputs], [output.logprobs for output in outputs]


def examine(folder: Path) -> Outcome:
    """Compare the model in ``folder`` with transformers and with itself."""
    expected = of_transformers(folder)
    try:
        llm = load(folder)
    except AiakqError as problem:
        return Outcome("refused", reason=problem.message)
    model = llm.engine.executor.runner.model
    found = [log_probabilities(llm), log_probabilities(load(folder, max_num_batched_tokens=16, max_num_seqs=8))]
    alone = continued(llm)
    crowded = load(folder, enable_prefix_caching=True, num_gpu_blocks_override=40, block_size=4)
    again = [continued(crowded) for _ in range(2)]
    assert crowded.engine.stats.preemptions and crowded.engine.stats.prefix_hits
    return Outcome(
        "native" if isinstance(model, Decoder) else "transformers",
        difference=max(float((a - b).abs().max()) for mode in found for a, b in zip(mode, expected, strict=True)),
        same=all(tokens == alone[0] for tokens, _ in again),
        same_bits=all(logprobs == alone[1] for _, logprobs in again),
        page_bytes=16 * model.kv_bytes_per_token(torch.float16) + model.state_bytes(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES if os.environ.get("AIAKQ_EVERY_ARCHITECTURE") else SHARE)
def test_it_is_exact_or_refused_in_one_sentence(name: str, byte_tokenizer: Any, tmp_path: Path) -> None:
    save(name, tmp_path, byte_tokenizer)
    outcome = examine(tmp_path)
    assert outcome.exact or outcome.runs == "refused", outcome
    assert "\n" not in outcome.reason and len(outcome.reason) < 400
    if json.loads((tmp_path / "config.json").read_text())["architectures"][0] in ARCHITECTURES:
        assert outcome.runs != "transformers"
