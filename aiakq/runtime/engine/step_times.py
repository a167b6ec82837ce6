"""StepTimes: how long a step of so many tokens takes, learned from the steps that ran."""

from __future__ import annotations

#: The weight of a new step among those of its size. A slower one counts less: something else may have had the
#: processor, and then it says nothing about its size.
_FASTER, _SLOWER = 0.2, 0.04


class StepTimes:
    """The average time of steps, by their number of tokens in powers of two. Times between are interpolated."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float]] = {}  # power of two: average of tokens, and of seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of ``tokens``, at least one, took ``seconds``."""
        old_tokens, old_seconds = self._sizes.get(tokens.bit_length(), (tokens, seconds))
        seconds = min(seconds, 4 * old_seconds)
        weight = _SLOWER if seconds > old_seconds else _FASTER
        self._sizes[tokens.bit_length()] = (
            old_tokens + weight * (tokens - old_tokens),
            old_seconds + weight * (seconds - old_seconds),
        )

    def most_tokens(self, base: int, stretch: float) -> int | None:
        """The most tokens of a step that takes as long as one of ``base`` tokens and ``stretch - 1`` of a single one;
        None if nothing is known.

        At most twice as many tokens as any step had. Fewer than any step had, if none was nearly as small as ``base``.
        """
        known = [self._sizes[size] for size in sorted(self._sizes)]
        if not known:
            return None
        if len(known) == 1 and known[0][0] > 2 * base:
            return int(known[0][0] / 4)
        allowed = _interpolated(known, base) + (stretch - 1) * _interpolated(known, 1)
        if known[0][1] > allowed:
            return int(known[0][0] * allowed / known[0][1])
        for (fewer, short), (more, long) in zip(known, known[1:], strict=False):
            if long > allowed:
                return int(fewer + (more - fewer) * (allowed - short) / (long - short))
        return int(2 * known[-1][0])


def _interpolated(known: list[tuple[float, float]], tokens: float) -> float:
    """Seconds of a step of ``tokens``, on the line through its neighbours in ``known``."""
    if len(known) == 1:
        return known[0][1]
    after = next((index for index, (size, _) in enumerate(known) if size >= tokens), len(known) - 1)
    (fewer, short), (more, long) = known[max(after, 1) - 1], known[max(after, 1)]
    found = short + (long - short) * (tokens - fewer) / (more - fewer)
    # The larger step may have been one of the first, which are slow; the smaller one repeated is never faster.
    found = min(found, short * max(1.0, tokens / fewer))
    # A line through two sizes that are both larger can say anything.
    return min(max(found, known[0][1] * min(1.0, tokens / known[0][0])), known[-1][1])
