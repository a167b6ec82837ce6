"""Finds smooth mappings (smooth layer, balance layers) by scaling channels at random and comparing outputs.

A mapping (groups.SmoothMapping) is kept only if two runs of the block on real calibration data confirm it. With the
smooth layer's channels multiplied by random powers of two, the inputs of its balance layers, and nothing else, must be
multiplied by the same numbers; with the columns of the balance layers divided by them as well, the block's output must
be unchanged. Powers of two cause almost no rounding, so a valid mapping holds to the last digits, and an invalid one
is far off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.errors import error
from aiakq.quantizers.model.activations import Activations
from aiakq.quantizers.model.experts import EXPERT, all_experts
from aiakq.quantizers.model.groups import Heads, SmoothMapping, forward_pre_hooks, structure, tensor_key, trace_groups

#: Maximum relative difference of equal values; unequal ones differ by a half or more.
TOLERANCE = 1e-4
#: Number of tokens on which a block is tested, if their outputs do not depend on the rest.
_TOKENS = 64
#: Number of rows of each tensor that are compared, half of them from its beginning.
_ROWS = 64


@dataclass
class BlockTrace:
    """Groups of linears that share an input and smooth mappings, traced once for all blocks of equal structure.

    fold  whether to look for smooth mappings as well.
    """

    heads: Heads
    fold: bool
    _known: dict[tuple[object, ...], tuple[list[tuple[str, ...]], tuple[SmoothMapping, ...]]] = field(
        default_factory=dict
    )

    def trace(
        self, block: nn.Module, index: int, inputs: Activations
    ) -> tuple[list[tuple[str, ...]], tuple[SmoothMapping, ...]]:
        """Return the groups (``trace_groups``) and smooth mappings of a block, traced on one calibration sequence.

        Without calibration inputs there are none. Raises ``not_finite``.
        """
        if not len(inputs.hidden):
            return [], ()
        kind = structure(block)
        if kind not in self._known:
            run = inputs.sample_forward(block, index, _TOKENS)
            if run is None and self.fold:
                hint = "Calibrate on other text, and check that the source model computes sensible output."
                raise error("not_finite", what=f"Every calibration input of block {index}", hint=hint)
            run = run or (lambda: inputs.run_one(block, index))
            with all_experts(block):
                groups = trace_groups(block, run)
                mappings = find_mappings(block, run, self.heads) if self.fold else ()
            self._known[kind] = groups, mappings
        return self._known[kind]

    def warnings(self) -> list[str]:
        """Return a sentence about the kinds of blocks for which no smooth mapping was found, if any were needed."""
        bare = sum(not mappings for _, mappings in self._known.values())
        if not self.fold or not bare:
            return []
        where = f"{bare} of {len(self._known)} kinds of blocks"
        return [f"No scale could be folded in {where}: nothing in them feeds a linear channel by channel."]


@dataclass
class _Read:
    """A tensor read by linears or routers: their names in order, some rows [R, K], and its position among the calls."""

    readers: list[str]
    rows: Tensor
    position: int


@dataclass(frozen=True)
class _Layout:
    """A possible layout of the channels of a smooth layer in tensors of ``width`` channels."""

    width: int
    heads: bool = False
    part: tuple[int, int, int] | None = None
    plus_one: bool = False


def find_mappings(block: nn.Module, run: Callable[[], Tensor], heads: Heads) -> tuple[SmoothMapping, ...]:
    """Find the mappings of a block, in execution order of their balance layers.

    ``run`` runs the block once on some calibration data and returns its output; every expert must see tokens
    (experts.all_experts). The weights of ``block`` are modified during the search and restored.
    """
    return _Search(block, run, heads).mappings()


class _Search:
    def __init__(self, block: nn.Module, run: Callable[[], Tensor], heads: Heads) -> None:
        self.block = block
        self.run = run
        self.heads = heads
        self.modules = dict(block.named_modules())
        self.generator = torch.Generator().manual_seed(0)
        self.call_order: dict[str, int] = {}
        self.reads: list[_Read] = []
        self.plain = self._trace(note=True)

    def mappings(self) -> tuple[SmoothMapping, ...]:
        """Return the mappings. Nearest smooth layers come first: a tensor belongs to the last module that feeds it."""
        chosen: list[SmoothMapping] = []
        self.taken: set[str] = set()
        for family in reversed(self._families()):
            for layout in self._layouts(family[0]):
                mappings = [
                    mapping
                    for mapping in self._mappings_of(family, layout)
                    if not self.taken & set(mapping.balance_layers)
                ]
                if mappings and self._is_valid(mappings, layout):
                    chosen += mappings
                    self.taken.update(name for mapping in mappings for name in mapping.balance_layers)
                    break
        return tuple(sorted(chosen, key=lambda mapping: min(self.call_order[name] for name in mapping.balance_layers)))

    # --- candidates -----------------------------------------------------------------------------------------------

    def _families(self) -> list[list[str]]:
        """Return possible smooth layers in execution order; corresponding layers of all experts form one family."""
        families: dict[str, list[str]] = {}
        for name in sorted(self.call_order, key=self.call_order.__getitem__):
            if is_norm(self.modules[name]) or type(self.modules[name]) is nn.Linear:
                families.setdefault(re.sub(r"\bexperts\.\d+\b", "experts.*", name), []).append(name)
        return list(families.values())

    def _layouts(self, source: str) -> Iterator[_Layout]:
        """Yield the possible layouts of the source's channels in a tensor that is read later, likely ones first."""
        module = self.modules[source]
        n = len(module.weight)
        later = [
            read
            for read in self.reads
            if read.position > self.call_order[source] and not self.taken & set(read.readers)
        ]
        widths = sorted({read.rows.shape[1] for read in later})
        if is_norm(module):
            if n in widths:
                yield _Layout(n)
                yield _Layout(n, plus_one=True)
            return
        shared = self.heads.q_heads // self.heads.kv_heads
        for width in widths:
            ties = [False, True] if shared > 1 and width % self.heads.q_heads == 0 else [False]
            for tied in ties:
                length = width // shared if tied else width
                if n == length:
                    yield _Layout(width, tied)
                elif n > length:
                    yield _Layout(width, tied, (1, n - length, length))
                    kv = self.heads.kv_heads
                    if n % kv == 0 and length % kv == 0 and kv > 1:
                        yield _Layout(width, tied, (kv, (n - length) // kv, length // kv))
                    yield _Layout(width, tied, (1, 0, length))

    def _mappings_of(self, family: list[str], layout: _Layout) -> list[SmoothMapping]:
        """Return a mapping for every member of the family whose channels reach a later tensor in this layout."""
        candidates = {name: SmoothMapping(name, (), "", layout.heads, layout.part, layout.plus_one) for name in family}
        scales = {name: self._random_scales(mapping) for name, mapping in candidates.items()}
        with self._scaled(list(candidates.values()), scales):
            before, after = self.reads, self._repeat_reads()
        mappings = []
        for name, mapping in candidates.items():
            columns = self.heads.spread(scales[name]) if layout.heads else scales[name]
            targets: list[str] = []
            for old, new in zip(before, after, strict=True):
                is_candidate = (
                    self.call_order[name] < old.position
                    and old.rows.shape[1] == layout.width
                    and _may_feed(name, old.readers)
                )
                if is_candidate and _equal(new.rows, old.rows * columns) and not _equal(new.rows, old.rows):
                    targets += old.readers
            if targets:
                targets.sort(key=lambda target: (type(self.modules[target]) is not nn.Linear, self.call_order[target]))
                mappings.append(replace(mapping, balance_layers=tuple(targets), parent=_parent(targets)))
        return mappings

    # --- verification -------------------------------------------------------------------------------------------------

    def _is_valid(self, mappings: list[SmoothMapping], layout: _Layout) -> bool:
        """Whether scaling the smooth layers changes the output, and scaling the balance layers as well restores it."""
        scales = {mapping.smooth_layer: self._random_scales(mapping) for mapping in mappings}
        with self._scaled(mappings, scales):
            if _equal(self._output(), self.plain):
                return False
            columns: dict[Any, Tensor] = {}
            for mapping in mappings:
                by = self.heads.spread(scales[mapping.smooth_layer]) if layout.heads else scales[mapping.smooth_layer]
                columns |= {self.modules[target].weight: by for target in mapping.balance_layers}
            for weight, by in columns.items():
                weight.data.div_(by)
            try:
                return _equal(self._output(), self.plain)
            finally:
                for weight, by in columns.items():
                    weight.data.mul_(by)

    def _random_scales(self, mapping: SmoothMapping) -> Tensor:
        """Return 1/4, 1/2, 2 or 4 for every channel of a mapping's smooth layer."""
        weight = self.modules[mapping.smooth_layer].weight
        assert isinstance(weight, Tensor)
        powers = torch.tensor([0.25, 0.5, 2.0, 4.0])
        count = len(mapping.rows(len(weight)))
        return powers[torch.randint(4, (count,), generator=self.generator)].to(weight.device)

    @contextmanager
    def _scaled(self, mappings: list[SmoothMapping], scales: dict[str, Tensor]) -> Iterator[None]:
        """Multiply the channels of the mappings' smooth layers by ``scales`` while the context is open."""
        small: list[tuple[Tensor, Tensor]] = []
        large: list[tuple[Tensor, Tensor]] = []
        for mapping in mappings:
            module, by = self.modules[mapping.smooth_layer], scales[mapping.smooth_layer]
            for parameter in (module.weight, getattr(module, "bias", None)):
                if not isinstance(parameter, Tensor):
                    continue
                factors = torch.ones(len(parameter), device=parameter.device)
                factors[mapping.rows(len(parameter)).to(parameter.device)] = by
                if parameter.dim() > 1:  # a matrix is not copied: powers of two can be divided out exactly
                    large.append((parameter.data, factors.unsqueeze(1)))
                    parameter.data.mul_(factors.unsqueeze(1))
                    continue
                one = float(mapping.plus_one and parameter is module.weight)
                small.append((parameter.data, parameter.data.clone()))
                parameter.data.copy_((parameter.data + one) * factors - one)
        try:
            yield
        finally:
            for matrix, factors in large:
                matrix.div_(factors)
            for vector, kept in small:
                vector.copy_(kept)

    def _output(self) -> Tensor:
        with torch.inference_mode():
            return self.run()

    # --- observation --------------------------------------------------------------------------------------------------

    def _trace(self, note: bool) -> Tensor:
        """Run the block and collect ``reads``; with ``note`` also their readers and the order of all modules."""
        by_tensor: dict[tuple[object, ...], _Read] = {}
        kept: list[Tensor] = []
        position = 0

        def hook(name: str, module: nn.Module) -> Callable[..., None]:
            def pre_hook(_: nn.Module, args: tuple[object, ...]) -> None:
                nonlocal position
                position += 1
                self.call_order.setdefault(name, position)
                if is_norm(module) or not args or not isinstance(args[0], Tensor):
                    return
                x = args[0]
                if x.shape[-1] != module.weight.shape[1]:  # type: ignore[index]
                    return
                kept.append(x)
                read = by_tensor.get(tensor_key(x))
                if read is None:
                    rows = x.reshape(-1, x.shape[-1])
                    read = by_tensor[tensor_key(x)] = _Read([], _some(rows), position)
                if name not in read.readers:
                    read.readers.append(name)

            return pre_hook

        hooks = {m: hook(name, m) for name, m in self.modules.items() if is_norm(m) or multiplies(m)}
        with forward_pre_hooks(hooks), torch.inference_mode():
            output = self.run()
        self.reads = list(by_tensor.values())
        return output

    def _repeat_reads(self) -> list[_Read]:
        before = self.reads
        self._trace(note=False)
        repeated, self.reads = self.reads, before
        assert [read.readers for read in repeated] == [read.readers for read in before], "a block runs in one order"
        return repeated


def is_norm(module: nn.Module) -> bool:
    """Whether a module has no submodules and one weight per channel."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and not next(module.children(), None)


def multiplies(module: nn.Module) -> bool:
    """Whether a module has no submodules and may multiply its input by a matrix [N, K]: a linear or a router."""
    weight = getattr(module, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.dim() == 2 and not next(module.children(), None)
    return plain and not isinstance(module, nn.Embedding)


def _may_feed(source: str, readers: list[str]) -> bool:
    """Whether ``source`` may feed ``readers``: linears of an expert only feed that expert."""
    expert = re.search(EXPERT, source)
    return expert is None or any(name.startswith(expert[0] + ".") for name in readers)


def _parent(targets: list[str]) -> str:
    """Return the smallest module that contains all targets; a single target is its own parent."""
    if len(targets) == 1:
        return targets[0]
    paths = [name.split(".")[:-1] for name in targets]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) != 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _some(rows: Tensor) -> Tensor:
    half = _ROWS // 2
    return rows.clone() if len(rows) <= _ROWS else torch.cat((rows[:half], rows[-half:]))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether all channels (last dimension) of two tensors are equal up to rounding."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    fine = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1)
    gap = (a[fine] - b[fine]).norm(dim=0)
    size = b[fine].norm(dim=0)
    return bool((gap <= TOLERANCE * torch.maximum(size, 1e-3 * size.mean())).all())
