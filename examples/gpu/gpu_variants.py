"""Launch configurations of weight-only products that are compared on a GPU: a step of gpu.py, ``variants``.

All of them are compiled first, on all cores, and computed once to compare with torch; then they are timed beside torch
in bfloat16, the rows that matter most first. Under $OUT it writes variants.txt, a table, and launch.json, the
launch file of this kind of GPU with the fastest of each number of rows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aiakq.bench.timing import copies, microseconds
from aiakq.kernels.triton import configs, linear
from aiakq.kernels.types import QWeight

#: Outputs and inputs.
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
#: Inputs of a group for each number of bits; None: one group.
GROUPS = {4: 128, 8: None}
#: Rows in the order in which they are timed.
ORDER = (64, 256, 32, 128, 16, 1024, 512)
#: Largest accepted relative RMS difference from a product with the same weights in float32.
TOLERANCE = 0.01
#: Seconds for compiling, before the rest is compiled when it is first used.
COMPILING = 60.0

FIRST, JOINED, BOTH = ["scale_first"], ["joined"], ["scale_first", "joined"]


def _product(tiles: list[list[int]], shares: tuple[int, ...], words: list[list[str]]) -> list[configs.Entry]:
    """Combine tiles [outputs, rows, warps, stages] with programs per multiprocessor and words."""
    return [[*tile, share, *each] for tile in tiles for share in shares for each in words]


#: Bits -> rows -> what is tried beside the entry in use.
TRIED: dict[int, dict[int, list[configs.Entry]]] = {
    4: {
        16: [
            *_product([[64, 16, 4, 5]], (2, 4), [[], JOINED, BOTH]),
            *_product([[128, 16, 4, 4]], (2,), [JOINED, BOTH]),
            [64, 16, 2, 5, 2],
            [64, 16, 2, 5, 2, *JOINED],
        ],
        32: [
            *_product([[64, 32, 4, 5]], (2, 4), [JOINED, BOTH]),
            *_product([[128, 32, 4, 4]], (1, 2), [BOTH]),
            [128, 32, 4, 4, 2, *JOINED],
            [128, 32, 8, 5, 2, *BOTH],
        ],
        64: [
            *_product([[128, 64, 8, 4], [64, 64, 4, 4], [128, 64, 4, 4]], (1, 2), [BOTH]),
            [128, 64, 8, 4, 1, *FIRST],
            [64, 64, 4, 5, 1, *BOTH],
            [256, 64, 8, 4, 1, *BOTH],
            [64, 64, 4, 4, 2, *FIRST],
            [64, 64, 4, 4, 2, *JOINED],
        ],
        128: [
            *_product([[128, 128, 8, 3], [64, 128, 4, 3]], (1, 2), [BOTH]),
            [128, 128, 8, 4, 1, *BOTH],
            [256, 128, 8, 3, 1, *BOTH],
            [128, 64, 8, 4, 1, *BOTH],
        ],
        256: [
            *_product([[128, 128, 8, 3], [128, 256, 8, 3], [256, 128, 8, 3], [64, 128, 4, 3]], (1,), [BOTH]),
            [128, 128, 8, 4, 1, *BOTH],
            [128, 256, 8, 2, 1, *BOTH],
            [64, 256, 4, 3, 1, *BOTH],
            [64, 128, 4, 3, 2, *BOTH],
        ],
        1024: _product([[128, 128, 8, 4], [128, 256, 8, 3], [256, 128, 8, 3]], (0,), [BOTH]),
    },
    8: {
        16: [
            *_product([[64, 16, 4, 5]], (2, 4), [[], JOINED]),
            [64, 16, 2, 5, 2, *JOINED],
            [128, 16, 4, 4, 2, *JOINED],
        ],
        32: _product([[64, 32, 4, 5], [128, 32, 4, 4]], (2,), [[], JOINED]),
        64: [
            *_product([[64, 64, 4, 4], [128, 64, 8, 4]], (1, 2), [JOINED]),
            [128, 64, 4, 3, 2, *JOINED],
            [64, 64, 4, 4, 2, *BOTH],
        ],
        128: [
            *_product([[128, 128, 8, 3]], (1, 2), [JOINED, BOTH]),
            [64, 128, 4, 3, 2, *JOINED],
            [256, 128, 8, 3, 1, *BOTH],
        ],
        256: [
            *_product([[128, 128, 8, 3], [256, 128, 8, 3]], (1,), [JOINED, BOTH]),
            [128, 256, 8, 3, 1, *BOTH],
            [128, 256, 8, 2, 1, *JOINED],
        ],
        1024: _product([[128, 128, 8, 3], [256, 128, 8, 3]], (0,), [JOINED, BOTH]),
    },
}  # fmt: skip


def entries_for(bits: int, rows: int, gpu: configs.Gpu) -> list[configs.Entry]:
    """Return the entry in use, first, and those to try for ``rows``."""
    used = configs.entry_for(gpu, "grouped", bits, rows)
    tried = TRIED[bits][1024 if rows > 256 else rows]
    return [used, *(entry for entry in tried if entry != used), *(["dense"] if rows > 256 and used != "dense" else [])]


def layer(bits: int, n: int, k: int, device: torch.device) -> linear.GroupedLinear:
    """Make a layer of random weights whose zero point is that of symmetric codes."""
    group = GROUPS[bits] or k
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) + 0.5).half() / 2**bits / 8
    weight = QWeight(f"w{bits}a16", codes, scales, group_size=group)
    return linear.prepare(weight, weight.problem(torch.bfloat16, device.type))


# --- compiling -----------------------------------------------------------------------------------------------------


def launches(shapes: dict[str, tuple[int, int]], gpu: configs.Gpu) -> Iterator[tuple[int, int, tuple[int, int], Any]]:
    """Yield bits, rows, shape and entry of all launches, as timed."""
    for rows in ORDER:
        for bits in TRIED:
            for entry in entries_for(bits, rows, gpu):
                for shape in shapes.values():
                    yield bits, rows, shape, entry


def compile_part(part: int, parts: int, gpu: configs.Gpu, shapes: dict[str, tuple[int, int]]) -> int:
    """Compile every ``parts``-th launch without a GPU into Triton's cache; return how many."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from aiakq.kernels.triton.precompile import AbsentGpu

    def compile_only(function: JITFunction, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **options: object) -> None:
            function.warmup(*arguments, grid=grid, **options)

        return launch

    JITFunction.__getitem__ = compile_only
    driver.set_active(AbsentGpu(gpu.capability))
    configs.assume(gpu)
    cpu = torch.device("cpu")
    seen = set()
    for bits, rows, (n, k), entry in launches(shapes, gpu):
        if entry != "dense":
            split = configs.config_of(entry, cpu, n, k // 128, rows).split
            seen.add(((bits, n, k, json.dumps(entry), split), rows))
    # One of each: rows beyond a tile change nothing.
    unique = dict(sorted(seen, key=lambda each: each[1]))
    mine = sorted(unique.items(), key=lambda each: (ORDER.index(each[1]), each[0][2], each[0][1]))[part::parts]
    for (bits, n, k, entry, _), rows in mine:
        group = GROUPS[bits] or k
        plane = linear.inputs_per_plane(k, group, bits)
        assert plane is not None
        steps = k // (plane * 16 // bits)
        empty = partial(torch.empty, device=cpu)
        state = linear.GroupedLinear(
            empty(n // 64, steps, 64, plane, dtype=torch.int16), empty(k // group, n, dtype=torch.int32), empty(n),
            None, None, n, k, group, bits, plane,
        )  # fmt: skip
        x = empty(rows, k, dtype=torch.bfloat16)
        try:
            linear.run(x, state, configs.config_of(json.loads(entry), cpu, n, steps, rows))
        except Exception as problem:
            sys.stderr.write(f"{entry}: {type(problem).__name__}: {str(problem)[:200]}\n")
    return len(mine)


def compile_all(gpu: configs.Gpu, shapes: dict[str, tuple[int, int]], seconds: float) -> str:
    """Compile in a process for each core, at most ``seconds``."""
    parts = os.cpu_count() or 1
    words = [sys.executable, __file__, "--gpu", json.dumps(gpu), "--shapes", json.dumps(shapes)]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen([*words, "--part", str(part), str(parts)], env=alone, stderr=subprocess.DEVNULL)
        for part in range(parts)
    ]
    began, codes = time.monotonic(), []
    for process in processes:
        try:
            codes.append(process.wait(max(0.5, seconds - (time.monotonic() - began))))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(None)
    return f"{codes.count(0)} of {parts} processes compiled all of theirs in {time.monotonic() - began:.0f} s"


# --- timing --------------------------------------------------------------------------------------------------------


class Timed:
    """A product of one shape and width: copies of a layer, the weights in bfloat16, and its float32 reference."""

    def __init__(self, bits: int, n: int, k: int, device: torch.device) -> None:
        self.n, self.k, self.device = n, k, device
        first = layer(bits, n, k, device)
        others = range(copies(device, n * k * bits / 8) - 1)
        self.layers = [
            first, *(replace(first, words=first.words.clone(), grid=first.grid.clone()) for _ in others)
        ]  # fmt: skip
        self.dense = torch.empty(n, k, dtype=torch.bfloat16, device=device)
        linear.dequantize(first, self.dense)

    def microseconds(self, x: torch.Tensor, entry: configs.Entry) -> tuple[float, float]:
        """Return the microseconds of a call and its relative RMS difference from the reference."""
        config = configs.config_of(entry, self.device, self.n, self.layers[0].steps, len(x))
        wanted = x.float() @ self.dense.float().T
        found = linear.run(x, self.layers[0], config).float()
        error = ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()
        calls = [partial(linear.run, x, each, config) for each in self.layers]
        return microseconds(calls, self.device), error


def torch_times(products: dict[str, Timed], rows: int) -> dict[str, float]:
    """Return microseconds of torch's product in bfloat16 for each shape."""
    times = {}
    for name, product in products.items():
        x = torch.randn(rows, product.k, dtype=torch.bfloat16, device=product.device)
        weights = [product.dense.clone() for _ in range(copies(product.device, 2 * product.n * product.k))]
        times[name] = microseconds([partial(torch.nn.functional.linear, x, each) for each in weights], product.device)
    return times


def measure(entry: configs.Entry, rows: int, products: dict[str, Timed], torch_us: dict[str, float]) -> dict[str, Any]:
    """Return times as fast as torch for each shape, their geometric mean, and the largest difference."""
    row: dict[str, Any] = {"entry": json.dumps(entry), "rows": rows}
    errors = []
    for name, product in products.items():
        x = torch.randn(rows, product.k, dtype=torch.bfloat16, device=product.device)
        try:
            us, error = product.microseconds(x, entry)
        except Exception as problem:
            return row | {"problem": f"{type(problem).__name__}: {str(problem).splitlines()[0][:120]}"}
        errors.append(error)
        row[name] = torch_us[name] / us
    row["mean"] = math.exp(sum(math.log(row[name]) for name in products) / len(products))
    row["error"] = max(errors)
    if not max(errors) < TOLERANCE:
        row["problem"] = f"differs by {max(errors):.2g}"
    return row


def variants(
    left: Callable[[], float],
    save: Callable[[dict[str, Any]], None],
    out: Path,
    device: torch.device,
    shapes: dict[str, tuple[int, int]] = SHAPES,
    order: tuple[int, ...] = ORDER,
) -> dict[str, Any]:
    """Time all entries; see the top of this file."""
    gpu = configs.gpu(device)
    notes = {}
    if device.type == "cuda":
        notes["compiled"] = compile_all(gpu, shapes, min(COMPILING, left() - 30))
    table: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    products = {
        bits: {name: Timed(bits, *shape, device) for name, shape in shapes.items()} for bits in TRIED
    }  # fmt: skip
    torch_rows: dict[int, dict[str, float]] = {}
    for rows in order:
        torch_rows[rows] = torch_times(products[4], rows)
        for bits in TRIED:
            for number, entry in enumerate(entries_for(bits, rows, gpu)):
                if left() < 4:
                    notes["not measured"] = f"from {rows} rows of {bits} bits on: no time left"
                    break
                row = {"bits": bits, "used": number == 0}
                table.append(row | measure(entry, rows, products[bits], torch_rows[rows]))
                save({"variants": table, "torch_us": torch_rows, "notes": notes})
            (out / "variants.txt").write_text(text(table, torch_rows, notes))
            (out / "launch.json").write_text(launch_file(table, gpu))
    return {"variants": table, "torch_us": torch_rows, "notes": notes}


def text(table: list[dict[str, Any]], torch_rows: dict[int, dict[str, float]], notes: dict[str, str]) -> str:
    """Return the entry in use (*) and the four fastest of each number of rows, times as fast as torch's bfloat16."""
    lines = [f"{name}: {note}" for name, note in notes.items()]
    for rows, times in torch_rows.items():
        lines.append(f"{rows} rows, torch us: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
        for bits in TRIED:
            these = [row for row in table if (row["bits"], row["rows"]) == (bits, rows)]
            good = sorted((row for row in these if "problem" not in row), key=lambda row: -row["mean"])
            shown = good[:4] + [row for row in good[4:] if row["used"]]
            for row in shown:
                cells = " ".join(f"{row[name]:.2f}" for name in times)
                lines.append(f" w{bits} {row['mean']:.3f} ({cells}) {'*' * row['used']}{row['entry']}")
            lines += [f" w{bits} failed: {row['entry']}: {row['problem'][:90]}" for row in these if "problem" in row]
    return "\n".join(lines).replace('"', "")[:6000] + "\n"


def launch_file(table: list[dict[str, Any]], gpu: configs.Gpu) -> str:
    """Return the launch file of this kind of GPU as JSON, with the fastest entries of the rows that were timed."""
    file = configs.FOLDER / f"sm_{gpu.capability}.json"
    tables: configs.Tables = json.loads(file.read_text()) if file.is_file() else {}
    grouped = tables.setdefault("grouped", {})
    for bits in TRIED:
        rows = sorted({8, *ORDER})
        chosen: dict[str, configs.Entry] = {}
        for m in rows:
            good = [row for row in table if (row["bits"], row["rows"]) == (bits, m) and "problem" not in row]
            best = max(good, key=lambda row: row["mean"], default=None)
            chosen[str(m)] = configs.entry_for(gpu, "grouped", bits, m) if best is None else json.loads(best["entry"])
        last = rows[-1]
        # From the first number of rows where a dense product is the fastest, and beyond what was timed.
        if chosen[str(last)] != "dense":
            chosen[str(last + 1)] = "dense"
        names = list(chosen)
        grouped[str(bits)] = {
            a: chosen[a] for a, b in zip(names, [*names[1:], None], strict=True) if b is None or chosen[a] != chosen[b]
        }
    kernels = (
        f' "{kernel}": {{\n' + ",\n".join(f'  "{bits}": {json.dumps(each)}' for bits, each in by_bits.items()) + "\n }"
        for kernel, by_bits in tables.items()
    )
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def main(words: list[str]) -> int:
    """Compile a part, for ``compile_all``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--part", nargs=2, type=int, required=True)
    given = parser.parse_args(words)
    os.environ.pop("TRITON_INTERPRET", None)
    compile_part(*given.part, configs.Gpu(*json.loads(given.gpu)), json.loads(given.shapes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
