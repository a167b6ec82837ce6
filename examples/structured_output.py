"""Structured output measured: which schemas are enforced, whether answers are valid, and what masks cost.

    python examples/structured_output.py schemas FILE.jsonl [--model FOLDER]   valid answers, refusals by keyword
    python examples/structured_output.py speed [--model FOLDER]                tokens per second with and without

FILE.jsonl has an object with a ``schema`` and, if known, ``valid`` and ``invalid`` instances on every line, as
JSONSchemaBench has them. Answers are sampled at temperature 1, so the model need not know JSON. Needs jsonschema.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.grammars import grammar_of
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.vocabulary import Vocabulary

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


def schemas(llm: LLM, file: Path) -> None:
    """An answer for every schema, and the instances that come with them."""
    import jsonschema

    limits = llm.engine.limits
    vocabulary = Vocabulary.of(llm.tokenizer).resized(limits.vocab_size, limits.eos_token_ids)
    compiler = GrammarCompiler(vocabulary)
    refused: Counter[str] = Counter()
    compile_times, counts = [], Counter()
    accepted = []
    for line in file.read_text().splitlines():
        case = json.loads(line)
        began = time.perf_counter()
        try:
            grammar = grammar_of("schema", {"json": case["schema"]})
            assert grammar is not None
            compiler.matcher(grammar)
        except AiakqError as failure:
            refused[str(failure.fields.get("reason", failure))[:100]] += 1
            continue
        compile_times.append(time.perf_counter() - began)
        accepted.append(case)
        for name, wanted in (("valid", True), ("invalid", False)):
            for instance in case.get(name, ()):
                counts[f"{name} instances"] += 1
                counts[f"{name} instances decided otherwise"] += follows(llm, compiler, grammar, instance) is not wanted
    mask_times = measured()
    params = [
        SamplingParams(seed=number, max_tokens=400, min_p=1e-3, structured_outputs={"json": case["schema"]})
        for number, case in enumerate(accepted)
    ]
    for result, case in zip(llm.generate(["Once"] * len(accepted), params), accepted, strict=True):
        output = result.outputs[0]
        counts[f"answers that end by {output.finish_reason}"] += 1
        if output.finish_reason == "stop":
            validator = jsonschema.validators.validator_for(case["schema"])(case["schema"])
            if not validator.is_valid(json.loads(output.text)):
                counts["invalid answers"] += 1
                print("invalid:", case.get("name"), output.text[:300])
        elif output.finish_reason == "error":
            print("failed:", case.get("name"), result.error)
    print(f"{len(accepted)} schemas enforced, {sum(refused.values())} refused")
    print(f"  invalid answers: {counts.pop('invalid answers', 0)}")
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    for reason, count in refused.most_common():
        print(f"  refused {count}: {reason}")
    report("compilation and first mask", compile_times)
    report("mask", mask_times)


def follows(llm: LLM, compiler: GrammarCompiler, grammar: object, instance: object) -> bool:
    """Whether the grammar allows ``instance``."""
    matcher = compiler.matcher(grammar)  # type: ignore[arg-type]
    library = matcher._matcher
    tokens = llm.tokenizer.encode(json.dumps(instance, ensure_ascii=False), add_special_tokens=False)
    return library.try_consume_tokens(tokens) == len(tokens) and library.is_accepting()


def measured() -> list[float]:
    """A list that grows by the time of every mask from now on."""
    times: list[float] = []
    fill = GrammarMatcher.fill_mask

    def timed(self: GrammarMatcher, address: int) -> None:
        began = time.perf_counter()
        fill(self, address)
        times.append(time.perf_counter() - began)

    GrammarMatcher.fill_mask = timed  # type: ignore[method-assign]
    return times


def report(name: str, times: list[float]) -> None:
    """Percentiles in microseconds."""
    cuts = statistics.quantiles(times, n=1000)
    shown = ", ".join(f"p{share / 10:g} {cuts[share - 1] * 1e6:.0f}" for share in (500, 900, 990, 999))
    print(f"{name}: {shown}, most {max(times) * 1e6:.0f} us, of {len(times)}")


def speed(llm: LLM) -> None:
    """Tokens per second of 16 sequences, with and without a grammar."""
    for name, constraint in (("free", None), ("regex", {"regex": "(.|\n)*"}), ("json", {"json": PET})) * 2:
        params = SamplingParams(max_tokens=128, ignore_eos=True, seed=1, structured_outputs=constraint)
        llm.generate(["Once"] * 16, SamplingParams(max_tokens=2, structured_outputs=constraint), use_tqdm=False)
        began = time.perf_counter()
        results = llm.generate(["Once upon a time"] * 16, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        count = sum(len(result.outputs[0].token_ids) for result in results)
        print(f"{name:>6}: {count / seconds:.0f} tokens/s ({count} tokens)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schemas", "speed"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--model", default=str(MODEL))
    arguments = parser.parse_args()
    llm = LLM(model=arguments.model)
    if arguments.what == "speed":
        speed(llm)
    else:
        schemas(llm, arguments.file)


if __name__ == "__main__":
    main()
