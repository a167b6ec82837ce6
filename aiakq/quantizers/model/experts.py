"""Mixtures of experts during quantization: one linear per expert and projection, and the tokens that each expert sees.

The fused experts of transformers are replaced by separate ones (runtime/loader/fused_experts.py), under the names that
checkpoints have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.runtime.loader.fused_experts import Expert, FusedExperts, SeparateExperts, fused_experts

#: An expert is calibrated on its own tokens if there are at least this many.
MIN_TOKENS = 128
#: Memory for second moments of the inputs of experts, which decides how many are looked at in one pass.
MOMENT_BYTES = 2 << 30
#: Where the name of an expert's module ends, in a name inside a block.
EXPERT = r"^.*\bexperts\.\d+\b"


class Experts(SeparateExperts):
    """Separate experts that can be counted and traced.

    everywhere  experts that run on every token, although only what their own tokens get counts in the output.
    counts      while it is a tensor [E], the tokens of each expert are added to it and no expert runs.
    tracing     every expert runs on every token and counts a little, so that one pass shows how all are wired.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__(experts)
        self.everywhere: frozenset[int] = frozenset()
        self.tracing = False
        self.counts: Tensor | None = None

    def chunks(self) -> list[range]:
        """The experts in runs whose second moments, [K, K] for every input, are in memory together."""
        first = next(self.children())
        each = sum(linear.in_features**2 * 4 for linear in first.children() if isinstance(linear, nn.Linear))
        size = max(1, min(self.count, MOMENT_BYTES // each))
        return [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, K], the chosen experts [T, A] int64 and what they count [T, A] -> [T, K]."""
        if self.counts is not None:
            given = torch.bincount(top_k_index.flatten(), minlength=self.count)
            self.counts += given[: self.count].to(self.counts.device)
            return torch.zeros_like(hidden_states)
        if not self.tracing and not self.everywhere:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.children()):
            if self.tracing or number in self.everywhere:
                counts = (top_k_weights * (top_k_index == number)).sum(-1, keepdim=True)
                out += expert(hidden_states) * (counts + 1 / self.count if self.tracing else counts)
            else:
                tokens, place = torch.where(top_k_index == number)
                if len(tokens):
                    out.index_add_(0, tokens, expert(hidden_states[tokens]) * top_k_weights[tokens, place, None])
        return out


def expert(name: str) -> str | None:
    """The expert that holds the module ``name``, by its own name; None outside of experts."""
    found = re.search(EXPERT, name)
    return None if found is None else found[0]


def place(name: str) -> str | None:
    """The name of an expert's linear without the number of the expert; None outside of experts."""
    found = re.search(EXPERT, name)
    return None if found is None else re.sub(r"\d+$", "*", found[0]) + name[found.end() :]


def in_stages(groups: list[tuple[str, ...]], mixture: Experts, name: str) -> list[tuple[str, ...]]:
    """Groups of linears so ordered that equal places of the experts of one chunk follow each other."""
    chunk_of = {f"{name}.{number}": at for at, chunk in enumerate(mixture.chunks()) for number in chunk}
    inside = [group for group in groups if expert(group[0]) in chunk_of]
    places = list(dict.fromkeys(place(group[0]) for group in inside))
    inside.sort(key=lambda group: (chunk_of[expert(group[0]) or ""], places.index(place(group[0]))))
    queue = iter(inside)
    return [next(queue) if expert(group[0]) in chunk_of else group for group in groups]


def experts_of(block: nn.Module) -> dict[str, Experts]:
    """The mixtures of a block, by name."""
    return {name: module for name, module in block.named_modules() if isinstance(module, Experts)}


@contextmanager
def all_experts(block: nn.Module) -> Iterator[None]:
    """While open, every expert of the block sees every token (``Experts.tracing``)."""
    mixtures = experts_of(block).values()
    for mixture in mixtures:
        mixture.tracing = True
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.tracing = False


# --- how much each one sees --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertTokens:
    """What the experts of one block were calibrated on.

    name        the module that holds them.
    tokens      how many calibration tokens each expert was given, [E].
    minimum     fewer are not enough to calibrate an expert on.
    everywhere  experts that had fewer, and were calibrated on every token of the block.
    rounded     experts that had fewer, and for which every token of the block was still too few: quantized with RTN.
    """

    name: str
    tokens: list[int]
    minimum: int
    everywhere: list[int]
    rounded: list[int]


def count_tokens(
    name: str, mixture: Experts, run: Callable[[], Any], total: int, add_up: Callable[[Tensor], Tensor]
) -> ExpertTokens:
    """Count what ``run`` gives to each expert, and decide what follows. ``add_up`` turns the counts [E] of this worker
    into those of all calibration data, ``total`` tokens.

    Too few is less than an eighth of the longest row, or 128: second moments of fewer tokens say little about the rest.
    Such an expert then sees every token (``Experts.everywhere``), as it would if the router were undecided.
    """
    mixture.counts = torch.zeros(mixture.count, dtype=torch.int64)
    run()
    tokens, mixture.counts = add_up(mixture.counts).tolist(), None
    longest = max(parameter.shape[1] for parameter in mixture.parameters())
    minimum = max(MIN_TOKENS, longest // 8)
    few = [number for number, count in enumerate(tokens) if count < minimum]
    enough = total >= minimum
    return ExpertTokens(name, tokens, minimum, few if enough else [], [] if enough else few)


def expert_warnings(seen: Iterable[ExpertTokens]) -> list[str]:
    """One sentence each about experts that had too few tokens."""
    mixtures = list(seen)
    count = sum(len(mixture.tokens) for mixture in mixtures)
    warnings = []
    for what, consequence in (
        ("everywhere", "were calibrated on every token of their block instead"),
        ("rounded", "were quantized with round-to-nearest (RTN), because their whole block had too few"),
    ):
        few = [(mixture, number) for mixture in mixtures for number in getattr(mixture, what)]
        if few:
            mixture, number = min(few, key=lambda item: item[0].tokens[item[1]])
            minimum = max(mixture.minimum for mixture, _ in few)
            warnings.append(
                f"{len(few)} of {count} experts were given fewer than {minimum} calibration tokens and {consequence}; "
                f"the fewest, {mixture.tokens[number]}, went to {mixture.name}.{number}. More --samples help."
            )
    return warnings


# --- taking apart -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedSlice:
    """Where a linear of an expert is inside a fused tensor: ``tensor[expert]``, or a half of its rows."""

    tensor: str
    expert: int
    half: int | None = None


@dataclass
class Apart:
    """What ``take_apart`` changed.

    fused  the weight of every new linear, by its new full name -> where a fused checkpoint keeps it.
    words  (new, own) full names of modules that were given the checkpoints' name.
    known  whether transformers knows the names of the new linears, and not only aiakq.
    """

    fused: dict[str, FusedSlice] = field(default_factory=dict)
    words: set[tuple[str, str]] = field(default_factory=set)
    known: bool = True

    def own_name(self, name: str) -> str:
        """What the transformers model itself calls a tensor."""
        for new, own in self.words:
            if name.startswith(new + "."):
                return own + name.removeprefix(new)
        return name


def take_apart(blocks: Iterable[tuple[str, nn.Module]], model_type: str) -> Apart:
    """Replace the fused experts inside ``blocks`` (full name, module), and name what is around them as checkpoints do.

    Experts that compute anything else are left as they are.
    """
    apart = Apart()
    for block_name, block in blocks:
        for fused in fused_experts(block, block_name, model_type):
            parent, _, last = fused.name.removeprefix(f"{block_name}.").rpartition(".")
            setattr(block.get_submodule(parent), last, _meta_like(fused))
            stored = fused.stored.rpartition(".")[0]
            if stored != f"{block_name}.{parent}":
                _rename(block, parent, stored.rpartition(".")[2])
                apart.words.add((stored, f"{block_name}.{parent}"))
            apart.known = fused.spelling.known
            for number in range(fused.shape[0]):
                for (name, _, _), (tensor, half) in zip(fused.linears(number), _PLACES, strict=True):
                    apart.fused[f"{name}.weight"] = FusedSlice(f"{fused.name}.{tensor}", number, half)
    return apart


#: Where the gate, up and down projection are: the fused tensor, and the half of its rows.
_PLACES: tuple[tuple[str, int | None], ...] = (("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", None))


def _meta_like(fused: FusedExperts) -> Experts:
    def linears(number: int) -> list[nn.Module]:
        return [nn.Linear(k, n, bias=False, device="meta") for _, n, k in fused.linears(number)]

    return Experts(Expert(fused.module.act_fn, fused.spelling, linears(each)) for each in range(fused.shape[0]))


def _rename(block: nn.Module, path: str, theirs: str) -> None:
    """Give the module at ``path`` the name ``theirs``, and keep it reachable under its own."""
    above, _, own = path.rpartition(".")
    holder = block.get_submodule(above)
    holder._modules = {theirs if key == own else key: value for key, value in holder._modules.items()}
    # The model's code asks for its own name; an attribute that is no module answers and is listed nowhere.
    holder.__dict__[own] = holder._modules[theirs]
