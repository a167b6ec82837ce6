"""Minimizes the KL divergence from the original model over scales and gains of norms, end to end, for fixed codes.

Adam on batches of calibration samples, with steps relative to the values and a rate that falls to zero. A seeded tenth
of the samples is held out; the values of the lowest divergence on it, after rounding to the dtypes in which they are
stored, are kept, and none if there was no gain. So the result depends only on the number of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from aiakq.quantizers.tuning.models import Student, Teacher, calls_of

#: Relative size of the first steps, Adam's decay rates, and tokens per step.
RATE, BETAS, STEP_TOKENS = 0.004, (0.9, 0.95), 2048
#: Steps between measurements on the held-out samples, and measurements without a gain after which tuning ends.
MEASURED_EVERY, PATIENCE = 8, 6
#: Maximum number of held-out tokens, which are measured often.
_HELD_OUT_TOKENS = 8192


@dataclass(frozen=True)
class Tuned:
    """The outcome of a tuning.

    steps      number of steps done; ``planned`` of them would have been done without early stop.
    kl_before  nats per token on the ``held_out`` samples, with the values as stored.
    best_step  number of steps after which the published values were found; 0: they are those from before.
    """

    steps: int
    planned: int
    best_step: int
    kl_before: float
    kl_after: float
    held_out: int
    seconds: float

    def document(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class TuningBudget:
    """How long to tune: a number of steps, or of seconds, from which the number is computed after the first steps."""

    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, text: str) -> TuningBudget:
        """Parse the canonical value of ``--tune``, like ``48steps`` or ``600s``."""
        if text.endswith("steps"):
            return cls(int(text.removesuffix("steps")), None)
        return cls(None, float(text.removesuffix("s")))


class Tuning:
    """One tuning of a student towards a teacher.

    scales, storage  dtypes in which scales and norms are stored.
    """

    def __init__(
        self, teacher: Teacher, student: Student, scales: torch.dtype, storage: torch.dtype, seed: int, vocabulary: int
    ) -> None:
        self.teacher, self.student = teacher, student
        self._dtypes = scales, storage
        self._vocabulary = vocabulary
        self._lengths = [len(sample) for sample in teacher.samples]
        self._generator = torch.Generator().manual_seed(seed)
        order: list[int] = torch.randperm(len(self._lengths), generator=self._generator).tolist()
        count = max(1, len(order) // 10)
        while count > 1 and sum(self._lengths[number] for number in order[:count]) > _HELD_OUT_TOKENS:
            count -= 1
        self.held_out, self._training = sorted(order[:count]), order[count:]
        self._waiting: list[int] = []

    def run(self, budget: TuningBudget, progress: Callable[[int, int], None]) -> Tuned:
        """Tune the student, whose parameters then have the best values."""
        started = time.monotonic()
        before = best = self._held_out_divergence()
        measuring = time.monotonic() - started
        kept, best_step, step, measured_at = self._values(), 0, 0, time.monotonic()
        adam, rates = self._optimizer()
        planned = budget.steps
        while planned is None or step < planned:
            for group, rate in zip(adam.param_groups, rates, strict=True):
                group["lr"] = rate * (1 - step / planned if planned else 1.0)
            self._step(adam)
            step += 1
            if planned is None:
                # The schedule needs the number of steps; the first one tells how long they take.
                each = time.monotonic() - measured_at + measuring / MEASURED_EVERY
                left = (budget.seconds or 0.0) - (time.monotonic() - started)
                planned = 1 + max(0, int(left / each))
            progress(step, planned)
            if step == planned or step % MEASURED_EVERY == 0:
                found = self._held_out_divergence()
                if found < best:
                    best, best_step, kept = found, step, self._values()
                elif step - best_step >= PATIENCE * MEASURED_EVERY:
                    break
        with torch.no_grad():
            for parameter, value in zip(self.student.parameters(), kept, strict=True):
                parameter.copy_(value)
        seconds = round(time.monotonic() - started, 1)
        return Tuned(step, planned, best_step, before, best, len(self.held_out), seconds)

    def _optimizer(self) -> tuple[torch.optim.Adam, list[float]]:
        """Return Adam and the rate of each of its groups: scales, then every norm, whose values differ in size."""
        factors = [linear.factor for linear in self.student.linears.values()]
        groups: list[dict[str, object]] = [{"params": factors}] if factors else []
        rates = [RATE] if factors else []
        for gain in self.student.gains.values():
            groups.append({"params": [gain]})
            rates.append(RATE * float(gain.detach().abs().mean()))
        return torch.optim.Adam(groups, lr=RATE, betas=BETAS), rates

    def _step(self, adam: torch.optim.Adam) -> None:
        chosen: list[int] = []
        tokens = 0
        while (length := self._next_length()) + tokens <= STEP_TOKENS or not chosen:
            chosen.append(self._waiting.pop())
            tokens += length
        adam.zero_grad(set_to_none=True)
        for call in calls_of(self._lengths, chosen, self._vocabulary):
            (self._divergence(call).sum() / tokens).backward()
        adam.step()

    def _next_length(self) -> int:
        """Return the length of the next training sample; all are used once, in random order, before any again."""
        if not self._waiting:
            order: list[int] = torch.randperm(len(self._training), generator=self._generator).tolist()
            self._waiting = [self._training[place] for place in order]
        return self._lengths[self._waiting[-1]]

    def _divergence(self, chosen: Sequence[int]) -> Tensor:
        """Return KL(original || quantized) at every token of some samples, [B, T]."""
        wanted = self.teacher.log_probabilities(chosen)
        found = self.student.log_probabilities(torch.stack([self.teacher.samples[number] for number in chosen]))
        return torch.where(wanted.isneginf(), 0.0, wanted.exp() * (wanted - found)).sum(-1)

    def _held_out_divergence(self) -> float:
        """Return nats per token on the held-out samples, with the values as they would be stored."""
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad(), self.student.rounded(*self._dtypes):
            for call in calls_of(self._lengths, self.held_out, self._vocabulary):
                total += self._divergence(call).double().sum().cpu()
        # Rounding can make a divergence of 0 negative; NaN stays NaN.
        return max(float(total) / sum(self._lengths[number] for number in self.held_out), 0.0)

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.student.parameters()]
