"""Options of ``aiakq bench`` in addition to those of the engine. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import argument
from aiakq.arguments.common import MODEL, device_argument

#: Latency limits in milliseconds from MLPerf Inference v5.1 (p99) and from GuideLLM's guide.
PRESETS: dict[str, dict[str, float]] = {
    "chat": {"ttft": 200, "tpot": 50},
    "completion": {"e2el": 2000},
    "mlperf-llama2-70b": {"ttft": 2000, "tpot": 200},
    "mlperf-llama2-70b-interactive": {"ttft": 450, "tpot": 40},
    "mlperf-llama3.1-8b": {"ttft": 2000, "tpot": 100},
    "mlperf-llama3.1-8b-interactive": {"ttft": 500, "tpot": 30},
}
_EXAMPLES = "Examples: --shape 4096x14336, --rows 1,16,256"


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft:200 tpot:50`` into a mapping to milliseconds. Raises ValueError with the invalid entry."""
    limits: dict[str, float] = {}
    for text in (part for entry in entries for part in entry.replace(",", " ").split()):
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(text) from None
        if name not in ("ttft", "tpot", "e2el") or not 0 < limits[name] < float("inf"):
            raise ValueError(text)
    return limits


def _shapes(entries: Sequence[str]) -> tuple[tuple[int, int], ...]:
    return tuple(_shape(entry) for entry in entries)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.lower().partition("x")
    return _whole_number(n, text), _whole_number(k, text)


def _row_counts(entries: Sequence[str]) -> tuple[int, ...]:
    return tuple(_whole_number(entry, entry) for entry in entries)


def _whole_number(text: str, entry: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(entry)
    return int(text)


@dataclass(frozen=True, kw_only=True)
class LatencyArguments:
    """Options of ``bench latency``."""

    input_len: int = argument(32, "Number of tokens of every random prompt.", low=1)
    output_len: int = argument(128, "Number of tokens to generate per request.", low=1)
    batch_size: int = argument(8, "Requests per batch.", low=1)
    iterations: int = argument(10, "Number of measured batches.", flags=("--num-iters",), low=1)
    warmups: int = argument(
        2, "Number of warm-up batches, which are not measured.", flags=("--num-warmups", "--num-iters-warmup"), low=0
    )
    compare_speculation: bool = argument(
        False, "Also run every batch without draft tokens, before or after in turns, and report the speedup."
    )
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class WorkloadArguments:
    """Options that select the requests."""

    num_prompts: int | None = argument(None, "Number of requests; 100, or the whole dataset, if not given.", low=1)
    input_len: int = argument(
        256, "Number of tokens of every random prompt.", flags=("--input-len", "--random-input-len"), low=1
    )
    output_len: int = argument(
        128,
        "Number of tokens to generate per request.",
        flags=("--output-len", "--random-output-len", "--prefix-repetition-output-len"),
        low=1,
    )
    workload: str | None = argument(
        None,
        "Source of requests: random, dataset, prefix, conversation, trace, sharegpt, or one that a plugin adds.",
        metavar="NAME",
    )
    dataset: Path | None = argument(
        None,
        'File of prompts, one per line, as text or JSON ({"prompt": ...}); or a trace or ShareGPT file.',
        flags=("--dataset", "--dataset-path"),
        metavar="FILE",
    )
    prefix_len: int = argument(
        256,
        "Workload prefix: number of tokens of a shared prefix, followed by --input-len other tokens.",
        flags=("--prefix-len", "--prefix-repetition-prefix-len"),
        low=1,
    )
    num_prefixes: int = argument(
        1,
        "Workload prefix: number of different prefixes.",
        flags=("--num-prefixes", "--prefix-repetition-num-prefixes"),
        low=1,
    )
    turns: int = argument(4, "Workload conversation: number of requests per conversation.", low=1)
    trace_speed: float = argument(1.0, "Workload trace: factor by which the trace is sped up.", above=0.0)
    ignore_eos: bool | None = argument(None, "Always generate --output-len tokens; the default for random prompts.")
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class ThroughputArguments(WorkloadArguments):
    """Options of ``bench throughput``."""

    warmups: int = argument(1, "Number of warm-up runs, which are not measured.", flags=("--num-warmups",), low=0)
    compare_speculation: bool = argument(
        False, "Run the same requests in turns with and without draft tokens, and report the speedup."
    )
    compare_rounds: int = argument(3, "Rounds of --compare-speculation, each of which runs all requests twice.", low=1)


@dataclass(frozen=True, kw_only=True)
class ServeArguments(WorkloadArguments):
    """Options of ``bench serve``."""

    base_url: str | None = argument(None, "Address of a running server, like http://127.0.0.1:8000.", metavar="URL")
    host: str = argument("127.0.0.1", "Host of a running server, if --base-url is not given.")
    port: int = argument(8000, "Port of a running server, if --base-url is not given.", low=1, high=65535)
    model: str | None = argument(
        None, "Name of the model on the server; the first one listed if not given.", metavar="NAME"
    )
    request_rate: float = argument(
        float("inf"), "Requests per second; inf sends all at once.", above=0.0, hint="inf sends all at once."
    )
    burstiness: float = argument(
        1.0,
        "Burstiness of arrivals: 1 is a Poisson process, lower is burstier, higher is steadier, inf is constant.",
        above=0.0,
        hint="1 is a Poisson process.",
    )
    ramp_up_strategy: str | None = argument(
        None,
        "Change the rate from --ramp-up-start-rps to --ramp-up-end-rps over the run.",
        choices=("linear", "exponential"),
    )
    ramp_up_start_rps: float | None = argument(None, "Initial rate of a ramp, in requests per second.", above=0.0)
    ramp_up_end_rps: float | None = argument(None, "Final rate of a ramp, in requests per second.", above=0.0)
    duration_s: float | None = argument(
        None,
        "Seconds to send requests for, instead of --num-prompts; at a rate of inf, --max-concurrency requests are kept "
        "in flight.",
        flags=("--duration",),
        above=0.0,
    )
    warmup_s: float = argument(
        0.0, "Seconds at the start of the load to exclude from the metrics.", flags=("--warmup-seconds",), low=0.0
    )
    cooldown_s: float = argument(
        0.0, "Seconds at the end of the load to exclude from the metrics.", flags=("--cooldown-seconds",), low=0.0
    )
    max_concurrency: int | None = argument(None, "Maximum number of concurrent requests.", low=1)
    max_errors: int | None = argument(None, "Stop after this many failed requests.", low=1)
    stop_on_overload: bool = argument(
        False, "Stop if the server falls behind the rate: significantly fewer requests finish than become due."
    )
    client_processes: int = argument(
        1, "Number of client processes, for more streams than one process can handle.", low=1, high=64
    )
    adapters: tuple[str, ...] = argument(
        (),
        "LoRA adapter (or model) on the server; requests are assigned round-robin.",
        flags=("--adapter",),
        metavar="NAME",
    )
    endpoint: str = argument(
        "/v1/completions",
        "Route to send requests to; the chat route gets every prompt as a message.",
        choices=("/v1/completions", "/v1/chat/completions"),
    )
    extra_body: Mapping[str, object] = argument(
        dict,
        "Additional fields of every request, as a JSON object: tools, response_format, sampling parameters.",
        type=dict,
    )
    tokenizer: str | None = argument(
        None,
        "Model folder whose tokenizer counts tokens if the server sends no usage, and generates random prompts for "
        "chat; if not given, that of the served model if it is on this machine.",
        metavar="DIR",
    )
    vocab_size: int | None = argument(
        None, "Vocabulary size for random prompts, if the server does not report it.", low=2
    )
    goodput: Mapping[str, float] = argument(
        dict,
        "Limits in milliseconds for goodput, like 'ttft:200 tpot:50'.",
        type=tuple,
        metavar="METRIC:MS",
        convert=parse_goodput,
        expected="a metric (ttft, tpot or e2el), a colon and milliseconds",
        hint="Example: --goodput ttft:200 --goodput tpot:50",
    )
    preset: str | None = argument(
        None, "Predefined limits for a use case, instead of --goodput.", choices=tuple(PRESETS), metavar="NAME"
    )
    num_warmups: int = argument(1, "Number of warm-up requests, which are not measured.", low=0)
    timeout_s: float = argument(
        600.0, "Seconds without a token after which a request has failed.", flags=("--timeout",), low=0.1
    )
    api_key: str | None = argument(None, "Bearer token to send.", metavar="KEY")
    save_detailed: bool = argument(False, "Include the timings of every request in the JSON.")
    html: Path | None = argument(
        None, "Also write a report with charts to this file; implies --save-detailed.", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class RepeatArguments:
    """Repetitions of a benchmark."""

    repeats: int = argument(
        1,
        "Number of runs, for means with 95 % confidence intervals. A server started for the benchmark is restarted for "
        "each run.",
        low=1,
    )
    compare_speculation: bool = argument(
        False,
        "Send the same requests in turns with and without draft tokens, and report the speedup. A running server needs "
        "--enable-admin-routes.",
    )
    compare_rounds: int = argument(3, "Rounds of --compare-speculation, each of which sends all requests twice.", low=1)


@dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """Options of ``bench sweep`` in addition to those of ``bench serve``."""

    levels: int = argument(6, "Number of rates between one request at a time and saturation.", low=1)
    search: str | None = argument(
        None, "Find the highest rate that meets the limits of --goodput or --preset.", choices=("goodput",)
    )
    goodput_share: float = argument(0.99, "Fraction of requests that must meet the limits.", above=0.0, high=1.0)
    precision: float = argument(10.0, "Precision of the rate found by --search, in percent.", above=0.0)


@dataclass(frozen=True, kw_only=True)
class KernelArguments:
    """Options of ``bench kernels``."""

    model: str | None = argument(
        None,
        f"The model whose shapes, scheme and attention heads are measured: {MODEL}.",
        positional=True,
        metavar="[MODEL]",
    )
    shapes: tuple[tuple[int, int], ...] = argument(
        (),
        "Shape of a linear layer: outputs x inputs.",
        flags=("--shape",),
        metavar="NxK",
        convert=_shapes,
        expected="whole numbers above 0",
        hint=_EXAMPLES,
    )
    schemes: tuple[str, ...] = argument(
        (), "Scheme, like w4a16, w8a16, w8a8, w16; the model's own if not given.", flags=("--scheme",), metavar="NAME"
    )
    group_size: int = argument(128, "Group size of schemes with fewer than 8 bits.", low=1)
    rows: tuple[int, ...] = argument(
        (1, 16, 64),
        "Number of rows: tokens per step, or decoding sequences for attention.",
        metavar="N",
        convert=_row_counts,
        expected="whole numbers above 0",
        hint=_EXAMPLES,
    )
    context: int = argument(1024, "Number of tokens per sequence, for attention.", low=2)
    dtype: str = argument("auto", "Dtype of activations; auto has the same meaning as for serve.")
    kv_cache_dtype: str = argument("auto", "Dtype of the KV cache, as for serve.")
    device: str = device_argument()
    tune: bool = argument(
        False, "First find the fastest launch configurations and save them. GPUs only; takes minutes."
    )
    into: Path | None = argument(
        None,
        "Folder in which --tune saves; ~/.config/aiakq/launch, which is read at startup, if not given.",
        metavar="DIR",
    )
