"""Every launch configuration compiled, and what became of it as JSON on stdout. Run by test_triton_compiled.py.

--record writes instructions.json, --page a section of docs/performance.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compiling import SHARED, Compiled, compiled
from triton.runtime.jit import MockTensor

from aiakq.kernels.triton import attention, configs, grouped, integers, linear

HERE = Path(__file__).resolve().parent
K, N = 4096, 4096
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Scheme, bits as stored, groups.
KINDS = [("w4a16", 4, 128), ("w4a16", 4, 32), ("w8a16", 8, 128), ("w8a16", 8, K), ("w2a16", 2, 128)]


def grouped_kernels() -> Iterator[dict[str, Any]]:
    for scheme, bits, group in KINDS:
        plane = linear.inputs_per_plane(K, group, bits)
        step = plane * (16 // bits)
        for most, entry in configs.table("default")["grouped"][str(bits)].items():
            if entry == "dense":
                continue
            bn, bm, warps, stages, *words = entry
            for name, dtype in DTYPES.items():
                for arch in SHARED if (scheme, group) == ("w4a16", 128) else [90]:
                    halves = [MockTensor(dtype)] * 3
                    made = compiled(
                        grouped.grouped_kernel, arch, halves[0], MockTensor(torch.float32), MockTensor(torch.int16),
                        MockTensor(torch.int32), *halves, MockTensor(torch.float32), MockTensor(torch.int32),
                        K, 1024, N, 7, N, N_PADDED=N, STEPS=K // step, GROUP=group, BITS=bits, BKP=plane, BN=bn, BM=bm,
                        SPLIT=4 if int(most) <= 64 else 1, STAGES=stages, BIAS=False, RESIDUAL=False,
                        SCALE_FIRST="scale_first" in words, PLAIN=False, num_warps=warps,
                    )  # fmt: skip
                    kind = f"{scheme} g{group}" if group < K else scheme
                    matrix = "HGMMA" if arch == 90 and warps >= 4 else "HMMA"
                    weights = bn * step / (warps * 32)
                    yield described(f"{kind} {name} m{most}", kind, arch, int(most), made, weights, matrix)


def integer_kernels() -> Iterator[dict[str, Any]]:
    for most, (bn, bm, warps, stages, *words) in configs.table("default")["integers"]["8"].items():
        y = MockTensor(torch.bfloat16)
        made = compiled(
            integers.integers_kernel, 90, MockTensor(torch.int8), MockTensor(torch.float32), MockTensor(torch.int8),
            MockTensor(torch.float32), y, y, y, MockTensor(torch.int32), MockTensor(torch.int32), N, 7, N,
            K=K, BN=bn, BM=bm, BK=128, SPLIT=4 if int(most) <= 64 else 1, STAGES=stages,
            WEIGHTS_LEFT="weights_left" in words, BIAS=False, RESIDUAL=False, num_warps=warps,
        )  # fmt: skip
        yield described(f"w8a8 m{most}", "w8a8", 90, int(most), made, bn * 128 / (warps * 32), "IGMMA")


def attention_kernels() -> Iterator[dict[str, Any]]:
    """Of Llama 3's heads; instructions are counted per element of a key and a value."""
    shape = {"HKV": 8, "GROUP": 4, "D": 128, "WIDTH": 128, "PAGE": 16, "TILE": 64}
    for name, dtype, cache in (("bf16", torch.bfloat16, torch.bfloat16), ("int8", torch.bfloat16, torch.int8)):
        caches = [MockTensor(cache)] * 2 + [MockTensor(torch.float32)] * 2
        tables = [MockTensor(torch.int32)] * 2
        common = {"WINDOW": 0, "CAP": False, "SCALED": cache == torch.int8, "STAGES": 3, "num_warps": 4}
        made = compiled(
            attention.decode_kernel, 90, MockTensor(dtype), *caches, *tables, *[MockTensor(torch.float32)] * 2,
            6144, 64, 0.1, 0.0, ROWS=16, SPLIT=4, **shape, **common,
        )  # fmt: skip
        yield described(f"decode {name}", "decode", 90, 1, made, 2 * 64 * 128 / 128, "HMMA")
        made = compiled(
            attention.prefill_kernel, 90, MockTensor(dtype), *caches, *tables, *tables, MockTensor(dtype),
            6144, 4096, 64, 0.1, 0.0, TOKENS=16, ROWS=64, **shape, **common,
        )  # fmt: skip
        yield described(f"prefill {name}", "prefill", 90, 64, made, 2 * 64 * 128 / 128, "HGMMA")


def described(
    name: str, kind: str, arch: int, rows: int, made: Compiled, weights: float, matrix: str
) -> dict[str, Any]:
    """``weights`` are those of one thread and one turn of the loop; ``matrix`` is what should multiply."""
    return {
        "name": f"{name} sm{arch}",
        "kind": kind,
        "arch": arch,
        "rows": rows,
        "per_weight": round(made.instructions() / weights, 3),
        "registers": made.registers,
        "stack": made.stack,
        "shared": made.shared,
        "most_shared": SHARED[arch],
        "matrix": matrix,
        "loop": dict(made.loop),
    }


PAGE = """\
## Triton kernels, compiled and not yet run

No GPU has taken part: these are what ptxas made for an H200 (sm_90) of every launch configuration of
`kernels/triton/launch/default.json`, {versions}. CI compiles them again, for sm_80 and sm_89 too, and fails if one does
not fit, spills registers, waits for a load in its main loop, multiplies with another instruction than is meant, or
needs more than 5 % more instructions per weight. At 4.3 TB/s an H200 can issue about four instructions per 4-bit
weight, seven per 8-bit weight, before issue is what limits it.

| kernel | up to rows | instructions per weight | registers | shared memory, KiB | multiplied by |
|---|---|---|---|---|---|
{rows}

Of attention, per element of a key and a value. Written by `python tests/kernels/triton/compile_all.py --page`."""


def page(made: list[dict[str, Any]]) -> str:
    rows = []
    for k in made:
        if k["arch"] == 90:
            name = k["name"].removesuffix(" sm90").rsplit(" m", 1)[0]
            shared = f"{k['shared'] / 1024:.0f}"
            cells = (name, k["rows"], f"{k['per_weight']:.2f}", k["registers"], shared, k["matrix"])
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    versions = f"Triton {importlib.metadata.version('triton')}"
    return PAGE.format(versions=versions, rows="\n".join(rows))


def main() -> None:
    made = [*grouped_kernels(), *integer_kernels(), *attention_kernels()]
    if "--record" in sys.argv:
        file = HERE / "instructions.json"
        file.write_text(json.dumps({kernel["name"]: kernel["per_weight"] for kernel in made}, indent=1) + "\n")
    if "--page" in sys.argv:
        sys.path.insert(0, str(HERE.parents[2] / "examples"))
        import sections

        sections.put(HERE.parents[2] / "docs" / "performance.md", "triton", page(made))
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
