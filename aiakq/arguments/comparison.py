"""Options of ``aiakq bench compare``, ``bench ab`` and ``bench counters``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import argument


def _margin() -> Any:
    return argument(2.0, "Percent by which a metric may be worse.", above=0.0, high=100.0)


def _confidence() -> Any:
    return argument(95.0, "Confidence of all verdicts together, in percent.", low=50.0, high=99.99)


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Files that other tools read."""

    output: Path | None = argument(None, "Also write the JSON to this file, atomically.", metavar="FILE")
    markdown: Path | None = argument(None, "Append a table in Markdown, as for $GITHUB_STEP_SUMMARY.", metavar="FILE")
    junit: Path | None = argument(None, "Write JUnit XML: a test case per gated metric.", metavar="FILE")
    github: Path | None = argument(
        None, "Write the new side's numbers for github-action-benchmark (customSmallerIsBetter).", metavar="FILE"
    )
    bencher: Path | None = argument(None, "Write the new side's numbers in Bencher's metric format.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Two results."""

    base: str = argument(
        ...,
        "A record of aiakq bench, vllm bench or guidellm (FILE#2 for its third benchmark), or a folder with a record "
        "per run.",
        positional=True,
        metavar="BASE",
    )
    new: str = argument(..., "The same, of what is compared with it.", positional=True, metavar="NEW")
    metrics: tuple[str, ...] = argument(
        (),
        "Metric that decides, like tpot_ms.p50; medians or means of durations, and throughput, if not given.",
        flags=("--metric",),
        metavar="KEY",
    )
    margin: float = _margin()
    confidence: float = _confidence()
    noise: float = argument(
        0.0, "Percent by which equal runs differ (standard deviation), where there is one run each.", low=0.0
    )
    across_machines: bool = argument(False, "Compare results of different machines.")
    allow_undecided: bool = argument(False, "Exit with 0 instead of 11 where intervals are too wide for a verdict.")


@dataclass(frozen=True, kw_only=True)
class AlternationArguments:
    """Two sides, measured in alternation."""

    base: str | None = argument(
        None,
        "What is compared with: a checkout, git revision, wheel, Python interpreter, virtual environment or model; "
        "this installation if not given.",
        metavar="SIDE",
    )
    new: str | None = argument(None, "What is compared; as --base.", metavar="SIDE")
    base_set: tuple[str, ...] = argument(
        (), "Engine argument of the base only; with --serve also a server's.", metavar="KEY=VALUE", separator=";"
    )
    new_set: tuple[str, ...] = argument(
        (), "Engine argument of the new side only; as --base-set.", metavar="KEY=VALUE", separator=";"
    )
    serve: bool = argument(False, "Start aiakq serve for each side in every round, and measure it over HTTP.")
    batch_size: int = argument(4, "Requests per batch; each turn is one batch.", low=1)
    input_len: int = argument(128, "Tokens of every random prompt.", low=1)
    output_len: int = argument(33, "Tokens to generate.", low=2)
    metrics: tuple[str, ...] = argument(
        (),
        "Metric that decides: prefill_ms, decode_ms, peak_mb (all three if not given), decode_mean_ms; "
        "with --serve ttft_ms, tpot_ms, peak_mb (all three if not given), e2el_ms, cpu_ms.",
        flags=("--metric",),
        metavar="KEY",
    )
    margin: float = _margin()
    confidence: float = _confidence()
    round_seconds: float = argument(3.0, "Seconds that a round measures, after both sides have started.", above=0.0)
    min_rounds: int = argument(5, "Rounds before the first look at the results.", low=2)
    max_rounds: int = argument(50, "Maximum number of rounds.", low=2)
    max_minutes: float = argument(10.0, "Minutes after which no further round begins.", above=0.0)
    timeout_s: float = argument(
        600.0, "Seconds without an answer until a side counts as failed.", flags=("--timeout",), low=0.1
    )
    allow_undecided: bool = argument(False, "Exit with 0 instead of 11 where intervals are too wide for a verdict.")
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class CounterArguments:
    """Counters and what they have to be."""

    against: Path | None = argument(
        None, "Counters that --output wrote earlier: exit with 10 if one is not what it was.", metavar="FILE"
    )
