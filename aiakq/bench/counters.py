"""``bench counters``: what the engine does for a fixed load, in numbers without noise that CI can hold to equality.

The load is the same in every run: prompts from a fixed seed, answers of a fixed length, all requests there from the
start, one thread. So is every number: steps, tokens computed, pages, operations, bytes.
"""

from __future__ import annotations

import gc
import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.comparison import CounterArguments
from aiakq.bench.comparison.compare import CHANGED, counter_rows, verdict_of
from aiakq.bench.comparison.readers import read_side
from aiakq.bench.counting import Counting, set_threads
from aiakq.errors import error
from aiakq.records import Record, environment

#: Engine arguments unless others are given: prompts are computed in chunks, and the pages do not hold every prompt.
_ENGINE = {"dtype": "float32", "num_gpu_blocks_override": 33, "max_num_batched_tokens": 128}
#: Counters of Python functions may grow by so much: nearly every change to the code moves them a little.
PYTHON_TOLERANCE = 0.02

#: Called with phases done, all phases and the name of the next one.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CountedPhase:
    """``requests`` prompts of ``length`` tokens, the first ``shared`` of which are the same in all; ``output`` tokens
    for each.
    """

    name: str
    requests: int
    length: int
    output: int
    shared: int = 0
    temperature: float = 0.0


PHASES = (
    CountedPhase("prefill", requests=1, length=96, output=1),
    CountedPhase("decode", requests=4, length=16, output=17),
    CountedPhase("chunked", requests=3, length=200, output=9),
    CountedPhase("preempted", requests=4, length=100, output=40),
    CountedPhase("prefix", requests=4, length=80, output=5, shared=64),
    CountedPhase("sampled", requests=2, length=16, output=9, temperature=0.8),
)


def run(options: CounterArguments, engine: Mapping[str, Any], progress: Progress) -> Record:
    """Count every phase, after a run of all that is not counted and fills what is made at first use."""
    from aiakq.runtime.llm import LLM

    set_threads()
    arguments = {**_ENGINE, **engine}
    progress(0, len(PHASES), "load")
    others = _live_storages()
    llm = LLM(**arguments)
    counters: dict[str, int] = {"loaded.tensor_bytes": _bytes_beyond(others)}
    for phase in PHASES:
        _generate(llm, phase, seed=1)
    details = {}
    for number, phase in enumerate(PHASES):
        progress(number, len(PHASES), phase.name)
        llm.reset_prefix_cache()
        found, details[phase.name] = _count(llm, phase)
        counters |= {f"{phase.name}.{name}": value for name, value in found.items()}
    counters["finished.tensor_bytes"] = _bytes_beyond(others)
    progress(len(PHASES), len(PHASES), "")
    config = {"engine": arguments, "phases": [vars(phase) for phase in PHASES]}
    where = {**environment("cpu", 1), "engine": dict(llm.engine.facts), "isa": _isa()}
    return Record("counters", 0, config, {"counters": counters, "details": details}, where)


def baseline(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a later count is compared with: the document without all that changes from run to run, as for a commit."""
    where = {key: record["environment"][key] for key in ("python", "torch", "isa")}
    kept = {key: record[key] for key in ("schema_version", "kind", "config", "counters")}
    return {**kept, "environment": {key: _short_version(value) for key, value in where.items()}}


def compare(record: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The document of a comparison of ``record`` with the one in ``file``.

    Counters that depend on other versions of Python or torch are left out, with a warning. Raises ``usage`` if the
    loads differ, and what reading the file raises.
    """
    base = read_side(file)
    differing = [key for key in ("engine", "phases") if _load_of(base.settings, key) != _load_of(record["config"], key)]
    if base.kind != "counters" or differing:
        reason = f"{file} was not counted with the same load: {', '.join(differing) or base.kind} differ."
        raise error("usage", reason=reason, hint="Count it again with the options of this run, and --output.")
    here = record["environment"]
    before, after, warnings = dict(base.counters), dict(record["counters"]), []
    for what, names in (("python", "python_"), ("torch", "torch_"), ("isa", "_bytes")):
        theirs, ours = (_short_version(side.get(what)) for side in (base.machine, here))
        if theirs != ours:
            warnings.append(f"Counted with {what} {theirs}, here it is {ours}: what depends on it is not compared.")
            before = {name: value for name, value in before.items() if names not in name}
            after = {name: value for name, value in after.items() if names not in name}
    rows = counter_rows(before, after)
    for row in rows:
        if row["counter"].endswith("python_calls") and row["verdict"] == CHANGED:
            row["verdict"] = CHANGED if row["new"] > row["base"] * (1 + PYTHON_TOLERANCE) else "equal"
    document = {
        "kind": "comparison",
        "base": base.label,
        "new": "this installation",
        "margin": 0.0,
        "confidence": 1.0,
        "metrics": [],
        "counters": rows,
        "warnings": warnings,
    }
    return {**document, "verdict": verdict_of(document)}


def _load_of(config: Mapping[str, Any], key: str) -> Any:
    found = config.get(key)
    # Where the model lies does not matter.
    return {name: value for name, value in found.items() if name != "model"} if isinstance(found, Mapping) else found


def _short_version(version: str | None) -> str | None:
    """``2.13.0+cpu`` as ``2.13``."""
    return None if version is None else ".".join(version.split(".")[:2])


def _count(llm: Any, phase: CountedPhase) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The counters of one phase; and for people, which operations and which functions ran how often."""
    before, step = llm.engine.stats, llm.engine.step
    pages: list[int] = []
    tokens: list[int] = []

    def counted(now: float, inbox: Any) -> Any:
        output = step(now, inbox)
        pages.append(output.stats.num_pages - output.stats.num_free_pages)
        tokens.append(output.stats.num_scheduled_tokens)
        return output

    llm.engine.step = counted
    try:
        with Counting() as counting:
            _generate(llm, phase, seed=2)
    finally:
        del llm.engine.step
    after = llm.engine.stats
    totals = ("steps", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions")
    counters = {name: getattr(after, name) - getattr(before, name) for name in totals}
    counters |= {"scheduled_tokens": sum(tokens), "peak_pages": max(pages)}
    details = {
        "operations": dict(sorted(counting.by_operation.items())),
        "functions": dict(counting.by_function.most_common(40)),
    }
    return counters | counting.counters(), details


def _generate(llm: Any, phase: CountedPhase, seed: int) -> None:
    from aiakq.runtime.sampling_params import SamplingParams

    rng = random.Random(f"{seed} {phase.name}")
    vocab_size = llm.engine.limits.vocab_size
    shared = [rng.randrange(vocab_size) for _ in range(phase.shared)]
    own = phase.length - phase.shared
    prompts = [
        {"prompt_token_ids": shared + [rng.randrange(vocab_size) for _ in range(own)]} for _ in range(phase.requests)
    ]
    params = SamplingParams(temperature=phase.temperature, max_tokens=phase.output, ignore_eos=True, seed=seed)
    if phase.shared:  # the first one alone: the others find its pages
        llm.generate(prompts[:1], params, use_tqdm=False)
    llm.generate(prompts[1 if phase.shared else 0 :], params, use_tqdm=False)


def _live_storages() -> dict[int, int]:
    """Address -> bytes of the memory of every tensor of this process."""
    import torch

    gc.unfreeze()
    gc.collect()
    kinds = torch.Tensor, torch.nn.Parameter
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # The type, not isinstance: that asks modules that stand for others, which warn. Some subclasses have no memory.
        if type(each) in kinds and each.device.type == "cpu" and each.layout == torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _bytes_beyond(others: Mapping[int, int]) -> int:
    """Bytes of the memory of all tensors but ``others``, which were there before."""
    return sum(size for address, size in _live_storages().items() if others.get(address) != size)


def _isa() -> str:
    from aiakq.kernels.cpu.library import load_library, unavailable

    return platform.machine() if unavailable() else load_library().isa
