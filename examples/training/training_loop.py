"""Train a causal language model on token ids, on one thread, in runs that can be interrupted.

Every step draws its windows from a generator seeded by the step, and a checkpoint holds weights, optimizer and step: a
run that was interrupted ends with the same weights as one that was not. Results are the same for the same seed, text,
number of threads, version of torch and processor.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from muon import Muon
from torch import Tensor, nn
from torch.nn import functional

#: Checkpoints in a run.
CHECKPOINTS = 40
#: Fraction of the steps in which the learning rate rises.
WARMUP = 0.05
CLIP = 1.0


@dataclass(frozen=True)
class Schedule:
    """How a model is trained.

    rate           peak learning rate of AdamW; it rises linearly and falls along a cosine to a tenth.
    muon           learning rate of Muon for the matrices of the blocks; None: AdamW for them too.
    distillation   weight of the KL divergence from the teacher's predictions; the rest is cross-entropy with the text.
    batch, length  sequences in a step and tokens in a sequence.
    """

    steps: int
    rate: float
    muon: float | None = None
    distillation: float = 0.0
    batch: int = 8
    length: int = 256
    seed: int = 0


@dataclass
class Spent:
    """What the steps of all runs together took, in seconds."""

    processor: float = 0.0
    wall: float = 0.0


def train(model: nn.Module, teacher: nn.Module | None, ids: Tensor, schedule: Schedule, folder: Path) -> Spent:
    """Train ``model`` in place on windows of ``ids`` [T] int64; checkpoints go to ``folder``.

    Parameters are float32, on any device; forward and backward passes compute in bfloat16 where it is fast.
    """
    optimizers = _optimizers(model, schedule)
    step, spent = _restore(folder, model, optimizers)
    model.train()
    while step < schedule.steps:
        processor, wall = time.process_time(), time.monotonic()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * _factor(step, schedule.steps)
        loss = _loss(model, teacher, _windows(ids, step, schedule), schedule.distillation)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        spent.processor += time.process_time() - processor
        spent.wall += time.monotonic() - wall
        if step % max(1, schedule.steps // CHECKPOINTS) == 0 or step == schedule.steps:
            _save(folder, model, optimizers, step, spent)
            print(
                f"step {step} of {schedule.steps}: loss {float(loss.detach()):.3f}, {spent.processor:.0f} s",
                file=sys.stderr,
            )
    model.eval()
    return spent


def perplexity(model: nn.Module, windows: Tensor) -> float:
    """The perplexity of ``model`` on windows [W, T], each a sequence of its own."""
    total = 0.0
    with torch.inference_mode():
        for window in windows:
            logits = model(window.unsqueeze(0)).logits[0, :-1].float()
            total += float(functional.cross_entropy(logits, window[1:]))
    return math.exp(total / len(windows))


def unigram_perplexity(ids: Tensor, windows: Tensor, vocab: int) -> float:
    """The perplexity on ``windows`` of the frequencies of single tokens in ``ids``, each counted once more."""
    counts = torch.bincount(ids, minlength=vocab).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[windows[:, 1:].flatten()].mean()))


def _windows(ids: Tensor, step: int, schedule: Schedule) -> Tensor:
    """Windows [batch, length] at random places, the same for the same seed and step."""
    generator = torch.Generator().manual_seed(schedule.seed * 1_000_003 + step)
    starts = torch.randint(0, len(ids) - schedule.length, (schedule.batch,), generator=generator)
    return torch.stack([ids[start : start + schedule.length] for start in starts.tolist()])


def _loss(model: nn.Module, teacher: nn.Module | None, windows: Tensor, distillation: float) -> Tensor:
    device = next(model.parameters()).device
    windows = windows.to(device)
    bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=_has_bfloat16(device))
    with bfloat16:
        logits = model(windows).logits[:, :-1].flatten(0, 1)
    scores = functional.log_softmax(logits.float(), -1)
    loss = functional.nll_loss(scores, windows[:, 1:].flatten())
    if teacher is None or not distillation:
        return loss
    with torch.no_grad(), bfloat16:
        wanted = teacher(windows).logits[:, :-1].flatten(0, 1)
    targets = functional.log_softmax(wanted.float(), -1)
    divergence = functional.kl_div(scores, targets, log_target=True, reduction="batchmean")
    return (1 - distillation) * loss + distillation * divergence


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16; without them they are many times slower."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def _optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices of the blocks if the schedule has it. Gains and biases do not decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    inner = [p for name, p in named if schedule.muon is not None and p.ndim == 2 and ".layers." in name]
    known = {id(p) for p in inner}
    rest = [p for _, p in named if id(p) not in known]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95))]
    if inner:
        optimizers.append(Muon(inner, lr=schedule.muon or 0.0, weight_decay=0.05))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _factor(step: int, steps: int) -> float:
    """The learning rate of a step relative to its peak."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def _save(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, spent: Spent) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    part = folder / "checkpoint.part"
    torch.save({**state, "step": step, "spent": json.dumps(vars(spent))}, part)
    os.replace(part, folder / "checkpoint.pt")


def _restore(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, Spent]:
    """Continue from the checkpoint in ``folder``, if there is one."""
    file = folder / "checkpoint.pt"
    if not file.is_file():
        return 0, Spent()
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], Spent(**json.loads(state["spent"]))
