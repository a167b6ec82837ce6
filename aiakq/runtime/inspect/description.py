"""Describes the implementation of every operation of a model, for the start-up table and ``aiakq inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import Difference, comparison
from aiakq.formats.left_out import describe as describe_left_out
from aiakq.formats.separate_head import remark as separate_head_remark
from aiakq.kernels.ops import Ops, PlannedOps
from aiakq.kernels.selection import Selection
from aiakq.kernels.types import AttentionSpec
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import build_without_weights
from aiakq.runtime.models import is_native
from aiakq.runtime.protocol.media import PLURALS, MediaKind

__all__ = [
    "Plan",
    "describe_left_out",
    "describe_linear_layers",
    "describe_model_part",
    "describe_operations",
    "plan",
    "separate_head_remark",
]


def describe_operations(ops: Ops) -> dict[str, str]:
    """Return rows of the start-up table about all operations of ``ops``."""
    return {
        "linear layers": describe_linear_layers(ops),
        "attention": _names(ops, "attention"),
        "other operations": "; ".join(
            f"{', '.join(operations)}: {name}" for name, operations in _other_operations(ops).items()
        ),
    }


def describe_linear_layers(ops: Ops) -> str:
    """Return a line like ``42 x w4a16: cpu; 1 x w16: torch (cpu: ...)``, with the reasons against better ones."""
    counts = Counter({each: count for each, count in ops.bound.items() if each.operation in ("linear", "dense")})
    return "; ".join(f"{count} x {each.kind}: {_described(each.selection)}" for each, count in counts.most_common())


def selections(ops: Ops) -> dict[str, list[Selection]]:
    """Return the selections by operation, without linear layers, the most frequent first."""
    by_operation: dict[str, list[Selection]] = {}
    for each, _ in ops.bound.most_common():
        if each.operation not in ("linear", "dense"):
            by_operation.setdefault(each.operation, []).append(each.selection)
    return by_operation


def _names(ops: Ops, operation: str) -> str:
    return ", ".join(map(_described, selections(ops).get(operation, [])))


def _other_operations(ops: Ops) -> dict[str, list[str]]:
    """Return the operations by the description of their implementation."""
    names: dict[str, list[str]] = {}
    for operation in selections(ops):
        if operation != "attention":
            names.setdefault(_names(ops, operation), []).append(operation)
    return names


def _described(selection: Selection) -> str:
    return selection.name + "".join(f" ({name}: {reason})" for name, reason in selection.passed_over)


@dataclass(frozen=True)
class Plan:
    """The result of planning to load a checkpoint.

    differences           tensors that differ from what the config implies; None for an architecture without a native
                          model.
    selected              selections of operations other than linear layers; empty if the config is not supported.
    kv_bytes_per_token    bytes per token in the KV cache over all layers; None for an architecture without a native
                          model.
    left_out              tensors of the checkpoint that the model does not use.
    """

    differences: tuple[Difference, ...] | None = None
    selected: tuple[tuple[str, Selection], ...] = ()
    kv_bytes_per_token: int | None = None
    left_out: tuple[str, ...] = ()


def plan(checkpoint: Checkpoint, ops: PlannedOps, config: ModelConfig | None = None) -> Plan:
    """Plan the loading of a checkpoint from its headers alone; ``config`` is made from its config.json."""
    differences = kv_bytes = None
    unused: set[str] = set()
    try:
        config = config or ModelConfig.from_hf(checkpoint.config)
        if is_native(config.architecture):
            required, model = build_without_weights(config, checkpoint, ops)
            found, unused = comparison(checkpoint, required)
            differences = tuple(found)
            kv_bytes = None if model is None else model.kv_bytes_per_token(ops.kv_dtype or ops.dtype)
        else:  # through transformers
            scale = config.head_dim**-0.5
            ops.attention(AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale))
            ops.sampler()
    except AiakqError:
        return Plan()
    selected = ((name, each) for name, selected_for in selections(ops).items() for each in dict.fromkeys(selected_for))
    return Plan(differences, tuple(selected), kv_bytes, tuple(sorted(unused)))


def support(architecture: str, refusal: Callable[[], str | None]) -> str:
    """Describe what computes models of an architecture; ``refusal`` returns why transformers' class cannot, or None."""
    if is_native(architecture):
        return "native"
    reason = refusal()
    return "through transformers (--model-impl transformers)" if reason is None else f"not served: {reason}"


def describe_model_part(beside_text: Collection[str], media: MediaKind | None, transcribes: bool = False) -> str:
    """Return a line about a multimodal checkpoint for the start-up table.

    media  what it reads besides text; None if nothing.
    """
    if transcribes:
        return f"audio: {len(beside_text)} tensors encode it"
    parts = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in beside_text}))
    if media is not None:
        return f"text and {PLURALS[media]}: {len(beside_text)} tensors of {parts} encode {PLURALS[media]}"
    return f"text only: {len(beside_text)} tensors of {parts} are left out"
