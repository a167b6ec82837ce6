"""Quantize a 7B Llama with random weights by every method, and write the peak memory.

Run by ``make large``. The weights are generated shard by shard, so that the whole model is never in memory. Calibration
is short, because the peak does not depend on it (hidden states beyond --activation-memory go to disk). An interrupted
run continues after the last finished layer; the times of its parts are added, the largest peak counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "out/large"))
LAYERS = int(os.environ.get("LAYERS", "32"))
METHODS = os.environ.get("METHODS", "weight_only_int8 smooth_quant awq gptq").split()
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make_model(folder: Path) -> None:
    """Write the random model, one shard per layer, unless it exists."""
    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    where: dict[str, str] = {}

    def shard(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}self_attn.{name}_proj.weight": random(hidden, hidden) for name in "qkvo"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": random(inner, hidden) for name in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = random(hidden, inner)
        tensors |= {f"{prefix}{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
        shard(f"layer-{layer:02d}.safetensors", tensors)
    shard("embedding.safetensors", {"model.embed_tokens.weight": random(vocab, hidden), "model.norm.weight": ones})
    shard("head.safetensors", {"lm_head.weight": random(vocab, hidden)})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def main() -> None:
    os.chdir(ROOT)
    source = OUT / "source"
    make_model(source)
    ids = OUT / "ids.txt"
    rows = torch.randint(0, CONFIG["vocab_size"], (4, 64), generator=torch.Generator().manual_seed(1)).tolist()
    ids.write_text("\n".join(" ".join(map(str, row)) for row in rows))
    results = json.loads((OUT / "large.json").read_text()) if (OUT / "large.json").exists() else {}
    for method in METHODS:
        if results.get(method, {}).get("bytes_after"):
            continue  # measured by an earlier run
        words = [str(Path(sys.executable).with_name("aiakq")), "quantize", "-i", str(source), "-o", str(OUT / method)]
        words += ["-quant_type", method, "-t", "bf16", "-token", str(ids), "--seqlen", "64"]
        words += ["--activation-memory", "0.5", "--no-eval", "--resume", "--json"]
        usage = {"layers": LAYERS, "seconds": 0, "peak_memory_bytes": 0} | results.get(method, {})
        report = run_measured(words, usage, lambda usage, method=method: save_results(results | {method: usage}))
        sizes = {"bytes_before": report["bytes_before"], "bytes_after": report["bytes_after"]}
        results[method] = usage | sizes
        save_results(results)
        print(method, results[method], file=sys.stderr)
        shutil.rmtree(OUT / method)


def save_results(results: dict) -> None:
    (OUT / "large.json").write_text(json.dumps(results, indent=1) + "\n")


def run_measured(words: list[str], usage: dict, on_update: Callable[[dict], None]) -> dict:
    """Run a command and return the JSON it prints; its seconds and peak memory (bytes) go into ``usage`` as it runs."""
    before, began = usage["seconds"], time.monotonic()
    # Into a file: an unread pipe buffers less than a report.
    with tempfile.TemporaryFile() as stdout, subprocess.Popen(words, stdout=stdout) as child:
        status = Path(f"/proc/{child.pid}/status")
        while child.poll() is None:
            peak = [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            usage["peak_memory_bytes"] = max(usage["peak_memory_bytes"], *peak, 0)
            usage["seconds"] = before + round(time.monotonic() - began)
            on_update(usage)
            time.sleep(2)
        if child.returncode:
            raise SystemExit(child.returncode)
        stdout.seek(0)
        report = json.load(stdout)
    usage["peak_memory_bytes"] = max(usage["peak_memory_bytes"], report["peak_memory_bytes"])
    return report


if __name__ == "__main__":
    main()
