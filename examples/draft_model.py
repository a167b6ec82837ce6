"""Measure the speed-up by a draft model for several acceptance rates: one engine, with and without draft tokens.

    python examples/draft_model.py MODEL --draft OUT [--acceptance 0.5 0.7 0.8 0.9] [--batch 1 2 4]

Every request is forced to generate a given text, and the draft model to propose the next token of that text with the
given probability, and another token otherwise. Both models compute and sample as usual, so that the times are real but
acceptance does not depend on the weights. With ``--acceptance real`` both models generate freely.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from typing import Any

from speculation import PROMPT, Forced, force, texts

from aiakq import LLM, SamplingParams
from aiakq.runtime.executor import sampled_step
from aiakq.runtime.protocol.command import EnableDrafts
from aiakq.runtime.speculation.draft_length import AcceptanceRate, StepCosts
from aiakq.runtime.speculation.draft_model import proposer
from aiakq.runtime.speculation.planner import DraftPlanner


class Guided(Forced):
    """The samples of a draft model, each replaced by the text's token with ``probability`` and by another otherwise."""

    def __init__(self, pending: Any, rows: list[Any], known: list[list[int]], probability: float) -> None:
        super().__init__(pending, rows, known)
        self._probability = probability

    def collect(self) -> list[Any]:
        """Wait for the results."""
        found = super().collect()
        for sampled, row in zip(found, self._rows, strict=True):
            if random.Random(f"{row.sequence.spec.seed} {row.position}").random() >= self._probability:
                sampled.token = 3 + sampled.token % 1000  # another one
        return found


def guide(known: list[list[int]], probability: float) -> None:
    """Make the draft model propose the tokens of the texts, each with ``probability``."""
    real = proposer.sample
    inner = getattr(real, "inner", real)

    def sample(sampler: Any, logits: Any, rows: list[Any]) -> Any:
        return Guided(inner(sampler, logits, rows), rows, known, probability)

    sample.inner = inner  # type: ignore[attr-defined]
    proposer.sample = sample  # type: ignore[assignment]


class Clock:
    """Milliseconds of the parts of the engine; those of both models' steps also by number of tokens."""

    def __init__(self, llm: LLM) -> None:
        executor = llm.engine.executor
        assert executor.proposer is not None
        self._parts: dict[str, dict[int, list[float]]] = {}
        for name, part, method in (
            ("model", executor.runner, "forward"),
            ("draft model", executor.proposer.runner, "forward"),
            ("proposals", executor.proposer, "propose"),
            ("scheduler", llm.engine.scheduler, "schedule"),
            ("steps", llm.engine, "step"),
        ):
            self._measure(name, part, method)

    def _measure(self, name: str, part: Any, method: str) -> None:
        inner = getattr(part, method)
        self._parts[name] = {}

        def timed(*args: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **keywords)
            finally:
                size = len(args[0].token_ids) if method == "forward" else 0
                self._parts[name].setdefault(size, []).append(1000 * (time.perf_counter() - started))

        setattr(part, method, timed)

    def reset(self) -> None:
        """Start again at 0."""
        for times in self._parts.values():
            times.clear()

    def result(self) -> dict[str, Any]:
        """Return total milliseconds, calls, and the median by number of tokens, for each part."""
        return {
            name: {
                "ms": round(sum(map(sum, times.values())), 1),
                "calls": sum(map(len, times.values())),
                **(
                    {"by_tokens": {size: round(statistics.median(times[size]), 1) for size in sorted(times)}}
                    if any(times)
                    else {}
                ),
            }
            for name, times in self._parts.items()
        }


def compare(llm: LLM, clock: Clock, known: list[list[int]], args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Alternate runs with and without draft tokens, with new texts every round; check that the outputs are equal."""
    planner = llm.engine.scheduler.resource(DraftPlanner)
    assert planner is not None
    llm.engine.step(0.0, [EnableDrafts(True)])

    def generate(number: int, max_tokens: int) -> list[Any]:
        chosen = [(number * batch + at) % len(known) for at in range(batch)]
        given = [{"prompt_token_ids": known[index][:PROMPT]} for index in chosen]
        params = [
            SamplingParams(temperature=args.temperature, seed=index, max_tokens=max_tokens, ignore_eos=True)
            for index in chosen
        ]
        return [one.outputs[0].token_ids for one in llm.generate(given, params, use_tqdm=False)]

    costs, planner.costs = planner.costs, StepCosts({1: 1.0, 1000: 1.0})
    for number in range(args.repeats + 1):
        generate(number, 8)  # from here on, both models have cached the prompts
    planner.costs = costs
    planner._acceptance = AcceptanceRate(args.initial_acceptance)  # forget statistics of earlier texts
    generate(args.repeats, args.output)
    before = llm.engine.stats.drafts.copy()
    times: dict[bool, list[float]] = {True: [], False: []}
    parts: dict[bool, Any] = {}
    for number in range(args.repeats):
        outputs = []
        for with_drafts in (True, False) if number % 2 else (False, True):
            llm.engine.step(0.0, [EnableDrafts(with_drafts)])
            clock.reset()
            started = time.perf_counter()
            outputs.append(generate(number, args.output))
            times[with_drafts].append(time.perf_counter() - started)
            parts[with_drafts] = clock.result()
        assert outputs[0] == outputs[1], "draft tokens changed the output"
    drafts, num_tokens = llm.engine.stats.drafts, batch * args.output
    ratios = [without / within for within, without in zip(times[True], times[False], strict=True)]
    num = drafts.drafts - before.drafts
    return {
        "without_tok_s": round(num_tokens / statistics.median(times[False]), 2),
        "with_tok_s": round(num_tokens / statistics.median(times[True]), 2),
        "speedup": round(statistics.median(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "accepted": round((drafts.accepted - before.accepted) / num, 3) if num else None,
        "draft_tokens_per_verification": round(num / max(1, drafts.steps - before.steps), 2),
        "parts_with": parts[True],
        "parts_without": parts[False],
    }


def main() -> None:
    """Run the command line; print a JSON document per line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--acceptance", nargs="+", default=["0.5", "0.7", "0.8", "0.9"], help="probabilities, or real")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=4, help="maximum number of draft tokens per step and sequence")
    parser.add_argument("--output", type=int, default=96, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--initial-acceptance", type=float, default=0.5, help="that the engine expects of new texts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    config = {"method": "draft_model", "model": args.draft, "num_speculative_tokens": args.tokens}
    llm = LLM(args.model, dtype=args.dtype, speculative_config=config, max_model_len=512, max_num_seqs=16)
    print(json.dumps({"model": args.model, "draft": args.draft, "facts": llm.engine.facts}), flush=True)
    clock, known = Clock(llm), texts(llm.engine.limits.vocab_size)["dialogue"]
    samplers = sampled_step.sample, proposer.sample
    for acceptance, batch in itertools.product(args.acceptance, args.batch):
        sampled_step.sample, proposer.sample = samplers
        if acceptance != "real":
            force(known)
            guide(known, float(acceptance))
        llm.reset_prefix_cache()
        found = compare(llm, clock, known, args, batch)
        print(json.dumps({"acceptance": acceptance, "batch": batch, **found}), flush=True)


if __name__ == "__main__":
    main()
