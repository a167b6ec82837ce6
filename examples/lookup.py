"""N-gram lookup beside the prompt lookup decoding of llama-cpp-python: the same texts, one request, in turns.

    python examples/lookup.py MODEL GGUF --python PYTHON [--kinds "code edit" dialogue] [--rounds 2]

MODEL and GGUF are the same weights in 4 bits; PYTHON has llama-cpp-python. Both engines are made to generate given
texts (see speculation.py), one after the other in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from speculation import PROMPT, texts

EXAMPLES = Path(__file__).resolve().parent


def llama(asked: argparse.Namespace, kind: str, vocab_size: int) -> dict[str, Any]:
    """What llama-cpp-python measures."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(
            json.dumps(
                {
                    "model": asked.gguf,
                    "threads": asked.threads,
                    "texts": texts(vocab_size)[kind][:1],
                    "prompt": PROMPT,
                    "num_pred_tokens": asked.tokens,
                    "repeats": asked.repeats,
                }
            )
        )
        script = EXAMPLES / "cpu_peers" / "lookup_llamacpp.py"
        subprocess.run([asked.python, script, request, result], check=True)
        return json.loads(result.read_text())


def aiakq(asked: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """What examples/speculation.py measures."""
    words = [asked.model, "--batch", "1", "--kinds", kind, "--repeats", str(asked.repeats)]
    rows = []
    for tokens in asked.tokens:
        command = [sys.executable, str(EXAMPLES / "speculation.py"), *words, "--tokens", str(tokens)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append({"num_speculative_tokens": tokens, **json.loads(done.stdout.splitlines()[0])})
    return rows


def main() -> None:
    """The command line; prints a JSON document per measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python")
    parser.add_argument("--kinds", nargs="+", default=["code edit"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 10], help="draft tokens of a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    vocab_size = json.loads(Path(asked.model, "config.json").read_text())["vocab_size"]
    for number in range(asked.rounds):
        for engine in ("aiakq", "llama") if number % 2 == 0 else ("llama", "aiakq"):
            for kind in asked.kinds:
                found = aiakq(asked, kind) if engine == "aiakq" else llama(asked, kind, vocab_size)
                print(json.dumps({"engine": engine, "text": kind, "found": found}), flush=True)


if __name__ == "__main__":
    main()
