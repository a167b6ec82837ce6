"""Quantization spec of each linear: the method's own, ``--layer`` and ``--skip``, and a format that holds them all.

A layer override is ``GLOB=HOW``: a glob over full module names (``*`` matches dots too), and settings separated by
commas: ``bits:8``, ``group:64`` (``-1`` for whole rows), ``sym``, ``asym``, ``skip``; in models of floats one word:
``fp8``, ``mxfp4``, ``nvfp4`` or ``skip``. The first matching override applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from aiakq import formats
from aiakq.errors import AiakqError, error
from aiakq.quantizers.model.groups import FUSED
from aiakq.quantizers.options import QuantizeOptions
from aiakq.spec import LayerSpec, QuantSpec

_HINT = "Example: --layer 'model.layers.0.*=bits:8,group:64'"


def plan_layers(options: QuantizeOptions, base: QuantSpec, names: Iterable[str], head: str | None) -> QuantSpec:
    """Return ``base`` with the per-layer options applied, in a format that can hold the result.

    ``names`` are the linears inside the blocks, ``head`` the output layer if there is one. Raises ``bad_option`` for an
    override that cannot be understood or matches nothing, ``option_conflict`` for a format that cannot hold the result.
    """
    linears = list(names)
    layers: dict[str, LayerSpec | None] = {}
    for text in options.layer:
        glob, layer = parse_override(text, base.layer, options.preset.bits, options.float_layers)
        if (
            base.activation_bits
            and not base.layer.is_float
            and layer is not None
            and (layer.group_size != -1 or not layer.symmetric)
        ):
            expected = "possible where activations are quantized too: their kernels take one symmetric scale per row"
            raise error(
                "bad_option", option="--layer", value=text, expected=expected, hint="Use skip for these layers."
            )
        for name in _matching(glob, linears, "--layer", head):
            layers.setdefault(name, layer)
    for glob in options.skip:
        layers |= dict.fromkeys(_matching(glob, linears, "--skip", head))
    if len([name for name in linears if layers.get(name, base.layer) is not None]) == 0:
        raise error(
            "bad_option",
            option="--skip",
            value=" ".join(options.skip),
            expected="a set of patterns that leaves a layer to quantize",
            hint="",
        )
    ignore = base.ignore
    if options.lm_head is not None:
        if head is None:
            raise error(
                "bad_option",
                option="--lm-head",
                value=options.lm_head,
                expected="possible for a model without an output layer",
                hint="Leave it away.",
            )
        ignore = tuple(name for name in ignore if name != head)
        layers[head] = LayerSpec(options.lm_head, -1 if options.lm_head == 8 else 128)
    _check_scales(options, [layers.get(name, base.layer) for name in linears])
    experts = any(".experts." in name for name in linears)
    quantized_head = head if options.lm_head is not None else None
    return settle_format(options, replace(base, ignore=ignore), layers, quantized_head, experts)


def _check_scales(options: QuantizeOptions, layers: Iterable[LayerSpec | None]) -> None:
    """Raise ``option_conflict`` if ``--activation-scales tensor`` would have no effect on any of the ``layers``."""
    if options.activation_scales == "tensor" and not any(
        layer is not None and layer.static_input and layer.table is None for layer in layers
    ):
        reason, option = "no layer is left that has one scale", "--activation-scales tensor"
        raise error("option_conflict", option=option, other="--layer, --skip", reason=reason, hint="Leave it away.")


def fit_head(spec: QuantSpec, head: str, k: int) -> QuantSpec:
    """Adapt the output layer's group size to divide its K inputs, if it is quantized; whole rows if none does."""
    own = spec.for_layer(head)
    if own is None or own.group_size == -1 or k % own.group_size == 0:
        return spec
    fits = next((size for size in (128, 64, 32) if size < own.group_size and k % size == 0), -1)
    others = tuple((pattern, layer) for pattern, layer in spec.layers if pattern != head)
    return replace(spec, layers=((head, replace(own.layer, group_size=fits)), *others))


def with_layers(spec: QuantSpec, layers: Mapping[str, LayerSpec | None]) -> QuantSpec:
    """Return ``spec`` with the named linears stored as in ``layers``; unquantized ones are added to ``ignore``."""
    skipped = tuple(name for name, layer in layers.items() if layer is None and name not in spec.ignore)
    differing = tuple((name, layer) for name, layer in layers.items() if layer is not None and layer != spec.layer)
    return replace(spec, ignore=(*spec.ignore, *skipped), layers=differing)


def settle_format(
    options: QuantizeOptions,
    base: QuantSpec,
    layers: Mapping[str, LayerSpec | None],
    head: str | None = None,
    experts: bool = False,
) -> QuantSpec:
    """Return ``base`` with its ``layers``, in the format of the options, else in the one that most programs can read.

    ``head`` is the output layer, if it is quantized; ``experts`` says that the model has some. Raises
    ``option_conflict`` for a format that cannot hold the result.
    """
    exceptions = tuple((name, layer) for name, layer in layers.items() if layer != base.layer or name == head)
    whole = replace(base, layers=exceptions)
    chosen = options.format
    if chosen is None:
        chosen = formats.choose(whole, experts)
    else:
        reason = formats.supports(replace(whole, format=chosen))
        if reason is not None:
            raise error(
                "option_conflict",
                option=f"--format {chosen}",
                other="the other options",
                reason=reason,
                hint="Leave --format away: aiakq takes the layout that fits.",
            )
    return replace(with_layers(base, layers), format=chosen)


def parse_override(
    text: str, base: LayerSpec, bits: tuple[int, ...], named: Mapping[str, LayerSpec] | None = None
) -> tuple[str, LayerSpec | None]:
    """Parse ``GLOB=HOW`` into the glob and the resulting spec, starting from ``base``. Raises ``bad_option``.

    named  what a single word stands for, if the layers of ``base`` are floats.
    """

    def bad(expected: str) -> AiakqError:
        return error("bad_option", option="--layer", value=text, expected=expected, hint=_HINT)

    glob, equals, settings = text.partition("=")
    if not glob or not equals or not settings:
        raise bad("a glob, an equals sign and settings")
    if named:
        if settings.strip() not in (*named, "skip"):
            raise bad(f"{', '.join(named)} or skip, which a layer of floats may be")
        return glob, named.get(settings.strip())
    layer = base
    for setting in settings.split(","):
        key, _, value = setting.strip().partition(":")
        if key == "skip" and not value:
            return glob, None
        if key in ("sym", "asym") and not value:
            layer = replace(layer, symmetric=key == "sym")
        elif key in ("bits", "group") and re.fullmatch(r"-?[0-9]{1,9}", value):
            number = int(value)
            if key == "bits" and number not in bits:
                raise bad(f"possible with this method, whose bits are {', '.join(map(str, sorted(bits)))}")
            if key == "group" and number != -1 and number < 1:
                raise bad("a group of at least one input, or -1")
            layer = replace(layer, bits=number) if key == "bits" else replace(layer, group_size=number)
        else:
            raise bad("made of bits:N, group:N, sym, asym or skip")
    return glob, layer


def _matching(glob: str, names: list[str], option: str, head: str | None) -> list[str]:
    matches = [name for name in names if fnmatchcase(name, glob)]
    if not matches:
        hint = f"They are called like {names[0]} and {names[-1]}; * stands for anything."
        if head is not None and fnmatchcase(head, glob):
            hint = "The output layer stays as it is unless --lm-head says how many bits it gets."
        raise error(
            "bad_option",
            option=option,
            value=glob,
            expected="the name of any quantized layer",
            hint=hint,
        )
    return matches


def fused_scheme_warnings(spec: QuantSpec, names: Iterable[str]) -> list[str]:
    """Return warnings about linears that vLLM fuses but that have different schemes, at most one per kind."""
    by_parent: dict[str, dict[str, LayerSpec | None]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        layer_spec = spec.for_layer(name)
        by_parent.setdefault(parent, {})[last] = None if layer_spec is None else layer_spec.layer
    warnings = []
    for parts in FUSED:
        for parent, stored in by_parent.items():
            if len({stored[part] for part in parts if part in stored}) > 1:
                warnings.append(
                    f"{parent} stores {', '.join(parts)} differently; vLLM joins them and will refuse the model. "
                    "aiakq and transformers read it."
                )
                break
    return warnings
