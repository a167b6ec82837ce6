"""Measure the speed-up by speculative decoding on texts of several kinds: one engine, with and without draft tokens.

    python examples/speculation.py MODEL [--method ngram suffix] [--draft MODEL] [--batch 1 2 4 16] [--temperature 0]

Without a draft model the proposer is n-gram lookup, or suffix decoding without earlier outputs, and every request is
forced to generate a given text: the model computes and samples as usual, but the token of the text replaces the sampled
one. Acceptance then depends on the text only, and the times are real, whatever the weights. With a draft model, both
generate freely.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from aiakq import LLM, SamplingParams
from aiakq.runtime.executor import sampled_step
from aiakq.runtime.protocol.command import EnableDrafts
from aiakq.runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PROMPT, OUTPUT = 256, 128


def texts(vocab_size: int) -> dict[str, list[list[int]]]:
    """Return texts of PROMPT + OUTPUT tokens for every kind."""
    tokenizer = Tokenizer.load(ROOT / "examples/tinybooks")
    draw = random.Random(1)
    found: dict[str, list[list[int]]] = {"code edit": [], "dialogue": [], "random": []}
    book = tokenizer.encode((ROOT / "examples/heldout.txt").read_text())
    sources = sorted((ROOT / "aiakq/runtime/engine").glob("*.py"))
    code = [token for path in sources for token in tokenizer.encode(path.read_text())]
    for number in range(16):
        # A function is repeated with one token in forty replaced.
        part = code[1500 * number : 1500 * number + PROMPT]
        changed = [draw.randrange(3, 300) if draw.random() < 1 / 40 else token for token in part[:OUTPUT]]
        found["code edit"].append(part + changed)
        found["dialogue"].append(book[600 * number : 600 * number + PROMPT + OUTPUT])
        found["random"].append([draw.randrange(3, vocab_size) for _ in range(PROMPT + OUTPUT)])
    return found


class Forced:
    """Sampled tokens replaced by those of the texts. The seed of a request is the number of its text."""

    def __init__(self, pending: Any, rows: list[Any], known: list[list[int]]) -> None:
        self._pending, self._rows, self._known = pending, rows, known

    def collect(self) -> list[Any]:
        """Wait for the results."""
        found = self._pending.collect()
        for sampled, row in zip(found, self._rows, strict=True):
            text = self._known[row.sequence.spec.seed]
            sampled.token = text[row.position] if row.position < len(text) else 0
        return found


def force(known: list[list[int]]) -> None:
    """Force every request to generate the text whose number is its seed."""
    real = sampled_step.sample
    inner = getattr(real, "inner", real)

    def sample(sampler: Any, logits: Any, rows: list[Any]) -> Any:
        return Forced(inner(sampler, logits, rows), rows, known)

    sample.inner = inner  # type: ignore[attr-defined]
    sampled_step.sample = sample  # type: ignore[assignment]


def seconds(llm: LLM, prompts: list[list[int]], with_drafts: bool, temperature: float = 0.0) -> tuple[float, list[Any]]:
    """Generate OUTPUT tokens for each of ``prompts``, which are in the prefix cache; return the seconds and outputs."""
    llm.engine.step(0.0, [EnableDrafts(with_drafts)])  # the proposer then has no earlier outputs
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=OUTPUT, ignore_eos=True)
        for number in range(len(given))
    ]
    started = time.perf_counter()
    results = llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - started, [one.outputs[0].token_ids for one in results]


def compare(llm: LLM, prompts: list[list[int]], repeats: int, temperature: float = 0.0) -> dict[str, Any]:
    """Alternate runs with and without draft tokens, and check that the outputs are equal."""
    fill = SamplingParams(temperature=0, seed=0, max_tokens=1)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], fill, use_tqdm=False)
    before, ratios = llm.engine.stats.drafts.copy(), []
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(repeats):
        outputs = []
        for with_drafts in (True, False) if number % 2 else (False, True):
            took, tokens = seconds(llm, prompts, with_drafts, temperature)
            times[with_drafts].append(took)
            outputs.append(tokens)
        assert outputs[0] == outputs[1], "draft tokens changed the output"
        ratios.append(times[False][-1] / times[True][-1])
    drafts, tokens_in_all = llm.engine.stats.drafts, len(prompts) * OUTPUT
    return {
        "without_tok_s": tokens_in_all / statistics.median(times[False]),
        "with_tok_s": tokens_in_all / statistics.median(times[True]),
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "draft_tokens": drafts.drafts - before.drafts,
        "accepted": drafts.accepted - before.accepted,
        "verifications": drafts.steps - before.steps,
    }


def main() -> None:
    """Run the command line; print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft", help="a draft model, in place of n-gram lookup")
    parser.add_argument("--method", nargs="+", default=["ngram"], choices=["ngram", "suffix"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--kinds", nargs="+", default=["code edit", "dialogue", "random"])
    parser.add_argument("--tokens", type=int, default=4, help="draft tokens of a sequence in a step, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    facts = {}
    for method in args.method if args.draft is None else ["draft_model"]:
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": args.tokens}
        if args.draft is not None:
            config["model"] = args.draft
        llm = LLM(args.model, dtype=args.dtype, speculative_config=config, max_model_len=512, max_num_seqs=16)
        facts[method] = llm.engine.facts
        known = texts(llm.engine.limits.vocab_size)
        for batch, kind, temperature in itertools.product(args.batch, args.kinds, args.temperature):
            if args.draft is None:
                force(known[kind])
            llm.reset_prefix_cache()
            prompts = [text[:PROMPT] for text in known[kind][:batch]]
            row = {"method": method, "text": kind, "batch": batch, "temperature": temperature}
            rows.append(row | compare(llm, prompts, args.repeats, temperature))
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"model": args.model, "draft": args.draft, "facts": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
