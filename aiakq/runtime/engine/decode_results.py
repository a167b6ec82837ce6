"""What the results of a step mean for the sequences of its ``ScheduledDecodes``: those that go on, in columns."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.runtime.engine.sequence import ScheduledDecodes
from aiakq.runtime.protocol.output import ContinuedOutputs, TokenOutput
from aiakq.runtime.protocol.step import DecodeResults


def plain_rows(decodes: ScheduledDecodes, results: DecodeResults) -> Sequence[int]:
    """Return the numbers of the chunks whose result is a token that counts."""
    if not decodes.dropped and not results.others:
        return range(len(decodes))
    return [
        row
        for row, sequence in enumerate(decodes.sequences)
        if row not in results.others and sequence not in decodes.dropped
    ]


def append_tokens(
    decodes: ScheduledDecodes, tokens: list[int], rows: Sequence[int], now: float
) -> dict[int, tuple[str, int | str | None]]:
    """Continue the sequences of ``rows`` with their ``tokens``; return (finish_reason, stop_reason) of those that end,
    by row.
    """
    sequences, steady = decodes.sequences, decodes.steady
    token_ids, max_lengths, times = steady.token_ids, steady.max_lengths, steady.times
    if len(rows) < len(sequences):
        token_ids, max_lengths = [token_ids[row] for row in rows], [max_lengths[row] for row in rows]
        sequences, times = [sequences[row] for row in rows], [times[row] for row in rows]
        tokens = [tokens[row] for row in rows]
    for one, own, token in zip(sequences, token_ids, tokens, strict=True):
        own.append(token)
        del one.pending_chunks[0]
    for each in times:
        each.last_token = now
    at_end = [at for at, (own, most) in enumerate(zip(token_ids, max_lengths, strict=True)) if len(own) >= most]
    if not steady.end_ids.isdisjoint(tokens):
        at_end += [at for at, token in enumerate(tokens) if token in sequences[at].end_ids]
    ended: dict[int, tuple[str, int | str | None]] = {}
    for at in sorted(at_end):
        reason, stop_reason = sequences[at].finish_reason(tokens[at])
        if reason is not None:
            ended[rows[at]] = reason, stop_reason
    return ended


def add_token(output: TokenOutput, results: DecodeResults, row: int) -> None:
    """Add the token of ``row`` to the output of its sequence."""
    output.token_ids, output.token_logprobs = [results.tokens[row]], [results.logprobs[row]]
    if results.top and (found := results.top[row]) is not None:
        output.logprobs = [found]


def continued_outputs(decodes: ScheduledDecodes, results: DecodeResults, rows: Sequence[int]) -> ContinuedOutputs:
    """Return the outputs of ``rows``, whose sequences go on."""
    steady = decodes.steady
    every = ContinuedOutputs(
        steady.request_ids,
        results.tokens,
        results.logprobs,
        results.top,
        steady.num_cached,
        steady.num_preemptions,
        steady.times,
    )
    return every if len(rows) == len(decodes) else every.of(rows)
