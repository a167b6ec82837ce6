"""docs/formats.md: which formats are read, written and computed packed, and by what. Written by ``make docs``.

What kernels and files can hold is asked of the code. What other programs load is a record of what was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aiakq import formats
from aiakq.formats.gguf.encoding import ENCODERS
from aiakq.formats.input_rounding import scheme_of_kernel
from aiakq.kernels.cpu import linear as native
from aiakq.kernels.triton import linear as triton
from aiakq.kernels.triton import linear_floats as triton_floats
from aiakq.kernels.triton import linear_int8 as triton_int8
from aiakq.kernels.types import LinearProblem
from aiakq.spec import Float8, LayerSpec, QuantSpec

_PAGE = """\
# Formats

Written by `make docs`: what kernels compute and files hold is asked of the code.
[quantize.md](quantize.md#files-of-other-tools) says what of each format is refused, [gguf.md](gguf.md) more about GGUF
files, and [convert.md](convert.md) how one becomes another.

## Who reads and computes what

*Native* kernels compute codes as they are stored, with every instruction set: portable, AVX2, AVX-512 and VNNI
(`tests/formats/test_instruction_sets.py` compares each with the torch reference, which computes all rows). *Triton*
kernels run on GPUs; without one, weights are dequantized there, at load if memory suffices. *Written* is what
`aiakq convert` or `quantize` writes.

{formats}

Decoded at load, to the model's dtype: {decoded}. The start-up table says the reason and the memory.

## Who loads what is written

Only what was run is in this table; "not tried" says nothing about whether it works.
[quality.md](quality.md#loading-in-other-engines) has the measured differences.

{readers}

Floats and rotations were loaded with transformers 5.24 and compressed-tensors 0.20, and with vLLM 0.32 on a CPU with
AVX2. With `examples/tinybooks` and 24 tokens, log-probabilities of transformers in float32 differ from ours by at
most 7e-6 nats (`FP8_BLOCK`, FP8 beside 16 bits, and 4-bit floats). With `FP8_DYNAMIC` and `FP8` they differ by 1.7e-5
until an activation between two values of e4m3 becomes the other one, and by up to 0.31 after it.

In float32, transformers stops at 4-bit floats of any program, llm-compressor's too (`expected m1 and m2 to have the
same dtype`): compressed-tensors 0.19 and 0.20 unpack them to bfloat16, whatever the dtype of the model is. Load them
with `dtype=torch.bfloat16`; the figure above is with that default changed.
"""

_DECODED = (
    "AQLM, SqueezeLLM and VPTQ (`aqlm`, `squeezellm`, `vptq`, which are read and not written), groups of quanto with "
    "16-bit scales, groups of HQQ's axis 0, blocks of bitsandbytes and groups of HQQ that end within rows, weights of "
    "bitsandbytes and torchao that their tool rounds, with `--cpu-math exact`, quantized embeddings and quantized "
    "routers"
)


@dataclass(frozen=True)
class Row:
    """One kind of weights of a format.

    layer    how it is stored; of widths, the first.
    widths   all bits of this kind.
    zeros    whether it has zero points; offsets: whether it has offsets.
    """

    format: str
    kind: str
    layer: LayerSpec
    widths: tuple[int, ...] = ()
    zeros: bool = False
    offsets: bool = False


_ALL = (2, 3, 4, 8)
_NVFP4 = LayerSpec(4, 16, activation_bits=4, static_input=True, table="e2m1", scale_type="e4m3")
_MXFP4 = LayerSpec(4, 32, table="e2m1", scale_type="e8m0")
_MXFP8 = LayerSpec(8, 32, activation_bits=8, float8=Float8(1, 32), scale_type="e8m0")
ROWS = (
    Row("gptq", "symmetric", LayerSpec(4, 128), _ALL),
    Row("gptq_v2", "zero points", LayerSpec(4, 128, False), _ALL, zeros=True),
    *(
        Row(name, "zero points", LayerSpec(4, 128, False), (4,), zeros=True)
        for name in ("awq", "awq_gemv", "awq_gemv_fast")
    ),
    Row("marlin", "symmetric", LayerSpec(4, 128), (4,)),
    Row("compressed-tensors", "integers", LayerSpec(4, 128), _ALL),
    Row("compressed-tensors", "integers with zero points", LayerSpec(4, 128, False), _ALL, zeros=True),
    Row("compressed-tensors", "integers of other widths", LayerSpec(5, 128), (5, 6, 7)),
    Row("compressed-tensors", "W8A8", LayerSpec(8, activation_bits=8), (8,)),
    Row(
        "compressed-tensors",
        "integers beside int8, uint8 or e4m3 (W4A8, W4AFP8)",
        LayerSpec(4, 128, activation_bits=8, activation_type="int8"),
        (2, 3, 4, 5, 6, 7, 8),
    ),
    Row("compressed-tensors", "FP8", LayerSpec(8, activation_bits=8, float8=Float8()), (8,)),
    Row("compressed-tensors", "MXFP8", _MXFP8, (8,)),
    Row("compressed-tensors", "NVFP4", _NVFP4, (4,)),
    Row("compressed-tensors", "MXFP4", _MXFP4, (4,)),
    Row("fp8", "tensors, rows, blocks", LayerSpec(8, 128, activation_bits=8, float8=Float8(128, 128)), (8,)),
    Row("modelopt", "NVFP4", _NVFP4, (4,)),
    Row("modelopt", "MXFP4", _MXFP4, (4,)),
    Row("modelopt", "W4A16_AWQ", LayerSpec(4, 128), (4,)),
    Row("modelopt", "W4A8_AWQ, 4 bits, computed as 8", LayerSpec(8, -1, True, 8, True, float8=Float8(-1)), (8,)),
    Row("modelopt", "MXFP4 beside e4m3", LayerSpec(4, 32, True, 8, True, table="e2m1", scale_type="e8m0"), (4,)),
    Row("bitsandbytes", "NF4, FP4", LayerSpec(4, 64, table="nf4"), (4,)),
    Row("bitsandbytes", "LLM.int8", LayerSpec(8), (8,)),
    Row("mlx", "affine groups", LayerSpec(4, 64, False), (2, 3, 4, 5, 6, 8), offsets=True),
    Row("mlx", "mxfp4, nvfp4", _MXFP4, (4,)),
    Row("hqq", "zero points that are floats", LayerSpec(4, 64, False), (2, 3, 4, 5, 6, 8), zeros=True),
    Row("quanto", "integers", LayerSpec(8), (8,)),
    Row("quanto", "groups with float32 scales", LayerSpec(4, 128, False), (2, 4), offsets=True),
    Row("quanto", "8-bit floats", LayerSpec(8, float8=Float8()), (8,)),
    Row("torchao", "int8, intx", LayerSpec(4, 32, False), (2, 3, 4, 5, 6, 7, 8), zeros=True),
    Row("torchao", "int4 in rows and in tiles", LayerSpec(4, 32, False), (4,), offsets=True),
    Row(
        "torchao",
        "int8, intx beside activations per token",
        LayerSpec(4, 32, activation_bits=8, activation_type="int8"),
        (2, 3, 4, 5, 6, 7, 8),
    ),
    Row("torchao", "8-bit floats", LayerSpec(8, activation_bits=8, float8=Float8()), (8,)),
    Row("qqq", "4 bits, computed as 8", LayerSpec(8, activation_bits=8), (8,)),
    Row("bitnet", "ternary, computed as 8", LayerSpec(8, activation_bits=8), (8,)),
    Row("gguf", "Q4_0, Q5_0, Q8_0, Q3_K, Q6_K", LayerSpec(4, 32), (3, 4, 5, 6, 8)),
    Row("gguf", "Q4_1, Q5_1, Q2_K, Q4_K, Q5_K", LayerSpec(4, 32, False), (2, 4, 5), offsets=True),
    Row("gguf", "IQ4_NL, IQ4_XS", LayerSpec(4, 32, table="iq4_nl"), (4,)),
    Row("gguf", "MXFP4", _MXFP4, (4,)),
)

#: Format and scheme -> what transformers and vLLM (both on a CPU), llama.cpp and SGLang did with files of aiakq; empty:
#: not tried. From docs/quality.md, docs/gguf.md and tests/formats/test_compressed_tensors.py.
_TESTED = {
    ("compressed-tensors", "W8A16"): ("loads", "no kernel on CPUs", "", ""),
    ("compressed-tensors", "W8A8"): ("loads", "loads", "", ""),
    ("compressed-tensors", "W4A16, mixed widths"): ("loads", "", "", ""),
    ("compressed-tensors", "`FP8_DYNAMIC`"): ("loads", "loads, in 16 bits", "", ""),
    ("compressed-tensors", "`FP8`, `FP8_BLOCK`, FP8 beside 16 bits"): ("loads", "no kernel with AVX2", "", ""),
    ("compressed-tensors", "`MXFP4A16`, `MXFP4`, `NVFP4A16`, `NVFP4`"): (
        "loads, in 16 bits",
        "no kernel with AVX2",
        "",
        "",
    ),
    ("gptq", "W4A16"): ("loads (gptqmodel)", "loads, in 16 bits; no kernel with AVX2", "", ""),
    ("gptq", "W4A16 with `--rotate`"): ("loads (gptqmodel)", "no kernel with AVX2", "", ""),
    ("awq", "W4A16"): ("loads (gptqmodel)", "loads, in 16 bits", "", ""),
    ("gguf", "F16, BF16, Q8_0, Q4_0, Q4_K_M"): ("", "", "loads", ""),
    ("gguf", "Q4_0 from gptq with `--rotate`"): ("", "", "loads", ""),
}


def formats_page() -> str:
    """Return docs/formats.md."""
    return _PAGE.format(formats=_formats_table(), decoded=_DECODED, readers=_readers_table())


def _formats_table() -> str:
    lines = ["| format | kind | bits | read | written | torch | native | Triton |", "|---|---|---|---|---|---|---|---|"]
    for row in ROWS:
        bits = ", ".join(map(str, row.widths))
        is_packed = (_word([native.supports(problem) for problem in _problems(row, "cpu")], row.widths), _triton(row))
        cells = [f"`{row.format}`", row.kind, bits, "yes", _written(row), "yes", *is_packed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _problems(row: Row, device: str) -> list[LinearProblem]:
    """Return what kernels are asked to compute: activations that are rounded before them are floats there."""
    problems = []
    for bits in row.widths:
        spec = QuantSpec("gptq", row.format, **{**vars(row.layer), "bits": bits})
        size = 4096 if spec.group_size == -1 else spec.group_size
        problems.append(
            LinearProblem(
                scheme=scheme_of_kernel(spec),
                n=4096,
                k=4096,
                group_size=size,
                has_zeros=row.zeros or bits == 7,
                has_perm=False,
                has_bias=False,
                static_input=False,
                dtype=torch.bfloat16,
                device=device,
                has_offsets=row.offsets,
                table=row.layer.table,
            )
        )
    return problems


def _triton(row: Row) -> str:
    """Return for which widths a Triton kernel can hold the weights; none takes offsets."""
    reasons = [
        "offsets" if row.offsets else triton.fits(problem) and triton_floats.fits(problem) and triton_int8.fits(problem)
        for problem in _problems(row, "cuda")
    ]
    return _word(reasons, row.widths)


def _word(reasons: Sequence[str | None], widths: Sequence[int]) -> str:
    """Return yes, no, or the widths without a reason against them."""
    fitting = [str(width) for width, reason in zip(widths, reasons, strict=True) if reason is None]
    return "yes" if len(fitting) == len(widths) else f"{', '.join(fitting)} bits" if fitting else "no"


def _written(row: Row) -> str:
    if row.format == "gguf":
        kinds = [kind for kind in row.kind.split(", ") if kind in ENCODERS]
        return "yes" if kinds == row.kind.split(", ") else ", ".join(kinds) or "no"
    module = formats.load(row.format)
    if not hasattr(module, "write"):
        return "no"
    reasons = []
    for bits in row.widths:
        held = bits in getattr(module, "BITS", _ALL) or row.layer.float8 is not None or row.layer.table is not None
        spec = QuantSpec("gptq", row.format, **{**vars(row.layer), "bits": bits})
        reasons.append(formats.supports(spec) if held else "width")
    return _word(reasons, row.widths)


def _readers_table() -> str:
    lines = [
        "| format | scheme | transformers, CPU | vLLM, CPU | llama.cpp | SGLang |",
        "|---|---|---|---|---|---|",
    ]
    for (format, scheme), tested in _TESTED.items():
        cells = [f"`{format}`", scheme, *(each or "not tried" for each in tested)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
