"""Mixtures of experts during quantization: one linear per expert and projection, and the tokens that each expert sees.

The fused experts of transformers are replaced by separate ones (runtime/hf/fused_experts.py), under the names that
checkpoints have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from aiakq.runtime.hf.fused_experts import Expert, FusedExperts, SeparateExperts, fused_experts

#: Minimum number of tokens for which an expert is calibrated on its own tokens.
MIN_TOKENS = 128
#: Memory for Hessians of experts, which determines how many are accumulated in one pass.
MOMENT_BYTES = 2 << 30
#: Matches the name of an expert's module at the start of a name inside a block.
EXPERT = r"^.*\bexperts\.\d+\b"


class Experts(SeparateExperts):
    """Separate experts that can be counted and traced.

    everywhere  experts that run on every token, although only the tokens routed to them count in the output.
    counts      while this is a tensor [E], it accumulates the token count of each expert and no expert runs.
    tracing     whether every expert runs on every token with a small weight, so that one pass traces all of them.
    selected    the experts selected for each token [T, A] in the last call, and the weights of their outputs in
                ``shares`` [T, A].
    matrices    number of [K, K] matrices that a method accumulates for every input.
    """

    def __init__(self, experts: Iterable[nn.Module], zero_experts: int = 0, weigh_inputs: bool = False) -> None:
        super().__init__(experts, zero_experts=zero_experts, weigh_inputs=weigh_inputs)
        self.everywhere: frozenset[int] = frozenset()
        self.tracing = False
        self.counts: Tensor | None = None
        self.selected: Tensor | None = None
        self.shares: Tensor | None = None
        self.matrices = 1

    def chunks(self) -> list[range]:
        """Split the experts into runs whose Hessians and other ``matrices`` fit into memory together."""
        first = next(self.children())
        expert_bytes = sum(linear.in_features**2 * 4 for linear in first.children() if isinstance(linear, nn.Linear))
        size = max(1, min(self.count, MOMENT_BYTES // (expert_bytes * self.matrices)))
        return [range(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, K], selected experts [T, A] int64 and their weights [T, A] -> [T, K]."""
        self.selected, self.shares = top_k_index, top_k_weights.detach()
        if self.weigh_inputs:
            self.shares = torch.ones_like(self.shares)
        if self.counts is not None:
            routed = torch.bincount(top_k_index.flatten(), minlength=self.count)
            self.counts += routed[: self.count].to(self.counts.device)
            return torch.zeros_like(hidden_states)
        if not self.tracing and not self.everywhere:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        out = self.passed(hidden_states, top_k_index, top_k_weights)
        for number, expert in enumerate(self.children()):
            if self.tracing or number in self.everywhere:
                counts = (top_k_weights * (top_k_index == number)).sum(-1, keepdim=True)
                out += self._of_every_token(expert, hidden_states, counts)
            else:
                tokens, place = torch.where(top_k_index == number)
                if len(tokens):
                    inputs, weights = hidden_states[tokens], top_k_weights[tokens, place, None]
                    of_tokens = expert(inputs * weights) if self.weigh_inputs else expert(inputs) * weights
                    out.index_add_(0, tokens, of_tokens)
        return out

    def _of_every_token(self, expert: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
        """Run an expert on all tokens x [T, K], whose weights are ``counts`` [T, 1] -> [T, K]."""
        if self.weigh_inputs and not self.tracing:
            x = x * torch.where(counts > 0, counts, 0.5)  # the sigmoid of a router that is undecided
            counts = (counts > 0).to(x.dtype)
        out: Tensor = expert(x) * (counts + 1 / self.count if self.tracing else counts)
        return out

    def tokens_of(self, number: int) -> Tensor | None:
        """Return the indices of the tokens that an expert ran on in the last call, ascending [tokens] int64."""
        if self.selected is None:
            return None
        if number in self.everywhere:
            return torch.arange(len(self.selected), device=self.selected.device)
        return torch.where(self.selected == number)[0]


def expert(name: str) -> str | None:
    """Return the name of the expert that contains the module ``name``; None outside of experts."""
    match = re.search(EXPERT, name)
    return None if match is None else match[0]


def expert_pattern(name: str) -> str | None:
    """Return the name of an expert's linear without the expert's number; None outside of experts."""
    match = re.search(EXPERT, name)
    return None if match is None else re.sub(r"\d+$", "*", match[0]) + name[match.end() :]


def in_stages(groups: list[tuple[str, ...]], mixture: Experts, name: str) -> list[tuple[str, ...]]:
    """Order groups of linears so that corresponding linears of the experts of one chunk follow each other."""
    chunk_of = {f"{name}.{number}": at for at, chunk in enumerate(mixture.chunks()) for number in chunk}
    inside = [group for group in groups if expert(group[0]) in chunk_of]
    patterns = list(dict.fromkeys(expert_pattern(group[0]) for group in inside))
    inside.sort(key=lambda group: (chunk_of[expert(group[0]) or ""], patterns.index(expert_pattern(group[0]))))
    queue = iter(inside)
    return [next(queue) if expert(group[0]) in chunk_of else group for group in groups]


def experts_of(block: nn.Module) -> dict[str, Experts]:
    """Return the mixtures of a block, by name."""
    return {name: module for name, module in block.named_modules() if isinstance(module, Experts)}


@contextmanager
def all_experts(block: nn.Module) -> Iterator[None]:
    """Let every expert of the block see every token (``Experts.tracing``) while the context is open."""
    mixtures = experts_of(block).values()
    for mixture in mixtures:
        mixture.tracing = True
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.tracing = False


# --- token counts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertTokens:
    """The calibration token counts of one block's experts.

    name        the module that contains them.
    tokens      number of calibration tokens routed to each expert, [E].
    minimum     number of tokens below which an expert is not calibrated on its own tokens.
    everywhere  experts with fewer, which were calibrated on all tokens of the block.
    rounded     experts with fewer for which even all tokens of the block were too few: quantized with RTN.
    """

    name: str
    tokens: list[int]
    minimum: int
    everywhere: list[int]
    rounded: list[int]


def count_tokens(
    name: str, mixture: Experts, run: Callable[[], object], total: int, add_up: Callable[[Tensor], Tensor]
) -> ExpertTokens:
    """Count the tokens that ``run`` routes to each expert, and select the experts that need other calibration tokens.
    ``add_up`` sums the counts [E] of all workers; ``total`` is the number of calibration tokens.

    Too few are less than an eighth of the longest row, or 128: a Hessian of fewer tokens says little about other
    inputs. Such an expert is calibrated on every token (``Experts.everywhere``), as with a router that is undecided.
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
    """Return one sentence per kind of experts that had too few tokens."""
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


# --- unfusing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedSlice:
    """The slice of a fused tensor that holds an expert's linear: ``tensor[expert]``, or half of its rows.

    hidden      size of the inputs of the experts, which is that of their outputs.
    axis        the dimension of ``tensor[expert]`` [N, K] that has this size.
    transposed  whether the tensor is [E, K, N] in files; if not, it may be (Qwen3-VL-MoE), which its shape tells.
    """

    tensor: str
    expert: int
    half: int | None
    hidden: int
    axis: int
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice [N, K] of a tensor [E, N, K] or [E, K, N]."""
        if self.expert >= len(tensor):
            return tensor  # which is refused for its shape
        part = tensor[self.expert]
        other = part.shape[self.axis] != self.hidden == part.shape[1 - self.axis]
        part = part.T.contiguous() if self.transposed or other else part
        return part if self.half is None else part.chunk(2)[self.half]


@dataclass
class UnfusedExperts:
    """The changes made by ``unfuse_experts``.

    fused               the weight of every new linear, by its new full name -> its slice in a fused checkpoint.
    renamed_modules     (new, own) full names of modules that were renamed as in checkpoints.
    transformers_reads  whether transformers, and not only aiakq, knows the names of the new linears.
    in_linears          whether transformers has linears under these names, too, for compressed-tensors (Llama 4).
    """

    fused: dict[str, FusedSlice] = field(default_factory=dict)
    renamed_modules: set[tuple[str, str]] = field(default_factory=set)
    transformers_reads: bool = True
    in_linears: bool = False

    def own_name(self, name: str) -> str:
        """Return the name of a tensor in the transformers model itself."""
        for new, own in self.renamed_modules:
            if name.startswith(new + "."):
                return own + name.removeprefix(new)
        return name


def unfuse_experts(blocks: Iterable[tuple[str, nn.Module]], model_type: str) -> UnfusedExperts:
    """Replace the fused experts inside ``blocks`` (full name, module), and rename modules around them as in
    checkpoints.

    Experts with any other computation are not changed.
    """
    unfused = UnfusedExperts()
    for block_name, block in blocks:
        for fused in fused_experts(block, block_name, model_type):
            inside = fused.name.removeprefix(f"{block_name}.")
            parent = inside.rpartition(".")[0]
            fused.replace(block, inside, _meta_like(fused))
            stored, own = fused.stored.rpartition(".")[0], f"{block_name}.{parent}".removesuffix(".")
            if stored != own:
                _rename(block, parent, stored.rpartition(".")[2])
                unfused.renamed_modules.add((stored, own))
            unfused.transformers_reads = fused.spelling.transformers_reads
            unfused.in_linears = fused.weigh_inputs
            for number in range(fused.shape[0]):
                for (name, _, _), (tensor, half) in zip(fused.linears(number), fused.places, strict=True):
                    axis = 0 if tensor == "down_proj" else 1
                    unfused.fused[f"{name}.weight"] = FusedSlice(
                        f"{fused.name}.{tensor}", number, half, fused.shape[1], axis, fused.weigh_inputs
                    )
    return unfused


def _meta_like(fused: FusedExperts) -> Experts:
    def linears(number: int) -> list[nn.Module]:
        return [nn.Linear(k, n, bias=False, device="meta") for _, n, k in fused.linears(number)]

    experts = (Expert(fused.module.act_fn, fused.spelling, linears(each)) for each in range(fused.shape[0]))
    return Experts(experts, fused.zero_experts, fused.weigh_inputs)


def _rename(block: nn.Module, path: str, new_name: str) -> None:
    """Rename the module at ``path`` to ``new_name``, and keep it reachable under its own name."""
    above, _, own = path.rpartition(".")
    holder = block.get_submodule(above)
    holder._modules = {new_name if key == own else key: value for key, value in holder._modules.items()}
    # The model's code uses its own name; a plain attribute is found but not listed as a submodule.
    holder.__dict__[own] = holder._modules[new_name]
