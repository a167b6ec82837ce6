"""StepTimes: estimates the time of a step from its number of tokens, learned from past steps."""

from __future__ import annotations

#: Weight of a new measurement in the moving average of its size. Slower measurements count less, because they may be
#: caused by other load on the processor.
_FASTER, _SLOWER = 0.2, 0.04


class StepTimes:
    """Moving averages of step times, by number of tokens in powers of two, with linear interpolation between them."""

    def __init__(self) -> None:
        self._sizes: dict[
            int, tuple[float, float]
        ] = {}  # bit length of the number of tokens -> (average tokens, average seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a step of ``tokens`` (at least one) took ``seconds``."""
        old_tokens, old_seconds = self._sizes.get(tokens.bit_length(), (tokens, seconds))
        seconds = min(seconds, 4 * old_seconds)
        weight = _SLOWER if seconds > old_seconds else _FASTER
        self._sizes[tokens.bit_length()] = (
            old_tokens + weight * (tokens - old_tokens),
            old_seconds + weight * (seconds - old_seconds),
        )

    def max_tokens(self, base: int, stretch: float) -> int | None:
        """Return the maximum number of tokens of a step whose time stays within a limit; None without measurements.

        The limit is the time of a step of ``base`` tokens plus ``stretch - 1`` times that of a single token. The result
        is at most twice the largest size measured so far. If only sizes far above ``base`` were measured, the result is
        smaller than those.
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
    """Return the seconds of a step of ``tokens``, interpolated between the neighboring sizes in ``known``."""
    if len(known) == 1:
        return known[0][1]
    after = next((index for index, (size, _) in enumerate(known) if size >= tokens), len(known) - 1)
    (fewer, short), (more, long) = known[max(after, 1) - 1], known[max(after, 1)]
    seconds = short + (long - short) * (tokens - fewer) / (more - fewer)
    # The larger size may have been measured in one of the slow first steps: never exceed repeated steps of the smaller.
    seconds = min(seconds, short * max(1.0, tokens / fewer))
    # Below the smallest size this is an extrapolation, which needs bounds.
    return min(max(seconds, known[0][1] * min(1.0, tokens / known[0][0])), known[-1][1])
