"""``aiakq quantize``: its options, one call into aiakq/quantizers, a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiakq.terminal import console, tables
from aiakq.terminal.options import JsonFlag, RevisionOption, TrustOption


def quantize(
    input: Annotated[
        str, typer.Option("-i", "--input", metavar="MODEL", help="The model: a folder, or a hub name (org/name).")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the quantized model.")],
    method: Annotated[
        str,
        typer.Option(
            "-quant_type", "--quant-type", metavar="METHOD", help="weight_only_int8, smooth_quant, awq or gptq."
        ),
    ],
    tp: Annotated[
        int,
        typer.Option(
            "-tp", "--tensor-parallel", metavar="N", help="GPUs it will be served on; checks that it can be cut so."
        ),
    ] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(
            "-t", "--dtype", metavar="fp16|bf16|fp32", help="Of what is not quantized; the source's own if not given."
        ),
    ] = None,
    smooth_alpha: Annotated[
        str | None,
        typer.Option(
            "-sq",
            "--smooth-alpha",
            metavar="X|auto",
            help="smooth_quant: strength, 0 to 1, or auto to search it; by the model's family if not given.",
        ),
    ] = None,
    token_ids: Annotated[
        Path | None,
        typer.Option(
            "-token",
            "--token-ids",
            "--tokenids_path",
            metavar="FILE",
            help="Calibration samples as token ids: a line of numbers or a JSON list each.",
        ),
    ] = None,
    multi_query_mode: Annotated[
        bool,
        typer.Option("--multi-query-mode", help="Insist that heads share keys and values; found out otherwise."),
    ] = False,
    bits: Annotated[
        int | None, typer.Option("--bits", metavar="N", help="Bits per weight; the method's usual if not given.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", metavar="N", help="Inputs per scale; -1: one scale a row. 128 for awq and gptq."),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Whether zero is always the middle code.", show_default=False),
    ] = None,
    act_order: Annotated[
        str | None,
        typer.Option(
            "--act-order",
            metavar="none|static|group",
            help="gptq: important inputs first, by row or within and between groups (if not given).",
        ),
    ] = None,
    scale_search: Annotated[
        str | None,
        typer.Option(
            "--scale-search", metavar="minmax|mse", help="Whole ranges, or also smaller ones by the error they leave."
        ),
    ] = None,
    sweeps: Annotated[
        int | None,
        typer.Option(
            "--sweeps", metavar="N", help="gptq: go over all columns again N times; 2 if not given, 0 as published."
        ),
    ] = None,
    gptaq: Annotated[
        bool, typer.Option("--gptaq", help="gptq: make up for changed inputs too (GPTAQ); about half as long again.")
    ] = False,
    awq_scaling: Annotated[bool, typer.Option("--awq-scaling", help="gptq: fold the scales of awq first.")] = False,
    gptq: Annotated[bool, typer.Option("--gptq", help="smooth_quant: round the weights as gptq does.")] = False,
    activation_scales: Annotated[
        str,
        typer.Option(
            "--activation-scales",
            metavar="token|tensor",
            help="smooth_quant: a scale per token when serving, or one stored per layer.",
        ),
    ] = "token",
    damp: Annotated[
        float | None,
        typer.Option("--damp", metavar="X", help="gptq: part of the mean diagonal to add; 0.01 if not given."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration",
            metavar="DATA",
            help="Text, chats or tables in files, or a data set (org/name); bundled prose if not given.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Calibration samples.")] = 128,
    seqlen: Annotated[int, typer.Option("--seqlen", metavar="N", min=1, help="Tokens per sample.")] = 512,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="The same seed gives the same bytes.")] = 0,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            help="auto: cuda if there is one, else cpu. Several with commas (cuda:0,cuda:1) share out calibration.",
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it exists.")] = False,
    evaluate: Annotated[bool, typer.Option("--eval/--no-eval", help="Measure perplexity before and after.")] = True,
    eval_text: Annotated[
        str | None, typer.Option("--eval-text", metavar="FILE", help="Text for it; a bundled book if not given.")
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            "--layer", metavar="GLOB=HOW", help="For some layers, like 'model.layers.0.*=bits:8,group:64'. Repeatable."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GLOB", help="Leave these layers as they are. Repeatable.")
    ] = None,
    lm_head: Annotated[
        int | None, typer.Option("--lm-head", metavar="4|8", help="Quantize the output layer too, to so many bits.")
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option("--target-bpw", metavar="X", help="Choose bits and groups per layer, for X bits per weight."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", metavar="X", help="Choose them for at most X nats per token from the original."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Layout on disk; the most widely read one if not given."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run with these options stopped.")
    ] = False,
    activation_memory: Annotated[
        float | None,
        typer.Option(
            "--activation-memory",
            metavar="GB",
            help="Hidden states held in memory; more goes to disk. A quarter of what is free if not given.",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    revision: RevisionOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Quantize a model: -i MODEL -o DIR -quant_type METHOD."""
    given = dict(locals())  # every option is a field of QuantizeOptions, under the same name
    from aiakq.quantizers.options import QuantizeOptions

    del given["as_json"]
    given |= {"output": str(output), "layer": tuple(layer or ()), "skip": tuple(skip or ())}
    options = QuantizeOptions(**given)
    # Heavy: only once the options are known to be good.
    from aiakq.quantizers.pipeline import quantize_checkpoint

    with console.Progress("quantize") as bars:
        report = quantize_checkpoint(options, lambda p: bars.update(p.stage, p.done, p.total, p.detail))
    tables.quantize_report(report)
    if as_json:
        console.emit({"schema_version": 1, "kind": "quantize", **report.document()})
