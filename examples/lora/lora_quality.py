"""Measure the quality of an adapter on a quantized base model: trained here with PEFT, then served in three ways.

    python examples/lora/lora_quality.py --steps 200

1. the model in 16 bits and the adapter; 2. the model in 4 bits, by gptq and by awq, and the adapter; 3. the adapter
merged into the model, which is then quantized to 4 bits. Perplexity on the second half of a held-out book, on whose
first half the adapter was trained, and KL divergence from the merged model in 16 bits. Needs ``pip install peft``.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from aiakq import LLM, LoRARequest, SamplingParams

HERE = Path(__file__).resolve().parents[1]
WINDOW = 256


def windows(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[W, WINDOW] token ids of the first and of the second half of the held-out text."""
    from transformers import AutoTokenizer

    text = (HERE / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(path)(text)["input_ids"])
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[: len(whole) // 2], whole[len(whole) // 2 :]


def train(path: str, tokens: torch.Tensor, options: argparse.Namespace, to: Path) -> None:
    """Train an adapter, and save it and the merged model in bfloat16."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    wrapped: Any = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=options.rate)
    for step in range(options.steps):
        batch = tokens[torch.randint(len(tokens), (4,))]
        loss = wrapped(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    wrapped.save_pretrained(to / "adapter")
    merged = wrapped.merge_and_unload().to(torch.bfloat16)
    merged.save_pretrained(to / "merged")
    AutoTokenizer.from_pretrained(path).save_pretrained(to / "merged")


def quantize(source: str, to: Path, method: str) -> str:
    """Quantize a model to 4 bits."""
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    quantize_checkpoint(QuantizeOptions(input=source, output=str(to), method=method, evaluate=False))
    return str(to)


def log_probabilities(path: str, tokens: torch.Tensor, adapter: Path | None) -> torch.Tensor:
    """[W, WINDOW - 1, V] of every token after the first."""
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 256} if adapter is not None else {}
    llm = LLM(path, max_model_len=WINDOW + 1, max_logprobs=-1, num_gpu_blocks_override=200, **lora)
    vocabulary = llm.engine.limits.vocab_size
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=vocabulary)
    request = None if adapter is None else LoRARequest("trained", 1, str(adapter))
    found = []
    for window in tokens.tolist():
        (answer,) = llm.generate({"prompt_token_ids": window}, params, use_tqdm=False, lora_request=request)
        rows = [[row[token].logprob for token in range(vocabulary)] for row in answer.prompt_logprobs[1:]]
        found.append(torch.tensor(rows))
    return torch.stack(found)


def perplexity(scores: torch.Tensor, tokens: torch.Tensor) -> float:
    """exp of the mean of -log p; scores [W, T - 1, V], tokens [W, T]."""
    return float(torch.exp(-scores.gather(2, tokens[:, 1:, None]).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=str(HERE / "tinybooks"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, default=32)
    options = parser.parse_args()
    learned, tested = windows(options.model)
    tested = tested[: options.windows]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(options.model, learned, options, folder)
        adapter, merged = folder / "adapter", str(folder / "merged")
        ways: dict[str, tuple[str, Path | None]] = {
            "16 bits": (options.model, None),
            "16 bits, merged": (merged, None),
            "16 bits + adapter": (options.model, adapter),
        }
        for method in ("gptq", "awq"):
            small = quantize(options.model, folder / method, method)
            ways[method] = small, None
            ways[f"{method} + adapter"] = small, adapter
            ways[f"merged, then {method}"] = quantize(merged, folder / f"merged-{method}", method), None
        scores = {way: log_probabilities(path, tested, used) for way, (path, used) in ways.items()}
    reference = scores["16 bits, merged"]
    rows = {
        way: {
            "perplexity": perplexity(found, tested),
            "kl": float(F.kl_div(found, reference, log_target=True, reduction="sum") / found[..., 0].numel()),
        }
        for way, found in scores.items()
    }
    print(json.dumps({"steps": options.steps, "rank": options.rank, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
