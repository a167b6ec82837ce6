"""The experts of transformers' mixture-of-experts modules, one linear per expert and projection.

transformers keeps the experts of a block in two tensors, ``gate_up_proj`` [E, 2F, K] and ``down_proj`` [E, K, F], or
``up_proj`` [E, F, K] in place of the first if they have no gates.
Checkpoints on the hub, and programs that read quantized ones, use one tensor per expert, like ``experts.3.w1``. This
module finds the fused modules of a model, maps their linears to names in checkpoints, and replaces them with separate
linears.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Spelling:
    """Names of an expert's projections in a family's checkpoints; ``gate`` is "" if experts have none.

    renames             pairs (name in checkpoints, name in transformers) of the modules around the experts.
    transformers_reads  whether the names come from transformers' own conversion rules, so that it reads them.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renames: tuple[tuple[str, str], ...] = ()
    transformers_reads: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.gate, self.up, self.down)))

    def stored(self, path: str) -> str:
        """Return the name in checkpoints of the module ``path`` of a model, which differs in its last part."""
        above, _, last = path.rpartition(".")
        stored_name = next((stored_name for stored_name, own in self.renames if own == last), last)
        return ".".join(filter(None, (above, stored_name)))


class Expert(nn.Module):
    """An expert, down(act(gate(x)) * up(x)) or down(act(up(x))), whose projections have the checkpoint's names."""

    def __init__(self, act: Callable[[Tensor], Tensor], spelling: Spelling, projections: Iterable[nn.Module]) -> None:
        super().__init__()
        self.spelling = spelling
        self.act = act
        for name, projection in zip(spelling.projections, projections, strict=True):
            self.add_module(name, projection)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, K]."""
        *gates, up, down = (self.get_submodule(name) for name in self.spelling.projections)
        out: Tensor = down(self.act(gates[0](x)) * up(x) if gates else self.act(up(x)))
        return out


class SeparateExperts(nn.Module):
    """Drop-in replacement of a fused module with one child module per expert, named 0 .. E-1.

    row_multiple  the rows given to an expert are padded with zeros to a multiple of this.
    zero_experts  number of experts beyond them that return their input (LongCat-Flash).
    weigh_inputs  whether weights multiply the inputs of experts instead of their outputs (Llama 4).
    """

    def __init__(
        self, experts: Iterable[nn.Module], row_multiple: int = 1, zero_experts: int = 0, weigh_inputs: bool = False
    ) -> None:
        super().__init__()
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.count = len(self._modules)
        self.row_multiple = row_multiple
        self.zero_experts = zero_experts
        self.weigh_inputs = weigh_inputs

    def passed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the output [T, K] of the experts that return their input, zeros without any; see ``forward``."""
        if not self.zero_experts:
            return torch.zeros_like(hidden_states)
        is_zero = (top_k_index >= self.count) & (top_k_index < self.count + self.zero_experts)
        return hidden_states * (top_k_weights * is_zero).sum(-1, keepdim=True).to(hidden_states.dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, K], the selected experts [T, A] int64 and their weights [T, A] -> [T, K]."""
        out = self.passed(hidden_states, top_k_index, top_k_weights)
        # Rows are sorted by expert, so that the counts alone tell which rows belong to which expert.
        order = torch.argsort(top_k_index.flatten(), stable=True)
        tokens, weights = order // top_k_index.shape[1], top_k_weights.flatten()[order, None]
        counts = torch.bincount(top_k_index.flatten(), minlength=self.count)[: self.count].tolist()
        start = 0
        for expert, count in zip(self.children(), counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                inputs, of_rows = hidden_states[rows], weights[start : start + count]
                inputs = inputs * of_rows if self.weigh_inputs else inputs
                output = expert(F.pad(inputs, (0, 0, 0, -count % self.row_multiple)))[:count]
                output = output if self.weigh_inputs else output * of_rows
                out.index_add_(0, rows, output.to(out.dtype))
            start += count
        return out


@dataclass(frozen=True)
class FusedExperts:
    """A fused module of a model.

    name          full name in the model.
    stored        name in checkpoints.
    weigh_inputs  whether it is that of Llama 4: tensors [E, K, 2F] and [E, F, K], and weights multiply the inputs.
    """

    name: str
    stored: str
    spelling: Spelling
    module: Any
    weigh_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of experts E, hidden size K and intermediate size F."""
        count, n, k = self.module.down_proj.shape
        return (count, k, n) if self.weigh_inputs else (count, n, k)

    @property
    def zero_experts(self) -> int:
        """Number of experts that return their input, which have no rows in the last projection."""
        return _zero_experts(self.module)

    def replace(self, root: nn.Module, name: str, experts: SeparateExperts) -> None:
        """Put ``experts`` in place of this module, which is called ``name`` inside ``root``."""
        root.set_submodule(name, experts)
        if self.weigh_inputs:
            parent: Any = root.get_submodule(name.rpartition(".")[0])
            parent.__class__ = _choosing(type(parent))  # type: ignore[arg-type]

    def linears(self, number: int) -> list[tuple[str, int, int]]:
        """Return the names in checkpoints of an expert's projections, gate, up and down, with their N and K."""
        _, hidden, inner = self.shape
        sizes = (*[(inner, hidden)] * (len(self.spelling.projections) - 1), (hidden, inner))
        names = (f"{self.stored}.{number}.{projection}" for projection in self.spelling.projections)
        return [(name, *size) for name, size in zip(names, sizes, strict=True)]

    @property
    def places(self) -> tuple[tuple[str, int | None], ...]:
        """Slices of these projections: the fused tensor, and the half of its rows."""
        if self.spelling.gate:
            return ("gate_up_proj", 0), ("gate_up_proj", 1), ("down_proj", None)
        return ("up_proj", None), ("down_proj", None)


def fused_experts(root: nn.Module, prefix: str, model_type: str) -> Iterator[FusedExperts]:
    """Yield the fused experts inside ``root``, whose full name is ``prefix``, unless they compute something else."""
    known = _spelling(model_type)
    same: dict[type, bool] = {}
    for name, module in list(root.named_modules(prefix=prefix)):
        if type(module).__name__ == "Llama4TextMoe":
            if type(module) not in same:
                same[type(module)] = _chooses_alike(module)
            if same[type(module)]:  # with compressed-tensors, transformers has a linear per expert and projection
                inside, spelling = f"{name}.experts", replace(known, transformers_reads=True)
                yield FusedExperts(inside, inside, spelling, module.experts, weigh_inputs=True)
            continue
        if not _looks_fused(module):
            continue
        if type(module) not in same:
            same[type(module)] = computes_the_same(module)
        if same[type(module)]:
            parent, _, last = name.rpartition(".")
            spelling = known if _first(module) == "gate_up_proj" else replace(known, gate="")
            yield FusedExperts(name, f"{spelling.stored(parent)}.{last}", spelling, module)


def _looks_fused(module: nn.Module) -> bool:
    names = dict(module.named_parameters(recurse=False))
    first = _first(module)
    return (
        set(names) == {first, "down_proj"}
        and all(parameter.dim() == 3 for parameter in names.values())
        and names[first].shape[1] == (2 if first == "gate_up_proj" else 1) * names["down_proj"].shape[2]
        and names[first].shape[2] == names["down_proj"].shape[1]
        and callable(getattr(module, "act_fn", None))
    )


def _zero_experts(module: Any) -> int:
    return int(module._parameters[_first(module)].shape[0] - module.down_proj.shape[0])


def _first(module: nn.Module) -> str:
    """Return the name of the tensor with the projections before the activation function."""
    return "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj"


def computes_the_same(fused: Any) -> bool:
    """Whether ``SeparateExperts`` gives the same results as this fused module, on small random weights."""
    count, hidden, inner, first = fused.down_proj.shape[0], 16, 8, _first(fused)
    zero = _zero_experts(fused)
    parts = 2 if first == "gate_up_proj" else 1
    spelling = Spelling() if parts == 2 else Spelling(gate="")
    make = torch.Generator().manual_seed(0)
    small: Any = copy.copy(fused)
    small._parameters = {
        first: nn.Parameter(torch.randn(count + zero, parts * inner, hidden, generator=make), requires_grad=False),
        "down_proj": nn.Parameter(torch.randn(count, hidden, inner, generator=make), requires_grad=False),
    }
    for name, value in vars(fused).items():  # some modules store their sizes for reshaping
        size = isinstance(value, int) and not isinstance(value, bool) and "expert" not in name
        if size and value in fused.down_proj.shape[1:]:
            vars(small)[name] = hidden if value == fused.down_proj.shape[1] else inner
    experts = []
    for both, down in zip(small._parameters[first][:count], small.down_proj, strict=True):
        experts.append(Expert(fused.act_fn, spelling, [_linear(weight) for weight in (*both.chunk(parts), down)]))
    x = torch.randn(16, hidden, generator=make)
    chosen = min(2, count + zero)
    index = torch.rand(16, count + zero, generator=make).topk(chosen).indices
    weights = torch.rand(16, chosen, generator=make)
    with torch.no_grad(), suppress(RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        separate = SeparateExperts(experts, zero_experts=zero)
        expected, actual = small(x, index, weights), separate(x, index, weights)
        return isinstance(expected, Tensor) and torch.allclose(expected, actual, rtol=1e-4, atol=1e-5)
    return False


@functools.cache
def _choosing(cls: type) -> type:
    """Return Llama 4's class ``cls`` of router and experts with a forward for ``SeparateExperts``, which are given all
    tokens once and the experts of each, instead of all tokens for every expert.
    """

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)  # zero for experts that are not selected
        weights, selected = scores.topk(self.top_k, dim=-1)
        return self.shared_expert(x) + self.experts(x, selected, weights), logits

    return type(cls.__name__, (cls,), {"forward": forward})


def _chooses_alike(module: Any) -> bool:
    """Whether ``_choosing`` gives the same results as Llama 4's module, on small random weights."""
    count, hidden, inner = 4, 16, 8
    make = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"), suppress(RuntimeError, ValueError, TypeError, AttributeError):
        config = copy.deepcopy(module.shared_expert.config)
        config.hidden_size, config.intermediate_size = hidden, inner
        config.num_local_experts, config.num_experts_per_tok = count, 2
        small = type(module)(config).float()
        for parameter in small.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=make))
        x = torch.randn(2, 8, hidden, generator=make)
        expected, _ = small(x)
        weights = zip(small.experts.gate_up_proj.mT, small.experts.down_proj.mT, strict=True)
        act = small.experts.act_fn
        experts = [Expert(act, Spelling(), map(_linear, (*both.chunk(2), down))) for both, down in weights]
        fused = FusedExperts("experts", "experts", Spelling(), small.experts, weigh_inputs=True)
        fused.replace(small, "experts", SeparateExperts(experts, weigh_inputs=True))
        return torch.allclose(expected, small(x)[0], rtol=1e-4, atol=1e-5)
    return False


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _spelling(model_type: str) -> Spelling:
    """Return the names in checkpoints of this family, from transformers' conversion rules."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    names: dict[str, list[str]] = {}
    renames = []
    for rule in get_checkpoint_conversion_mapping(model_type) or []:
        sources, targets = (
            [pattern.replace(r"\.", ".") for pattern in patterns]
            for patterns in (rule.source_patterns, rule.target_patterns)
        )
        last = targets[0].rpartition(".")[2] if targets else ""
        if "experts" in (targets[0] if targets else "") and last in ("gate_up_proj", "up_proj", "down_proj"):
            matches = [re.search(r"experts\.\*\.(\w+)\.weight", pattern) for pattern in sources]
            names[last] = [match[1] for match in matches if match]
        elif len(sources) == 1 and all(re.fullmatch(r"\.\w+\.", pattern) for pattern in (sources[0], targets[0])):
            renames.append((sources[0].strip("."), targets[0].strip(".")))
    if len(names.get("gate_up_proj", ())) == 2 and len(names.get("down_proj", ())) == 1:
        gate, up = names["gate_up_proj"]
        return Spelling(gate, up, names["down_proj"][0], tuple(renames), transformers_reads=True)
    if len(names.get("up_proj", ())) == 1 and len(names.get("down_proj", ())) == 1:
        return Spelling("", names["up_proj"][0], names["down_proj"][0], tuple(renames), transformers_reads=True)
    return Spelling(renames=tuple(renames))
