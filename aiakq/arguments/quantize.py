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
        expected="fp16 or bf16",
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
    )
    token_ids: str | Path | None = argument(
        None,
        "Calibration samples as token ids: a line of numbers or a JSON list each. Replaces --calibration.",
        flags=("-token", "--token-ids", "--tokenids_path"),
        metavar="FILE",
    )
    multi_query_mode: bool = argument(False, "Require that heads share keys and values; detected otherwise.")
    bits: int | None = argument(None, "Bits per weight; the method's default if not given.")
    group_size: int | None = argument(
        None, "Inputs per scale; -1: one scale per row. 128 for awq and gptq if not given."
    )
    symmetric: bool | None = argument(
        None, "Whether quantization is symmetric; the method's default if not given.", off="--asymmetric"
    )
    act_order: str | None = argument(
        None,
        "gptq: order columns by importance: over the whole row (static), or within and between groups (group, "
        "if not given).",
        choices=("none", "static", "group"),
        hint="",
    )
    scale_search: str | None = argument(
        None,
        "Quantization ranges: whole (minmax), or also smaller ones if their error is lower (mse).",
        choices=("minmax", "mse"),
        hint="",
    )
    sweeps: int | None = argument(
        None,
        "gptq: further passes over all columns; 2 if not given, 0 as published.",
        low=0,
        high=100,
        expected="between 0 and 100",
        hint="",
    )
    gptaq: bool = argument(
        False, "gptq: also compensate for the error of the inputs (GPTAQ); takes about 1.5 times as long."
    )
    awq_scaling: bool = argument(False, "gptq: fold the scales of awq first.")
    gptq: bool = argument(False, "smooth_quant: round the weights as gptq does.")
    activation_scales: str = argument(
        "token",
        "smooth_quant: a scale per token when serving, or one stored per layer.",
        choices=("token", "tensor"),
        hint="",
    )
    damp: float | None = argument(
        None,
        "gptq: fraction of the Hessian's mean diagonal to add; 0.01 if not given.",
        above=0.0,
        high=1.0,
        expected="above 0 and at most 1",
        hint="0.01 is usual.",
    )
    calibration: str | Path | None = argument(
        None,
        "Text, chats or tables in files, or a data set (org/name); bundled prose if not given.",
        metavar="DATA",
    )
    samples: int = argument(128, "Calibration samples.", low=1, hint="")
    seqlen: int = argument(512, "Tokens per sample.", low=2, hint="")
    seed: int = argument(
        0,
        "The same seed gives the same bytes.",
        low=0,
        high=2**63 - 1,
        expected="between 0 and 2^63",
        hint="",
    )
    device: str = argument(
        "auto",
        "auto: cuda if available, else cpu. Several, as in cuda:0,cuda:1, share the calibration.",
        metavar="auto|cpu|cuda",
    )
    workers: int = argument(
        1,
        "Processes that share out samples, searches and layers on a CPU. The bytes are those of one.",
        low=1,
        high=8,
        expected="a number of processes from 1 to 8",
        hint="One for each NUMA node is usual.",
    )
    distributed_executor_backend: str | None = argument(
        None,
        "What starts the processes of --workers. mp (if not given): this process, on this machine; ray: Ray, on one or "
        "several.",
        choices=("mp", "ray"),
    )
    lora: str | Path | None = argument(
        None,
        "A LoRA adapter as PEFT saves it, merged into the weights in float32 before anything else.",
        metavar="DIR",
    )
    overwrite: bool = argument(False, "Replace the output folder if it exists.")
    evaluate: bool = argument(True, "Measure perplexity before and after.", flags=("--eval",))
    eval_text: str | Path | None = argument(
        None, "Text to measure perplexity on; a bundled book if not given.", metavar="FILE"
    )
    layer: tuple[str, ...] = argument(
        (),
        "Settings of some layers, like 'model.layers.0.*=bits:8,group:64'.",
        metavar="GLOB=HOW",
        separator=";",
    )
    skip: tuple[str, ...] = argument((), "Layers that are not quantized.", metavar="GLOB")
    lm_head: int | None = argument(
        None,
        "Also quantize the output layer, to this many bits.",
        choices=(4, 8),
        metavar="4|8",
        expected="4 or 8 bits",
        hint="Without it the head stays.",
    )
    target_bpw: float | None = argument(
        None,
        "Choose bits and groups of each layer for X bits per weight on average.",
        above=2.0,
        high=8.5,
        expected="above 2 and at most 8.5",
        hint="4.5 is usual.",
    )
    max_kl: float | None = argument(
        None,
        "Choose them for a KL divergence from the original of at most X nats per token.",
        above=0.0,
        hint="0.01 nats per token is little, 0.05 can be noticed.",
    )
    format: str | None = argument(
        None,
        "Format on disk; the most widely supported one if not given.",
        metavar="NAME",
    )
    resume: bool = argument(False, "Continue an interrupted run that had the same options.")
    activation_memory: float | None = argument(
        None,
        "Most hidden states in memory; the rest goes to disk. A quarter of the free memory if not given.",
        low=0.0,
        metavar="GB",
        expected="a number of gigabytes",
        hint="",
    )
    trust_remote_code: bool = argument(False, "Run Python code from the model folder.")
    revision: str | None = revision_argument()


QUANTIZE_ARGUMENTS: tuple[Argument, ...] = rows_of(QuantizeArguments)
