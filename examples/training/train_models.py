"""Train the small models that ``make quality`` measures on, besides the example model.

    python examples/training/train_models.py [--out FOLDER] [--text FILE...] [--only NAME...]
        [--device cuda] [--longer N]

qwen2      another architecture: Qwen2 with biases, 6 query heads on 1 key-value head and an untied output layer
outliers   massive activations and outlier channels, as in large models; trained after they were planted
moe        a mixture of experts: Qwen3-MoE with 8 experts, 2 active
chat       tuned on dialogues in the chat template

Without --text they are trained on the text bundled for calibration, which is a part of the books of the example model;
with all of these books they are better. Each takes one to five minutes of one core. An interrupted run continues, and
finished models are kept. Weights depend on seed, text, version of torch, device and processor; the run always takes one
thread. --device cuda makes long runs (--longer) a matter of minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "training")]

import torch  # noqa: E402
from dialogues import dialogues  # noqa: E402
from model_shapes import RECIPES, Recipe  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from training_loop import perplexity, train, unigram_perplexity  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402

EXAMPLE, HELDOUT = ROOT / "examples" / "tinybooks", ROOT / "examples" / "heldout.txt"
BUNDLED = ROOT / "aiakq" / "data" / "calibration.txt"
OUT = Path(os.environ.get("MODELS", ROOT / "out" / "models"))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
#: Windows of the held-out book, and tokens in each.
WINDOWS, LENGTH = 32, 512
#: Written last into the folder of a model: how it was made, and its perplexity.
RECORD = "training.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the models (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", default=[BUNDLED], help="files of text to train on")
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--longer", type=int, default=1, help="times as many steps as in the recipe")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        recipe = RECIPES[name]
        schedule = replace(recipe.schedule, steps=recipe.schedule.steps * args.longer)
        record = train_model(name, replace(recipe, schedule=schedule), args.text, args.out, torch.device(args.device))
        print(json.dumps({"model": name, **record}))


def train_model(name: str, recipe: Recipe, texts: list[Path], out: Path, device: torch.device) -> dict[str, Any]:
    """Train one model into a folder of its name, unless it is there; return its record."""
    folder = out / name
    if (folder / RECORD).is_file():
        return json.loads((folder / RECORD).read_text())
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE)
    text = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    ids, heldout = (token_ids(words, tokenizer, recipe) for words in (text, HELDOUT.read_text(encoding="utf-8")))
    scored = spread_windows(heldout)
    generator = torch.Generator().manual_seed(recipe.schedule.seed)
    model = recipe.make(example_model(), ids, generator).float()
    before = perplexity(model, scored)
    print(f"{name}: {len(ids)} tokens, perplexity before training {before:.1f}", file=sys.stderr)
    teacher = example_model().to(device) if recipe.schedule.distillation else None
    spent = train(model.to(device), teacher, ids, recipe.schedule, out / f"{name}.run")
    save(model.cpu(), folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    record = {
        "about": recipe.about,
        "parameters": sum(p.numel() for p in saved.parameters()),
        "perplexity": round(perplexity(saved, scored), 3),
        "perplexity_before": round(before, 3),
        "perplexity_unigram": round(unigram_perplexity(ids, scored, tokenizer.vocab_size), 1),
        "experts": expert_shares(saved, scored[:8]),
        "processor_seconds": round(spent.processor, 1),
        "wall_seconds": round(spent.wall, 1),
        "schedule": vars(recipe.schedule),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(out / f"{name}.run")
    return record


def example_model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32).eval().requires_grad_(True)


def token_ids(text: str, tokenizer: Any, recipe: Recipe) -> Tensor:
    """The ids [T] of the text, or of the dialogues in it."""
    if recipe.dialogues:
        text = "".join(tokenizer.apply_chat_template(turns, tokenize=False) for turns in dialogues(text))
    pieces = [text[start : start + 8192] for start in range(0, len(text), 8192)]
    found = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for piece in found for token in piece])


def spread_windows(ids: Tensor) -> Tensor:
    """Windows [W, T] at equal distances over the whole text."""
    count = min(WINDOWS, len(ids) // LENGTH)
    step = len(ids) // count
    return torch.stack([ids[at * step : at * step + LENGTH] for at in range(count)])


def save(model: nn.Module, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(EXAMPLE / name, folder / name)


def expert_shares(model: nn.Module, windows: Tensor) -> list[list[float]] | None:
    """The share of tokens that each expert of each block gets, or None without experts."""
    if not hasattr(model.config, "num_experts"):
        return None
    with torch.inference_mode():
        logits = model(windows, output_router_logits=True).router_logits
    count, active = model.config.num_experts, model.config.num_experts_per_tok
    chosen = [torch.bincount(rows.topk(active).indices.flatten(), minlength=count) for rows in logits]
    return [[round(float(share), 3) for share in counts / counts.sum()] for counts in chosen]


if __name__ == "__main__":
    main()
