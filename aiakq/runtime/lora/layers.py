"""AdaptableLayers: the linear layers of a loaded model that can have adapters, by module name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.formats.folded_scales import LinearScales
from aiakq.formats.padded_widths import Widths
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.lora import AdaptedLinear, AdapterRows, LoraPart
from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.lora.adapter_folder import AdapterFolder, LoraWeights
from aiakq.runtime.lora.quantized_base import QuantizedBase, dora_factors, fits, fitted

_EXPERT = re.compile(r"\.experts\.\d+\.")
#: The part of a module name from the list of layers on; what precedes it depends on the model around the layers.
_IN_LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)$")
#: Parts of module names in files -> those in transformers' classes, which PEFT writes: of Kimi Linear's step sizes, of
#: the MLPs and shared experts of it, and of LFM3's gates.
_OF_CLASSES = (
    (re.compile(r"\.self_attn\.(f_[ab]_proj)$"), r".self_attn.forget_gate.\1"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.self_attn\.gate_proj$"), ".self_attn.g_proj"),
)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def is_adaptable(name: str) -> bool:
    """Whether a linear layer of this name can have adapters: it is not part of an expert, and not shared by layers,
    each of which would have an adapter of its own (Zamba 2).
    """
    return not _EXPERT.search(name) and ".shared_transformer." not in name


def find_module(name: str, modules: Collection[str]) -> str | None:
    """Return the name in ``modules`` of the module that an adapter calls ``name``; None if there is none."""
    if name in modules:
        return name
    inside = _inside(name)
    found = [module for module in modules if inside is not None and _inside(module) == inside]
    return found[0] if len(found) == 1 else None


def _inside(name: str) -> str | None:
    """Return the part of a module name from the list of layers on, as transformers' class calls it; None outside."""
    found = _IN_LAYER.search(name)
    if found is None:
        return None
    inside = found[1]
    for stored, replacement in _OF_CLASSES:
        inside = stored.sub(replacement, inside)
    return inside


def check_fits(
    adapter: AdapterFolder,
    modules: Mapping[str, tuple[int, int]],
    model_type: str,
    widths: Widths | None = None,
) -> None:
    """Raise ``adapter_mismatch`` unless every module of ``adapter`` is one of ``modules``: name -> N and K, and
    ``adapter_contradiction`` unless the adapter's config selects it, by its name in the adapter or in the model.

    model_type  that of the model, as in config.json.
    widths      those that were padded since the adapter was trained.
    """
    targets = adapter.config.targets

    def mismatch(reason: str) -> Exception:
        base = adapter.config.base_model or "a model that its config does not name"
        return error("adapter_mismatch", adapter=adapter.path, reason=reason, base=base)

    for name, module in adapter.modules.items():
        found = find_module(name, modules)
        if found is None:
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.0)
            raise mismatch(f"{name} is not a linear layer that can be adapted; similar names: {', '.join(near)}")
        if not fits((module.n, module.k), modules[found], widths or {}, found):
            n, k = modules[found]
            raise mismatch(
                f"{name} has {module.k} inputs and {module.n} outputs in the adapter, {k} and {n} in the model"
            )
        field = targets.deselecting_field(name, model_type)
        if field is not None and (found == name or targets.deselecting_field(found, model_type) is not None):
            raise error("adapter_contradiction", adapter=adapter.path, module=name, field=field)


@dataclass(frozen=True)
class AdapterTarget:
    """The linear layer ``name`` [N, K] of the checkpoint, which is a range of the outputs of ``layer``.

    order   index of the target among those of ``layer``.
    first   its first output in ``layer``.
    rows    [N] int64: output i of the layer is row rows[i] of the stored weight; None: in order.
    weight  returns the stored weight [N, K], dequantized.
    scales  what was folded into it.
    """

    name: str
    layer: AdaptedLinear
    order: int
    first: int
    n: int
    k: int
    rows: Tensor | None
    weight: Callable[[], Tensor]
    scales: LinearScales


#: The tensors of an adapter by layer, as packed by the LoRA product of the layer.
PreparedAdapter = dict[AdaptedLinear, Any]


@dataclass
class AdaptableLayers:
    """The layers of one rank.

    base                what quantization changed in them.
    tokens, logit_rows  the adapter of each row of a step's tokens, and of its logits.
    targets             by module name.
    """

    config: LoraConfig
    base: QuantizedBase = field(default_factory=QuantizedBase)
    tokens: AdapterRows = field(default_factory=AdapterRows)
    logit_rows: AdapterRows = field(default_factory=AdapterRows)
    targets: dict[str, AdapterTarget] = field(default_factory=dict)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """See AdapterLimits."""
        return {name: (target.n, target.k) for name, target in self.targets.items()}

    @property
    def are_used(self) -> bool:
        """Whether a row of the current step has an adapter."""
        return bool(self.tokens.segments or self.logit_rows.segments)

    @contextmanager
    def for_any_rows(self) -> Iterator[None]:
        """While open, record operations for any rows, not only for those of the current step."""
        self.tokens.any_rows = self.logit_rows.any_rows = True
        try:
            yield
        finally:
            self.tokens.any_rows = self.logit_rows.any_rows = False

    @property
    def largest_bytes(self) -> int:
        """Return the bytes of the largest adapter that can be loaded: A, B, the bias of B and the factors of DoRA."""
        size = 2 if self.config.dtype in ("float16", "bfloat16") else 4
        return sum(
            size * self.config.max_rank * (target.n + target.k) + 8 * target.n for target in self.targets.values()
        )

    @property
    def largest_file_bytes(self) -> int:
        """Return the bytes of these layers' tensors in the largest adapter file, in float32."""
        return sum(4 * self.config.max_rank * (target.n + target.k) + 8 * target.n for target in self.targets.values())

    @property
    def bytes_per_file_byte(self) -> int:
        """Return the largest ratio of an adapter's size in memory to that of its tensors in the file."""
        dtype = self.config.dtype
        return 2 if dtype == "float32" or (dtype == "auto" and self.base.scales) else 1

    def reserved_bytes(self, device: torch.device, num_stages: int) -> int:
        """Return the memory reserved on ``device`` for adapters in bytes, by each of ``num_stages`` pipeline stages.

        That is for those that are loaded and, on a CPU, for those that are staged and for the file that is being read.
        On a GPU these are in the host's memory.
        """
        lora, max_bytes = self.config, self.config.max_bytes

        def limited(count: int) -> int:
            size = count * self.largest_bytes
            return size if max_bytes is None else min(size, max_bytes * self.bytes_per_file_byte)

        if device.type != "cpu":
            return limited(lora.max_resident)
        file = num_stages * self.largest_file_bytes  # a stage reads the layers of the others, too
        file = file if max_bytes is None else min(file, max_bytes)
        return limited(lora.max_resident) + limited(lora.max_staged) + file

    def adapted(
        self,
        ops: Ops,
        base: LinearLayer,
        parts: Sequence[tuple[str, int]],
        k: int,
        bias: Tensor | None,
        rows: Tensor | None,
        weight_of: Callable[[str, int], Tensor],
    ) -> LinearLayer:
        """Return ``base`` with adapters: the concatenated layers ``parts`` (name, N) with K inputs and bias [sum of N].

        rows       of the only part; see AdapterTarget.
        weight_of  returns the stored weight [N, K] of a part, dequantized.

        Raises ``model_malformed`` for folded scales of another size.
        """
        if not all(is_adaptable(name) for name, _ in parts):
            return base
        n, config = sum(n for _, n in parts), self.config
        bias = None if bias is None else bias.float().to(ops.device)
        layer = AdaptedLinear(
            base,
            lambda which: ops.lora(n, k, which, config.max_resident, config.max_rank * len(parts), bias),
            (self.tokens, self.logit_rows),
        )
        first = 0
        for order, (name, width) in enumerate(parts):

            def weight(name: str = name, width: int = width) -> Tensor:
                return weight_of(name, width)

            scales = self._scales(name, width, k)
            self.targets[name] = AdapterTarget(name, layer, order, first, width, k, rows, weight, scales)
            first += width
        return layer

    def _scales(self, name: str, n: int, k: int) -> LinearScales:
        """Return what was folded into the linear layer ``name`` [N, K]. Raises ``model_malformed`` for other sizes."""
        recorded = find_module(name, self.base.scales)
        scales = LinearScales() if recorded is None else self.base.scales[recorded]
        scales.check(name, n, k)
        return scales

    def prepare(self, weights: Mapping[str, LoraWeights]) -> PreparedAdapter:
        """Pack an adapter for ``load``, without the modules of other ranks.

        Thread-safe while steps run. Raises ``adapter_malformed`` for values that overflow the dtype.
        """
        parts: dict[AdaptedLinear, list[tuple[int, LoraPart]]] = {}
        for name, lora in weights.items():
            found = find_module(name, self.targets)
            if found is not None:
                target = self.targets[found]
                parts.setdefault(target.layer, []).append((target.order, self._part(target, lora)))
        return {
            layer: layer.product.pack([part for _, part in sorted(own, key=lambda each: each[0])])
            for layer, own in parts.items()
        }

    def load(self, slot: int, prepared: PreparedAdapter) -> int:
        """Load an adapter into a slot; returns its bytes."""
        try:
            return sum(layer.product.load(slot, packed) for layer, packed in prepared.items())
        except BaseException:
            self.unload(slot)
            raise

    def unload(self, slot: int) -> None:
        """Free a slot, if it has an adapter."""
        for layer in {target.layer for target in self.targets.values()}:
            layer.product.unload(slot)

    def _part(self, target: AdapterTarget, lora: LoraWeights) -> LoraPart:
        scales = target.scales
        lora = fitted(lora, scales, target.n, target.k, self.base.widths, target.name)
        factors = None if lora.magnitude is None else dora_factors(target.weight().to("cpu"), lora, scales) - 1
        dtype = _DTYPES.get(self.config.dtype, lora.a.dtype)
        a, b, bias = lora.a.to(dtype), lora.b.to(dtype), lora.bias
        if dtype != lora.a.dtype and not (a.isfinite().all() and b.isfinite().all()):
            reason = f"{target.name} has values that are too large for {self.config.dtype} (--lora-dtype)"
            raise error("adapter_malformed", adapter=target.name, reason=reason)
        if target.rows is not None:
            rows = target.rows.to(b.device)
            b = b[rows]
            bias, factors = (None if each is None else each[rows] for each in (bias, factors))
        return LoraPart(target.first, lora.scale, a, b.contiguous(), bias, factors)
