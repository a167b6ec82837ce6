"""Measure structured output: which schemas are enforced, whether outputs are valid, and the time of masks.

    python examples/structured_output.py schemas FILE.jsonl   which schemas are enforced, their instances, mask times
    python examples/structured_output.py answers FILE.jsonl   outputs of a server with random weights, validated
    python examples/structured_output.py speed                time per token of 16 sequences, with and without a grammar

Each takes --model FOLDER. A line of FILE.jsonl is an object with a ``schema`` and, optionally, ``valid`` and
``invalid`` instances, as in JSONSchemaBench. Answers are sampled at temperature 1. Needs jsonschema and openai.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoConfig

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import grammar_of
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.vocabulary import vocabulary_of
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.background import start_in_background

MODEL = Path(__file__).parent / "tinybooks"
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 30},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def schemas(model: str, file: Path) -> None:
    """Measure which schemas are enforced, whether their instances are accepted or rejected correctly, and times."""
    limits = AutoConfig.from_pretrained(model)
    tokenizer = Tokenizer.load(Path(model))
    compiler = GrammarCompiler(vocabulary_of(tokenizer).resized(limits.vocab_size, [limits.eos_token_id]))
    refused: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    compile_times: list[float] = []
    mask_times: list[float] = []
    for case in cases(file):
        began = time.perf_counter()
        try:
            grammar = grammar_of("schema", {"json": case["schema"]})
            assert grammar is not None
            compiler.matcher(grammar)
        except AiakqError as failure:
            refused[str(failure.fields.get("reason", failure))[:100]] += 1
            continue
        compile_times.append(time.perf_counter() - began)
        for name, wanted in (("valid", True), ("invalid", False)):
            for instance in case.get(name, ()):
                tokens = tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
                counts[f"{name} instances"] += 1
                if accepts(compiler.matcher(grammar), tokens, mask_times) is not wanted:
                    counts[f"{name} instances decided otherwise"] += 1
                    print(f"{name}, decided otherwise: {case.get('name')}")
    print(f"{len(compile_times)} schemas enforced, {refused.total()} refused")
    for count_name, count in sorted(counts.items()):
        print(f"  {count_name}: {count}")
    for reason, count in refused.most_common():
        print(f"  refused {count}: {reason}")
    report("compilation and first mask", compile_times)
    report("mask", mask_times)


def cases(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def accepts(matcher: GrammarMatcher, tokens: list[int], times: list[float]) -> bool:
    """Return whether the grammar accepts ``tokens`` as a whole; append the time of each mask to ``times``."""
    mask = torch.empty(matcher.num_words, dtype=torch.int32)
    address = mask.data_ptr()
    for token in tokens:
        began = time.perf_counter()
        matcher.fill_mask(address)
        times.append(time.perf_counter() - began)
        if not mask[token // 32].item() >> (token % 32) & 1:
            return False
        matcher.advance(token)
    return matcher.failure is None and matcher._matcher.is_accepting()


def answers(model: str, file: Path) -> None:
    """Generate two outputs for every schema by a server with random weights: a streamed chat and a completion."""
    end = AutoConfig.from_pretrained(model).vocab_size
    tokenizer = Tokenizer.load(Path(model))
    # Prefer closing tokens: random weights write long strings, and most texts would be cut off.
    closing = [id for id in range(end) if (text := tokenizer.token_bytes(id)) and not text.strip(b'"]}')]
    counts: Counter[str] = Counter()
    server_arguments = {"model": model, "load_format": "dummy", "served_model_name": ["random"]}
    with start_in_background(server_arguments, timeout=240) as server, ThreadPoolExecutor(16) as pool:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        numbered = enumerate(cases(file))
        for one in pool.map(lambda pair: answers_of(client, *pair, {str(id): 4 for id in closing}), numbered):
            counts += one
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")


def answers_of(client: OpenAI, number: int, case: dict[str, Any], bias: dict[str, int]) -> Counter[str]:
    """The results of the outputs for one schema."""
    shared: dict[str, Any] = {
        "model": "random",
        "seed": number,
        "temperature": 1,
        "max_tokens": 900,
        "logit_bias": bias,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "schema", "schema": case["schema"], "strict": True}}
    messages = [{"role": "user", "content": "Once"}]
    counts: Counter[str] = Counter()
    try:
        chunks = client.chat.completions.create(**shared, messages=messages, response_format=wanted, stream=True)
        deltas = [chunk.choices[0] for chunk in chunks]
        texts = [("".join(one.delta.content or "" for one in deltas), deltas[-1].finish_reason)]
        schema = {"guided_json": case["schema"]}
        whole = client.completions.create(**shared, prompt="Once upon a time", extra_body=schema).choices[0]
        texts.append((whole.text, whole.finish_reason))
    except BadRequestError:
        return Counter({"schemas refused with 400": 1})
    validator = jsonschema.validators.validator_for(case["schema"])
    for text, finish_reason in texts:
        counts[f"answers that end by {finish_reason}"] += 1
        if finish_reason == "stop" and not validator(case["schema"]).is_valid(json.loads(text)):
            counts["invalid answers"] += 1
            print("invalid:", case.get("name"), text[:300])
    return counts + Counter({"schemas enforced": 1})


def report(name: str, times: list[float]) -> None:
    """Percentiles in microseconds."""
    cuts = statistics.quantiles(times, n=1000)
    shown = ", ".join(f"p{share / 10:g} {cuts[share - 1] * 1e6:.0f}" for share in (500, 900, 990, 999))
    print(f"{name}: {shown}, max {max(times) * 1e6:.0f} us, of {len(times)}")


def speed(model: str, rounds: int = 10) -> None:
    """Measure the time per token of 16 sequences, alternating between with and without a grammar."""
    llm = LLM(model=model)
    constraints: dict[str, dict[str, Any] | None] = {"none": None, "regex": {"regex": "(.|\n)*"}, "json": {"json": PET}}
    times: dict[str, list[float]] = {name: [] for name in constraints}
    for number in range(-1, rounds):  # the first round compiles
        for name in sorted(constraints, reverse=number % 2 == 1):
            params = SamplingParams(max_tokens=128, ignore_eos=True, seed=number, structured_outputs=constraints[name])
            began = time.perf_counter()
            results = llm.generate(["Once upon a time"] * 16, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            if number >= 0:
                times[name].append(seconds / sum(len(result.outputs[0].token_ids) for result in results))
    for name, found in times.items():
        ratio = statistics.median(one / free for one, free in zip(found, times["none"], strict=True))
        print(f"{name:>6}: {statistics.median(found) * 1e6:.1f} us per token (median), {ratio:.3f} of no grammar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schemas", "answers", "speed"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--model", default=str(MODEL))
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.model)
    elif arguments.file is None:
        parser.error("FILE.jsonl is missing")
    else:
        {"schemas": schemas, "answers": answers}[arguments.what](arguments.model, arguments.file)


if __name__ == "__main__":
    main()
