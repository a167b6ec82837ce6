"""Quantize a model of random weights in the shape of a 7B Llama by every method, and write how much memory it took.

Run by ``make large``. The weights are made shard by shard, so that the model itself is never in memory either. Few
calibration tokens: the peak does not depend on them (hidden states beyond --activation-memory go to disk). A run that
was stopped goes on at the last finished layer when started again; seconds and peaks of its parts are put together.
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
    """Write the random model, a shard per layer, unless it is there."""
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
        part = {"layers": LAYERS, "seconds": 0, "peak_memory_bytes": 0} | results.get(method, {})
        report = watched(words, part, lambda part, method=method: keep(results | {method: part}))
        sizes = {"bytes_before": report["bytes_before"], "bytes_after": report["bytes_after"]}
        results[method] = part | sizes
        keep(results)
        print(method, results[method], file=sys.stderr)
        shutil.rmtree(OUT / method)


def keep(results: dict) -> None:
    (OUT / "large.json").write_text(json.dumps(results, indent=1) + "\n")


def watched(words: list[str], part: dict, tell: Callable[[dict], None]) -> dict:
    """Run a command and return the JSON it prints; its seconds and peak memory (bytes) go into ``part`` as it runs."""
    before, began = part["seconds"], time.monotonic()
    # Into a file: a pipe that nobody reads meanwhile holds less than a report.
    with tempfile.TemporaryFile() as said, subprocess.Popen(words, stdout=said) as child:
        status = Path(f"/proc/{child.pid}/status")
        while child.poll() is None:
            peak = [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            part["peak_memory_bytes"] = max(part["peak_memory_bytes"], *peak, 0)
            part["seconds"] = before + round(time.monotonic() - began)
            tell(part)
            time.sleep(2)
        if child.returncode:
            raise SystemExit(child.returncode)
        said.seek(0)
        report = json.load(said)
    part["peak_memory_bytes"] = max(part["peak_memory_bytes"], report["peak_memory_bytes"])
    return report


if __name__ == "__main__":
    main()
