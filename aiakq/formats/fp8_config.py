"""The ``quantization_config`` of FP8 checkpoints: quant_method fp8 and fbgemm_fp8.

What the keys mean is what vLLM (vllm/model_executor/layers/quantization/{fp8,fbgemm_fp8}.py) and transformers
(integrations/finegrained_fp8.py) do with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiakq.formats.config_values import (
    first_of,
    read_integer,
    read_names,
    read_word,
    says_nothing,
    unsupported,
)
from aiakq.formats.skipped_layers import skipped_names, unnamed_layers
from aiakq.spec import Float8, LayerSpec, QuantSpec

METHODS = ("fp8", "fbgemm_fp8")
#: FBGEMM's default of ``activation_scale_ub``.
_BOUND = 1200.0


def from_config(config: Mapping[str, object]) -> QuantSpec | None:
    """Return the spec of a config. Raises ``format_unsupported``."""
    method = read_word(config, "quant_method", default="fp8")
    return _fbgemm(config) if method == "fbgemm_fp8" else _fp8(config)


def _spec(
    float8: Float8, activations: str, ignore: tuple[str, ...], group_size: int = -1, method: str = "fp8"
) -> QuantSpec:
    """activations: static, dynamic, or none if they are not rounded."""
    return QuantSpec(
        method=method,
        format="fp8",
        bits=8,
        group_size=group_size,
        activation_bits=None if activations == "none" else 8,
        static_input=activations == "static",
        float8=float8,
        ignore=ignore,
    )


def _fp8(config: Mapping[str, object]) -> QuantSpec:
    activations = read_word(config, "activation_scheme", default="dynamic")
    if activations not in ("static", "dynamic"):
        raise unsupported(f"FP8 with activation_scheme {activations!r:.40}")
    if (kind := read_word(config, "fmt", default="e4m3")) not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        raise unsupported(f"FP8 of the format {kind!r:.40}, for which activations have no definition")
    if (experts := read_word(config, "expert_dtype", default="fp8")) != "fp8":
        raise unsupported(f"FP8 with experts of another type ({experts!r:.40})")
    scales = read_word(config, "scale_fmt", default="float")
    if scales not in ("float", "float32", "ue8m0"):
        raise unsupported(f"FP8 with scale_fmt {scales!r:.40}")
    ignore = _skipped(config, "modules_to_not_convert")
    # vLLM compares whole names.
    ignore += read_names(config.get("ignored_layers"), "ignored_layers")
    block = config.get("weight_block_size")
    if says_nothing(block):
        return _spec(Float8(rows=-1, powers_of_two=scales == "ue8m0"), activations, ignore)
    rows, size = _block_size(block)
    if activations == "static":
        raise unsupported("FP8 in blocks with static activations, which have no definition")
    return _spec(Float8(rows, size, powers_of_two=scales == "ue8m0"), activations, ignore, size)


def _block_size(block: object) -> tuple[int, int]:
    """Return the rows and inputs of a block. Raises ``format_unsupported``."""
    sizes = [read_integer(size, "weight_block_size") for size in block] if isinstance(block, list) else []
    if len(sizes) != 2 or min(sizes) < 1:
        raise unsupported(f"FP8 with weight_block_size {block!r:.40}")
    return sizes[0], sizes[1]


def _skipped(config: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return the patterns of modules that transformers leaves out: those whose name an entry, a regular expression,
    matches up to the end of a part, and those that end in an entry.
    """
    names = read_names(config.get(key), key)
    return (*map(_pattern, names), *(f"*{name}" for name in names))


def _pattern(name: str) -> str:
    return rf"re:(?:{name})(?:(?<=\.)|(?=\.|$))"


def _fbgemm(config: Mapping[str, object]) -> QuantSpec:
    stored = first_of(config, "activation_scale_ub", default=_BOUND)
    if isinstance(stored, bool) or not isinstance(stored, int | float) or not 0 < stored < float("inf"):
        raise unsupported(f"FBGEMM's FP8 with activation_scale_ub {stored!r:.40}")
    return _spec(
        Float8(bound=float(stored)), "dynamic", _skipped(config, "modules_to_not_convert"), method="fbgemm_fp8"
    )


def unwritable(spec: QuantSpec) -> str | None:
    """Return why no config of this format describes ``spec``, or None."""
    float8 = spec.float8
    if float8 is None or spec.mixed:
        return "such files have one kind of 8-bit floats for all layers"
    if not spec.activation_bits:
        return "such files say that activations are rounded, too"
    if spec.layer != LayerSpec(8, spec.group_size, True, 8, spec.static_input, float8):
        return "such files have scales that are any floats, and activations of 8 bits"
    blocks = float8.rows > 1 and 0 < spec.group_size == float8.activation_group and not spec.static_input
    tensor = float8.rows == -1 and spec.group_size == -1 and float8.activation_group == -1
    rows = Float8(bound=float8.bound) == float8 and spec.group_size == -1 and not spec.static_input
    if not (rows if float8.bound is not None else blocks or tensor):
        return "such files have one scale per tensor, or square blocks"
    return unnamed_layers(spec, {_pattern(name) for name in skipped_names(spec)})


def to_config(spec: QuantSpec) -> dict[str, object]:
    """Return the ``quantization_config`` of a spec. Raises ``format_unsupported`` where ``unwritable`` has a reason."""
    float8, reason = spec.float8, unwritable(spec)
    if float8 is None or reason is not None:
        raise unsupported(f"fp8 for this model: {reason}")
    modules = skipped_names(spec)
    if float8.bound is not None:
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": float8.bound,
            "modules_to_not_convert": modules,
        }
    config: dict[str, object] = {
        "quant_method": "fp8",
        "activation_scheme": "static" if spec.static_input else "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": modules,
    }
    if float8.powers_of_two:
        config["scale_fmt"] = "ue8m0"
    # transformers takes a missing size for 128 x 128.
    config["weight_block_size"] = [float8.rows, spec.group_size] if float8.rows > 1 else None
    return config
