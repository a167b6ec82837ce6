"""Mixtures of experts: the fused experts of a transformers model, taken apart into one linear per projection.

transformers keeps the experts of a block in two tensors, ``gate_up_proj`` [E, 2F, K] and ``down_proj`` [E, K, F].
Checkpoints on the hub, and everything that reads quantized ones, have ``experts.3.w1`` and the like: one linear per
expert and projection. Here the fused module is replaced by one of that shape and those names, where trying both on
random numbers shows that they compute the same.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: An expert is calibrated on its own tokens if there are at least this many.
MIN_TOKENS = 128
#: Memory for second moments of the inputs of experts, which decides how many are looked at in one pass.
MOMENT_BYTES = 2 << 30
#: Where the name of an expert's module ends, in a name inside a block.
EXPERT = r"^.*\bexperts\.\d+\b"


@dataclass(frozen=True)
class Spelling:
    """What a family's checkpoints call an expert's projections, and (theirs, the model's) words before them."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    words: tuple[tuple[str, str], ...] = ()


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), under the checkpoint's names."""

    def __init__(self, hidden: int, inner: int, act: Callable[[Tensor], Tensor], spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.act = act
        self.add_module(spelling.gate, nn.Linear(hidden, inner, bias=False))
        self.add_module(spelling.up, nn.Linear(hidden, inner, bias=False))
        self.add_module(spelling.down, nn.Linear(inner, hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, K]."""
        gate, up, down = (
            self.get_submodule(name) for name in (self.spelling.gate, self.spelling.up, self.spelling.down)
        )
        return down(self.act(gate(x)) * up(x))


class Experts(nn.Module):
    """Experts 0 .. E-1 as children of those names; called as the fused module is.

    everywhere  experts that run on every token, although only what their own tokens get counts in the output.
    counts      while it is a tensor [E], the tokens of each expert are added to it and no expert runs.
    tracing     every expert runs on every token and counts a little, so that one pass shows how all are wired.
    """

    def __init__(
        self, count: int, hidden: int, inner: int, act: Callable[[Tensor], Tensor], spelling: Spelling
    ) -> None:
        super().__init__()
        self.count = count
        self.everywhere: frozenset[int] = frozenset()
        self.tracing = False
        self.counts: Tensor | None = None
        for number in range(count):
            self.add_module(str(number), Expert(hidden, inner, act, spelling))

    def chunks(self) -> list[range]:
        """The experts in runs whose second moments, [K, K] for every input, are in memory together."""
        first = next(self.children())
        each = sum(linear.in_features**2 * 4 for linear in first.children() if isinstance(linear, nn.Linear))
        size = max(1, min(self.count, MOMENT_BYTES // each))
        return [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, K], the chosen experts [T, A] int64 and what they count [T, A] -> [T, K]."""
        out = torch.zeros_like(hidden_states)
        if self.counts is not None:
            given = torch.bincount(top_k_index.flatten(), minlength=self.count)
            self.counts += given[: self.count].to(self.counts.device)
            return out
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
    rounded     experts that had fewer, and for which every token of the block was still too few: plainly rounded.
    """

    name: str
    tokens: list[int]
    minimum: int
    everywhere: list[int]
    rounded: list[int]


def count_tokens(name: str, mixture: Experts, run: Callable[[], Any], total: int) -> ExpertTokens:
    """Count what ``run`` (all calibration data, ``total`` tokens) gives to each expert, and decide what follows.

    Too few is less than an eighth of the longest row, or 128: second moments of fewer tokens say little about the rest.
    Such an expert then sees every token (``Experts.everywhere``), as it would if the router were undecided.
    """
    mixture.counts = torch.zeros(mixture.count, dtype=torch.int64)
    run()
    tokens, mixture.counts = mixture.counts.tolist(), None
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
        ("rounded", "were rounded plainly: their whole block had too few"),
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
    """

    fused: dict[str, FusedSlice] = field(default_factory=dict)
    words: set[tuple[str, str]] = field(default_factory=set)

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
    spelling = _spelling(model_type)
    apart = Apart()
    same: dict[type, bool] = {}
    for block_name, block in blocks:
        for name, module in [(name, module) for name, module in block.named_modules() if _looks_fused(module)]:
            if type(module) not in same:
                same[type(module)] = computes_the_same(module)
            if not same[type(module)]:
                continue
            parent, _, last = name.rpartition(".")
            setattr(block.get_submodule(parent), last, _meta_like(module, spelling))
            path = _renamed(block, parent, spelling)
            if path != parent:
                apart.words.add((f"{block_name}.{path}", f"{block_name}.{parent}"))
            own = f"{block_name}.{name}"
            for number in range(module.down_proj.shape[0]):
                new = ".".join(part for part in (block_name, path, last, str(number)) if part)
                apart.fused[f"{new}.{spelling.gate}.weight"] = FusedSlice(f"{own}.gate_up_proj", number, 0)
                apart.fused[f"{new}.{spelling.up}.weight"] = FusedSlice(f"{own}.gate_up_proj", number, 1)
                apart.fused[f"{new}.{spelling.down}.weight"] = FusedSlice(f"{own}.down_proj", number)
    return apart


def _looks_fused(module: nn.Module) -> bool:
    names = dict(module.named_parameters(recurse=False))
    return (
        set(names) == {"gate_up_proj", "down_proj"}
        and all(parameter.dim() == 3 for parameter in names.values())
        and names["gate_up_proj"].shape[1] == 2 * names["down_proj"].shape[2]
        and names["gate_up_proj"].shape[2] == names["down_proj"].shape[1]
        and callable(getattr(module, "act_fn", None))
    )


def computes_the_same(fused: Any) -> bool:
    """Whether ``Experts`` gives what this fused module gives, on small random weights."""
    count, hidden, inner = fused.gate_up_proj.shape[0], 16, 8
    make = torch.Generator().manual_seed(0)
    small: Any = copy.copy(fused)
    small._parameters = {
        "gate_up_proj": nn.Parameter(torch.randn(count, 2 * inner, hidden, generator=make), requires_grad=False),
        "down_proj": nn.Parameter(torch.randn(count, hidden, inner, generator=make), requires_grad=False),
    }
    for name, value in vars(fused).items():  # some keep their sizes for reshaping
        size = isinstance(value, int) and not isinstance(value, bool) and "expert" not in name
        if size and value in fused.down_proj.shape[1:]:
            vars(small)[name] = hidden if value == fused.down_proj.shape[1] else inner
    ours = Experts(count, hidden, inner, fused.act_fn, Spelling())
    for number, expert in enumerate(ours.children()):
        gate, up = small.gate_up_proj[number].chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", small.down_proj[number])):
            expert.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(16, hidden, generator=make)
    chosen = min(2, count)
    index = torch.rand(16, count, generator=make).topk(chosen).indices
    weights = torch.rand(16, chosen, generator=make)
    with torch.no_grad(), suppress(RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        theirs = small(x, index, weights)
        return isinstance(theirs, Tensor) and torch.allclose(theirs, ours(x, index, weights), rtol=1e-4, atol=1e-5)
    return False


def _meta_like(fused: Any, spelling: Spelling) -> Experts:
    count, hidden, inner = fused.down_proj.shape
    with torch.device("meta"):
        return Experts(count, hidden, inner, fused.act_fn, spelling)


def _renamed(block: nn.Module, path: str, spelling: Spelling) -> str:
    """Give the module at ``path`` the name checkpoints use, and keep it reachable under its own; returns the name."""
    above, _, last = path.rpartition(".")
    for theirs, own in spelling.words:
        if last == own:
            holder = block.get_submodule(above)
            holder._modules = {theirs if key == own else key: value for key, value in holder._modules.items()}
            # The model's code asks for its own name; an attribute that is no module answers and is listed nowhere.
            holder.__dict__[own] = holder._modules[theirs]
            return ".".join(filter(None, (above, theirs)))
    return path


def _spelling(model_type: str) -> Spelling:
    """How checkpoints of this family spell experts, from the rules by which transformers fuses them."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    names: dict[str, list[str]] = {}
    words = []
    for rule in get_checkpoint_conversion_mapping(model_type) or []:
        sources, targets = list(rule.source_patterns), list(rule.target_patterns)
        last = targets[0].rpartition(".")[2] if targets else ""
        if "experts" in (targets[0] if targets else "") and last in ("gate_up_proj", "down_proj"):
            found = [re.search(r"experts\.\*\.(\w+)\.weight", pattern) for pattern in sources]
            names[last] = [match[1] for match in found if match]
        elif len(sources) == 1 and all(re.fullmatch(r"\.\w+\.", pattern) for pattern in (sources[0], targets[0])):
            words.append((sources[0].strip("."), targets[0].strip(".")))
    if len(names.get("gate_up_proj", ())) == 2 and len(names.get("down_proj", ())) == 1:
        gate, up = names["gate_up_proj"]
        return Spelling(gate, up, names["down_proj"][0], tuple(words))
    return Spelling(words=tuple(words))
