"""What kernels are asked to compute for a quantized linear of a checkpoint, from headers alone."""

from __future__ import annotations

from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.expert_stack import ExpertStack
from aiakq.formats.input_rounding import rounding_of, scheme_of_kernel
from aiakq.formats.mxfp4 import stacked_experts
from aiakq.kernels.ops import Ops
from aiakq.kernels.types import InputRounding, LinearProblem


def stored_scheme(checkpoint: Checkpoint, name: str) -> str:
    """Return the scheme of the linear ``name``; files may have other widths of integers than their config says."""
    spec = checkpoint.linear_spec(name)
    dimensions, _ = checkpoint.dimensions(name)
    return spec.scheme if spec.activation_bits or spec.float8 or spec.table else f"w{dimensions.bits}a16"


def stored_problem(checkpoint: Checkpoint, name: str, ops: Ops) -> LinearProblem:
    """Return the problem of the linear ``name`` on the device of ``ops``."""
    spec = checkpoint.linear_spec(name)
    dimensions, group_size = checkpoint.dimensions(name)
    headers = checkpoint.linear_headers(name)
    scheme = scheme_of_kernel(spec, stored_scheme(checkpoint, name))
    return LinearProblem(
        scheme=scheme,
        n=dimensions.n,
        k=dimensions.k,
        group_size=group_size,
        has_zeros=not spec.symmetric,
        has_perm=dimensions.has_perm,
        has_bias="bias" in headers,
        static_input=dimensions.static_input,
        dtype=ops.dtype,
        device=ops.device_type,
        table=spec.table,
        rounding=rounding_of(spec) if scheme.endswith("a8") else InputRounding(),
        e5m2=any(header.dtype == "F8_E5M2" for header in headers.values()),
    )


def stacks(checkpoint: Checkpoint) -> list[ExpertStack]:
    """Return the quantized experts that are stored in one tensor."""
    foreign = () if checkpoint.foreign is None else checkpoint.foreign.stacked_experts
    return [*stacked_experts(checkpoint.inventory), *foreign]


def stacked_problem(experts: ExpertStack, ops: Ops) -> LinearProblem:
    """Return the problem of one of ``experts`` on the device of ``ops``."""
    return LinearProblem(
        scheme=experts.scheme,
        n=experts.n,
        k=experts.k,
        group_size=experts.layer.group_size,
        has_zeros=False,
        has_perm=False,
        has_bias=True,
        static_input=False,
        dtype=ops.dtype,
        device=ops.device_type,
        has_offsets=not experts.layer.symmetric,
        table=experts.layer.table,
    )
