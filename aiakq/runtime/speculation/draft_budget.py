"""DraftBudget: bounds the time that an engine may lose with draft tokens that are rejected."""

from __future__ import annotations

import math

#: The part of the time of steps that draft tokens may lose.
_SHARE = 0.01
#: The budget at first, and the highest one, in steps: after a long time of gains, text of another kind loses no more.
_MAX_STEPS = 4.0


class DraftBudget:
    """A balance of seconds. It earns a part of the time that steps take without draft tokens, and what accepted draft
    tokens save; searches for draft tokens and verifications are charged to it. While it is spent, there are neither.

    So whatever the texts are and however wrong acceptance rates are, the engine falls back by that part of its time
    at most, and draft tokens that pay are never held up. All times are those of ``StepCosts``.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._step_seconds = 0.0
        self._token_seconds = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be charged."""
        return self._seconds is not None and self._seconds <= 0

    @property
    def num_steps_until_earned(self) -> int:
        """How many steps it takes until it is no longer spent."""
        if self._seconds is None or self._seconds > 0 or not self._step_seconds:
            return 0
        return math.floor(-self._seconds / (_SHARE * self._step_seconds)) + 1

    def earn(self, num_steps: int, step_seconds: float, num_decodes: int) -> None:
        """``num_steps`` were scheduled since the last call; without draft tokens one takes ``step_seconds`` and brings
        ``num_decodes`` tokens.
        """
        limit = _MAX_STEPS * step_seconds
        self._seconds = limit if self._seconds is None else self._seconds + _SHARE * num_steps * step_seconds
        self._seconds = min(self._seconds, limit)
        self._step_seconds, self._token_seconds = step_seconds, step_seconds / num_decodes

    def charge(self, seconds: float) -> None:
        """Searches or verifications take ``seconds``."""
        if self._seconds is not None:
            self._seconds -= seconds

    def credit(self, num_accepted: int) -> None:
        """``num_accepted`` draft tokens saved the steps that would have sampled them."""
        if self._seconds is not None:
            self._seconds += num_accepted * self._token_seconds
