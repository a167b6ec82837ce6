"""Log-probabilities of a tiny model by aiakq and by transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq import LLM, SamplingParams

VOCABULARY = 320
LENGTHS = (1, 2, 3, 7, 16, 17, 50, 90, 60)
#: Nats; float32 sums in another order.
TOLERANCE = 1e-4
#: Where transformers' own float32 is further than that from its float64, or both together are: the chunked form of the
#: delta rule by 1.5e-4 (ours by 0.8e-4), that of Kimi Linear by 1.2e-4 (ours by 0.6e-4), OLMo-Hybrid by up to 3.4e-4
#: (ours by 0.8e-4), Mamba by 0.4e-4 (ours by 0.6e-4), FalconMamba by 0.5e-4 (ours by 1.2e-4).
RECURRENT = ("Zamba2", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "KimiLinear", "Mamba", "FalconMamba", "Jamba")
TOLERANCES = {f"{name}ForCausalLM": 3e-4 for name in RECURRENT} | {"OlmoHybridForCausalLM": 6e-4}


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def of_transformers(folder: Path, change: Callable[[Any], None] | None = None) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt, after a ``change`` of the model."""
    from transformers import AutoModelForCausalLM

    # Its eager attention adds Falcon's ALiBi twice: to the scores, and in the mask.
    kind = "sdpa" if json.loads((folder / "config.json").read_text()).get("alibi") else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=kind).eval()
    with torch.inference_mode():
        if change is not None:
            change(model)
        return [model(torch.tensor([each]), use_cache=False).logits[0].log_softmax(-1) for each in prompts()]


def ours(folder: Path, **arguments: Any) -> list[Tensor]:
    """Log-probabilities [T, V] of every prompt."""
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=128,
        cpu_math="exact",
        num_gpu_blocks_override=257,
        enable_prefix_caching=False,
        max_logprobs=-1,
        **arguments,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCABULARY, logprobs=VOCABULARY)
    answers = llm.generate([{"prompt_token_ids": each} for each in prompts()], params, use_tqdm=False)
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in each]) for each in rows]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def rewritten(folder: Path, target: Path, values: dict[str, Any]) -> Path:
    """The model with other values in config.json; None removes one."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {name: value for name, value in config.items() if value is not None or name not in values}
    (target / "config.json").write_text(json.dumps(config))
    return target
