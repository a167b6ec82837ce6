"""Launcher of recurrence_kernel.py, token by token, and recurrence_chunks_kernel.py, in chunks of tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.recurrence import EPSILON
from aiakq.kernels.recurrent_types import RecurrenceProblem, RecurrenceSpec
from aiakq.kernels.triton import configs
from aiakq.kernels.triton.attention_blocks import power_of_two
from aiakq.kernels.triton.layouts import block_for
from aiakq.kernels.triton.states import FEWEST, chunk_tables, state_tables
from aiakq.kernels.types import AttentionContext

#: State elements that a program of one warp holds in registers.
HELD = 2048
#: Maximum key size, the length of a column: a program holds at least two columns.
MAX_KEY_SIZE = 1024
#: Maximum key size of a recurrence that is computed in chunks.
MAX_CHUNKED_KEY_SIZE = 128


def supports(problem: RecurrenceProblem) -> str | None:
    """Return None, or why not."""
    reason = triton.unsupported_dtype("recurrence", problem)
    if reason is None and problem.key_dim > MAX_KEY_SIZE:
        reason = f"keys have at most {MAX_KEY_SIZE} elements"
    return reason


def prepare(spec: RecurrenceSpec, problem: RecurrenceProblem) -> TritonRecurrence:
    """Prepare the recurrence of one layer."""
    return TritonRecurrence(spec)


def columns(spec: RecurrenceSpec) -> int:
    """Return the number of state columns per program."""
    return min(block_for(spec.value_dim), HELD // block_for(spec.key_dim))


@dataclass(frozen=True)
class ChunkConfig:
    """The configuration of both launches of a recurrence in chunks.

    tokens   of a chunk, a power of two.
    columns  of the state per program.
    stages   number of chunks prefetched, and one for the numbers of their tokens.
    warps    of scan_kernel, and chunk_warps of chunk_kernel.
    """

    tokens: int
    columns: int
    stages: int
    warps: int
    chunk_warps: int


def chunk_config(spec: RecurrenceSpec, device: torch.device, dtype: torch.dtype) -> ChunkConfig:
    """Return the configuration for a layer, whose table entries are those of up to so many elements of a key."""
    return chunk_config_of(configs.entry_for(configs.gpu(device), spec.kind, 16, spec.key_dim), spec, dtype)


def chunk_config_of(entry: configs.Entry, spec: RecurrenceSpec, dtype: torch.dtype) -> ChunkConfig:
    """Convert a table ``entry``, the fields of ChunkConfig; programs have no columns to spare.

    Keys and queries in float16 are divided into halves, too, which leaves registers for half of the tokens and columns.
    """
    tokens, block, stages, warps, chunk_warps = (int(number) for number in entry)
    if dtype == torch.float16:
        tokens, block = min(tokens, 32), min(block, 16)
    return ChunkConfig(tokens, min(block, power_of_two(spec.value_dim)), stages, warps, chunk_warps)


def chunk_constants(spec: RecurrenceSpec, config: ChunkConfig) -> dict[str, object]:
    """Return the compile-time constants of both kernels."""
    return {
        "H": spec.num_heads,
        "HK": spec.num_key_heads,
        "DK": spec.key_dim,
        "WIDTH": power_of_two(spec.key_dim),
        "DV": spec.value_dim,
        "CHUNK": config.tokens,
        "DELTA": spec.is_delta_rule,
    }


class TritonRecurrence:
    """Triton recurrence; the interface is Recurrence in ops/recurrence.py.

    Sequences of at least FEWEST tokens are computed in chunks, which begin at their first token of the step and behind
    every token whose state is saved, unless every element of a key has a step. Sums of a chunk are added in another
    order than token by token, so these results depend, by rounding errors of 2^-16, on where chunks begin.
    """

    def __init__(self, spec: RecurrenceSpec, config: ChunkConfig | None = None) -> None:
        """config: of chunks; None: that of the GPU's table."""
        self.spec, self.config = spec, config
        self.rate = -spec.a_log.float().exp()
        self.step_bias = spec.step_bias.float().contiguous()
        self.skip = None if spec.skip is None else spec.skip.float().contiguous()

    def __call__(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext) -> Tensor:
        """x [T, width] and gates [T, gates_width], whose rows may be strided -> [T, H * value_dim]."""
        spec, tables = self.spec, state_tables(context, x.device)
        assert states.shape[1:] == spec.state_shape and states.is_contiguous(), "the states of this layer"
        y = torch.empty(len(x), spec.num_heads * spec.value_dim, dtype=x.dtype, device=x.device)
        y[context.query_start_list[-1] :] = 0
        starts = context.query_start_list
        long = sum(end - start >= FEWEST for start, end in itertools.pairwise(starts[: len(tables.sources) + 1]))
        if x.itemsize > 2 or spec.key_dim > MAX_CHUNKED_KEY_SIZE or spec.has_channel_steps:
            long = 0
        if long:
            self._in_chunks(x, gates, states, context, y)
        if long < len(tables.sources):
            self.by_token(x, gates, states, context, y, FEWEST - 1 if long else 2**31 - 1)
        return y

    def by_token(
        self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext, y: Tensor, most: int
    ) -> None:
        """Compute the rows of y [T, H * value_dim] of sequences of at most ``most`` tokens."""
        from aiakq.kernels.triton.recurrence_kernel import recurrence_kernel

        spec, tables = self.spec, state_tables(context, x.device)
        block = columns(spec)
        recurrence_kernel[(-(-spec.value_dim // block), spec.num_heads, len(tables.sources))](
            x, gates, self.rate, self.step_bias, self.rate if self.skip is None else self.skip, states,
            tables.sources, context.query_start, tables.firsts, tables.saves, y, x.stride(0), gates.stride(0), most,
            *spec.step_limits, spec.key_dim**-0.5, EPSILON,
            H=spec.num_heads, HK=spec.num_key_heads, DK=spec.key_dim, WIDTH=block_for(spec.key_dim), DV=spec.value_dim,
            BLOCK=block, DELTA=spec.is_delta_rule, SKIP=self.skip is not None, STRENGTH=spec.strength,
            CHANNELS=spec.has_channel_steps, num_warps=1,
        )  # fmt: skip

    def _in_chunks(self, x: Tensor, gates: Tensor, states: Tensor, context: AttentionContext, y: Tensor) -> None:
        """Compute the rows of y [T, H * value_dim] of sequences of at least FEWEST tokens."""
        config = self.config or chunk_config(self.spec, x.device, x.dtype)
        factors, matrices = self.chunks(x, gates, context, config)
        self.scan(x, factors, matrices, states, context, y, config)

    def chunks(self, x: Tensor, gates: Tensor, context: AttentionContext, config: ChunkConfig) -> tuple[Tensor, Tensor]:
        """Return what the N chunks need besides states, as in recurrence_chunks_kernel.py: factors [H, 3, T] float32
        and matrices [N, H, 2 or 4, C, C] bfloat16.
        """
        from aiakq.kernels.triton.recurrence_chunks_kernel import chunk_kernel

        spec, size = self.spec, config.tokens
        chunks, constants = chunk_tables(context, x.device, size).chunks, chunk_constants(spec, config)
        factors = torch.empty(spec.num_heads, 3, len(x), dtype=torch.float32, device=x.device)
        shape = len(chunks), spec.num_heads, 4 if constants["DELTA"] else 2, size, size
        matrices = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
        chunk_kernel[shape[:2]](
            x, gates, self.rate, self.step_bias, chunks, factors, matrices, len(x), x.stride(0), gates.stride(0),
            *spec.step_limits, spec.key_dim**-0.5, EPSILON, **constants, LEVELS=size.bit_length() - 1,
            STRENGTH=spec.strength, num_warps=config.chunk_warps,
        )  # fmt: skip
        return factors, matrices

    def scan(
        self, x: Tensor, factors: Tensor, matrices: Tensor, states: Tensor, context: AttentionContext, y: Tensor,
        config: ChunkConfig,
    ) -> None:  # fmt: skip
        """Compute rows of y [T, H * value_dim] and states with the factors and matrices of ``chunks``."""
        from aiakq.kernels.triton.recurrence_chunks_kernel import scan_kernel

        spec, tables = self.spec, chunk_tables(context, x.device, config.tokens)
        scan_kernel[(-(-spec.value_dim // config.columns), spec.num_heads, len(tables.sequences))](
            x, self.rate if self.skip is None else self.skip, states, state_tables(context, x.device).sources,
            tables.sequences, tables.chunks, factors, matrices, y, len(x), x.stride(0), **chunk_constants(spec, config),
            BLOCK=config.columns, SKIP=self.skip is not None, STAGES=config.stages, num_warps=config.warps,
        )  # fmt: skip
