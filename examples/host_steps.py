"""Measure the processor time that the engine itself takes for a decode step, without the model and the native sampler.

    python examples/host_steps.py [MODEL] [--batches 1 64 256] [--contexts 1000 8000] [--torch-sampler]

This is what a GPU would wait for. The model's forward is replaced by logits that were drawn before, and the time of
native calls is subtracted. Python calls and torch operations per step are exact; milliseconds are the median and, less
disturbed by other programs, the lower decile over steps. With --torch-sampler the sampler of GPUs takes the place of
the native one; on a CPU, milliseconds include its operations.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from aiakq import LLM, SamplingParams
from aiakq.bench.counting import Counting
from aiakq.kernels.cpu.library import OpList
from aiakq.kernels.ops.sampling import CANDIDATES, TorchSampler

EXAMPLE = Path(__file__).parent / "tinybooks"
PAGE = 16
STEPS = 60
STEP_TOKENS = 8192
#: Sampling parameters by name.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top-k, top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "5 log-probabilities": {"temperature": 0, "logprobs": 5},
    "grammar": {"temperature": 0, "structured_outputs": {"regex": "[a-z ]{2000}"}},
}


class Logits(dict[int, torch.Tensor]):
    """Drawn logits [R, V] by number of rows; a forward of the model returns them."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab

    def __missing__(self, rows: int) -> torch.Tensor:
        self[rows] = torch.randn(rows, self._vocab, generator=torch.Generator().manual_seed(rows))
        return self[rows]


def measure(model: str, batch: int, context: int, params: dict[str, Any], torch_sampler: bool) -> dict[str, float]:
    """Run ``batch`` sequences behind prompts of ``context`` tokens; returns the numbers of a row."""
    # The first sequences must still run when the prompts of all are computed.
    tokens = 2 * STEPS + batch * context // STEP_TOKENS
    pages = batch * (2 + (context + tokens) // PAGE) + 2
    llm = LLM(
        model,
        dtype="float32",
        max_num_seqs=batch,
        max_model_len=context + tokens,
        hf_overrides={"max_position_embeddings": context + tokens},
        num_gpu_blocks_override=pages,
        block_size=PAGE,
        max_num_batched_tokens=STEP_TOKENS,
        async_scheduling=True,
    )
    engine = llm.engine
    if torch_sampler:
        vars(engine.executor)["_sampler"] = TorchSampler(CANDIDATES)
    vocab = engine.limits.vocab_size
    logits = Logits(vocab)
    vars(engine.executor.runner)["forward"] = lambda step: logits[len(step.logit_rows)]
    draw = random.Random(batch)
    prompts = [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(context)]} for _ in range(batch)]
    native, times, counted = [0.0], [], []
    call, step = OpList.__call__, engine.step

    def timed_call(self: OpList, threads: int = 0) -> None:
        began = time.process_time()
        call(self, threads)
        native[0] += time.process_time() - began

    def timed_step(now: float, inbox: Any) -> Any:
        if len(times) == STEPS:  # one step is counted instead
            with Counting() as counting:
                output = step(now, inbox)
            times.append(0.0)
            counted.append(counting.counters())
            return output
        native[0] = 0.0
        began = time.process_time()
        output = step(now, inbox)
        if output.stats.num_scheduled_tokens == batch:
            times.append(time.process_time() - began - native[0])
        return output

    OpList.__call__ = timed_call
    vars(engine)["step"] = timed_step
    try:
        llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params), use_tqdm=False)
    finally:
        OpList.__call__ = call
    found = sorted(each for each in times if each)
    return {
        "median ms": 1e3 * statistics.median(found),
        "decile ms": 1e3 * found[len(found) // 10],
        "Python calls": counted[0]["python_calls"],
        "torch operations": counted[0]["torch_operations"],
    }


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(EXAMPLE))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--torch-sampler", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| sampling | batch | context | median ms | decile ms | Python calls | torch operations |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds:
        for batch in options.batches:
            for context in options.contexts:
                row = measure(options.model, batch, context, KINDS[kind], options.torch_sampler)
                numbers = f"{row['median ms']:.2f} | {row['decile ms']:.2f}"
                numbers += f" | {row['Python calls']:.0f} | {row['torch operations']:.0f}"
                print(f"| {kind} | {batch} | {context} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
