"""``bench counters``: deterministic counters of the engine's work for a fixed load, which CI can compare exactly.

The load is the same in every run: seeded prompts, fixed output lengths, all requests submitted at once, one thread. So
are the counters: steps, scheduled tokens, pages, operations, bytes.
"""

from __future__ import annotations

import gc
import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiakq.arguments.comparison import CounterArguments
from aiakq.bench.comparison.compare import CHANGED, ComparedRows, ComparisonDocument, counter_rows, verdict_of
from aiakq.bench.comparison.readers import read_side
from aiakq.bench.counting import Counting, set_threads
from aiakq.errors import error
from aiakq.records import Record, environment

if TYPE_CHECKING:
    from aiakq.runtime.llm import LLM
    from aiakq.runtime.offline_prompts import Prompt
    from aiakq.runtime.protocol.command import Inbox
    from aiakq.runtime.protocol.output import StepOutput

#: Default engine arguments, which force chunked prefill and preemption.
_ENGINE = {"dtype": "float32", "num_gpu_blocks_override": 33, "max_num_batched_tokens": 128}
#: Tolerated relative growth of Python call counts, which nearly every code change affects slightly.
PYTHON_TOLERANCE = 0.02

#: Progress callback: phases completed, total number of phases, name of the next phase.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CountedPhase:
    """One phase of the load.

    requests  number of requests.
    length    prompt length in tokens.
    output    output length in tokens.
    shared    length of the prefix that all prompts have in common, in tokens.
    """

    name: str
    requests: int
    length: int
    output: int
    shared: int = 0
    temperature: float = 0.0
    presence_penalty: float = 0.0


PHASES = (
    CountedPhase("prefill", requests=1, length=96, output=1),
    CountedPhase("decode", requests=4, length=16, output=17),
    CountedPhase("chunked", requests=3, length=200, output=9),
    CountedPhase("preempted", requests=4, length=100, output=40),
    CountedPhase("prefix", requests=4, length=80, output=5, shared=64),
    CountedPhase("sampled", requests=2, length=16, output=9, temperature=0.8),
    CountedPhase("crowd", requests=24, length=6, output=9, temperature=0.8, presence_penalty=0.5),
)


def run(options: CounterArguments, engine: Mapping[str, Any], progress: Progress) -> Record:
    """Run and count every phase, after an uncounted run of all of them that triggers lazy initialization."""
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


def baseline(record: Mapping[str, Any]) -> dict[str, object]:
    """Return the parts of the document that do not change from run to run, as a baseline to be committed."""
    where = {key: record["environment"][key] for key in ("python", "torch", "isa")}
    kept = {key: record[key] for key in ("schema_version", "kind", "config", "counters")}
    return {**kept, "environment": {key: _short_version(value) for key, value in where.items()}}


def compare(record: Mapping[str, Any], file: Path) -> ComparisonDocument:
    """Compare ``record`` with the baseline in ``file`` and return the comparison document.

    Counters that depend on Python, torch or the instruction set are omitted with a warning where these differ. Raises
    ``usage`` if the loads differ, and the errors of ``read_side``.
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
            warnings.append(
                f"The baseline was counted with {what} {theirs}, this run with {ours}: counters that depend on it "
                "are not compared."
            )
            before = {name: value for name, value in before.items() if names not in name}
            after = {name: value for name, value in after.items() if names not in name}
    rows = counter_rows(before, after)
    for row in rows:
        if row["counter"].endswith("python_calls") and row["verdict"] == CHANGED:
            grown = (row["new"] or 0) > (row["base"] or 0) * (1 + PYTHON_TOLERANCE)
            row["verdict"] = CHANGED if grown else "equal"
    compared: ComparedRows = {"metrics": [], "counters": rows}
    return {
        "kind": "comparison",
        "base": base.label,
        "new": "this installation",
        "margin": 0.0,
        "confidence": 1.0,
        **compared,
        "warnings": warnings,
        "verdict": verdict_of(compared),
    }


def _load_of(config: Mapping[str, object], key: str) -> object:
    load = config.get(key)
    # The path of the model does not affect the counters.
    return {name: value for name, value in load.items() if name != "model"} if isinstance(load, Mapping) else load


def _short_version(version: str | None) -> str | None:
    """Return ``2.13`` for ``2.13.0+cpu``."""
    return None if version is None else ".".join(version.split(".")[:2])


def _count(llm: LLM, phase: CountedPhase) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Run one phase. Returns its counters, and the number of calls of each operation and of the top functions."""
    before, step = llm.engine.stats, llm.engine.step
    pages: list[int] = []
    tokens: list[int] = []

    def counted(now: float, inbox: Inbox) -> StepOutput:
        output = step(now, inbox)
        pages.append(output.stats.num_pages - output.stats.num_free_pages)
        tokens.append(output.stats.num_scheduled_tokens)
        return output

    vars(llm.engine)["step"] = counted
    try:
        with Counting() as counting:
            _generate(llm, phase, seed=2)
    finally:
        del vars(llm.engine)["step"]
    after = llm.engine.stats
    totals = ("steps", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "preemptions")
    counters = {name: getattr(after, name) - getattr(before, name) for name in totals}
    counters |= {"scheduled_tokens": sum(tokens), "peak_pages": max(pages)}
    details = {
        "operations": dict(sorted(counting.by_operation.items())),
        "functions": dict(counting.by_function.most_common(40)),
    }
    return counters | counting.counters(), details


def _generate(llm: LLM, phase: CountedPhase, seed: int) -> None:
    from aiakq.runtime.protocol.sampling_params import SamplingParams

    rng = random.Random(f"{seed} {phase.name}")
    vocab_size = llm.engine.limits.vocab_size
    shared = [rng.randrange(vocab_size) for _ in range(phase.shared)]
    own = phase.length - phase.shared
    prompts: list[Prompt] = [
        {"prompt_token_ids": shared + [rng.randrange(vocab_size) for _ in range(own)]} for _ in range(phase.requests)
    ]
    params = SamplingParams(
        temperature=phase.temperature,
        presence_penalty=phase.presence_penalty,
        max_tokens=phase.output,
        ignore_eos=True,
        seed=seed,
    )
    if phase.shared:  # the first request alone fills the prefix cache for the others
        llm.generate(prompts[:1], params, use_tqdm=False)
    llm.generate(prompts[1 if phase.shared else 0 :], params, use_tqdm=False)


def _live_storages() -> dict[int, int]:
    """Return the address -> size in bytes of the storage of every CPU tensor of this process."""
    import torch

    gc.unfreeze()
    gc.collect()
    kinds = torch.Tensor, torch.nn.Parameter
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        # isinstance would trigger warnings of lazily loaded modules and include subclasses without storage.
        if type(each) in kinds and each.device.type == "cpu" and each.layout == torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _bytes_beyond(others: Mapping[int, int]) -> int:
    """Return the total bytes of all live tensor storages except ``others``."""
    return sum(size for address, size in _live_storages().items() if others.get(address) != size)


def _isa() -> str:
    from aiakq.kernels.cpu.library import load_library, unavailable

    return platform.machine() if unavailable() else load_library().isa
