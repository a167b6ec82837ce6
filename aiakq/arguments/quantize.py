"""Options of ``aiakq quantize``, which are the fields of ``QuantizeOptions``. Standard library only.

This module validates single options; QuantizeOptions validates what depends on the method or on other options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from aiakq.arguments.argument import Argument, argument, rows_of
from aiakq.arguments.byte_size import shard_bytes
from aiakq.arguments.common import MODEL, revision_argument, shard_size_argument

#: Values of -t -> the safetensors dtype.
DTYPES = {
    "fp16": "F16",
    "float16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp32": "F32",
    "float32": "F32",
}


def _tuning_budget(value: str | float) -> str:
    """Return the canonical text of a time budget: ``600s`` or ``48steps``. Raises ValueError."""
    text = str(value).strip()
    steps = re.fullmatch(r"([0-9]{1,7}) ?steps?", text)
    number = float(steps[1] if steps else text.removesuffix("s"))
    if not (1 if steps else 0.001) <= number <= 999_999_999:
        raise ValueError(value)
    return f"{int(number)}steps" if steps else f"{round(number, 3):.12g}s"


@dataclass(frozen=True)
class QuantizeArguments:
    """Options of ``aiakq quantize``; None selects the default of the method or the model."""

    input: str = argument(
        ...,
        f"The model: {MODEL}.",
        flags=("-i", "--input"),
        metavar="MODEL",
    )
    output: str = argument(..., "Folder for the quantized model.", flags=("-o", "--output"), metavar="DIR")
    method: str = argument(
        ...,
        "weight_only_int8, smooth_quant, awq, gptq, fp8, mxfp4, nvfp4, gguf, or a method that a plugin package adds.",
        flags=("-quant_type", "--quant-type"),
        metavar="METHOD",
    )
    recipe: str | Path | None = argument(
        None,
        "YAML file with these options, transforms and a rounder, or a report to repeat. Command-line options take "
        "precedence.",
        metavar="FILE",
    )
    tp: int = argument(
        1,
        "Tensor-parallel size used for serving; group sizes and MLP widths are chosen so that the model can be "
        "sharded.",
        flags=("-tp", "--tensor-parallel"),
        low=1,
        high=1024,
        expected="a number of GPUs",
        hint="Without it the model is not sharded.",
    )
    dtype: str | None = argument(
        None,
        "Dtype of tensors that are not quantized; the source's dtype if not given.",
        flags=("-t", "--dtype"),
        choices=tuple(DTYPES),
        metavar="fp16|bf16|fp32",
        expected="fp16, bf16 or fp32",
    )
    smooth_alpha: float | str | None = argument(
        None,
        "smooth_quant: smoothing strength from 0 to 1, or auto to search for it; if not given, the usual value of the "
        "model family.",
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
        "File of calibration samples as token ids, each a line of numbers or a JSON list. Replaces --calibration.",
        flags=("-token", "--token-ids", "--tokenids_path"),
        metavar="FILE",
        group="calibration",
    )
    multi_query_mode: bool = argument(
        False, "Require grouped-query or multi-query attention; detected otherwise.", group="model"
    )
    bits: int | None = argument(None, "Bits per weight; the method's default if not given.", group="method")
    group_size: int | None = argument(
        None,
        "Number of inputs that share a scale; -1: one scale per row. 128 for awq and gptq if not given; 128 with fp8: "
        "one scale per block of 128 x 128.",
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
        "gptq: order in which columns are quantized. static: by importance over the whole row; group: by importance "
        "within and between groups (the default); none: natural order.",
        choices=("none", "static", "group"),
        group="method",
    )
    scale_search: str | None = argument(
        None,
        "Range of each group. minmax: the full range of its weights; mse: also smaller ranges if their error is lower.",
        choices=("minmax", "mse"),
        group="method",
    )
    sweeps: int | None = argument(
        None,
        "gptq: number of additional passes over all columns; 2 if not given, 0 for the published algorithm.",
        low=0,
        high=100,
        expected="between 0 and 100",
        group="method",
    )
    targets: str | None = argument(
        None,
        "Outputs that the quantized weights should reproduce. original: those of the unquantized model, with its "
        "residual stream (the default of gptq and awq below 8 bits); own: those of the unrounded weights on the same "
        "inputs, as published.",
        choices=("original", "own"),
        group="method",
    )
    gptaq: bool = argument(False, "gptq: another name of --targets original.", group="method")
    awq_scaling: bool = argument(False, "gptq: apply AWQ's scales first.", group="method")
    gptq: bool | None = argument(
        None,
        "smooth_quant, fp8, mxfp4, nvfp4, gguf: round the weights with GPTQ. fp8, mxfp4 and nvfp4 do so by default if "
        "calibration data is given, gguf unless --no-gptq says otherwise.",
        group="method",
    )
    max_shard_size: str | None = shard_size_argument(group="output")
    gguf_type: str | None = argument(
        None,
        "gguf: type of the file, as llama-quantize calls it: q4_k_m (the default), q4_k_s, q5_k_m, q5_k_s, q6_k, q8_0, "
        "q4_0, q4_1, q5_0, q5_1.",
        metavar="TYPE",
        group="method",
    )
    rotate: str = argument(
        "none",
        "Rotate the residual stream and the values of each head before quantization, folded into the weights. "
        "hadamard: random Hadamard transforms; learned: rotations that minimize outliers of the weights (OptRot).",
        choices=("none", "hadamard", "learned"),
        hint="",
        group="method",
    )
    activation_scales: str = argument(
        "token",
        "smooth_quant, fp8: token: dynamic activation scales per token; tensor: one static scale per layer, with fp8 "
        "also of its weights.",
        choices=("token", "tensor"),
        hint="",
        group="method",
    )
    activation_bits: int | None = argument(
        None,
        "fp8, mxfp4, nvfp4: bits that activations are rounded to; 16: they are not. 8 for fp8 and 16 for mxfp4 and "
        "nvfp4 if not given.",
        choices=(4, 8, 16),
        metavar="4|8|16",
        expected="4, 8 or 16 bits",
        hint="",
        group="method",
    )
    damp: float | None = argument(
        None,
        "gptq: damping added to the Hessian, as a fraction of its mean diagonal; 0.01 if not given.",
        above=0.0,
        high=1.0,
        expected="above 0 and at most 1",
        hint="0.01 is usual.",
        group="method",
    )
    importance: str | None = argument(
        None,
        "gptq: what counts most, by a backward pass of the original model. gradient-rows: outputs that matter "
        "together, so that rows of a weight make up for each other's errors; gradient: calibration tokens, which "
        "lowers the error on text like the calibration text; none (the default): all equal.",
        choices=("gradient-rows", "gradient", "none"),
        group="method",
    )
    tune: str | int | float | None = argument(
        None,
        "Tune scales and norms of the quantized model end to end on the calibration samples, for about this many "
        "seconds, or a number of steps like 48steps, which gives the same bytes every time; 96steps without a value. "
        "For 2 and 3 bits; the whole quantized model is in memory.",
        bare="96steps",
        convert=_tuning_budget,
        metavar="SECONDS|Nsteps",
        expected="a number of seconds from 0.001 to 999999999, or of steps like 48steps",
        hint="600 are ten minutes.",
        group="method",
    )
    calibration: str | Path | None = argument(
        None,
        "Calibration data: files of text, chats or tables, or a data set (org/name); a bundled text if not given.",
        metavar="DATA",
        group="calibration",
    )
    calibration_column: str | None = argument(
        None,
        "Column of --calibration with texts or conversations; detected if not given.",
        metavar="NAME",
        group="calibration",
    )
    calibration_images: str | Path | None = argument(
        None,
        "Images for up to half of the calibration samples of a model that reads them: a folder, or JSON lines with "
        "image, text and answer.",
        metavar="FOLDER|FILE",
        group="calibration",
    )
    samples: int = argument(128, "Number of calibration samples.", low=1, hint="", group="calibration")
    seqlen: int = argument(512, "Number of tokens per sample.", low=2, hint="", group="calibration")
    seed: int = argument(
        0,
        "Random seed; equal seeds give identical files.",
        low=0,
        high=2**63 - 1,
        expected="between 0 and 2^63",
        hint="",
        group="calibration",
    )
    device: str = argument(
        "auto",
        "auto: cuda if available, else cpu. Several devices, like cuda:0,cuda:1, share the calibration.",
        metavar="auto|cpu|cuda",
        group="machine",
    )
    workers: int = argument(
        1,
        "Number of processes that share samples, searches and layers on a CPU. The result is identical to that of one.",
        low=1,
        high=8,
        expected="a number of processes from 1 to 8",
        hint="One for each NUMA node is usual.",
        group="machine",
    )
    distributed_executor_backend: str | None = argument(
        None,
        "What starts the processes of --workers. mp (the default): this process, on this machine; ray: Ray, on one or "
        "several machines.",
        choices=("mp", "ray"),
        group="machine",
    )
    lora: str | Path | None = argument(
        None,
        "Folder of a LoRA adapter in PEFT's format, merged into the weights in float32 before quantization.",
        metavar="DIR",
        group="model",
    )
    overwrite: bool = argument(False, "Replace the output folder if it exists.", group="output")
    evaluate: bool = argument(
        True,
        "Measure the divergence of the result from the source, and the perplexity of both.",
        flags=("--eval",),
        group="evaluation",
    )
    eval_text: str | Path | None = argument(
        None,
        "Texts to compare the result with the source on, divided by commas: files, or prose (the default), dialogue or "
        "code for bundled ones.",
        metavar="FILE",
        group="evaluation",
    )
    layer: tuple[str, ...] = argument(
        (),
        "Override settings of matching layers, like 'model.layers.0.*=bits:8,group:64'.",
        metavar="GLOB=HOW",
        separator=";",
        group="layers",
    )
    skip: tuple[str, ...] = argument((), "Do not quantize matching layers.", metavar="GLOB", group="layers")
    lm_head: int | None = argument(
        None,
        "Also quantize the output layer, to this many bits.",
        choices=(4, 8),
        metavar="4|8",
        expected="4 or 8 bits",
        hint="Without it the output layer is not quantized.",
        group="layers",
    )
    target_bpw: float | None = argument(
        None,
        "Choose the bits and group size of each layer for an average of X bits per weight.",
        above=2.0,
        high=8.5,
        expected="above 2 and at most 8.5",
        hint="4.5 is usual.",
        group="layers",
    )
    max_kl: float | None = argument(
        None,
        "Choose the bits and group size of each layer for a KL divergence from the original of at most X nats per "
        "token.",
        above=0.0,
        hint="0.01 nats per token is small, 0.05 is noticeable.",
        group="layers",
    )
    format: str | None = argument(
        None,
        "Format on disk: gptq, gptq_v2, awq, awq_gemv, awq_gemv_fast, compressed-tensors, or one that a package adds; "
        "the most widely supported one if not given.",
        metavar="NAME",
        group="output",
    )
    resume: bool = argument(False, "Continue an interrupted run with the same options.", group="output")
    activation_memory: float | None = argument(
        None,
        "Maximum size of hidden states in memory; the rest is stored on disk. A quarter of the free memory if not "
        "given.",
        low=0.0,
        metavar="GB",
        expected="a number of gigabytes",
        group="machine",
    )
    trust_remote_code: bool = argument(False, "Run Python code from the model folder.", group="model")
    revision: str | None = revision_argument()

    @property
    def max_shard_bytes(self) -> int | None:
        """``max_shard_size`` in bytes. Raises ``bad_option``."""
        return shard_bytes(self.max_shard_size)


@dataclass(frozen=True, kw_only=True)
class DryRunArguments:
    """Option for a run that only says what it would do."""

    dry_run: bool = argument(
        False,
        "Only say what would be done, from the config and headers: what each layer becomes, size, disk, peak memory, "
        "and how long it takes at least. Of a model on the hub no weights are fetched.",
    )


QUANTIZE_ARGUMENTS: tuple[Argument, ...] = rows_of(QuantizeArguments)
