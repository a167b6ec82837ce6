"""Compile every launch configuration and print the results as JSON. Run by test_triton_compiled.py.

--quick compiles each kernel once for each architecture and number of warps, and what multiplies no matrices for one
architecture. --arch N, several times if wanted, compiles for that architecture alone. --record writes the counts of
this version of Triton to instructions.json, --page a section of docs/performance.md.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import compiling
import torch
from compile_chunks import chunked_kernels
from compile_experts import expert_kernels
from compile_floats import decoding_kernel, float_code_kernels
from compile_fp8 import fp8_kernels
from compile_sampling import sampling_kernels
from compile_splits import split_kernels
from compiling import SHARED, Compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import (
    attention,
    attention_kernel,
    configs,
    gptq,
    latent_attention,
    layouts,
    linear,
    linear_int8_kernel,
    linear_kernel,
    lora,
)
from aiakq.kernels.triton.activation_kernel import gate_kernel
from aiakq.kernels.triton.convolution import CHANNELS
from aiakq.kernels.triton.convolution_kernel import convolution_kernel
from aiakq.kernels.triton.gated_norm_kernel import gated_norm_kernel
from aiakq.kernels.triton.gptq_kernel import round_kernel, search_kernel
from aiakq.kernels.triton.latent_attention_kernel import latent_decode_kernel, latent_prefill_kernel
from aiakq.kernels.triton.lora_kernel import expand_kernel, shrink_kernel
from aiakq.kernels.triton.norm_kernel import norm_kernel
from aiakq.kernels.triton.recurrence import HELD
from aiakq.kernels.triton.recurrence_kernel import recurrence_kernel
from aiakq.kernels.triton.rotary_kernel import rotary_kernel
from aiakq.kernels.triton.selective_scan import HELD as SCANNED
from aiakq.kernels.triton.selective_scan_kernel import selective_scan_kernel
from aiakq.kernels.triton.states import TOKENS
from aiakq.kernels.types import AttentionSpec

HERE = Path(__file__).resolve().parent
K, N = 4096, 4096
QUICK = "--quick" in sys.argv
compiled = partial(compiling.compiled, once=QUICK)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: What becomes of a kernel; None of one that was not compiled again.
Row = dict[str, Any] | None
#: Arithmetic of 64 bits, which nothing here wants: a constant that is no float32 makes Triton take it.
DOUBLE = {"DFMA", "DMUL", "DADD", "DSETP", "DMNMX"}
#: Scheme, bits as stored, groups.
KINDS = [("w4a16", 4, 128), ("w4a16", 4, 32), ("w8a16", 8, 128), ("w8a16", 8, K), ("w2a16", 2, 128)]
#: One of each width: what is compiled for GPUs other than an H200, too, in bfloat16.
EVERYWHERE = [("w4a16", 4, 128), ("w8a16", 8, K), ("w2a16", 2, 128)]


def launches(arch: int, kernel: str, bits: int) -> list[tuple[str, list[Any]]]:
    """Most rows and configuration of every launch on a GPU without a file of its own, the widest first.

    With --quick, it is the one of its kind that is compiled, and the one that needs most.
    """
    entries = configs.table(configs.DEFAULT, arch)[kernel][str(bits)]
    return [(most, entry) for most, entry in reversed(entries.items()) if not isinstance(entry, str)]


def tensor_core(arch: int, warps: int, integers: bool = False) -> str:
    """The instruction that should multiply. Hopper's products of floats need four warps, as do those of sm_100, where
    Triton before 3.9 multiplies integers as before Hopper.
    """
    if arch == 90 and (integers or warps >= 4):
        return "IGMMA" if integers else "HGMMA"
    if arch == 100 and warps >= 4 and not integers:
        return "UTCHMMA"
    return "IMMA" if integers else "HMMA"


def is_split(most: str, words: list[Any]) -> bool:
    """Whether programs share an output."""
    return int(most) <= configs.SPLIT_ROWS or any(isinstance(word, int) for word in words)


def grouped_kernels(arch: int) -> Iterator[Row]:
    for scheme, bits, group in KINDS if arch == 90 else EVERYWHERE:
        plane = linear.inputs_per_plane(K, group, bits)
        step = plane * (16 // bits)
        entries = launches(arch, "grouped", bits)
        wide = entries[0][0]
        for most, entry in entries:
            bn, bm, warps, stages, *words = entry
            for name in DTYPES if arch == 90 else ("bf16",):
                dtype = DTYPES[name]
                halves = [MockTensor(dtype)] * 3
                # Without inline assembly, which ``--tune`` tries too, the widest one needs most registers.
                without = most == wide and arch < 100 and (scheme, bits, group) in EVERYWHERE
                for plain in (False, True) if without else (False,):
                    made = compiled(
                        linear_kernel.grouped_kernel, arch, halves[0], MockTensor(torch.float32),
                        MockTensor(torch.int16), MockTensor(torch.int32), MockTensor(torch.float32), *halves[:2],
                        MockTensor(torch.float32), MockTensor(torch.int32), K, 1024, N, 7, N, N_PADDED=N,
                        STEPS=K // step, GROUP=group, BITS=bits, BKP=plane, BN=bn, BM=bm,
                        SPLIT=4 if is_split(most, words) else 1, STAGES=stages, BIAS=False,
                        SCALE_FIRST="scale_first" in words or ("joined" in words and group < step),
                        JOINED="joined" in words, PLAIN=plain, num_warps=warps,
                    )  # fmt: skip
                    kind = f"{scheme} g{group}" if group < K else scheme
                    matrix = tensor_core(arch, warps)
                    weights = bn * step / (warps * 32)
                    label = f"{kind} {name}{' plain' * plain} m{most}"
                    yield described(label, kind, arch, int(most), made, weights, matrix)


def integer_kernels(arch: int) -> Iterator[Row]:
    for most, (bn, bm, warps, stages, *words) in launches(arch, "integers", 8):
        y = MockTensor(torch.bfloat16)
        made = compiled(
            linear_int8_kernel.integers_kernel, arch, MockTensor(torch.int8), MockTensor(torch.float32),
            MockTensor(torch.int8), MockTensor(torch.float32), y, y, MockTensor(torch.int32), MockTensor(torch.int32),
            N, 7, N, K=K, BN=bn, BM=bm, BK=128, SPLIT=3 if is_split(most, words) else 1, STAGES=stages,
            WEIGHTS_LEFT="weights_left" in words, BIAS=False, num_warps=warps,
        )  # fmt: skip
        matrix = tensor_core(arch, warps, integers=True)
        yield described(f"w8a8 m{most}", "w8a8", arch, int(most), made, bn * 128 / (warps * 32), matrix)


#: Of keys and values, in the order of the table; GPUs before sm_89 know no floats of 8 bits.
CACHES = {"bf16": torch.bfloat16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def caches(arch: int) -> Iterator[tuple[str, torch.dtype, bool]]:
    """Name, dtype, and whether there are scales; on GPUs that nothing is tuned for, one of 8 bits."""
    for name, dtype in CACHES.items():
        if arch >= 100:
            if name in ("bf16", "e4m3"):
                yield name, dtype, dtype.itemsize == 1
        elif arch >= 89 or not dtype.is_floating_point or dtype.itemsize > 1:
            yield name, dtype, dtype.itemsize == 1


def attention_kernels(arch: int) -> Iterator[Row]:
    """Of Llama 3's heads; instructions are counted per element of a key and a value."""
    x = MockTensor(torch.bfloat16)
    for name, dtype, scaled in caches(arch):
        cache = [MockTensor(dtype)] * 2 + [MockTensor(torch.float32)] * 2
        tables = [MockTensor(torch.int32)] * 2
        bits = "8" if scaled else "16"
        for kernel in ("decode", "prefill"):
            entries = launches(arch, kernel, int(bits))
            for most, entry in entries:
                config = configs.attention_config_of(entry, 128)
                warps = config.warps or attention.prefill_warps(arch // 10)
                common = {
                    "HKV": 8, "GROUP": 4, "D": 128, "WIDTH": 128, "DV": 128, "WIDTH_V": 128, "PAGE": 16,
                    "TILE": config.tile, "WINDOW": 0, "CHUNK": 0, "CAPPED": False, "ALIBI": False,
                    "SCALED": scaled, "STAGES": config.stages, "num_warps": warps,
                }  # fmt: skip
                if kernel == "decode":
                    rows, matrix = 1, "HMMA"
                    made = compiled(
                        attention_kernel.decode_kernel, arch, x, *cache, *tables, *tables, 64,
                        *[MockTensor(torch.float32)] * 2, x, *[MockTensor(torch.float32)] * 2, 6144, 4096, 64, 0.1, 0.0,
                        ROWS=16, SINKS=False, **common,
                    )  # fmt: skip
                else:
                    rows, matrix = config.share, tensor_core(arch, warps)
                    made = compiled(
                        attention_kernel.prefill_kernel, arch, x, *cache, *tables, *tables, x,
                        *[MockTensor(torch.float32)] * 2, 6144, 4096, 64, 0.1, 0.0, TOKENS=rows // 4, ROWS=rows,
                        SINKS=False, **common,
                    )  # fmt: skip
                title = f"{kernel} {name}" + (f" to {most}" if len(entries) > 1 else "")
                yield described(title, kernel, arch, rows, made, 2 * config.tile * 128 / (warps * 32), matrix)


def latent_kernels(arch: int) -> Iterator[Row]:
    """Of DeepSeek's latents and of the heads of V3 and V2 Lite; instructions are counted per element of a latent."""
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    for name, dtype, scaled in caches(arch):
        cache = torch.empty(1, 16, 1, 1, dtype=dtype, device="meta")
        for heads, decoding in itertools.product((128, 16) if arch < 100 else (128,), (True, False)):
            spec = AttentionSpec(heads, 1, 576, 0.1, value_dim=512, latent=True)
            config = latent_attention.config_of(arch // 10, heads, decoding, 8 * dtype.itemsize)
            constants = latent_attention.constants(spec, [cache] * (1 + scaled), config)
            first = [x, *[MockTensor(dtype)] * 2, floats, numbers, numbers]
            if decoding:
                made = compiled(
                    latent_decode_kernel, arch, *first, numbers, numbers, 64, floats, floats, (heads + 1) * 576, 64,
                    0.1, **constants,
                )  # fmt: skip
            else:
                made = compiled(
                    latent_prefill_kernel, arch, *first, numbers, numbers, x, (heads + 1) * 576, heads * 512, 64, 0.1,
                    TOKENS=config.tokens, **constants,
                )  # fmt: skip
            title = f"latent {'decode' if decoding else 'prefill'} {heads} heads {name}"
            rows, threads = config.heads * config.tokens, config.warps * 32
            matrix = "HGMMA" if arch == 90 and rows == 64 else "HMMA"
            yield described(title, "latent", arch, rows, made, config.tile * 576 / threads, matrix)


def recurrent_kernels(arch: int) -> Iterator[Row]:
    """Of Qwen3-Next's, Mamba 2's and FalconMamba's sizes; instructions of all of it, per number of a state or a row."""
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)

    def row(name: str, made: Compiled | None, elements: int, warps: int) -> Row:
        return described(name, "recurrent", arch, 1, made, elements / (warps * 32), None)

    for name, delta, value_dim in (("delta rule", True, 128), ("state space", False, 64)):
        made = compiled(
            recurrence_kernel, arch, x, x, *[floats] * 4, *[numbers] * 4, x, 8192, 64, 9, 0.0, 1.0, 0.1, 1e-6, H=32,
            HK=16, DK=128, WIDTH=128, DV=value_dim, BLOCK=HELD // 128, DELTA=delta, SKIP=not delta, num_warps=1,
        )  # fmt: skip
        yield row(name, made, HELD, 1)
    made = compiled(
        selective_scan_kernel, arch, *[x] * 5, *[floats] * 4, *[numbers] * 4, x, 16384, 8192, 288, 288, 16384, C=8192,
        N=16, WIDTH=16, BLOCK=SCANNED // 16, num_warps=1,
    )  # fmt: skip
    yield row("selective scan", made, SCANNED, 1)
    made = compiled(
        convolution_kernel, arch, x, x, x, *[floats] * 3, *[numbers] * 4, x, 8192, 8192, 8192, 8, C=8192, TAPS=4,
        TOKENS=TOKENS, BLOCK=CHANNELS, BIAS=True, SILU=True, BEFORE=True, AFTER=True, num_warps=4,
    )  # fmt: skip
    yield row("convolution", made, TOKENS * CHANNELS, 4)
    made = compiled(
        gated_norm_kernel, arch, x, x, floats, x, 4096, 12288, 4096, 1e-6, GROUP=128, BLOCK=128, GATE_FIRST=False,
        num_warps=1,
    )  # fmt: skip
    yield row("gated norm", made, 128, 1)


def gptq_kernels(arch: int) -> Iterator[Row]:
    """Of groups of 128 columns and of 4 bits; instructions of all of it, per column and row of the weight."""
    floats, numbers, codes = MockTensor(torch.float32), MockTensor(torch.int32), MockTensor(torch.uint8)
    for name, sweep in (("GPTQ loop", False), ("GPTQ sweep", True)):
        made = compiled(
            round_kernel, arch, *[floats] * 6, codes, numbers, N, K, N, N, N, N, N, gptq.LONGEST, gptq.LONGEST,
            TOP=15, SWEEP=sweep, LENGTH=gptq.LONGEST, BLOCK=gptq.ROUNDED, num_warps=4,
        )  # fmt: skip
        yield described(name, "gptq", arch, 1, made, gptq.LONGEST * gptq.ROUNDED / 128, None)
    made = compiled(
        search_kernel, arch, *[floats] * 5, 1, gptq.LONGEST * N, N, N, gptq.LONGEST, 20, 40, 1e-8, TOP=15,
        SYMMETRIC=True, SIGNIFICANT=11, LENGTH=gptq.LONGEST, BLOCK=gptq.SEARCHED, num_warps=4,
    )  # fmt: skip
    yield described("GPTQ ranges", "gptq", arch, 1, made, gptq.LONGEST * gptq.SEARCHED / 128, None)


def lora_kernels(arch: int) -> Iterator[Row]:
    """Of one tile of rows, which takes as long for one row; instructions per number of A or B."""
    x, floats, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    tables = [MockTensor(torch.int64), numbers, numbers]
    steps = K // lora.INPUTS // lora.MAX_SPLIT
    common = {"LINE": lora.LINE, "ROWS": lora.ROWS, "RANKS": lora.RANKS, "num_warps": 4}
    made = compiled(
        shrink_kernel, arch, x, *tables, floats, K, 16, 16 * 7, K=K, STEPS=steps, BLOCK=lora.INPUTS, **common
    )  # fmt: skip
    yield described("LoRA shrink", "lora", arch, lora.ROWS, made, lora.RANKS * lora.INPUTS / 128, None)
    made = compiled(
        expand_kernel, arch, floats, *tables, x, floats, 16, 16 * 7, N, SPLIT=lora.MAX_SPLIT, BASE_BIAS=True,
        BLOCK=lora.OUTPUTS, **common,
    )  # fmt: skip
    yield described("LoRA expand", "lora", arch, lora.ROWS, made, lora.RANKS * lora.OUTPUTS / 128, None)


def row_kernels(arch: int) -> Iterator[Row]:
    """What has no matrices to multiply; instructions of all of it, per element of a row or of a weight."""
    x, scales, numbers = MockTensor(torch.bfloat16), MockTensor(torch.float32), MockTensor(torch.int32)
    codes = MockTensor(torch.int8)

    def row(name: str, kernel: Any, *arguments: Any, elements: int, warps: int = 0, **constants: Any) -> Row:
        warps = warps or layouts.warps_for(elements)
        made = compiled(kernel, arch, *arguments, num_warps=warps, **constants)
        return described(name, "row", arch, 1, made, elements / (warps * 32), None)

    for name, out in (("", x), (" to int8", codes)):
        rounded = out is codes
        yield row(
            f"norm{name}", norm_kernel, x, x, x, x, out, scales, scales, K, K, K, 1e-5, D=K, BLOCK=K,
            RESIDUAL=True, CENTERED=False, BIAS=False, CODES=rounded, GIVEN=False, elements=K,
        )  # fmt: skip
        block = 16384 if rounded else 1024
        yield row(
            f"gate{name}", gate_kernel, x, x, out, scales, scales, 28672, 28672, 14336, D=14336, BLOCK=block,
            ACTIVATION=0, UP=True, CODES=rounded, GIVEN=False, elements=block,
        )  # fmt: skip
    summed = {"sums_ptr": scales, "sums_stride": 16, "SUMS": True}
    yield row(
        "norm with sums", norm_kernel, x, x, x, x, x, scales, scales, K, K, K, 1e-5, D=K, BLOCK=K,
        RESIDUAL=True, CENTERED=False, BIAS=False, CODES=False, GIVEN=False, **summed, elements=K,
    )  # fmt: skip
    yield row(
        "norm in order", norm_kernel, x, x, x, x, x, scales, scales, K, K, K, 1e-5, D=K, BLOCK=K,
        RESIDUAL=True, CENTERED=False, BIAS=False, CODES=False, GIVEN=False, perm_ptr=numbers, PERM=True, **summed,
        elements=K,
    )  # fmt: skip
    yield row(
        "gate with sums", gate_kernel, x, x, x, scales, scales, 28672, 28672, 14336, D=14336, BLOCK=1024,
        ACTIVATION=0, UP=True, CODES=False, GIVEN=False, **summed, elements=1024,
    )  # fmt: skip
    yield row(
        "rows to int8", linear_int8_kernel.quantize_kernel, x, codes, scales, scales, K, K=K, BLOCK=K, GIVEN=False,
        elements=K,
    )  # fmt: skip
    for name, dtype, scaled in caches(arch):
        positions = MockTensor(torch.int64)
        cache = [MockTensor(dtype)] * 2 + [scales] * 2
        yield row(
            f"rotary into {name}", rotary_kernel, x, x, x, x, x, scales, scales, positions, positions, *cache,
            6144, 6144, 6144, 0.0, H=32, HKV=8, D=128, DV=128, WIDTH=128, WIDTH_Q=128, ROTATED=128, INTERLEAVED=False,
            NORM=0, SCALED=scaled, elements=128, warps=1,
        )  # fmt: skip
    yield row(
        "arrange", linear_kernel.arrange_kernel, x, numbers, x, scales, K, 16, K=K, BLOCK=1024, BITS=4, BKP=32,
        PERM=False, SUMS=True, PER_PLANE=False, elements=1024,
    )  # fmt: skip
    yield row(
        "dequantize", linear_kernel.dequantize_kernel, MockTensor(torch.int16), numbers,
        MockTensor(torch.float32), x, N, N_PADDED=N,
        STEPS=K // 128, GROUP=128, BITS=4, BKP=32, PLAIN=False, elements=64 * 128, warps=4,
    )  # fmt: skip


def described(
    name: str, kind: str, arch: int, rows: int, made: Compiled | None, weights: float, matrix: str | None
) -> Row:
    """``weights`` are those of one thread and one turn of the loop; ``matrix`` is what should multiply there."""
    if made is None:
        return None
    count = made.whole.total() if matrix is None else made.instructions()
    return {
        "name": f"{name} sm{arch}",
        "kernel": made.kernel,
        "bounds": made.bounds,
        "waits": made.waits,
        "kind": kind,
        "arch": arch,
        "rows": rows,
        "per_weight": round(count / weights, 3),
        "registers": made.registers,
        "stack": made.stack,
        "shared": made.shared,
        "columns": made.columns,
        "trap": made.trap,
        "most_shared": SHARED[arch],
        "matrix": matrix,
        "double": sum(count for name, count in made.whole.items() if name in DOUBLE),
        "loop": dict(made.loop),
        "copies": made.whole["LDGSTS"],
    }


PAGE = """\
## Triton kernels as compiled

What ptxas generates for an H200 (sm_90) from every launch configuration of `kernels/triton/launch`, {versions}. CI
compiles them again, also for sm_80, 89, 100 and 120, and fails if a kernel exceeds the shared or tensor memory, spills
registers, waits for a load in its main loop, uses a different matrix instruction than intended, or (up to sm_90) needs
over 5 % more instructions per weight. At 4.3 TB/s an H200 can issue about four instructions per 4-bit weight and seven
per 8-bit weight before it becomes issue-bound.

| kernel | up to rows | instructions per weight | registers | shared memory, KiB | matrix instruction |
|---|---|---|---|---|---|
{rows}

Triton 3.9.0 needs 2.2 to 2.9 times as many instructions for W8A8 on sm_80 and sm_89, and spills registers in latent
attention on sm_90; `make triton` compiles with the newest version.

For attention, instructions per element of a key and a value, or of a latent; for kernels without a matrix product, per
element of a row, of a state or of a dequantized weight. Generated by
`python tests/kernels/triton/compile_all.py --page`."""


def page(made: list[dict[str, Any]]) -> str:
    rows = []
    for k in made:
        if k["arch"] == 90:
            name = k["name"].removesuffix(" sm90").removesuffix(f" m{k['rows']}")
            shared = f"{k['shared'] / 1024:.0f}"
            cells = (name, k["rows"], f"{k['per_weight']:.2f}", k["registers"], shared, k["matrix"] or "")
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    versions = f"Triton {importlib.metadata.version('triton')}"
    return PAGE.format(versions=versions, rows="\n".join(rows))


def made_for(arch: int) -> list[dict[str, Any]]:
    kinds = [grouped_kernels, integer_kernels, attention_kernels, latent_kernels]
    if arch == 90 or not QUICK:
        kinds += [row_kernels, recurrent_kernels, lora_kernels, gptq_kernels]
    made = [kernel for kind in kinds for kernel in kind(arch)]
    made += chunked_kernels(arch, compiled, described, launches, tensor_core)
    made += expert_kernels(arch, compiled, described, launches, tensor_core)
    made += float_code_kernels(arch, compiled, described, launches, tensor_core, is_split)
    made += fp8_kernels(arch, compiled, described, launches, is_split)
    if arch == 90 or not QUICK:
        made += [*decoding_kernel(arch, compiled, described), *split_kernels(arch, compiled, described)]
        made += sampling_kernels(arch, compiled, described)
    return [kernel for kernel in made if kernel is not None]


def main() -> None:
    # Torch has threads, which a fork may leave locked.
    # And Triton keeps what it made of a cast for one GPU, which another may not know.
    archs = [int(after) for word, after in itertools.pairwise(sys.argv) if word == "--arch"]
    # sm_89 has the launches and, but for floats of 8 bits, the code of sm_80.
    archs = archs or [arch for arch in sorted(SHARED, reverse=True) if not (QUICK and arch == 89)]
    workers = min(len(archs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        made = [kernel for kernels in pool.map(made_for, archs) for kernel in kernels]
    if "--record" in sys.argv:
        file = HERE / "instructions.json"
        recorded = json.loads(file.read_text())
        known = recorded.setdefault(importlib.metadata.version("triton"), {})
        for name in [name for name in known if int(name.rpartition(" sm")[2]) in archs]:
            del known[name]
        known |= {kernel["name"]: kernel["per_weight"] for kernel in made if kernel["arch"] < 100}
        file.write_text(json.dumps(recorded, indent=1, sort_keys=False) + "\n")
    if "--page" in sys.argv:
        sys.path.insert(0, str(HERE.parents[2] / "examples"))
        import sections

        sections.put(HERE.parents[2] / "docs" / "performance.md", "triton", page(made))
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
