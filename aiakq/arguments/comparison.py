"""Options of ``aiakq bench compare``, ``bench ab`` and ``bench counters``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.arguments.argument import argument


def _margin() -> Any:
    return argument(2.0, "Percent by which a metric may get worse.", above=0.0, high=100.0)


def _confidence() -> Any:
    return argument(95.0, "Joint confidence level of all verdicts, in percent.", low=50.0, high=99.99)


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Report files for other tools."""

    output: Path | None = argument(None, "Also write the JSON to this file, atomically.", metavar="FILE")
    markdown: Path | None = argument(None, "Append a table in Markdown, as for $GITHUB_STEP_SUMMARY.", metavar="FILE")
    junit: Path | None = argument(None, "Write JUnit XML: a test case per gated metric.", metavar="FILE")
    github: Path | None = argument(
        None, "Write the new side's numbers for github-action-benchmark (customSmallerIsBetter).", metavar="FILE"
    )
    bencher: Path | None = argument(None, "Write the new side's numbers in Bencher's metric format.", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Options of ``bench compare``."""

    base: str = argument(
        ...,
        "A result file of aiakq bench, vllm bench or guidellm (FILE#2 for its third benchmark), or a folder with a "
        "file per run.",
        positional=True,
        metavar="BASE",
    )
    new: str = argument(..., "The result to compare with BASE, given in the same way.", positional=True, metavar="NEW")
    metrics: tuple[str, ...] = argument(
        (),
        "Gated metric, like tpot_ms.p50; if not given, the median or mean of every duration, and throughput.",
        flags=("--metric",),
        metavar="KEY",
    )
    margin: float = _margin()
    confidence: float = _confidence()
    noise: float = argument(
        0.0, "Standard deviation between equal runs in percent, for sides with a single run.", low=0.0
    )
    across_machines: bool = argument(False, "Compare results of different machines.")
    allow_undecided: bool = argument(False, "Exit with 0 instead of 11 if intervals are too wide for a verdict.")


@dataclass(frozen=True, kw_only=True)
class AlternationArguments:
    """Options of ``bench ab``."""

    base: str | None = argument(
        None,
        "Base side: a checkout, git revision, wheel, Python interpreter, virtual environment or model; this "
        "installation if not given.",
        metavar="SIDE",
    )
    new: str | None = argument(None, "Side to compare with the base, given in the same way.", metavar="SIDE")
    base_set: tuple[str, ...] = argument(
        (),
        "Engine argument of the base side only; with --serve also server arguments.",
        metavar="KEY=VALUE",
        separator=";",
    )
    new_set: tuple[str, ...] = argument(
        (), "Engine argument of the new side only, like --base-set.", metavar="KEY=VALUE", separator=";"
    )
    serve: bool = argument(False, "Start aiakq serve for each side in every round, and measure it over HTTP.")
    batch_size: int = argument(4, "Requests per batch; each turn is one batch.", low=1)
    input_len: int = argument(128, "Number of tokens of every random prompt.", low=1)
    output_len: int = argument(33, "Number of tokens to generate per request.", low=2)
    metrics: tuple[str, ...] = argument(
        (),
        "Gated metric: prefill_ms, decode_ms, peak_mb (the three defaults) or decode_mean_ms; "
        "with --serve ttft_ms, tpot_ms, peak_mb (the three defaults), e2el_ms or cpu_ms.",
        flags=("--metric",),
        metavar="KEY",
    )
    margin: float = _margin()
    confidence: float = _confidence()
    round_seconds: float = argument(3.0, "Measuring time per round in seconds, excluding startup.", above=0.0)
    min_rounds: int = argument(5, "Number of rounds before the first analysis of the results.", low=2)
    max_rounds: int = argument(50, "Maximum number of rounds.", low=2)
    max_minutes: float = argument(10.0, "Minutes after which no further round is started.", above=0.0)
    timeout_s: float = argument(
        600.0, "Seconds without a response after which a side has failed.", flags=("--timeout",), low=0.1
    )
    allow_undecided: bool = argument(False, "Exit with 0 instead of 11 if intervals are too wide for a verdict.")
    seed: int | None = argument(None, "Seed, to repeat an earlier run; a new one each time if not given.", low=0)


@dataclass(frozen=True, kw_only=True)
class CounterArguments:
    """Options of ``bench counters``."""

    against: Path | None = argument(
        None, "Baseline that --output wrote earlier: exit with 10 if a counter differs from it.", metavar="FILE"
    )
