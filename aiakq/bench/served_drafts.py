"""``bench serve --compare-speculation``: the same load with and without draft tokens, in turns on one server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import httpx

from aiakq.bench import client as http
from aiakq.bench import repeats, serve, workload
from aiakq.bench.drafts import add_speedup, order
from aiakq.bench.load import Progress
from aiakq.bench.serve import ServeOptions
from aiakq.errors import error
from aiakq.records import Record

NO_DRAFTS = "The server proposed no draft tokens. Was it started with --speculative-config or --speculative-model?"


def run(
    options: ServeOptions, rounds: int, progress: Callable[[str], Progress], facts: Mapping[str, str] | None = None
) -> Record:
    """Send the same requests ``rounds`` times with draft tokens and as often without.

    Returns the record of the runs with draft tokens, whose ``speculation`` has the speed-up: ratios of the output
    throughput, and ``tpot_speedup``, which also tells where requests arrive at a given rate.

    progress  returns the callback of a run that it is given the name of.
    Raises ``usage`` for a server without admin routes, and what ``serve.run`` raises.
    """
    seed = workload.new_seed() if options.seed is None else options.seed
    runs: dict[bool, list[Record]] = {True: [], False: []}
    try:
        for number in range(rounds):
            for with_drafts in order(number):
                asyncio.run(_start_anew(options, with_drafts))
                name = f"round {number + 1} of {rounds}, {'with' if with_drafts else 'without'} drafts"
                runs[with_drafts].append(serve.run(replace(options, seed=seed), progress(name), facts))
    finally:
        asyncio.run(_start_anew(options, True))
    record = runs[True][0] if rounds == 1 else repeats.join(runs[True])
    found = dict(record.metrics["speculation"])
    _add_comparison(found, [run.metrics for run in runs[True]], [run.metrics for run in runs[False]])
    has_drafts = any(run.metrics["speculation"]["num_drafts"] for run in runs[True])
    return replace(
        record,
        config={**record.config, "compare_rounds": rounds},
        metrics={**record.metrics, "speculation": found},
        warnings=record.warnings if has_drafts else (*record.warnings, NO_DRAFTS),
    )


def template(rounds: int) -> dict[str, Any]:
    """Return the document of a comparison without requests."""
    document = serve.template()
    document["speculation"]["tpot_speedup"] = None
    return document if rounds == 1 else repeats.template(document)


def _add_comparison(
    found: dict[str, Any], drafting: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]
) -> None:
    """Add the speed-up to the metrics of draft tokens ``found``, from the metrics of the runs with and without them.
    None where a run measured nothing, also if all tokens of its requests arrived at once.
    """
    found["tpot_speedup"] = None
    fast, slow = ([run["mean_tpot_ms"] for run in runs] for runs in (drafting, plain))
    if all((*fast, *slow)):
        found["tpot_speedup"] = median(without / within for within, without in zip(fast, slow, strict=True))
    fast, slow = ([run["output_throughput"] for run in runs] for runs in (drafting, plain))
    if all((*fast, *slow)):
        add_speedup(found, [1 / rate for rate in fast], [1 / rate for rate in slow], 1)


async def _start_anew(options: ServeOptions, with_drafts: bool) -> None:
    """Switch draft tokens on or off, and clear the prefix cache."""
    async with http.open_client(options.base_url, options.api_key, options.timeout_s) as client:
        for path, body in (("/speculation", {"enabled": with_drafts}), ("/reset_prefix_cache", None)):
            try:
                answer = await client.post(path, json=body)
            except httpx.HTTPError as problem:
                reason = f"{type(problem).__name__} at POST {path}"
                raise error("no_answer", server=options.base_url, reason=reason) from None
            if answer.status_code in (404, 405):
                reason = f"--compare-speculation needs POST {path}, which the server does not have."
                hint = "Start it with --enable-admin-routes, or give its MODEL here instead of an address."
                raise error("usage", reason=reason, hint=hint)
            if answer.status_code != 200:
                reason = f"POST {path} has status {answer.status_code}."
                raise error("no_answer", server=options.base_url, reason=reason)
