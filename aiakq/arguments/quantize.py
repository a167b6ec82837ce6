"""Options of ``aiakq quantize``, which are the fields of ``QuantizeOptions``. Standard library only.

Checked here is what concerns one option; what the method or other options decide is checked by QuantizeOptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import Argument, argument, rows_of
from aiakq.arguments.common import revision_argument

#: Spellings of -t, and the safetensors dtype each means.
DTYPES = {
    "fp16": "F16",
    "float16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp32": "F32",
    "float32": "F32",
}


@dataclass(frozen=True)
class QuantizeArguments:
    """What ``aiakq quantize`` can be given; None means the method's or the model's own choice."""

    input: str = argument(
        ...,
        "The model: a folder, or a hub name (org/name).",
        flags=("-i", "--input"),
        metavar="MODEL",
    )
    output: str = argument(..., "Folder for the quantized model.", flags=("-o", "--output"), metavar="DIR")
    method: str = argument(
        ...,
        "weight_only_int8, smooth_quant, awq, gptq, or one that a package adds.",
        flags=("-quant_type", "--quant-type"),
        metavar="METHOD",
    )
    recipe: str | Path | None = argument(
        None,
        "A YAML file of these options and of transforms and a rounder, or a report to repeat. Flags come first.",
        metavar="FILE",
    )
    tp: int = argument(
        1,
        "Tensor-parallel size it will be served with; groups and widths are chosen so that the model can be split.",
        flags=("-tp", "--tensor-parallel"),
        low=1,
        high=1024,
        expected="a number of GPUs",
        hint="Without it nothing is cut.",
    )
    dtype: str | None = argument(
        None,
        "Dtype of what is not quantized; that of the source if not given.",
        flags=("-t", "--dtype"),
        choices=tuple(DTYPES),
        metavar="fp16|bf16|fp32",
        expected="fp16, bf16 or fp32",
        hint="",
    )
    smooth_alpha: float | str | None = argument(
        None,
        "smooth_quant: strength, 0 to 1, or auto to search it; usual for the model family if not given.",
        flags=("-sq", "--smooth-alpha"),
        low=0.0,
        high=1.0,
        automatic=True,
        metavar="X|auto",
        expected="between 0 and 1, or auto",
        hint="0.5 and 0.8 are usual.",
        group="method",
    )
    token_ids: str | Path | None = argument(
        None,
        "Calibration samples as token ids: a line of numbers or a JSON list each. Replaces --calibration.",
        flags=("-token", "--token-ids", "--tokenids_path"),
        metavar="FILE",
        group="calibration",
    )
    multi_query_mode: bool = argument(
        False, "Require that heads share keys and values; detected otherwise.", group="model"
    )
    bits: int | None = argument(None, "Bits per weight; the method's default if not given.", group="method")
    group_size: int | None = argument(
        None,
        "Inputs per scale; -1: one scale per row. 128 for awq and gptq if not given.",
        group="method",
    )
    symmetric: bool | None = argument(
        None,
        "Whether quantization is symmetric; the method's default if not given.",
        off="--asymmetric",
        group="method",
    )
    act_order: str | None = argument(
        None,
        "gptq: order columns by importance: over the whole row (static), or within and between groups (group, "
        "if not given).",
        choices=("none", "static", "group"),
        hint="",
        group="method",
    )
    scale_search: str | None = argument(
        None,
        "Range of each group: the full one (minmax), or the one with the least error of several (mse).",
        choices=("minmax", "mse"),
        hint="",
        group="method",
    )
    sweeps: int | None = argument(
        None,
        "gptq: further passes over all columns; 2 if not given, 0 as published.",
        low=0,
        high=100,
        expected="between 0 and 100",
        hint="",
        group="method",
    )
    gptaq: bool = argument(
        False,
        "gptq: also compensate for the error of the inputs (GPTAQ); takes longer.",
        group="method",
    )
    awq_scaling: bool = argument(False, "gptq: fold the scales of awq first.", group="method")
    gptq: bool = argument(False, "smooth_quant: round the weights as gptq does.", group="method")
    activation_scales: str = argument(
        "token",
        "smooth_quant: a scale per token when serving, or one stored per layer.",
        choices=("token", "tensor"),
        hint="",
        group="method",
    )
    damp: float | None = argument(
        None,
        "gptq: fraction of the Hessian's mean diagonal to add; 0.01 if not given.",
        above=0.0,
        high=1.0,
        expected="above 0 and at most 1",
        hint="0.01 is usual.",
        group="method",
    )
    calibration: str | Path | None = argument(
        None,
        "Text, chats or tables in files, or a data set (org/name); bundled prose if not given.",
        metavar="DATA",
        group="calibration",
    )
    samples: int = argument(128, "Calibration samples.", low=1, hint="", group="calibration")
    seqlen: int = argument(512, "Tokens per sample.", low=2, hint="", group="calibration")
    seed: int = argument(
        0,
        "The same seed gives the same bytes.",
        low=0,
        high=2**63 - 1,
        expected="between 0 and 2^63",
        hint="",
        group="calibration",
    )
    device: str = argument(
        "auto",
        "auto: cuda if available, else cpu. Several, as in cuda:0,cuda:1, share the calibration.",
        metavar="auto|cpu|cuda",
        group="machine",
    )
    workers: int = argument(
        1,
        "Processes that share out samples, searches and layers on a CPU. The bytes are those of one.",
        low=1,
        high=8,
        expected="a number of processes from 1 to 8",
        hint="One for each NUMA node is usual.",
        group="machine",
    )
    distributed_executor_backend: str | None = argument(
        None,
        "What starts the processes of --workers. mp (if not given): this process, on this machine; ray: Ray, on one or "
        "several.",
        choices=("mp", "ray"),
        group="machine",
    )
    lora: str | Path | None = argument(
        None,
        "A LoRA adapter as PEFT saves it, merged into the weights in float32 before anything else.",
        metavar="DIR",
        group="model",
    )
    overwrite: bool = argument(False, "Replace the output folder if it exists.", group="output")
    evaluate: bool = argument(True, "Measure perplexity before and after.", flags=("--eval",), group="evaluation")
    eval_text: str | Path | None = argument(
        None,
        "Text to measure perplexity on; a bundled book if not given.",
        metavar="FILE",
        group="evaluation",
    )
    layer: tuple[str, ...] = argument(
        (),
        "Settings of some layers, like 'model.layers.0.*=bits:8,group:64'.",
        metavar="GLOB=HOW",
        separator=";",
        group="layers",
    )
    skip: tuple[str, ...] = argument((), "Layers that are not quantized.", metavar="GLOB", group="layers")
    lm_head: int | None = argument(
        None,
        "Also quantize the output layer, to this many bits.",
        choices=(4, 8),
        metavar="4|8",
        expected="4 or 8 bits",
        hint="Without it the head stays.",
        group="layers",
    )
    target_bpw: float | None = argument(
        None,
        "Choose bits and groups of each layer for X bits per weight on average.",
        above=2.0,
        high=8.5,
        expected="above 2 and at most 8.5",
        hint="4.5 is usual.",
        group="layers",
    )
    max_kl: float | None = argument(
        None,
        "Choose them for a KL divergence from the original of at most X nats per token.",
        above=0.0,
        hint="0.01 nats per token is little, 0.05 can be noticed.",
        group="layers",
    )
    format: str | None = argument(
        None,
        "Format on disk: gptq, gptq_v2, awq, awq_gemv, awq_gemv_fast, compressed-tensors, or one that a package adds; "
        "the most widely supported one if not given.",
        metavar="NAME",
        group="output",
    )
    resume: bool = argument(False, "Continue an interrupted run that had the same options.", group="output")
    activation_memory: float | None = argument(
        None,
        "Most hidden states in memory; the rest goes to disk. A quarter of the free memory if not given.",
        low=0.0,
        metavar="GB",
        expected="a number of gigabytes",
        hint="",
        group="machine",
    )
    trust_remote_code: bool = argument(False, "Run Python code from the model folder.", group="model")
    revision: str | None = revision_argument()


QUANTIZE_ARGUMENTS: tuple[Argument, ...] = rows_of(QuantizeArguments)
