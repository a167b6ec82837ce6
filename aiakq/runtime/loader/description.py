"""Describes which implementation every operation of a model uses, for the start-up table and ``aiakq inspect``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import Difference, compare
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.kernels.selection import Selection
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import build_without_weights
from aiakq.runtime.models import ARCHITECTURES


def describe_operations(ops: Ops) -> dict[str, str]:
    """Rows of the start-up table about everything that was bound to ``ops``."""
    return {
        "linear layers": describe_linear_layers(ops),
        "attention": _names(ops, "attention"),
        "other operations": "; ".join(
            f"{', '.join(operations)}: {name}" for name, operations in _other_operations(ops).items()
        ),
    }


def describe_linear_layers(ops: Ops) -> str:
    """One line like ``42 x w4a16: cpu; 1 x w16: torch (cpu: ...)``, with the reasons why nothing better was taken."""
    counts = Counter({each: count for each, count in ops.bound.items() if each.operation in ("linear", "dense")})
    return "; ".join(f"{count} x {each.kind}: {_described(each.selection)}" for each, count in counts.most_common())


def selections(ops: Ops) -> dict[str, list[Selection]]:
    """Operation -> the different selections for it, the most frequent first; linear layers left out."""
    found: dict[str, list[Selection]] = {}
    for each, _ in ops.bound.most_common():
        if each.operation not in ("linear", "dense"):
            found.setdefault(each.operation, []).append(each.selection)
    return found


def _names(ops: Ops, operation: str) -> str:
    return ", ".join(map(_described, selections(ops).get(operation, [])))


def _other_operations(ops: Ops) -> dict[str, list[str]]:
    """The implementation in words -> the operations that run in it."""
    found: dict[str, list[str]] = {}
    for operation in selections(ops):
        if operation != "attention":
            found.setdefault(_names(ops, operation), []).append(operation)
    return found


def _described(selection: Selection) -> str:
    return selection.name + "".join(f" ({name}: {reason})" for name, reason in selection.passed_over)


@dataclass(frozen=True)
class Plan:
    """What loading a checkpoint would find and select.

    differences           tensors that are not as the config implies; None if the family is not one of ours.
    selected              operations besides linear layers with what was selected for them; none if the config is not
                          understood.
    kv_bytes_per_token    of the cache, over all layers; None if the family is not one of ours.
    """

    differences: tuple[Difference, ...] | None = None
    selected: tuple[tuple[str, Selection], ...] = ()
    kv_bytes_per_token: int | None = None


def plan(checkpoint: Checkpoint, ops: PlannedOps, config: ModelConfig | None = None) -> Plan:
    """What loading a checkpoint would find and select, from its headers alone; ``config``: that of its config.json."""
    differences = kv_bytes = None
    try:
        config = config or ModelConfig.from_hf(checkpoint.config)
        if config.architecture in ARCHITECTURES:
            required, model = build_without_weights(config, checkpoint, ops)
            differences = tuple(compare(checkpoint, required))
            kv_bytes = None if model is None else model.kv_bytes_per_token(ops.kv_dtype or ops.dtype)
        else:  # through transformers
            scale = config.head_dim**-0.5
            ops.attention(AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale))
            ops.sampler()
    except AiakqError:
        return Plan()
    selected = ((name, each) for name, found in selections(ops).items() for each in dict.fromkeys(found))
    return Plan(differences, tuple(selected), kv_bytes)
