"""Batch inference over Ray Data: a data set of prompts through as many engines as the cluster has room for.

    python examples/ray/batch.py --model out/awq --prompts prompts.jsonl --output answers --engines 4 --cpus 8

Each line of the input has a ``prompt``; the output has the same lines with an ``answer``. Answers do not depend on how
prompts are divided into batches, nor on how many engines there are. Reading takes a processor besides theirs.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from aiakq import LLM, SamplingParams


class Answer:
    """One engine, in an actor of Ray Data."""

    def __init__(self, model: str, max_tokens: int) -> None:
        self._llm = LLM(model)
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answer the prompts of a batch, whose columns are arrays."""
        prompts = [str(prompt) for prompt in batch["prompt"]]
        results = self._llm.generate(prompts, self._params, use_tqdm=False)
        return {**batch, "answer": [result.outputs[0].text for result in results]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name, readable on every node")
    parser.add_argument("--prompts", required=True, help="JSON lines")
    parser.add_argument("--output", required=True, help="folder for JSON lines")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=1, help="of each engine")
    parser.add_argument("--batch-size", type=int, default=256, help="prompts that an engine gets at a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    (
        ray.data.read_json(given.prompts, lines=True)
        .map_batches(
            Answer,
            fn_constructor_args=(given.model, given.max_tokens),
            batch_size=given.batch_size,
            num_cpus=given.cpus,
            compute=ray.data.ActorPoolStrategy(size=given.engines),
        )
        .write_json(given.output)
    )


if __name__ == "__main__":
    main()
