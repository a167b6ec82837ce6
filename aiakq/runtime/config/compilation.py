"""Which decoding steps become CUDA graphs: what --compilation-config and --max-seq-len-to-capture ask for.

The spellings are vLLM's. Models are not compiled, so what is there about compiling is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.errors import error

#: Keys of the configuration that mean something here, each with its older name if it has one.
KEYS = {
    "mode": "level",
    "cudagraph_mode": "use_cudagraph",
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": "max_capture_size",
}
#: Only decoding is captured, so all but the first mean the same.
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class Capture:
    """What is captured.

    eager  nothing.
    sizes  numbers of sequences that graphs are made for, ascending; None: graphs.sizes chooses.
    most   the largest of them; None: as many sequences as a step may have.
    length tokens of the longest sequence of such a step; None: as long as any may be.
    """

    eager: bool = False
    sizes: tuple[int, ...] | None = None
    most: int | None = None
    length: int | None = None

    @staticmethod
    def of(config: int | Mapping[str, Any] | None, length: int | None, eager: bool) -> Capture:
        """From --compilation-config (a level, or an object), --max-seq-len-to-capture and
        --enforce-eager. Raises ``bad_option``.
        """
        given = dict(config) if isinstance(config, Mapping) else {} if config is None else {"mode": config}
        older = {old: new for new, old in KEYS.items() if old}
        unknown = given.keys() - KEYS.keys() - older.keys()
        if unknown:
            raise _bad(config, f"one of {', '.join(KEYS)}, not {sorted(unknown)[0]}")
        given = {older.get(key, key): value for key, value in given.items() if value is not None}
        mode, graphs = given.get("mode", 3), given.get("cudagraph_mode", True)
        if not _whole(mode, 0) or mode > 3:
            raise _bad(config, "a mode from 0 (step by step, no graphs) to 3")
        if not isinstance(graphs, bool) and str(graphs).upper() not in MODES:
            raise _bad(config, f"a cudagraph_mode of {', '.join(MODES)}")
        sizes, most = given.get("cudagraph_capture_sizes"), given.get("max_cudagraph_capture_size")
        if sizes is not None and not (isinstance(sizes, list) and all(_whole(size, 1) for size in sizes)):
            raise _bad(config, "cudagraph_capture_sizes that are a list of numbers of sequences")
        if most is not None and not _whole(most, 0):
            raise _bad(config, "a max_cudagraph_capture_size that is a number of sequences")
        none = mode == 0 or graphs is False or str(graphs).upper() == "NONE" or sizes == [] or most == 0
        return Capture(
            eager=eager or none,
            sizes=tuple(sorted(set(sizes))) if sizes else None,
            most=most,
            length=length,
        )


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _bad(config: Any, expected: str) -> Exception:
    return error(
        "bad_option",
        option="--compilation-config",
        value=config,
        expected=expected,
        hint="Models are not compiled; it says which decoding steps become CUDA graphs.",
    )
