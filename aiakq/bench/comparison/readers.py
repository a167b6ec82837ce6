"""Read benchmark results: JSON files of aiakq, of vLLM's benchmarks and of GuideLLM.

A reader converts a document to a ``Result`` with aiakq's metric names. ``read_side`` reads a file, or a folder with one
JSON file per run of the same benchmark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from aiakq.bench.comparison.statistics import Estimate, of_mean, of_quantile, of_runs, student_t
from aiakq.bench.summary import MACHINE, PERCENTILES
from aiakq.errors import AiakqError, error
from aiakq.records import MAX_RESULT_BYTES
from aiakq.system.files import read_named_text

#: Durations that have statistics, without their unit, in display order.
DURATIONS = ("latency", "ttft", "tpot", "itl", "e2el", "scheduled_e2el", "queue")
#: Metrics of which a higher value is better. A lower value of any other is.
HIGHER_IS_BETTER = frozenset(
    {
        *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "goodput_share"),
        "max_output_tokens_per_s",
    }
)
_RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
#: GuideLLM's metric -> aiakq's. Its inter-token latency excludes the first token and averages per request: tpot.
_GUIDELLM = {"time_to_first_token_ms": "ttft", "inter_token_latency_ms": "tpot", "request_latency": "e2el"}
_GUIDELLM_RATES = {
    "requests_per_second": "request_throughput",
    "output_tokens_per_second": "output_throughput",
    "tokens_per_second": "total_token_throughput",
}


@dataclass(frozen=True)
class Result:
    """Results of one or several runs of a benchmark.

    tool      "aiakq", "vllm" or "guidellm".
    kind      which benchmark of the tool.
    label     file name, with the version or commit if known.
    metrics   metric name, like ``ttft_ms.p50`` -> estimate.
    counters  counter name -> value; deterministic.
    machine   properties of the machine that affect timings; empty if the tool does not record any.
    settings  options of the benchmark.
    """

    tool: str
    kind: str
    label: str
    metrics: Mapping[str, Estimate]
    counters: Mapping[str, int] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


def read_side(path: Path) -> Result:
    """Read a result file, or a folder of runs as one result. Raises ``model_malformed`` and ``usage``."""
    if not path.is_dir():
        return _read_file(path)
    files = sorted(path.glob("*.json"))
    if not files:
        raise error("usage", reason=f"The folder {path} has no *.json files.", hint="Each file in it is one run.")
    return join_runs(path.name, [_read_file(file) for file in files])


def join_runs(label: str, runs: Sequence[Result]) -> Result:
    """Merge several runs of one benchmark into one result. Raises ``usage`` if tools or kinds differ."""
    first = runs[0]
    if len(runs) == 1:
        return first
    for run in runs[1:]:
        if (run.kind, run.tool) != (first.kind, first.tool):
            raise error(
                "usage",
                reason=f"{first.label} and {run.label} are not runs of the same benchmark.",
                hint="A folder must contain runs of one benchmark.",
            )
    common = [name for name in first.metrics if all(name in run.metrics for run in runs)]
    metrics = {name: of_runs([run.metrics[name].value for run in runs]) for name in common}
    counters = {
        name: value for name, value in first.counters.items() if all(run.counters.get(name) == value for run in runs)
    }
    return Result(first.tool, first.kind, label, metrics, counters, first.machine, first.settings)


def _read_file(path: Path) -> Result:
    name, _, number = path.name.partition("#")
    file = path.with_name(name)

    def unreadable(reason: str) -> AiakqError:
        hint = "Give a benchmark result, or a folder of them."
        return error("usage", reason=f"{file} cannot be read: {reason}.", hint=hint)

    text = read_named_text(file, MAX_RESULT_BYTES, unreadable)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error("no_result", file=file, reason=f"it is no JSON ({problem})") from None
    for matches, read in _READERS:
        if isinstance(document, dict) and matches(document):
            try:
                return read(document, str(path), int(number) if number.isdecimal() else None)
            except (KeyError, TypeError, AttributeError, IndexError) as problem:
                reason = f"it lacks {problem}" if isinstance(problem, KeyError) else problem
                raise error("no_result", file=file, reason=reason) from None
    raise error("no_result", file=file, reason="it lacks the keys of one")


# --- aiakq ----------------------------------------------------------------------------------------------------------


def _read_aiakq(document: dict[str, Any], label: str, number: int | None) -> Result:
    if document.get("runs"):  # of --repeats
        single = {key: value for key, value in document.items() if key not in ("runs", "intervals")}
        runs = [_read_aiakq({**single, **run}, label, number) for run in document["runs"]]
        return join_runs(runs[0].label, runs)
    environment, config = document.get("environment") or {}, document.get("config") or {}
    samples = _samples_of(document)
    metrics = _durations(document, samples, document.get("completed") or document.get("num_requests"))
    metrics |= _rates(document)
    for name in ("load_s", "peak_bytes"):
        if _positive(document.get(name)):
            metrics[name] = Estimate(document[name])
    for row in document.get("rows") or () if document["kind"] == "kernels" else ():
        name = "_".join(str(row[key]) for key in ("kernel", "of", "rows")).replace(" ", "_")
        metrics[f"{name}_us"] = Estimate(row["us"])
    machine = {key: environment[key] for key in MACHINE if environment.get(key) is not None}
    engine = environment.get("engine") or {}
    if engine.get("device"):
        machine["engine device"] = engine["device"]
    commit = environment.get("commit") or environment.get("aiakq")
    label = f"{label} ({commit})" if commit else label
    settings = {key: value for key, value in config.items() if key not in ("base_url", "server_version")}
    counters = document.get("counters") or {}
    if document["kind"] == "counters":
        machine = {key: environment.get(key) for key in ("python", "torch", "isa")}
    return Result("aiakq", document["kind"], label, metrics, counters, machine, settings)


def _samples_of(document: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the samples of each duration, one per request or batch, in milliseconds, if the file has them."""
    detailed = document.get("detailed") or document
    samples: dict[str, list[float]] = {}
    for key, name in (("ttfts", "ttft"), ("latencies", "latency" if "avg_latency" in document else "e2el")):
        values = [1000 * value for value in detailed.get(key) or () if value]
        if values:
            samples[name] = values
    gaps, lengths = detailed.get("itls"), detailed.get("output_lens")
    if gaps and lengths:
        samples["tpot"] = [
            1000 * sum(each) / (length - 1) for each, length in zip(gaps, lengths, strict=False) if length > 1 and each
        ]
    return samples


def _durations(
    document: Mapping[str, Any], samples: Mapping[str, Sequence[float]], count: object
) -> dict[str, Estimate]:
    """Return means and percentiles, which both tools store under vLLM's flat keys, with errors where possible."""
    estimates: dict[str, Estimate] = {}
    for name in DURATIONS:
        mean, deviation = document.get(f"mean_{name}_ms"), document.get(f"std_{name}_ms")
        own = samples.get(name, ())
        if _positive(mean):
            many = len(own) or (count if isinstance(count, int) and name in ("ttft", "tpot", "e2el") else 0)
            known = isinstance(deviation, (int, float)) and many > 1
            estimates[f"{name}_ms.mean"] = of_mean(mean, float(deviation or 0), many) if known else Estimate(mean)
        for rank in PERCENTILES:
            value = document.get(f"p{rank}_{name}_ms", document.get(f"median_{name}_ms") if rank == 50 else None)
            if _positive(value):
                estimates[f"{name}_ms.p{rank}"] = of_quantile(own, value, rank) if own else Estimate(value)
    return estimates


def _rates(document: Mapping[str, Any]) -> dict[str, Estimate]:
    return {name: Estimate(document[name]) for name in _RATES if _positive(document.get(name))}


def _positive(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


# --- vLLM -----------------------------------------------------------------------------------------------------------


def _read_vllm(document: dict[str, Any], label: str, number: int | None) -> Result:
    names = ("backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency")
    settings = {name: document[name] for name in names if name in document}
    if "avg_latency" in document:
        seconds = document["latencies"]
        metrics = {"latency_ms.mean": of_runs([1000 * value for value in seconds])}
        for rank, value in document.get("percentiles", {}).items():
            if int(rank) in PERCENTILES:
                metrics[f"latency_ms.p{rank}"] = of_quantile([1000 * x for x in seconds], 1000 * value, int(rank))
        return Result("vllm", "latency", label, metrics, settings=settings)
    if "elapsed_time" in document:
        names_of_rates = {"requests_per_second": "request_throughput", "tokens_per_second": "total_token_throughput"}
        metrics = {ours: Estimate(document[name]) for name, ours in names_of_rates.items() if name in document}
        return Result("vllm", "throughput", label, metrics, settings=settings)
    metrics = _durations(document, _samples_of(document), document["completed"]) | _rates(document)
    return Result("vllm", "serve", label, metrics, settings=settings)


# --- GuideLLM -------------------------------------------------------------------------------------------------------


def _read_guidellm(document: dict[str, Any], label: str, number: int | None) -> Result:
    benchmarks = document["benchmarks"]
    if number is None and len(benchmarks) > 1:
        raise error(
            "usage",
            reason=f"{label} contains {len(benchmarks)} benchmarks.",
            hint=f"Choose one: {label}#0 to {label}#{len(benchmarks) - 1}.",
        )
    chosen = benchmarks[number or 0]
    measured, config = chosen["metrics"], chosen.get("config") or {}
    requests = (measured.get("request_totals") or {}).get("successful")
    confidence = config.get("confidence") or 0.95
    metrics: dict[str, Estimate] = {}
    for theirs, ours in _GUIDELLM.items():
        found = (measured.get(theirs) or {}).get("successful") or {}
        scale = 1000.0 if theirs == "request_latency" else 1.0
        if not _positive(found.get("mean")):
            continue
        # GuideLLM's count of per-token times is that of tokens, which are not independent within a request.
        count = min(found.get("count") or 0, requests or math.inf)
        deviation = scale * (found.get("std_dev") or 0.0)
        metrics[f"{ours}_ms.mean"] = of_mean(scale * found["mean"], deviation, int(count))
        for rank in PERCENTILES:
            value = (found.get("percentiles") or {}).get(f"p{rank}")
            bounds = (found.get("percentile_cis") or {}).get(f"p{rank}")
            if _positive(value):
                metrics[f"{ours}_ms.p{rank}"] = _of_interval(scale * value, bounds, confidence, int(count))
    for theirs, ours in _GUIDELLM_RATES.items():
        value = ((measured.get(theirs) or {}).get("successful") or {}).get("mean")
        if _positive(value):
            metrics[ours] = Estimate(value)
    strategy = config.get("strategy") or {}
    settings = {key: strategy[key] for key in ("type_", "streams", "rate") if strategy.get(key) is not None}
    return Result("guidellm", "serve", label, metrics, settings=settings)


def _of_interval(value: float, bounds: Mapping[str, object] | None, confidence: float, count: int) -> Estimate:
    """Return a percentile with the error of the interval that GuideLLM 0.8 and later store for it."""
    low, high = ((bounds or {}).get(key) for key in ("lower", "upper"))
    if not _positive(low) or not _positive(high):
        return Estimate(value)
    error = math.log(high / low) / 2 / student_t((1 + confidence) / 2, math.inf)
    return Estimate(value, error, math.inf, count, "requests") if error > 0 else Estimate(value)


_Reader = Callable[[dict[str, object], str, int | None], Result]
#: (whether a document is of a tool, reader for it), first match wins.
_READERS: list[tuple[Callable[[dict[str, object]], bool], _Reader]] = [
    (lambda document: "schema_version" in document and "kind" in document, _read_aiakq),
    (lambda document: isinstance(document.get("benchmarks"), list) and "metadata" in document, _read_guidellm),
    (
        lambda document: "mean_ttft_ms" in document or "avg_latency" in document or "elapsed_time" in document,
        _read_vllm,
    ),
]
