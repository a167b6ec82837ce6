"""CompilationConfig: the decode batch sizes that are captured as CUDA graphs.

The keys and values of --compilation-config are vLLM's. Models are not compiled, so keys about compilation are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import error

#: Supported keys, each with its older alias if it has one.
KEYS = {
    "mode": "level",
    "cudagraph_mode": "use_cudagraph",
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": "max_capture_size",
}
#: Values of cudagraph_mode. Only decode steps are captured, so all but the first are equivalent.
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class CompilationConfig:
    """Settings of steps that are captured as CUDA graphs, or recorded on a CPU.

    enforce_eager               capture and record nothing.
    cudagraph_capture_sizes     batch sizes to capture, ascending; None lets the executor choose.
    max_cudagraph_capture_size  maximum batch size to capture; None for the maximum batch of a step.
    max_seq_len_to_capture      maximum sequence length of a captured step; None for ``max_model_len``.
    """

    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    max_seq_len_to_capture: int | None = None

    @staticmethod
    def from_args(args: EngineArguments) -> CompilationConfig:
        """Create it from --compilation-config (a level or an object), --max-seq-len-to-capture and --enforce-eager.

        Raises ``bad_option``.
        """
        config = args.compilation_config
        values = dict(config) if isinstance(config, Mapping) else {} if config is None else {"mode": config}
        values = _with_flags(args, values)
        older = {old: new for new, old in KEYS.items() if old}
        unknown = values.keys() - KEYS.keys() - older.keys()
        if unknown:
            raise _bad(config, f"one of {', '.join(KEYS)}, not {sorted(unknown)[0]}")
        values = {older.get(key, key): value for key, value in values.items() if value is not None}
        mode, graphs = values.get("mode", 3), values.get("cudagraph_mode", True)
        if not _whole(mode, 0) or mode > 3:
            raise _bad(config, "a mode from 0 (step by step, no graphs) to 3")
        if not isinstance(graphs, bool) and str(graphs).upper() not in MODES:
            raise _bad(config, f"a cudagraph_mode of {', '.join(MODES)}")
        sizes, largest = values.get("cudagraph_capture_sizes"), values.get("max_cudagraph_capture_size")
        if sizes is not None and not (isinstance(sizes, list) and all(_whole(size, 1) for size in sizes)):
            raise _bad(config, "cudagraph_capture_sizes as a list of batch sizes")
        if largest is not None and not _whole(largest, 0):
            raise _bad(config, "a batch size as max_cudagraph_capture_size")
        none = mode == 0 or graphs is False or str(graphs).upper() == "NONE" or sizes == [] or largest == 0
        return CompilationConfig(
            enforce_eager=args.enforce_eager or none,
            cudagraph_capture_sizes=tuple(sorted(set(sizes))) if sizes else None,
            max_cudagraph_capture_size=largest,
            max_seq_len_to_capture=args.max_seq_len_to_capture,
        )


def _with_flags(args: EngineArguments, values: dict[str, Any]) -> dict[str, object]:
    """Return ``values`` with those that have an option of their own. Raises ``bad_option``."""
    sizes = args.cudagraph_capture_sizes
    if sizes is not None:
        if not all(size.strip().isdecimal() for size in sizes):
            expected = "a list of batch sizes"
            raise error("bad_option", option="--cudagraph-capture-sizes", value=sizes, expected=expected, hint="")
        values["cudagraph_capture_sizes"] = [int(size) for size in sizes]
    if args.max_cudagraph_capture_size is not None:
        values["max_cudagraph_capture_size"] = args.max_cudagraph_capture_size
    if args.optimization_level is not None and "mode" not in values and "level" not in values:
        values["mode"] = args.optimization_level
    return values


def _whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _bad(config: object, expected: str) -> Exception:
    return error(
        "bad_option",
        option="--compilation-config",
        value=config,
        expected=expected,
        hint="Models are not compiled; it selects the decoding steps that are captured as CUDA graphs.",
    )
