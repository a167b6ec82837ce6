"""Options of ``aiakq bench`` in addition to those of the engine. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import argument
from aiakq.arguments.common import device_argument

#: Limits in milliseconds that others measure against: MLPerf's (inference v5.1, p99), and those of GuideLLM's guide.
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
    """``ttft:200 tpot:50`` (milliseconds) as a mapping. Raises ValueError with the entry that is wrong."""
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
    """One batch of equal requests."""

    input_len: int = argument(32, "Tokens of every random prompt.", low=1)
    output_len: int = argument(128, "Tokens to generate.", low=1)
    batch_size: int = argument(8, "Requests per batch.", low=1)
    iterations: int = argument(10, "Measured batches.", flags=("--num-iters",), low=1)
    warmups: int = argument(2, "Runs before the measured ones.", flags=("--num-warmups",), low=0)
    compare_speculation: bool = argument(
        False, "Run the same requests without draft tokens too, in turns, and report the speed-up."
    )
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class WorkloadArguments:
    """Which requests are sent."""

    num_prompts: int | None = argument(None, "Number of requests; 100, or all of the dataset, if not given.", low=1)
    input_len: int = argument(256, "Tokens of every random prompt.", low=1)
    output_len: int = argument(128, "Tokens to generate.", low=1)
    workload: str | None = argument(
        None,
        "Where requests come from: random, dataset, prefix, conversation, trace, sharegpt, or one that a package adds.",
        metavar="NAME",
    )
    dataset: Path | None = argument(
        None,
        'Prompts: a line of text or of JSON ({"prompt": ...}) each; or a trace, or a file of ShareGPT.',
        metavar="FILE",
    )
    prefix_len: int = argument(256, "Tokens of a shared prefix, before --input-len more; workload prefix.", low=1)
    num_prefixes: int = argument(1, "Number of shared prefixes; workload prefix.", low=1)
    turns: int = argument(4, "Requests of a conversation; workload conversation.", low=1)
    trace_speed: float = argument(1.0, "How many times as fast as recorded a trace is sent.", above=0.0)
    ignore_eos: bool | None = argument(None, "Always generate --output-len tokens; the default for random prompts.")
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class ThroughputArguments(WorkloadArguments):
    """Many requests that are all there from the start."""

    warmups: int = argument(1, "Runs before the measured ones.", flags=("--num-warmups",), low=0)
    compare_speculation: bool = argument(
        False, "Run the same requests without draft tokens too, in turns, and report the speed-up."
    )


@dataclass(frozen=True, kw_only=True)
class ServeArguments(WorkloadArguments):
    """Load on a server."""

    base_url: str | None = argument(None, "A running server, like http://127.0.0.1:8000.", metavar="URL")
    host: str = argument("127.0.0.1", "Instead of --base-url.")
    port: int = argument(8000, "Instead of --base-url.", low=1, high=65535)
    model: str | None = argument(
        None, "Name of the model on the server; the first one listed if not given.", metavar="NAME"
    )
    request_rate: float = argument(
        float("inf"), "Requests per second; inf sends all at once.", above=0.0, hint="inf sends all at once."
    )
    burstiness: float = argument(
        1.0,
        "Burstiness of arrivals: 1 is a Poisson process, less is burstier, more is steadier, inf is constant.",
        above=0.0,
        hint="1 is a Poisson process.",
    )
    ramp_up_strategy: str | None = argument(
        None,
        "Let the rate rise or fall from --ramp-up-start-rps to --ramp-up-end-rps.",
        choices=("linear", "exponential"),
    )
    ramp_up_start_rps: float | None = argument(None, "First rate of a ramp, in requests per second.", above=0.0)
    ramp_up_end_rps: float | None = argument(None, "Last rate of a ramp.", above=0.0)
    duration_s: float | None = argument(
        None,
        "Seconds to send for, in place of --num-prompts; at a rate of inf, --max-concurrency are kept in flight.",
        flags=("--duration",),
        above=0.0,
    )
    warmup_s: float = argument(
        0.0, "Seconds at the start of the load that are not measured.", flags=("--warmup-seconds",), low=0.0
    )
    cooldown_s: float = argument(
        0.0, "Seconds at its end that are not measured.", flags=("--cooldown-seconds",), low=0.0
    )
    max_concurrency: int | None = argument(None, "Most concurrent requests.", low=1)
    client_processes: int = argument(
        1, "Processes that send, for more streams than one can keep up with.", low=1, high=64
    )
    endpoint: str = argument(
        "/v1/completions",
        "Route to send to; to chat every prompt goes as a message.",
        choices=("/v1/completions", "/v1/chat/completions"),
    )
    extra_body: Mapping[str, Any] = argument(
        dict,
        "Further fields of every request as JSON: tools, response_format, sampling parameters.",
        type=dict,
    )
    tokenizer: str | None = argument(
        None,
        "Model folder whose tokenizer counts tokens where the server does not, and makes random prompts for chat; the "
        "served one's if it is on this machine.",
        metavar="DIR",
    )
    vocab_size: int | None = argument(
        None, "Vocabulary size for random prompts, if the server does not report it.", low=2
    )
    goodput: Mapping[str, float] = argument(
        dict,
        "Count the requests within these limits in ms, like 'ttft:200 tpot:50'.",
        type=tuple,
        metavar="METRIC:MS",
        convert=parse_goodput,
        expected="a metric (ttft, tpot or e2el), a colon and milliseconds",
        hint="Example: --goodput ttft:200 --goodput tpot:50",
    )
    preset: str | None = argument(
        None, "Limits of a known kind of use, in place of --goodput.", choices=tuple(PRESETS), metavar="NAME"
    )
    num_warmups: int = argument(1, "Runs before the measured ones.", low=0)
    timeout_s: float = argument(
        600.0, "Seconds without a token until a request counts as failed.", flags=("--timeout",), low=0.1
    )
    api_key: str | None = argument(None, "Bearer token to send.", metavar="KEY")
    save_detailed: bool = argument(False, "Keep the timings of every request in the JSON.")
    html: Path | None = argument(
        None, "Also write a report with charts to this file; implies --save-detailed.", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """Rising load on a server."""

    levels: int = argument(6, "Rates between one request at a time and saturation.", low=1)
    search: str | None = argument(
        None, "Find the highest rate that keeps the limits of --goodput or --preset.", choices=("goodput",)
    )
    goodput_share: float = argument(0.99, "Share of requests that has to keep the limits.", above=0.0, high=1.0)
    precision: float = argument(10.0, "Percent within which the rate is searched.", above=0.0)


@dataclass(frozen=True, kw_only=True)
class KernelArguments:
    """Single kernels."""

    model: str | None = argument(
        None,
        "Folder or hub name of a model whose shapes, scheme and heads are used.",
        positional=True,
        metavar="[MODEL]",
    )
    shapes: tuple[tuple[int, int], ...] = argument(
        (),
        "Shape of a layer: outputs x inputs.",
        flags=("--shape",),
        metavar="NxK",
        convert=_shapes,
        expected="whole numbers above 0",
        hint=_EXAMPLES,
    )
    schemes: tuple[str, ...] = argument(
        (), "Scheme, like w4a16, w8a16, w8a8, w16; the model's own if not given.", flags=("--scheme",), metavar="NAME"
    )
    group_size: int = argument(128, "Inputs per scale, for fewer than 8 bits.", low=1)
    rows: tuple[int, ...] = argument(
        (1, 16, 64),
        "Tokens of a step, or decoding sequences.",
        metavar="N",
        convert=_row_counts,
        expected="whole numbers above 0",
        hint=_EXAMPLES,
    )
    context: int = argument(1024, "Tokens of each sequence, for attention.", low=2)
    dtype: str = argument("auto", "Dtype of activations; auto as for serve.")
    kv_cache_dtype: str = argument("auto", "Dtype of the KV cache; as for serve.")
    device: str = device_argument()
    tune: bool = argument(
        False, "First find the fastest launch configurations and save them. GPUs only; takes minutes."
    )
    into: Path | None = argument(None, "Where --tune writes; ~/.config/aiakq/launch, read from then on.", metavar="DIR")
