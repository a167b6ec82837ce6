"""Targets of the original model: what GPTQ minimizes beside the error of a linear on its own inputs.

A linear with weights W sees inputs x in the quantized model and x' in the original one; if its output is added to the
residual stream, that stream is r and r' before the addition. Its codes should minimize

    E || (r' + W x') - (r + Q x) ||^2

instead of ``E || W x - Q x ||^2``. With ``H = E[x x^T]`` this is ``tr(Q H Q^T - 2 Q (W H + S)^T)`` with the shift
``S = alpha W E[(x' - x) x^T] + beta E[(r' - r) x^T]``, which numerics/gptq.py adds to the loop. Factors alpha and beta
below 1 regularize: the original's outputs on the calibration samples are only partly what other text needs. Without the
residual term this is the objective of GPTAQ (arXiv:2504.02692) and Qronos (arXiv:2505.11695).

The second stream of hidden states is that of block/original.py, on a part of the tokens. q, k and v of the first block
have equal inputs in both models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aiakq.quantizers.block.decoder_block import DecoderBlock
from aiakq.quantizers.block.statistics import Statistic
from aiakq.quantizers.model.experts import Experts, expert, expert_pattern
from aiakq.quantizers.model.groups import forward_pre_hooks
from aiakq.quantizers.model.replay import Replay
from aiakq.quantizers.model.residuals import Residual
from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror


@dataclass(eq=False)
class Moments:
    """The statistics of the inputs of a group of linears.

    hessian  mean of x x^T, [K, K] float32.
    drift    [K, K], such that weights W have the shift ``W drift``; None without.
    shift    [N, K], the shift of all linears of the group; None without.
    """

    hessian: Tensor
    drift: Tensor | None = None
    shift: Tensor | None = None

    def shift_of(self, block: DecoderBlock, group: tuple[str, ...], names: tuple[str, ...]) -> Tensor | None:
        """Return the rows of ``shift`` for some linears of the group, [n, K]; None without."""
        if self.shift is None or names == group:
            return self.shift
        of_name = dict(zip(group, self.shift.split([block.linears[name].out_features for name in group]), strict=True))
        return torch.cat([of_name[name] for name in names])


def runs(groups: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield groups that are rounded at the same time: corresponding ones of several experts do not feed each other."""
    for _, run in itertools.groupby(groups, key=lambda group: expert_pattern(group[0]) or group):
        yield list(run)


class _AllSeen(Exception):
    pass


class OriginalTargets:
    """Collects the moments of a block's groups with the targets of the original model."""

    def __init__(self, block: DecoderBlock, alpha: float, beta: float) -> None:
        assert block.original is not None
        self.block, self.original, self.alpha, self.beta = block, block.original, alpha, beta
        self.replay = Replay(self.original.module, block.index, self.original.inputs)
        self._ahead: dict[str, Moments] = {}
        self._streams: dict[tuple[str, int], Tensor] = {}
        self._seen: tuple[int, dict[str, Tensor]] = (-1, {})

    def moments(self, group: tuple[str, ...]) -> Moments:
        """Return the moments of a group, for experts together with those of the same linears of other experts.

        Raises ``not_finite``.
        """
        name = group[0]
        if name not in self._ahead:
            groups = [group]
            if expert_pattern(name) is not None:
                leaders = {each[0]: each for each in self.block.groups}
                groups += [leaders[other] for other in self.block.inputs.neighbours([name])]
            self._ahead |= self._gathered(groups)
        return self._ahead.pop(name)

    def _gathered(self, groups: list[tuple[str, ...]]) -> dict[str, Moments]:
        inputs = self.block.inputs
        sources = [_Sums(self, group, self._last(group)) for group in groups]
        streams = {s.residual.stream for s in sources if s.residual is not None and s.residual.stream}
        keep = expert_pattern(groups[0][0]) is None
        self._names = tuple(source.name for source in sources)
        sums = inputs.gather(
            {source.name: source.statistic() for source in sources},
            keep=keep,
            beside={stream: partial(self._put_stream, stream) for stream in streams},
        )
        self._streams.clear()
        self._seen = (-1, {})
        return {source.name: source.moments(*sums[source.name]) for source in sources}

    def _last(self, group: tuple[str, ...]) -> bool:
        """Whether this is the last group of the block, after which its outputs in the original model are not needed
        again."""
        return group == self.block.groups[-1] and expert_pattern(group[0]) is None

    def _put_stream(self, stream: str, batch: int, x: Tensor) -> None:
        if self.original.inputs.hidden.has(batch):
            self._streams[stream, batch] = x.clone()

    def residual_gap(self, stream: str, batch: int) -> Tensor | None:
        """Return r' - r [T, hidden] for a batch whose inputs have just been seen in both models."""
        if stream:
            r, expected = self._streams.pop((stream, batch), None), self._seen[1].get(stream)
            return None if r is None or expected is None else (expected - r).flatten(0, -2)
        device = self.block.inputs.activations.device
        hidden = self.block.inputs.activations.hidden[batch].to(device)
        return (self._first_input(batch).to(device) - hidden).flatten(0, -2)

    def _first_input(self, batch: int) -> Tensor:
        return self._before if batch in self.original.advanced else self.original.inputs.hidden[batch]

    def original_input(self, name: str, batch: int, stream: str, whole: bool) -> Tensor | None:
        """Return the linear's input [T, K] in the original model, divided by the scales folded before it.

        The input of the module ``stream`` is noted in the same run. ``whole``: run to the end of the block and replace
        the batch's inputs by the outputs. None if no token reaches the linear.
        """
        if self._seen[0] != batch:
            self._run(batch, {*self._names, *((stream,) if stream else ())}, whole)
        x = self._seen[1].get(name)
        columns = self.block.folder.columns
        return x / columns[name] if x is not None and name in columns else x

    def _run(self, batch: int, names: set[str], whole: bool) -> None:
        seen: dict[str, Tensor] = {}
        keep = [name for name in self._names if expert_pattern(name) is None]

        def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if name in keep and not whole:
                    self.replay.keep(name, batch, args[0])
                seen[name] = args[0].reshape(-1, args[0].shape[-1]) if name in self._names else args[0]
                if len(seen) == len(names) and not whole:
                    raise _AllSeen

            return hook

        module, inputs = self.original.module, self.original.inputs
        with forward_pre_hooks({module.get_submodule(name): note(name) for name in names}), torch.inference_mode():
            try:
                output = self.replay.run(batch, names=tuple(names))
            except _AllSeen:
                pass
            else:
                if whole:
                    self._before = inputs.hidden[batch]
                    inputs.hidden[batch] = output.to("cpu")
                    self.original.advanced.add(batch)
        self._seen = batch, seen

    def mixtures(self, name: str) -> tuple[Experts, Experts, int] | None:
        """Return the experts that contain a linear, in the quantized and the original block, and its expert's number;
        None outside of experts."""
        path = expert(name)
        if path is None:
            return None
        above, _, number = path.rpartition(".")
        ours, theirs = (block.get_submodule(above) for block in (self.block.module, self.original.module))
        assert isinstance(ours, Experts) and isinstance(theirs, Experts)
        return ours, theirs, int(number)


class _Sums:
    """The sums over tokens for one group: x x^T, and the shift or the drift, whichever is smaller."""

    def __init__(self, targets: OriginalTargets, group: tuple[str, ...], last: bool) -> None:
        self.targets, self.group, self.name, self.last = targets, group, group[0], last
        block = targets.block
        self.sizes = [len(block.weight(name)) for name in group]
        residuals = targets.original.residuals if targets.beta else {}
        found = [name for name in group if name in residuals]
        self.residual: Residual | None = residuals[found[0]] if found else None
        first = sum(self.sizes[: group.index(found[0])]) if found else 0
        self.rows = slice(first, first + (self.sizes[group.index(found[0])] if found else 0))
        k = block.weight(self.name).shape[1]
        self.by_rows = self.residual is not None or sum(self.sizes) < k
        self.equal = block.index == 0 and group == block.groups[0]

    def statistic(self) -> Statistic:
        inputs, k = self.targets.block.inputs, self.targets.block.weight(self.name).shape[1]

        def start() -> list[Tensor]:
            hessian = inputs.new_hessian(self.name)
            if self.equal:
                return [hessian]
            other = torch.zeros(sum(self.sizes) if self.by_rows else k, k, device=hessian.device)
            return [hessian, other, torch.zeros(1, dtype=torch.int64)]

        return Statistic(start, self._add, weighted=True)

    def _add(self, totals: list[Tensor], x: Tensor, batch: int, weights: Tensor | None) -> None:
        add_second_moment(totals[0], x if weights is None else x * weights.sqrt().unsqueeze(1))
        targets = self.targets
        if self.equal or not targets.original.inputs.hidden.has(batch):
            return
        stream = "" if self.residual is None else self.residual.stream
        expected = targets.original_input(self.name, batch, stream, self.last)
        matched = self._matched(x, expected)
        if matched is None:
            return
        rows, expected = matched
        seen = x[rows]
        _, sums, count = totals
        gap = (expected - seen).mul_(targets.alpha)
        seen = seen if weights is None else seen * weights[rows].unsqueeze(1)
        if not self.by_rows:
            sums.addmm_(gap.T, seen)
        else:
            block = targets.block
            wanted = torch.cat([gap @ block.weight(name).T for name in self.group], dim=1)
            if self.residual is not None:
                stream_gap = targets.residual_gap(stream, batch)
                if stream_gap is None or len(stream_gap) != len(wanted):
                    return
                factor = targets.beta * self.residual.share / self.residual.multiplier
                wanted[:, self.rows].add_(stream_gap, alpha=factor)
            if not bool(torch.isfinite(wanted.sum())):
                return
            sums.addmm_(wanted.T, seen)
        count += len(x)

    def _matched(self, x: Tensor, expected: Tensor | None) -> tuple[Tensor | slice, Tensor] | None:
        """Return which rows of x are tokens that reach the linear in both models, and their inputs in the original;
        None if they cannot be told.
        """
        mixtures = self.targets.mixtures(self.name)
        if mixtures is None:
            whole = expected is not None and expected.shape == x.shape and bool(torch.isfinite(expected.sum()))
            return (slice(None), expected) if whole and expected is not None else None
        if self.targets.block.inputs.activations.others:
            return None  # other devices have copies of the experts, which know the tokens
        ours, theirs, number = mixtures
        tokens, others = ours.tokens_of(number), theirs.tokens_of(number)
        if tokens is None or others is None or len(tokens) != len(x):
            return None
        if expected is None:
            return (slice(0), x[:0]) if not len(others) else None
        if len(others) != len(expected) or not bool(torch.isfinite(expected.sum())):
            return None
        return torch.isin(tokens, others), expected[torch.isin(others, tokens)]

    def moments(self, rows: int, totals: list[Tensor]) -> Moments:
        """Return the moments for the sums over all batches; a warning says if none could be compared."""
        hessian, *rest = totals
        found = Moments(mirror(hessian.div_(rows)))
        if rest:
            sums, count = rest
            if not int(count):
                block = self.targets.block
                block.result.warnings.append(
                    f"{block.prefix}.{self.name} was rounded towards its own outputs: its tokens in the original model "
                    "could not be compared."
                )
            elif self.by_rows:
                found.shift = sums.div_(int(count))
            else:
                found.drift = sums.div_(int(count))
        return found
