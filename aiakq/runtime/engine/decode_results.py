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
    ended: dict[int, tuple[str, int | str | None]] = {}
    sequences = decodes.sequences
    for row in rows:
        sequence, token = sequences[row], tokens[row]
        token_ids = sequence.token_ids
        token_ids.append(token)
        sequence.num_pending_tokens -= 1
        del sequence.pending_chunks[0]
        sequence.times.last_token = now
        if token in sequence.end_ids or len(token_ids) >= sequence.max_length:
            reason, stop_reason = sequence.finish_reason(token)
            if reason is not None:
                ended[row] = reason, stop_reason
    return ended


def add_token(output: TokenOutput, results: DecodeResults, row: int) -> None:
    """Add the token of ``row`` to the output of its sequence."""
    output.token_ids, output.token_logprobs = [results.tokens[row]], [results.logprobs[row]]
    if results.top and (found := results.top[row]) is not None:
        output.logprobs = [found]


def continued_outputs(decodes: ScheduledDecodes, results: DecodeResults, rows: Sequence[int]) -> ContinuedOutputs:
    """Return the outputs of ``rows``, whose sequences go on."""
    sequences, tokens, logprobs, top = decodes.sequences, results.tokens, results.logprobs, results.top
    if len(rows) < len(sequences):
        sequences, tokens = [sequences[row] for row in rows], [tokens[row] for row in rows]
        logprobs, top = [logprobs[row] for row in rows], [top[row] for row in rows] if top else []
    return ContinuedOutputs(
        [sequence.spec.request_id for sequence in sequences],
        tokens,
        logprobs,
        top,
        [sequence.num_cached or 0 for sequence in sequences],
        [sequence.num_preemptions for sequence in sequences],
        [sequence.times for sequence in sequences],
    )
