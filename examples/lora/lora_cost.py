"""Measure the cost of LoRA adapters: tokens per second while decoding with 0, 1, 4, 16 and 64 adapters, alternating.

    python examples/lora/lora_cost.py MODEL --rank 16 --batch 16 --rounds 5
    python examples/lora/lora_cost.py --shape w4 --tokens 12

The second one takes the 1.04 B shape of ``make bench-cpu`` with random weights: w4, w8, w8a8, or source for bfloat16.
Adapters are random, on every linear layer of the blocks. With more adapters than ``--batch``, requests of all of them
wait for a place in the batch. Prints one JSON document; ``ratio`` is relative to the tokens per second of an engine
without adapters: the median over rounds of pairs that were measured one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lora_rounds import compare, decoding_speed, sampling
from safetensors.torch import save_file

from aiakq import LLM, LoRARequest, SamplingParams


def write_adapters(folder: Path, modules: dict[str, tuple[int, int]], rank: int, count: int) -> list[LoRARequest]:
    """Random adapters of ``modules``: name -> outputs and inputs."""
    requests = []
    for number in range(count):
        path = folder / str(number)
        path.mkdir()
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (n, k) in modules.items():
            for part, shape in (("lora_A", (rank, k)), ("lora_B", (n, rank))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"base_model.model.{name}.{part}.weight"] = values.to(torch.bfloat16)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
        (path / "adapter_config.json").write_text(json.dumps(config))
        requests.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return requests


def shape_folder(kind: str, folder: Path) -> str:
    """Config and tokenizer of the shape of examples/cpu_peers/shape.py in one of its formats, without weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu_peers"))
    import shape

    made = folder / kind
    made.mkdir()
    shape._write_tokenizer(made)
    spec = shape.SPECS.get(kind)
    quantization = {} if spec is None else {"quantization_config": shape.quantization_config.write(spec)}
    (made / "config.json").write_text(json.dumps(shape.CONFIG | quantization))
    return str(made)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    num_adapters = max(options.adapters)
    resident = max(num_adapters, options.batch)
    arguments: dict[str, Any] = {
        "model": options.model,
        "load_format": options.load_format,
        "max_model_len": 16 + options.tokens,
        "max_num_seqs": options.batch,
        "num_gpu_blocks_override": 2 + options.batch * math.ceil((16 + options.tokens) / 16),
        "enable_prefix_caching": False,
    }
    base = LLM(**arguments)
    lora = LLM(
        **arguments, enable_lora=True, max_loras=options.batch, max_cpu_loras=resident, max_lora_rank=options.rank
    )
    limits = lora.engine.limits.adapters
    assert limits is not None
    modules = {name: shape for name, shape in limits.modules.items() if ".layers." in name}
    requests = write_adapters(folder, modules, options.rank, num_adapters)
    params, warm_up = (SamplingParams(**sampling(tokens)) for tokens in (options.tokens, 2))
    for llm, adapters in ((base, []), (lora, requests)):  # loads every adapter
        decoding_speed(llm, warm_up, adapters, max(options.batch, len(adapters)))
    return {
        "model": options.model,
        "rank": options.rank,
        "batch": options.batch,
        "tokens": options.tokens,
        "threads": torch.get_num_threads(),
        "adapter_bytes": sum(2 * options.rank * (n + k) for n, k in modules.values()),
        "facts": dict(lora.engine.facts),
        **compare(base, lora, params, requests, options.adapters, options.batch, options.rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", choices=("source", "w4", "w8", "w8a8"), help="instead of a model")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights of the model's shape")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--keep", help="a new folder in which adapters and shape are left, for lora_cost_vllm.py")
    options = parser.parse_args()
    if (options.model is None) == (options.shape is None):
        parser.error("give a model, or --shape")
    kept = None if options.keep is None else contextlib.nullcontext(options.keep)
    with kept or tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if options.shape is not None:
            options.model, options.load_format = shape_folder(options.shape, Path(folder)), "dummy"
        print(json.dumps(measure(options, Path(folder)), indent=2))


if __name__ == "__main__":
    main()
