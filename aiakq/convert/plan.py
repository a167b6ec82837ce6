"""ConversionPlan: how every linear is stored in the output, decided from headers before any weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from aiakq import formats
from aiakq.convert.exact import Abilities
from aiakq.convert.module_names import module_names, with_module_names
from aiakq.errors import AiakqError, error
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.headers import expected_groups
from aiakq.kernels.packing import SUPPORTED_BITS
from aiakq.spec import LayerSpec, QuantSpec

#: Values of --to that mean dequantized weights.
DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
#: Inputs that share a scale where rows are rounded to fewer bits.
_GROUP = 128
#: Parts of the names of modules whose matrices are no linear layers.
_TABLES = ("embed", "wte", "wpe")


@dataclass(frozen=True)
class Linear:
    """A packed linear of the source, from its headers: N outputs, K inputs, how it is stored, and its order."""

    name: str
    n: int
    k: int
    layer: LayerSpec
    has_perm: bool


def linears_of(checkpoint: Checkpoint) -> list[Linear]:
    """Return all packed linears of a quantized checkpoint. Raises ``tensor_mismatch``."""
    linears = []
    for name in checkpoint.quantized_linears():
        found, size = checkpoint.dimensions(name)
        spec = checkpoint.linear_spec(name)
        # One that is larger than the inputs of a layer stays, as its config says it.
        fits = expected_groups(spec, found.k) == found.groups
        group = spec.group_size if fits else -1 if found.groups == 1 else size
        bits = found.bits if spec.table is None and spec.float8 is None else spec.bits
        layer = replace(spec.layer, bits=bits, group_size=group)
        linears.append(Linear(name, found.n, found.k, layer, found.has_perm))
    return linears


@dataclass
class ConversionPlan:
    """How the linears are stored in the format ``name``.

    layers   linear -> how it is stored.
    changed  linear -> why it cannot be stored as it is, and is rounded again.
    notes    decisions made on the user's behalf.
    """

    name: str
    source: QuantSpec
    layers: dict[str, LayerSpec]
    changed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def abilities(self) -> Abilities:
        """What files of this format can hold."""
        module = formats.load(self.name)
        spec = self._spec(next(iter(self.layers.values())))
        # Formats that fix the dtype of scales return it whatever that of the model is.
        dtypes = {module.scale_dtype(spec, dtype) for dtype in (torch.float16, torch.bfloat16)}
        return Abilities(
            signed_scales=formats.has_signed_scales(self.name),
            input_order=bool(getattr(module, "INPUT_ORDER", False)),
            scales=dtypes.pop() if len(dtypes) == 1 else None,
        )

    def layer_spec(self, name: str) -> QuantSpec:
        """Return the spec of one linear alone."""
        return self._spec(self.layers[name])

    def _spec(self, layer: LayerSpec) -> QuantSpec:
        return spec_of(self.name, layer, self.source)

    def spec(self, left_out: Iterable[str], has_perm: bool, modules: Mapping[str, str]) -> QuantSpec:
        """Return the spec of the output; ``left_out`` names linears that are not quantized, and ``modules`` is what
        ``modules_of`` returns."""
        base = Counter(self.layers.values()).most_common(1)[0][0]
        others = tuple((name, layer) for name, layer in self.layers.items() if layer != base)
        spec = replace(self._spec(base), ignore=tuple(left_out), layers=others, desc_act=has_perm)
        return with_module_names(spec, modules, self.layers)


def spec_of(format: str, layer: LayerSpec, source: QuantSpec) -> QuantSpec:
    """Return the spec of linears stored as ``layer`` in ``format``, with the method and notes of ``source``."""
    return QuantSpec(method=source.method, format=format, **vars(layer), ignore=(), notes=source.notes)


def refusal(format: str, layer: LayerSpec, source: QuantSpec) -> str | None:
    """Return why the files of ``format`` cannot hold a linear stored as ``layer``, or None."""
    return formats.supports(spec_of(format, layer, source))


def plan(
    linears: list[Linear], name: str, source: QuantSpec, bits: int | None, group_size: int | None, lossy: bool
) -> ConversionPlan:
    """Return how ``linears`` are stored in the format ``name``.

    bits, group_size  those of the output; None: the source's.
    lossy             whether what cannot be stored as it is may be rounded again.

    Raises ``conversion_inexact`` with the first obstacle and its remedy.
    """
    target = ConversionPlan(name, source, {})
    for linear in linears:
        if obstacle := _float_problem(linear.layer, bits, group_size, lossy):
            raise error("conversion_inexact", layer=linear.name, to=name, reason=obstacle[0], hint=obstacle[1])
    has_zeros = bool(getattr(formats.load(name), "ZERO_POINTS", False))
    if not _holds_exceptions(name, source, linears) and group_size is None:
        group_size = _common_group(linears, target)
    for linear in linears:
        if any(table in linear.name.rpartition(".")[2] for table in _TABLES):
            raise inexact(linear.name, name, "readers of such files expect embeddings as floats", lossy=False)
        wanted = replace(
            linear.layer if bits is None or not _holds_floats(linear.layer) else LayerSpec(8, linear.layer.group_size),
            bits=bits or linear.layer.bits,
            group_size=linear.layer.group_size if group_size is None else group_size,
            symmetric=linear.layer.symmetric and not (has_zeros and linear.layer.float8 is None),
            blocks=linear.layer.blocks if name == source.format else None,
        )
        layer, reason = _fitting(name, wanted, source)
        if layer is None:
            layer = _nearest(name, wanted, source, linear.name)
            if not lossy:
                raise inexact(linear.name, name, reason, _holding(linears, source))
            target.changed[linear.name] = reason
        if problem := formats.shape_problem(spec_of(name, layer, source), linear.n, linear.k):
            shape = f"it has {linear.n} outputs and {linear.k} inputs, and {problem}"
            hint = (
                "Use --to compressed-tensors, which takes any shape, or another --group-size if that is the obstacle."
            )
            raise error("conversion_inexact", layer=linear.name, to=name, reason=shape, hint=hint)
        target.layers[linear.name] = layer
    widened = sum(target.layers[each.name].bits > each.layer.bits for each in linears)
    if widened and bits is None:
        target.notes.append(f"The codes of {widened} of {len(linears)} layers take more bits, as {name} files need it.")
    if not _holds_exceptions(name, source, linears):
        _unify(target)
    return target


def _holds_floats(layer: LayerSpec) -> bool:
    return layer.float8 is not None or layer.table is not None


def _float_problem(layer: LayerSpec, bits: int | None, group_size: int | None, lossy: bool) -> tuple[str, str] | None:
    """Return why the codes of ``layer``, which are floats or indices, cannot have these bits and groups, and the
    remedy; None if they can, or if weights are rounded to integers.
    """
    if not _holds_floats(layer):
        return None
    kind = f"{layer.bits}-bit floats" if layer.float8 is not None else f"indices of the table {layer.table}"
    if bits is not None and not lossy:
        reason = f"its codes are {kind}, and --bits {bits} makes integers of them"
        return reason, "Leave --bits away, or add --lossy, which reports the error of every layer."
    if bits is None and layer.scale_type is not None and group_size not in (None, layer.group_size):
        reason = f"its {kind} share a scale in {layer.scale_type} in groups of {layer.group_size}, not {group_size}"
        return reason, f"Leave --group-size away, or add --bits {layer.bits} --lossy, which makes integers of them."
    return None


def _fitting(name: str, wanted: LayerSpec, source: QuantSpec) -> tuple[LayerSpec | None, str]:
    """Return the layer with the fewest bits that the files can hold, from ``wanted`` on; else None and the reason."""
    first = refusal(name, wanted, source)
    if first is None:
        return wanted, ""
    if wanted.float8 is None and wanted.table is None:
        for bits in SUPPORTED_BITS:
            wider = replace(wanted, bits=bits)
            if bits > wanted.bits and refusal(name, wider, source) is None:
                return wider, ""
    return None, first


def _nearest(name: str, wanted: LayerSpec, source: QuantSpec, linear: str) -> LayerSpec:
    """Return a layer of integers without rounded activations, near to what the files cannot hold.

    Raises ``conversion_inexact`` if the format holds no integers.
    """
    bits = 8 if wanted.float8 is not None else wanted.bits
    for width in sorted(SUPPORTED_BITS, key=lambda each: (abs(each - bits), -each)):
        for symmetric in (wanted.symmetric, not wanted.symmetric):
            # Fewer bits than the source's need scales of their own for smaller groups.
            group = _GROUP if width < bits and wanted.group_size == -1 else wanted.group_size
            layer = LayerSpec(width, group, symmetric)
            if refusal(name, layer, source) is None:
                return layer
    reason = "its files hold no integers, and rounding to floats is a quantization"
    hint = "Quantize the model: aiakq quantize reads quantized ones, too."
    raise error("conversion_inexact", layer=linear, to=name, reason=reason, hint=hint)


def _holds_exceptions(name: str, source: QuantSpec, linears: list[Linear]) -> bool:
    """Whether the files can say that a layer is stored in another way than the rest."""
    layers = [linear.layer for linear in linears]
    layers += [LayerSpec(bits) for bits in SUPPORTED_BITS]
    for layer in layers:
        spec = spec_of(name, layer, source)
        if formats.supports(spec) is None:
            other = replace(layer, group_size=32 if layer.group_size != 32 else 64)
            return formats.supports(replace(spec, layers=(("other", other),))) is None
    return True


def _common_group(linears: list[Linear], target: ConversionPlan) -> int | None:
    """Return the largest group size that divides those of all linears; None if they are equal."""
    sizes = {linear.layer.group_size for linear in linears}
    if len(sizes) == 1:
        return None
    size = math.gcd(*(linear.k if linear.layer.group_size == -1 else linear.layer.group_size for linear in linears))
    target.notes.append(f"Scales are repeated for groups of {size} inputs: {target.name} files have one size for all.")
    return size


def _unify(target: ConversionPlan) -> None:
    """Make all layers asymmetric, and as wide as the widest, if they differ."""
    layers = target.layers.values()
    symmetric, bits = all(layer.symmetric for layer in layers), max(layer.bits for layer in layers)
    target.layers = {name: replace(layer, symmetric=symmetric, bits=bits) for name, layer in target.layers.items()}


def _holding(linears: list[Linear], source: QuantSpec) -> list[str]:
    """Return the formats that can hold all linears as they are, judging by their headers."""
    layers = {(linear.layer, linear.has_perm) for linear in linears}
    return [
        name
        for name in formats.FORMATS
        if name != source.format
        and all(
            refusal(name, layer, source) is None and (not perm or getattr(formats.load(name), "INPUT_ORDER", False))
            for layer, perm in layers
        )
    ]


def inexact(linear: str, to: str, reason: str, holding: Iterable[str] = (), lossy: bool = True) -> AiakqError:
    """Return the error for a linear that the target cannot hold.

    holding  formats that can.
    lossy    whether rounding would help.
    """
    others = [name for name in holding if name != to][:3]
    able = f"Write {' or '.join(others)}, or" if others else "Write"
    also = ", or allow rounding with --lossy, which reports the error of every layer" if lossy else ""
    hint = f"{able} floats (--to bf16){also}."
    return error("conversion_inexact", layer=linear, to=to, reason=reason, hint=hint)


def unquantized(checkpoint: Checkpoint, linears: Iterable[str]) -> list[str]:
    """Return the modules with a matrix of floats that may be linear layers and are not quantized, by name."""
    packed = set(linears)
    names = {"lm_head"} - packed
    for name, info in checkpoint.inventory.items():
        module, _, last = name.rpartition(".")
        part = module.rpartition(".")[2]
        if last == "weight" and len(info.shape) == 2 and module not in packed:
            if not any(table in part for table in _TABLES):
                names.add(module)
    return sorted(names)


def modules_of(checkpoint: Checkpoint, linears: Iterable[str]) -> dict[str, str]:
    """Return the names in transformers of ``linears`` of a multimodal checkpoint, see ``module_names``."""
    return module_names(checkpoint.config, list(linears))


def check_config(config: Mapping[str, object], target: ConversionPlan, left_out: Iterable[str]) -> None:
    """Raise ``conversion_inexact`` unless a reader of the output's config finds every layer as it is stored."""
    spec = quantization_config.read(config)
    for name, layer in target.layers.items():
        found = spec.for_layer(name)
        if found is None or found.layer != layer:
            what = "not quantized" if found is None else found.describe()
            raise inexact(name, target.name, f"its config can only say that this layer is {what}", lossy=False)
    for name in left_out:
        if spec.for_layer(name) is not None:
            raise inexact(name, target.name, "its config cannot say that this layer is not quantized", lossy=False)
