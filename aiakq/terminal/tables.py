"""Tables of results: one function per kind of result."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from aiakq.evaluation.wording import DECIDES, change_text, counted, interval_text, kl_text, percent_text
from aiakq.terminal import console, quality_tables
from aiakq.terminal.console import facts, number, plain, result_line, show, size, table, warning

if TYPE_CHECKING:
    from aiakq.bench.gates import Outcome
    from aiakq.quantizers.report.records import QuantizeReport
    from aiakq.runtime.inspect.inspection import Inspection, Layer

#: Distributions of a benchmark, in display order.
_DURATIONS = {
    "latency_ms": "batch latency",
    "queue_ms": "wait before sending",
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2el_ms": "end-to-end latency",
    "scheduled_e2el_ms": "latency from scheduled time",
}
#: Distributions shown only if requests had to wait.
_IF_QUEUED = ("queue_ms", "scheduled_e2el_ms")
_RATES = {
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "all tokens/s",
    "max_output_tokens_per_s": "peak output tokens/s",
    "max_concurrent_requests": "peak concurrent requests",
}


def bench_result(document: Mapping[str, Any]) -> None:
    """Print a benchmark's record: configuration, rates, distributions in milliseconds, warnings."""
    config, environment = document["config"], document["environment"]
    model = config.get("model") or config.get("engine", {}).get("model")
    rows: dict[str, object] = {"model": model, "load": _load(document, config)}
    engine = environment.get("engine") or {}
    rows["device"] = engine.get("device")
    if environment.get("device_name"):
        rows["device"] = f"{environment['device_name']}, {counted(environment['threads'], 'thread')}"
    rows["dtype"] = engine.get("dtype")
    if "completed" in document:
        rows["requests"] = _requests(document)
    if document.get("duration"):
        rows["duration"] = console.seconds(document["duration"])
    # The peak is per full second, which a shorter run does not have.
    is_short = document.get("duration") is not None and document["duration"] < 1
    for key, name in _RATES.items():
        if document.get(key) is not None and not (is_short and key == "max_output_tokens_per_s"):
            rows[name] = number(document[key]) + _interval(document, key)
    share = document["prefix_cache"]["hit_rate"]
    rows["prefix-cache hits"] = "not reported" if share is None else f"{share:.1%}"
    rows |= _drafts(document.get("speculation") or {})
    rows["seed"] = document["seed"]
    facts(f"bench {document['kind']}", rows)
    grid = table("milliseconds", "mean", "p50", "p90", "p95", "p99", "max")
    for key, name in _DURATIONS.items():
        summary = document.get(key)
        if summary is None or summary["mean"] is None or (key in _IF_QUEUED and document["queue_ms"]["max"] < 1):
            continue
        columns = ("mean", "p50", "p90", "p95", "p99", "max")
        grid.add_row(name, *(number(summary[column]) for column in columns))
        bounds = (document.get("intervals") or {}).get(key)
        if bounds is not None:
            grid.add_row("  95 % interval, +-", *(_half_width(bounds[column]) for column in columns))
    show(grid)
    for text in document["warnings"]:
        warning(text)


def _interval(document: Mapping[str, Any], key: str) -> str:
    """Format the interval of several runs, like `` (95 %: 9.1 to 9.7)``; empty if there is none."""
    bounds = (document.get("intervals") or {}).get(key)
    if bounds is None or bounds["low"] is None:
        return ""
    return f" (95 %: {number(bounds['low'])} to {number(bounds['high'])})"


def _half_width(bounds: Mapping[str, float | None]) -> str:
    low, high = bounds["low"], bounds["high"]
    return "-" if low is None or high is None else number((high - low) / 2)


def _drafts(drafts: Mapping[str, Any]) -> dict[str, object]:
    """Return rows about draft tokens, if there were any."""
    rows: dict[str, object] = {}
    if drafts.get("num_draft_tokens"):
        by_position = ", ".join(f"{share:.0%}" for share in drafts["acceptance_by_position"])
        rows["draft tokens"] = f"{drafts['acceptance_rate']:.1%} accepted; by position {by_position}"
        rows["tokens per verification"] = number(drafts["acceptance_length"])
    if drafts.get("speedup") is not None:
        without, bounds = number(drafts["output_throughput_without"]), drafts["speedup_interval"]
        rounds = len(drafts["speedups"])
        interval = "" if bounds["low"] is None else f" (95 %: {bounds['low']:.2f} to {bounds['high']:.2f})"
        rows["speedup from drafts"] = f"{drafts['speedup']:.2f} x{interval}, {rounds} rounds in turns"
        if drafts.get("tpot_speedup") is not None:
            rows["speedup of TPOT"] = f"{drafts['tpot_speedup']:.2f} x"
        rows["output tokens/s without"] = without
    return rows


def sweep_result(document: Mapping[str, Any]) -> None:
    """Print a sweep: one row per level, and the highest rate within the limits."""
    config = document["config"]
    limits = ", ".join(f"{name} {number(limit)} ms" for name, limit in document["limits"].items())
    rows: dict[str, object] = {"model": config["model"], "seconds per level": number(config["duration_s"])}
    if limits:
        rows["limits"] = f"{limits}, for {config['goodput_share']:.1%} of the requests"
        best = document["max_goodput_rate"]
        rows["highest rate"] = "no rate met the limits" if best is None else f"{number(best)} requests/s"
    facts("bench sweep", rows)
    grid = table("load", "requests/s", "tokens/s", "good", "TTFT p50", "p99", "TPOT p50", "p99")
    for level in document["levels"]:
        share, ttft, tpot = level["goodput_share"], level["ttft_ms"], level["tpot_ms"]
        grid.add_row(
            level["level"],
            *(number(level[key], 3) for key in ("request_throughput", "output_throughput")),
            "-" if share is None else f"{share:.0%}",
            *(number(value, 3) for value in (ttft["p50"], ttft["p99"], tpot["p50"], tpot["p99"])),
        )
    show(grid)
    for text in document["warnings"]:
        warning(text)


def kernels_result(document: Mapping[str, Any]) -> None:
    """Print times of kernels, each next to its roofline."""
    environment, ceilings = document["environment"], document["ceilings"]
    peak = (
        f"{number(ceilings['gbps'])} GB/s, {number(ceilings['float_tflops'], 3)} TFLOP/s, "
        f"{number(ceilings['int8_tops'], 3)} TOP/s of int8"
    )
    facts(
        "bench kernels",
        {
            "device": ", ".join(
                (environment["device_name"], counted(environment["threads"], "thread"), document["config"]["dtype"])
            ),
            "measured peak": peak,
            "of the roofline": f"{document['of_roofline']:.0%} (geometric mean)",
        },
    )
    grid = table("kernel", "of", "runs in", "rows", "us", "GB/s", "roofline, us", "reached", left=(0, 1, 2))
    for row in document["rows"]:
        names = (row["kernel"], row["of"], row["implementation"])
        numbers = (number(row[key]) for key in ("rows", "us", "gbps", "roofline_us"))
        grid.add_row(*map(plain, names), *numbers, f"{row['of_roofline']:.0%}")
    show(grid)
    for text in document["warnings"]:
        result_line((plain(text), "dim"))


def counters_result(document: Mapping[str, Any]) -> None:
    """Print counters: one row per counter, one column per phase."""
    counters = document["counters"]
    phases = [phase["name"] for phase in document["config"]["phases"]]
    names = dict.fromkeys(name.partition(".")[2] for name in counters if name.partition(".")[0] in phases)
    facts(
        "bench counters",
        {f"tensor bytes when {name}": number(counters[f"{name}.tensor_bytes"]) for name in ("loaded", "finished")},
    )
    grid = table("counter", *phases)
    for name in names:
        grid.add_row(name, *(number(counters[f"{phase}.{name}"]) for phase in phases))
    show(grid)


#: Styles of verdicts.
_VERDICTS = {"worse": "bold red", "changed": "bold red", "undecided": "yellow", "better": "green"}


def comparison(document: Mapping[str, Any]) -> None:
    """Print a comparison: every metric with its change, interval and verdict, and the counters that changed."""
    from aiakq.bench.comparison.compare import percent

    rows: dict[str, object] = {"base": document["base"], "new": document["new"]}
    if document["metrics"]:
        confidence = f"{100 * document['confidence']:g} % joint confidence"
        rows["verdicts"] = f"{confidence}; margin {100 * document['margin']:g} %"
    if "rounds" in document:
        rows["rounds"] = f"{document['rounds']} in {console.seconds(document['duration'])}"
    changed = [row for row in document["counters"] if row["verdict"] == "changed"]
    if document["counters"]:
        rows["counters"] = f"{len(changed)} of {len(document['counters'])} changed"
    facts("comparison", rows)
    if document["metrics"]:
        grid = table("metric", "base", "new", "change, %", "interval, %", "verdict", left=(0, 5))
        for row in document["metrics"]:
            low, high = row["low"], row["high"]
            interval = "-" if low is None else f"{percent(low)} to {percent(high)}"
            verdict = Text(row["verdict"], _VERDICTS.get(row["verdict"], "")) if row["gated"] else ""
            numbers = (number(row["base"]), number(row["new"]), percent(row["ratio"]), interval)
            grid.add_row(plain(row["metric"]), *numbers, verdict)
        show(grid)
    if changed:
        grid = table("counter", "base", "new")
        for row in changed:
            grid.add_row(plain(row["counter"]), number(row["base"]), number(row["new"]))
        show(grid)
    for text in document["warnings"]:
        warning(text)


def _load(document: Mapping[str, object], config: Mapping[str, Any]) -> str:
    lengths = f"{config['input_len']} tokens in, {config['output_len']} out"
    if document["kind"] == "latency":
        return f"{config['iterations']} batches of {config['batch_size']}, {lengths}"
    source = config["dataset"] if config["workload"] == "dataset" else f"{config['workload']} prompts, {lengths}"
    text = f"{config['num_prompts']} requests: {source}"
    if config.get("repeats"):
        text = f"{config['repeats']} runs of {text}"
    if document["kind"] == "serve":
        rate = config["request_rate"]
        text += ", all at once" if rate == "inf" else f", {number(rate)} per second"
        if config["max_concurrency"]:
            text += f", at most {config['max_concurrency']} in flight"
    return text


def _requests(document: Mapping[str, Any]) -> str:
    text = f"{document['completed']} completed"
    if document["failed"]:
        text += f", {document['failed']} failed"
    return text + f"; {number(document['total_input_tokens'])} tokens in, {number(document['total_output_tokens'])} out"


def quantize_report(report: QuantizeReport) -> None:
    """Print the report of a quantization: size, errors, and the command to serve the checkpoint."""
    worst = report.worst
    rows: dict[str, object] = {
        "method": f"{report.method}, {report.format} format",
        "scheme": report.scheme,
        "bits per weight": f"{report.bits_per_weight:.2f} in quantized layers",
        "size": f"{size(report.bytes_before)} before, {size(report.bytes_after)} after",
        "layer error": "not measured" if worst is None else f"{report.mean_error:.2%} mean",
        "worst layer": None if worst is None else f"{worst.error:.2%} {worst.name}",
        **_quality(report),
        "calibration": None if report.calibration is None else f"{report.calibration}, {number(report.tokens)} tokens",
        "time": console.seconds(report.seconds),
        "written to": report.output,
    }
    facts("quantized", rows)
    if report.evaluations:
        if len(report.evaluations) > 1:
            quality_tables.text_table(report.evaluations)
        quality_tables.wrapped(DECIDES, "dim")
    for text in report.notes:
        quality_tables.wrapped(text, "dim")
    for text in report.warnings:
        warning(text)
    result_line("")
    from aiakq.runtime.text.tokenizer_files import has_tokenizer

    serve = f"aiakq serve {shlex.quote(plain(report.output))}"
    result_line("next: ", (serve if has_tokenizer(Path(report.output)) else f"{serve} --tokenizer DIR", "bold"))


def _quality(report: QuantizeReport) -> dict[str, object]:
    """Return rows about the comparison with the source on the first text, if there was one."""
    before, after = report.perplexity_before, report.perplexity_after
    if before is None or after is None:
        how = "; aiakq eval measures it" if report.predicts_text else ": compare the results of your own texts"
        return {"quality": f"not measured{how}"}
    first = report.evaluations[0] if report.evaluations else {}

    def interval(key: str, shown: Callable[[float], str]) -> str:
        bounds = first.get(f"{key}_interval")
        return "" if bounds is None else f" ({interval_text(bounds, shown)})"

    rows: dict[str, object] = {}
    rows["quality"] = f"on {number(report.evaluation_tokens)} tokens of {report.evaluation_text}; 95 % intervals"
    if report.kl is not None and report.top1_agreement is not None:
        rows["KL divergence"] = f"{number(report.kl, 3)} nats per token{interval('kl', kl_text)}"
        rows["top-1 agreement"] = f"{percent_text(report.top1_agreement)}{interval('top1_agreement', percent_text)}"
    change = f"{change_text(after / before)}{interval('perplexity_ratio', change_text)}"
    rows["perplexity"] = f"{number(before, 5)} before, {number(after, 5)} after, {change}"
    return rows


def gate_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print one line per gate."""
    for outcome in outcomes:
        verdict = ("failed", "bold red") if outcome.failed else ("passed", "green")
        result_line("gate ", verdict, "  ", plain(outcome.describe()))


def inspection(report: Inspection, layers: Sequence[Layer]) -> None:
    """Print a checkpoint: facts, its layers (collapsed or not), and why better kernels were passed over."""
    spec = report.spec
    facts(
        "checkpoint",
        {
            "folder": report.path,
            "architecture": f"{report.architecture}, {report.support}",
            "written by": report.writer,
            "quantization": "none" if spec is None else f"{spec.method}, {spec.describe()}, {spec.format} format",
            "parameters": f"{number(report.parameters)} in {size(report.nbytes)}, {report.files} file(s)",
            "bits per weight": _bits(report),
            "context": None if report.context is None else f"{report.context} tokens",
            "KV cache": None if report.kv_bytes_per_token is None else f"{size(report.kv_bytes_per_token)} per token",
            "would run on": f"{report.device}, {report.dtype} ({report.dtype_reason})",
            "operations": _operations(report),
        },
    )
    grid = table("layer", "scheme", "N x K", "group", "size", "runs on")
    narrow = console.err().width < 100
    for layer in layers:
        count = f"{layer.count} x " if layer.count > 1 else ""
        grid.add_row(
            plain(_short(layer.name) if narrow else layer.name),
            layer.scheme,
            f"{count}{layer.n} x {layer.k}",
            {None: "-", layer.k: "row"}.get(layer.group_size, str(layer.group_size)),
            size(layer.nbytes * layer.count),
            layer.implementation or "-",
        )
    show(grid)
    for text in _reasons(report, layers):
        for part in textwrap.wrap(text, console.err().width):
            result_line((part, "dim"))
    _inventory(report)


def _inventory(report: Inspection) -> None:
    """Print the tensors that are missing, extra or of another shape, if any."""
    from aiakq.formats import separate_head
    from aiakq.formats.left_out import describe
    from aiakq.runtime.inspect.inspection import collapse_differences

    for remark in report.remarks:
        warning(remark)
    if report.stored_head:
        warning(separate_head.remark(report.stored_head))
    for left_out in describe(report.left_out):
        result_line((f"left out: {left_out}", "dim"))
    if report.differences is None:
        return
    if not report.differences:
        result_line(("inventory: every tensor that the config implies is there, and no other", "dim"))
        return
    grid = table("not as the config implies", "found", "expected", "tensors")
    for each, count in collapse_differences(report.differences):
        grid.add_row(plain(each.name), each.found, each.expected, number(count))
    show(grid)
    warning(
        f"{len(report.differences)} tensors are missing, extra, or of another shape or dtype; aiakq would not load this"
    )


def _bits(report: Inspection) -> str | None:
    whole, quantized = report.bits_per_weight(), report.bits_per_weight(quantized_only=True)
    if whole is None:
        return None
    return f"{whole:.2f}" if quantized is None else f"{quantized:.2f} in quantized layers, {whole:.2f} in all"


def _short(name: str) -> str:
    """Remove the prefix that all layers share from a module name."""
    for stem in ("model.decoder.layers.", "model.layers.", "transformer.h.", "model."):
        if name.startswith(stem):
            return name.removeprefix(stem)
    return name


def _operations(report: Inspection) -> str | None:
    """Return the implementations of operations other than linear: ``norm, attention: cpu; sampling: torch``."""
    names: dict[str, list[str]] = {}
    for each in report.operations:
        names.setdefault(each.implementation, []).append(each.name)
    return "; ".join(f"{', '.join(operations)}: {name}" for name, operations in names.items()) or None


def _reasons(report: Inspection, layers: Sequence[Layer]) -> list[str]:
    """Return why better implementations were passed over, once per implementation and reason."""
    kinds: dict[tuple[str, str], dict[str, None]] = {}
    rows = [(each.name, each.passed_over) for each in report.operations]
    for kind, passed_over in [*rows, *((layer.scheme, layer.passed_over) for layer in layers)]:
        for why in passed_over:
            kinds.setdefault(why, {})[kind] = None
    return [f"{', '.join(of)}: not {name}, because {reason}" for (name, reason), of in kinds.items()]
