"""Autotuning of launch configurations for ``aiakq bench kernels --tune``, and the files that store the results."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from aiakq.kernels.triton import configs
from aiakq.kernels.triton.configs import Entry

_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
#: Maximum rows of each entry; for attention see configs.py.
BUCKETS = {
    "grouped": _ROWS,
    "integers": _ROWS,
    "fp8": _ROWS,
    "decode": (8, 32, 128, 512, 2048),
    "prefill": (128, 1024, 8192),
}
#: Minimum rows for which dequantizing the weights and a dense product are also tried.
DENSE_FROM = 256
#: Programs per multiprocessor up to which inputs are split, tried for the fastest tile of up to so many rows.
SHARES, SHARES_TO = (1, 2, 4), 256


def candidates(kernel: str, m: int) -> list[Entry]:
    """Return the entries that may be the fastest for ``m`` rows."""
    if kernel == "decode":
        return [list(entry) for entry in itertools.product((32, 64, 128), (2, 3, 4), (2, 4), (1, 2, 4))]
    if kernel == "prefill":
        return [list(entry) for entry in itertools.product((32, 64, 128), (2, 3), (4, 8), (64, 128))]
    tile = max(8 if kernel == "grouped" else 16, min(128, 1 << (m - 1).bit_length()))
    rows = [tile] if tile <= 16 else [tile // 2, tile]
    entries: list[Entry] = []
    for bm in rows:
        for bn in (64, 128, 256) if kernel == "integers" else (64, 128):
            for warps in (2, 4) if bm <= 16 else (4, 8):
                for stages in (3, 4, 5):
                    if kernel in ("integers", "fp8"):
                        words: list[list[str]] = [["weights_left"], []] if bm >= 64 else [["weights_left"]]
                    else:
                        words = [[]] if bm <= 8 else [[], ["scale_first"]] if bm <= 32 else [["scale_first"]]
                    entries += [[bn, bm, warps, stages, *extra] for extra in words]
    return [*entries, "dense"] if kernel == "grouped" and m >= DENSE_FROM else entries


def trials(kernel: str, m: int) -> int:
    """Return the number of entries that ``tuned`` measures for ``m`` rows."""
    return len(candidates(kernel, m)) + (len(SHARES) if _is_split(kernel, m) else 0)


def _is_split(kernel: str, m: int) -> bool:
    return kernel in ("grouped", "integers", "fp8") and m <= SHARES_TO


def tuned(kernel: str, cost: Callable[[int, Entry], float]) -> dict[str, Entry]:
    """Return the entry with the lowest ``cost(rows, entry)`` for every bucket; failed launches cost infinity."""
    best_entries: dict[str, Entry] = {}
    for m in BUCKETS[kernel]:
        costs = [(cost(m, entry), entry) for entry in candidates(kernel, m)]
        if _is_split(kernel, m):
            _, best = min((each for each in costs if each[1] != "dense"), key=_first)
            assert not isinstance(best, str)
            bn, bm, warps, stages, *words = best
            shared: list[Entry] = [[bn, bm, warps, stages, share, *words] for share in SHARES]
            costs += [(cost(m, entry), entry) for entry in shared]
        least, best = min(costs, key=_first)
        if least < float("inf"):
            best_entries[str(m)] = best
    # Omit a bucket that equals the next one.
    names = list(best_entries)
    return {
        a: best_entries[a]
        for a, b in zip(names, [*names[1:], None], strict=True)
        if b is None or best_entries[a] != best_entries[b]
    }


def _first(costs: tuple[float, Entry]) -> float:
    return costs[0]


def write(gpu: configs.Gpu, tables: configs.Tables, folder: Path) -> Path:
    """Merge kernel -> bits -> entries into the table of ``gpu``, write it, and return the file."""
    whole = copy.deepcopy(configs.table(gpu.name, gpu.capability))
    for kernel, by_bits in tables.items():
        whole.setdefault(kernel, {}).update(by_bits)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{gpu.name}.json"
    lines = (
        f' "{kernel}": {{\n'
        + ",\n".join(f'  "{bits}": {json.dumps(entries)}' for bits, entries in sorted(by_bits.items()))
        + "\n }"
        for kernel, by_bits in whole.items()
    )
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    configs.table.cache_clear()
    return file
