"""Compare n-gram lookup with the prompt lookup decoding of llama-cpp-python, on the same texts, one request at a time.

    python examples/lookup.py MODEL GGUF --python PYTHON [--kinds "code edit" dialogue] [--rounds 2]

MODEL and GGUF are the same weights in 4 bits; PYTHON has llama-cpp-python. Both engines are forced to generate
given texts (see speculation.py), one after the other, each in its own process.
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


def llama(args: argparse.Namespace, kind: str, vocab_size: int) -> dict[str, Any]:
    """Measure llama-cpp-python."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(
            json.dumps(
                {
                    "model": args.gguf,
                    "threads": args.threads,
                    "texts": texts(vocab_size)[kind][:1],
                    "prompt": PROMPT,
                    "num_pred_tokens": args.tokens,
                    "repeats": args.repeats,
                }
            )
        )
        script = EXAMPLES / "cpu_peers" / "lookup_llamacpp.py"
        subprocess.run([args.python, script, request, result], check=True)
        return json.loads(result.read_text())


def aiakq(args: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Measure aiakq with examples/speculation.py."""
    words = [args.model, "--batch", "1", "--kinds", kind, "--repeats", str(args.repeats)]
    rows = []
    for tokens in args.tokens:
        command = [sys.executable, str(EXAMPLES / "speculation.py"), *words, "--tokens", str(tokens)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        rows.append({"num_speculative_tokens": tokens, **json.loads(done.stdout.splitlines()[0])})
    return rows


def main() -> None:
    """Run the command line; print a JSON document per measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("--python", required=True, help="of an environment with llama-cpp-python")
    parser.add_argument("--kinds", nargs="+", default=["code edit"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 10], help="draft tokens of a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    vocab_size = json.loads(Path(args.model, "config.json").read_text())["vocab_size"]
    for number in range(args.rounds):
        for engine in ("aiakq", "llama") if number % 2 == 0 else ("llama", "aiakq"):
            for kind in args.kinds:
                found = aiakq(args, kind) if engine == "aiakq" else llama(args, kind, vocab_size)
                print(json.dumps({"engine": engine, "text": kind, "found": found}), flush=True)


if __name__ == "__main__":
    main()
