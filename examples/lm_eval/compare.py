"""Score the example model with lm_eval through a server, and compare with scores computed directly.

    python examples/lm_eval/compare.py [--lm-eval PROGRAM] [--write-data]

lm_eval is found on the path or by --lm-eval (in its own environment: pip install "lm-eval[api]" transformers); if it is
missing, a message says so. Direct scores are computed with transformers in this process: float32, no server, no cache,
no batch. Accuracies must be equal, perplexities to six digits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
MODEL = ROOT / "examples" / "tinybooks"
TASKS = ("tinybooks_continuation", "tinybooks_text")
ITEMS, PASSAGES = 100, 12


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lm-eval", default="lm_eval", help="the program, if it is not on the path")
    parser.add_argument("--write-data", action="store_true", help="write the tasks' data again, and nothing else")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.write_data:
        write_data()
        return 0
    program = shutil.which(args.lm_eval)
    if program is None:
        print(
            'lm_eval is not installed (pip install "lm-eval[api]" transformers): nothing was compared', file=sys.stderr
        )
        return 0
    served, direct = by_lm_eval(program), directly()
    print(f"{'':40}{'lm_eval':>14}{'directly':>14}")
    same = True
    for name, value in direct.items():
        exact = name.endswith(("acc", "acc_norm"))
        same &= served[name] == value if exact else math.isclose(served[name], value, rel_tol=1e-6)
        print(f"{name:40}{served[name]:14.7g}{value:14.7g}")
    print("the same" if same else "NOT the same")
    return 0 if same else 1


def by_lm_eval(program: str) -> dict[str, float]:
    """Return the scores of a server by lm_eval."""
    from aiakq.server.background import start_in_background

    arguments = {"model": str(MODEL), "served_model_name": ["tinybooks"], "dtype": "float32"}
    with start_in_background(arguments, timeout=300) as server, tempfile.TemporaryDirectory() as out:
        values = {
            "model": "tinybooks",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(MODEL),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 8,
            "max_length": 1024,
            "tokenized_requests": True,
        }
        words = ["--model", "local-completions", "--tasks", ",".join(TASKS), "--include_path", str(FOLDER)]
        words += ["--model_args", ",".join(f"{name}={value}" for name, value in values.items())]
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": out, "no_proxy": "127.0.0.1"}
        command = [program, "run", *words, "--output_path", f"{out}/scores"]
        subprocess.run(command, stdout=sys.stderr, env={**os.environ, **quiet}, check=True)
        file = next(Path(out, "scores").rglob("results*.json"))
        results = json.loads(file.read_text())["results"]
    found = {}
    for task in TASKS:
        for name, value in results[task].items():
            metric = name.partition(",")[0]
            if isinstance(value, float) and not metric.endswith("_stderr"):
                found[f"{task} {metric}"] = value
    return found


def directly() -> dict[str, float]:
    """Return the same scores computed with the model directly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def score(before: list[int], after: list[int]) -> float:
        """The log-probability of ``after``."""
        whole = torch.tensor([before + after])
        with torch.no_grad():
            logprobs = model(whole).logits[0].double().log_softmax(-1)
        return sum(logprobs[len(before) + at - 1, token].item() for at, token in enumerate(after))

    right = right_by_length = 0
    items = read("continuation.jsonl")
    for item in items:
        scores = []
        for choice in item["choices"]:
            context = ids(item["context"])
            scores.append(score(context, ids(f"{item['context']} {choice}")[len(context) :]))
        right += scores.index(max(scores)) == item["answer"]
        by_length = [one / len(choice) for one, choice in zip(scores, item["choices"], strict=True)]
        right_by_length += by_length.index(max(by_length)) == item["answer"]
    texts = [item["text"] for item in read("text.jsonl")]
    total = sum(score([tokenizer.bos_token_id], ids(text)) for text in texts)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    return {
        "tinybooks_continuation acc": right / len(items),
        "tinybooks_continuation acc_norm": right_by_length / len(items),
        "tinybooks_text word_perplexity": math.exp(-total / words),
        "tinybooks_text bits_per_byte": -total / size / math.log(2),
    }


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def write_data() -> None:
    """Both tasks, from a book the example model has not seen."""
    draw = random.Random(0)
    words = (ROOT / "examples" / "heldout.txt").read_text(encoding="utf-8").split()

    def piece(least: int, most: int) -> tuple[int, str]:
        at, count = draw.randrange(len(words) - 400), draw.randint(least, most)
        return at + count, " ".join(words[at : at + count])

    items = []
    for _ in range(ITEMS):
        end, context = piece(30, 50)
        length, answer = draw.randint(4, 8), draw.randrange(4)
        choices = [piece(length, length)[1] for _ in range(4)]
        choices[answer] = " ".join(words[end : end + length])
        items.append({"context": context, "choices": choices, "answer": answer})
    passages = [{"text": piece(250, 320)[1]} for _ in range(PASSAGES)]
    for name, rows in (("continuation.jsonl", items), ("text.jsonl", passages)):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
