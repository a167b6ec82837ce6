"""Compare the speed of aiakq with llama.cpp's on the same GGUF file, in turns.

    python examples/gguf_speed.py FILE --llama DIR [--threads 1] [--turns 5]

DIR holds llama-bench. Times are processor times of the whole process, which other programs on the machine disturb less
than they do the clock; both engines are also affected by what the others read from memory, so a streaming read is timed
beside every turn. Decoding is the difference between 32 and 8 tokens, a prompt has 128 tokens; medians over the turns,
and of the ratios within each turn. With more than one thread, wait times count: compare one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

DECODED, PROMPT, SHORT = 24, 128, 8


def main() -> None:
    """Measure and print a line for each turn, then medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    ours = Ours(options.file, options.threads)
    rows = []
    for _ in range(options.turns):
        row = {"read GB/s": ours.read()}
        row["decode"], row["prompt"] = ours.decode(), ours.prompt()
        row["llama.cpp decode"] = (bench(options, 0, SHORT + DECODED) - bench(options, 0, SHORT)) / DECODED
        # llama-bench runs a prompt twice: its warm-up is the same.
        row["llama.cpp prompt"] = (bench(options, 32 + PROMPT, 0) - bench(options, 32, 0)) / (2 * PROMPT)
        rows.append(row)
        print_row(row)
    print("medians")
    print_row({name: statistics.median(row[name] for row in rows) for name in rows[0]})
    for name in ("decode", "prompt"):
        ratio = statistics.median(row[f"llama.cpp {name}"] / row[name] for row in rows)
        print(f"{name}: {ratio:.2f} times as fast as llama.cpp")


def print_row(row: dict[str, float]) -> None:
    """Print a turn: milliseconds of processor time per token."""
    print("  ".join(f"{name} {value if 'GB' in name else 1e3 * value:.2f}" for name, value in row.items()), flush=True)


def bench(options: argparse.Namespace, prompt: int, tokens: int) -> float:
    """Return the processor seconds of a run of llama-bench."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["-m", options.file, "-t", str(options.threads), "-p", str(prompt), "-n", str(tokens), "-r", "1"]
    subprocess.run([options.llama / "llama-bench", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Ours:
    """aiakq with the model loaded."""

    def __init__(self, file: Path, threads: int) -> None:
        from aiakq.system.threads import spin_briefly

        spin_briefly(os.environ)
        import torch

        from aiakq import LLM

        torch.set_num_threads(threads)
        began = time.process_time()
        self.llm = LLM(
            model=str(file),
            max_model_len=512,
            max_num_seqs=4,
            num_gpu_blocks_override=96,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        print(f"loaded in {time.process_time() - began:.1f} s of processor time", file=sys.stderr)
        print(self.llm.engine.facts["linear layers"], file=sys.stderr)
        self.random = random.Random(1)
        self.memory = torch.ones(64 << 20)
        self.generate(16, 4)

    def generate(self, prompt: int, tokens: int) -> float:
        """Return the processor seconds of a random prompt and its continuation."""
        from aiakq import SamplingParams

        ids = [self.random.randrange(100, 1000) for _ in range(prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.process_time()
        self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return time.process_time() - began

    def decode(self) -> float:
        """Return the seconds of a decoded token."""
        short = self.generate(16, SHORT)
        return (self.generate(16, SHORT + DECODED) - short) / DECODED

    def prompt(self) -> float:
        """Return the seconds of a token of a prompt."""
        return self.generate(PROMPT, 1) / PROMPT

    def read(self) -> float:
        """Return GB/s of a streaming read, the best of three."""
        best = 0.0
        for _ in range(3):
            began = time.process_time()
            self.memory.sum()
            best = max(best, self.memory.nbytes / (time.process_time() - began) / 1e9)
        return best


if __name__ == "__main__":
    main()
