"""Measure the parts of a tensor-parallel step on this machine, and estimate from them the speed on more NUMA nodes.

    python examples/scaling.py [--out FILE.json]

Measured: a decoding step of a model with random weights in one process with all threads, and gathers between two
processes in shared memory; the fastest ones, because other programs may use the machine.
Computed: a step on 2, 4 and 8 nodes, each as fast as this machine: the linear layers take 1/N of the time, and five
gathers per layer are added. The estimate leaves out what one machine cannot show: gathers between nodes cross a slower
link, and each node has its memory bandwidth to itself.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: About 1 B parameters.
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq",
    },
}  # fmt: skip
ROWS = (1, 4, 16)
NODES = (2, 4, 8)
ROUNDS = 500


def gather_seconds(widths: list[int]) -> dict[str, float]:
    """Return the seconds of one gather between two processes, by "rows x columns": the 10th percentile of ROUNDS."""
    from aiakq.kernels.cpu.gather import memory_bytes

    memory = os.memfd_create("scaling")
    os.ftruncate(memory, memory_bytes(2))
    jobs = [(rows, columns) for rows in (*ROWS, 512) for columns in widths]
    other = subprocess.Popen(
        [sys.executable, __file__, "--rank", str(memory), json.dumps(jobs)],
        pass_fds=(memory,),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        return dict(zip([f"{rows} x {columns}" for rows, columns in jobs], _gather(memory, 0, jobs), strict=True))
    finally:
        other.wait(60)
        os.close(memory)


def _gather(memory: int, rank: int, jobs: list[tuple[int, int]]) -> list[float]:
    import torch

    from aiakq.kernels.cpu.gather import NativeCollective, memory_bytes

    torch.set_num_threads(1)
    collective = NativeCollective(mmap.mmap(memory, memory_bytes(2)), rank, 2, 60.0)
    found = []
    for rows, columns in jobs:
        x, bounds, times = torch.ones(rows, columns // 2), [0, columns // 2, columns], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            collective.gather(x, bounds)
            times.append(time.perf_counter() - began)
        found.append(statistics.quantiles(times, n=10)[0])
    return found


def step_seconds(config: dict[str, Any]) -> dict[int, float]:
    """Return the seconds of one decoding step of the whole model in this process, by rows: the minimum of five runs."""
    from aiakq import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=max(ROWS))

    def seconds(rows: int, tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": [number + 5, 9]} for number in range(rows)], params, use_tqdm=False)
        return time.perf_counter() - began

    found = {}
    for rows in ROWS:
        seconds(rows, 4)
        found[rows] = min((seconds(rows, 34) - seconds(rows, 2)) / 32 for _ in range(5))
    return found


def main() -> None:
    """Print and write the measurements and estimates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _gather(int(args.rank[0]), 1, json.loads(args.rank[1]))
        return
    D, F, head_dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head_dim, CONFIG["num_key_value_heads"] * head_dim
    of_layer = [queries + 2 * keys, queries, D, 2 * F, D]
    ends = [D, CONFIG["vocab_size"]]
    gathers = gather_seconds(sorted({*of_layer, *ends}))
    steps = step_seconds(CONFIG)
    found: dict[str, Any] = {
        "measured": {
            "gather_us": {name: round(1e6 * seconds, 1) for name, seconds in gathers.items()},
            "step_ms": {rows: round(1e3 * seconds, 2) for rows, seconds in steps.items()},
        },
        "computed": {},
    }
    for rows, step in steps.items():
        meeting = CONFIG["num_hidden_layers"] * sum(gathers[f"{rows} x {columns}"] for columns in of_layer)
        meeting += sum(gathers[f"{rows} x {columns}"] for columns in ends)
        found["computed"][rows] = {
            "gathers_ms": round(1e3 * meeting, 2),
            **{f"speedup_{nodes}": round(step / (step / nodes + meeting), 2) for nodes in NODES},
        }
    print(json.dumps(found, indent=2))
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
