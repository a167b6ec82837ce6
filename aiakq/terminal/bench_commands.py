"""``aiakq bench``: options, one call into aiakq/bench, a table, one JSON document, gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aiakq.arguments.server import checked, engine_arguments
from aiakq.errors import error
from aiakq.terminal import console, tables
from aiakq.terminal.help import Command, Group
from aiakq.terminal.options import DeviceOption, GateOption, OutputOption, SeedOption, with_arguments

if TYPE_CHECKING:
    from aiakq.records import Record

bench = typer.Typer(name="bench", cls=Group, help="Measure: a table on stderr, one JSON document on stdout.")

InputLen = Annotated[int, typer.Option("--input-len", metavar="N", min=1, help="Tokens of every random prompt.")]
OutputLen = Annotated[int, typer.Option("--output-len", metavar="N", min=1, help="Tokens to generate.")]
Warmups = Annotated[int, typer.Option("--num-warmups", metavar="N", min=0, help="Runs before it, not measured.")]
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", metavar="N", min=1, help="Requests; 100, or all of the dataset, if not given."),
]
Dataset = Annotated[
    Path | None,
    typer.Option("--dataset", metavar="FILE", help='Prompts: a line of text or of JSON ({"prompt": ...}) each.'),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        show_default=False,
        help="Always generate --output-len tokens; the default for random prompts.",
    ),
]


def measure(
    template: dict[str, Any],
    fail_if: list[str] | None,
    output: Path | None,
    run: Callable[[], Record],
    show: Callable[[dict[str, Any]], None] = tables.bench_result,
    emit: bool = True,
) -> None:
    """Check gates and output before the run, run, show and write the result, then hold it against the gates.

    template  a document with every key the result will have.
    emit      whether the document goes to stdout.

    Raises ``bad_gate``, ``output_failed``, ``bench_failed`` when a request failed, ``gate_failed``.
    """
    from aiakq.bench import gates
    from aiakq.records import write_json

    conditions = gates.parse(fail_if or ())
    gates.check_keys(conditions, template)
    if output is not None and not output.parent.is_dir():
        raise error("output_failed", path=output, reason="its folder does not exist")
    record = run()
    document = record.document()
    show(document)
    if output is not None:
        write_json(document, output)
    if emit:
        console.emit(document)
    if document.get("failed"):
        total = document["completed"] + document["failed"]
        raise error("bench_failed", failed=document["failed"], total=total, reason=document["first_error"])
    outcomes = gates.evaluate(conditions, document)
    tables.gate_outcomes(outcomes)
    if (problem := gates.failure(outcomes)) is not None:
        raise problem


def _check_engine(engine: dict[str, Any], command: str) -> None:
    """Refuse wrong engine arguments before anything heavy is imported."""
    if not checked(engine, server=False)["model"]:
        raise error("usage", reason="No model is given.", hint=f"Example: aiakq bench {command} MODEL")


@bench.command(cls=Command)
@with_arguments(engine_arguments())
def latency(
    engine: dict[str, Any],
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Requests per batch.")] = 8,
    iterations: Annotated[int, typer.Option("--num-iters", metavar="N", min=1, help="Batches measured.")] = 10,
    warmups: Warmups = 2,
    seed: SeedOption = None,
    output: OutputOption = None,
    fail_if: GateOption = None,
) -> None:
    """Time one batch of equal requests, in this process."""
    _check_engine(engine, "latency")
    from aiakq.bench import latency as measuring

    options = measuring.LatencyOptions(engine, input_len, output_len, batch_size, iterations, warmups, seed)

    def run() -> Record:
        with console.Progress("bench latency") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), fail_if, output, run)


@bench.command(cls=Command)
@with_arguments(engine_arguments())
def throughput(
    engine: dict[str, Any],
    num_prompts: NumPrompts = None,
    input_len: InputLen = 256,
    output_len: OutputLen = 128,
    dataset: Dataset = None,
    ignore_eos: IgnoreEos = None,
    warmups: Warmups = 1,
    seed: SeedOption = None,
    output: OutputOption = None,
    fail_if: GateOption = None,
) -> None:
    """Time many requests that are all there from the start, in this process."""
    _check_engine(engine, "throughput")
    from aiakq.bench import throughput as measuring

    options = measuring.ThroughputOptions(
        engine, num_prompts, input_len, output_len, dataset, ignore_eos, warmups, seed
    )

    def run() -> Record:
        with console.Progress("bench throughput") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), fail_if, output, run)


@bench.command(cls=Command)
@with_arguments(engine_arguments(), model_help="Folder or hub name of a model to start a server for.")
def serve(
    engine: dict[str, Any],
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="A running server, like http://127.0.0.1:8000.")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="TEXT", help="Instead of --base-url.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Instead of --base-url.")] = 8000,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Name on the server; the first it lists if not given.")
    ] = None,
    num_prompts: NumPrompts = None,
    request_rate: Annotated[
        float, typer.Option("--request-rate", metavar="X", help="Requests per second; inf sends all at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float,
        typer.Option("--burstiness", metavar="X", help="Of the arrivals: 1 Poisson, less burstier, more steadier."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", metavar="N", min=1, help="Most requests in flight.")
    ] = None,
    input_len: InputLen = 256,
    output_len: OutputLen = 128,
    dataset: Dataset = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="N", min=2, help="For random prompts, if the server is silent."),
    ] = None,
    ignore_eos: IgnoreEos = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", metavar="METRIC:MS", help="Count requests within limits, like 'ttft:200 tpot:50'."),
    ] = None,
    warmups: Warmups = 1,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="X", min=0.1, help="Seconds without news until a request has failed.")
    ] = 600.0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", envvar="AIAKQ_API_KEY", help="Bearer token to send.")
    ] = None,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Keep the timings of every request in the JSON.")
    ] = False,
    seed: SeedOption = None,
    output: OutputOption = None,
    fail_if: GateOption = None,
) -> None:
    """Put load on a server and time its answers as clients see them.

    With MODEL a server is started for it, with the engine options given, and stopped at the end; without, --base-url
    or --host and --port say where one runs.
    """
    from aiakq.bench import serve as measuring

    if not request_rate > 0:
        raise error(
            "bad_option", option="--request-rate", value=request_rate, expected="above 0", hint="inf sends all at once."
        )
    if not 0 < burstiness < float("inf"):
        raise error(
            "bad_option", option="--burstiness", value=burstiness, expected="above 0", hint="1 is a Poisson process."
        )
    options = measuring.ServeOptions(
        base_url=_running_server(engine, base_url, host, port),
        model=model,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        input_len=input_len,
        output_len=output_len,
        dataset=dataset,
        vocab_size=vocab_size,
        ignore_eos=ignore_eos,
        goodput=measuring.parse_goodput(goodput or ()),
        num_warmups=warmups,
        seed=seed,
        timeout_s=timeout,
        api_key=api_key,
        save_detailed=save_detailed,
    )

    def run() -> Record:
        with console.Progress("bench serve") as bars:

            def progress(done: int, total: int, failed: int) -> None:
                bars.update("requests", done, total, f"{failed} failed" if failed else "")

            if "model" not in engine:
                return measuring.run(options, progress)
            from aiakq.server.background import start_in_background

            bars.update("start", 0, 1)
            with start_in_background(engine | _EVERYONE_MAY_WAIT) as started:
                assert started.ready is not None
                return measuring.run(replace(options, base_url=started.url), progress, started.ready.facts)

    measure(measuring.template(), fail_if, output, run)


#: A benchmark measures how requests are served, not how they are refused.
_EVERYONE_MAY_WAIT = {
    "max_connections": 1 << 16,
    "max_connections_per_address": 1 << 16,
    "max_num_queued_reqs": 1 << 30,
    "max_num_queued_tokens": 1 << 40,
    "max_queue_seconds": 1e6,
    "max_request_seconds": 1e6,
}


@bench.command(cls=Command)
def kernels(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Folder or hub name: its shapes, its scheme, its heads.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="NxK", help="Outputs and inputs of a layer; may be repeated.")
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", metavar="NAME", help="Like w4a16, w8a16, w8a8, w16; the model's own if not given."),
    ] = None,
    group_size: Annotated[
        int, typer.Option("--group-size", metavar="N", min=1, help="Inputs per scale, for fewer than 8 bits.")
    ] = 128,
    rows: Annotated[
        str, typer.Option("--rows", metavar="LIST", help="Tokens of a step, or sequences that decode.")
    ] = "1,16,64",
    context: Annotated[
        int, typer.Option("--context", metavar="N", min=2, help="Tokens of every sequence, for attention.")
    ] = 1024,
    dtype: Annotated[str, typer.Option("--dtype", metavar="TEXT", help="Of activations; auto as for serve.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", metavar="TEXT", help="Of keys and values; as for serve.")
    ] = "auto",
    device: DeviceOption = "auto",
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Find the quickest launch configurations first and write them; on a GPU, minutes."),
    ] = False,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="DIR", help="Where --tune writes; ~/.config/aiakq/launch, read from then on."),
    ] = None,
    output: OutputOption = None,
    fail_if: GateOption = None,
) -> None:
    """Time each kernel on this device, beside what its memory and its units would allow."""
    from aiakq.bench import kernels as measuring

    checked({"dtype": dtype, "device": device, "kv_cache_dtype": kv_cache_dtype}, server=False)
    options = measuring.KernelOptions(
        model=model,
        shapes=tuple(_shape(text) for text in shape or ()),
        schemes=tuple(name for text in scheme or () for name in text.split(",")),
        group_size=group_size,
        rows=tuple(_whole("--rows", part) for part in rows.split(",")),
        context=context,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        tune=tune,
        into=into,
    )
    measuring.check(options)

    def run() -> Record:
        with console.Progress("bench kernels") as bars:
            return measuring.run(options, bars.update)

    measure(measuring.template(), fail_if, output, run, tables.kernels_result)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.lower().partition("x")
    return _whole("--shape", n, text), _whole("--shape", k, text)


def _whole(option: str, text: str, whole: str | None = None) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        hint = "Examples: --shape 4096x14336, --rows 1,16,256"
        raise error("bad_option", option=option, value=whole or text, expected="whole numbers above 0", hint=hint)
    return int(text)


def _running_server(engine: dict[str, Any], base_url: str | None, host: str, port: int) -> str:
    """The URL of the server to measure; empty when one is to be started. Raises ``option_conflict``, ``usage``."""
    if "model" in engine:
        if base_url is not None:
            raise error(
                "option_conflict",
                option=f"The model {engine['model']!r}",
                other="--base-url",
                reason="it would start a server beside the running one",
                hint="Give one. The name of a model on a running server is --model.",
            )
        checked(engine, server=False)
        return ""
    if engine:
        raise error(
            "usage",
            reason=f"--{next(iter(engine)).replace('_', '-')} is for a server that is started here.",
            hint="Name its model: aiakq bench serve MODEL",
        )
    return base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
