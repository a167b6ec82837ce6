"""QuantizeOptions: the options of ``aiakq quantize``, checked in one place.

Refused here is what no model could satisfy; what one model cannot is refused by tensor_parallel.py, before any
calibration. The command line builds the options before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import checked_value
from aiakq.arguments.quantize import QUANTIZE_ARGUMENTS, QuantizeArguments
from aiakq.errors import error
from aiakq.formats import FORMATS
from aiakq.spec import QuantSpec, canonical_method


@dataclass(frozen=True)
class MethodDefaults:
    """What a method does when not told otherwise, and what it can be told."""

    bits: tuple[int, ...]  # the first is the default
    group_size: int
    symmetric: tuple[bool, ...]  # the first is the default
    format: str


METHOD_DEFAULTS: dict[str, MethodDefaults] = {
    "weight_only_int8": MethodDefaults((8,), -1, (True, False), "compressed-tensors"),
    "smooth_quant": MethodDefaults((8,), -1, (True,), "compressed-tensors"),
    "awq": MethodDefaults((4, 8), 128, (False, True), "awq"),
    "gptq": MethodDefaults((4, 8, 3, 2), 128, (True, False), "gptq"),
}
#: The strength of smoothing that is published for a model family; the rest takes the last entry.
SMOOTH_ALPHA = {
    "opt": 0.5,
    "bloom": 0.5,
    "glm": 0.75,
    "glm4": 0.75,
    "glm130": 0.75,
    "chatglm": 0.75,
    "falcon": 0.65,
    "": 0.8,
}


@dataclass(frozen=True)
class QuantizeOptions(QuantizeArguments):
    """Everything ``aiakq quantize`` can be given, checked; the fields are those of aiakq/arguments/quantize.py.

    None means the method's or the model's own choice. ``act_order`` leaves no trace in the file. ``resume`` continues
    the work of an earlier, interrupted run with the same options, and keeps what a failure leaves.
    """

    def __post_init__(self) -> None:
        """Raises ``bad_option`` and ``option_conflict``."""
        object.__setattr__(self, "method", canonical_method(self.method))
        for row in QUANTIZE_ARGUMENTS:
            object.__setattr__(self, row.name, checked_value(row, getattr(self, row.name)))
        if isinstance(self.smooth_alpha, int):
            object.__setattr__(self, "smooth_alpha", float(self.smooth_alpha))
        self._check_values()
        self._check_pairs()

    def _check_values(self) -> None:
        def need(fine: bool, option: str, value: Any, expected: str) -> None:
            if not fine:
                raise error("bad_option", option=option, value=value, expected=expected, hint="")

        bits = METHOD_DEFAULTS[self.method].bits
        offered = f"one of {', '.join(map(str, sorted(bits)))}, which {self.method} offers"
        need(self.bits is None or self.bits in bits, "--bits", self.bits, offered)
        size = self.group_size
        need(size is None or size == -1 or size > 0, "--group-size", size, "a positive number, or -1 for whole rows")
        need(self.format in (None, *FORMATS), "--format", self.format, "one of " + ", ".join(FORMATS))

    def _check_pairs(self) -> None:
        def conflict(option: str, other: str, reason: str, hint: str) -> None:
            raise error("option_conflict", option=option, other=other, reason=reason, hint=hint)

        method = f"-quant_type {self.method}"
        if self.smooth_alpha is not None and self.method != "smooth_quant":
            conflict("-sq", method, "only smooth_quant smooths", "Leave -sq away, or use -quant_type smooth_quant.")
        if self.act_order not in (None, "none") and self.method != "gptq" and not self.gptq:
            conflict("--act-order", method, "only gptq has an order", "Leave it away, or use -quant_type gptq.")
        if self.sweeps is not None and self.method != "gptq" and not self.gptq:
            conflict("--sweeps", method, "only gptq goes over columns again", "Leave it away, or use -quant_type gptq.")
        for given, option in ((self.gptaq, "--gptaq"), (self.awq_scaling, "--awq-scaling")):
            if given and self.method != "gptq":
                conflict(option, method, "it is a part of gptq", "Leave it away, or use -quant_type gptq.")
        if self.gptq and self.method != "smooth_quant":
            conflict("--gptq", method, "it says how smooth_quant rounds", "Use -quant_type gptq.")
        if self.activation_scales != "token" and self.method != "smooth_quant":
            conflict(
                "--activation-scales", method, "its activations are not quantized", "Use -quant_type smooth_quant."
            )
        if self.method == "smooth_quant" and self.group_size not in (None, -1):
            conflict("--group-size", method, "its kernels take one scale per row", "Leave --group-size away.")
        if self.symmetric is not None and self.symmetric not in METHOD_DEFAULTS[self.method].symmetric:
            conflict("--asymmetric", method, "its format is symmetric", "Leave it away, or use awq or gptq.")
        if self.token_ids is not None and self.calibration is not None:
            conflict("-token", "--calibration", "both say what to calibrate on", "Give one of them.")
        if self.target_bpw is not None and self.max_kl is not None:
            conflict("--target-bpw", "--max-kl", "both choose the bits", "Give one of them.")
        if (self.target_bpw is not None or self.max_kl is not None) and self.method not in ("gptq", "awq"):
            conflict("--target-bpw, --max-kl", method, "it has one width", "Use -quant_type gptq or awq.")
        if (self.target_bpw is not None or self.max_kl is not None) and (self.bits or self.group_size or self.layer):
            conflict("--target-bpw, --max-kl", "--bits, --group-size, --layer", "all choose the bits", "Give one kind.")
        if self.max_kl is not None and not self.evaluate:
            conflict("--max-kl", "--no-eval", "the divergence is measured there", "Leave --no-eval away.")

    def spec(self, version: str, ignore: Iterable[str] = ("lm_head",)) -> QuantSpec:
        """The QuantSpec these options lead to; ``ignore`` names the linears that are left alone."""
        defaults = METHOD_DEFAULTS[self.method]
        bits = self.bits or defaults.bits[0]
        # Zero points gain nothing at 8 bits, and fewer programs read them there.
        symmetric = (defaults.symmetric[0] or bits == 8) if self.symmetric is None else self.symmetric
        return QuantSpec(
            method=self.method,
            # Version 1 cannot say a zero point of 0 that every reader understands.
            format="gptq_v2" if self.method == "gptq" and not symmetric else defaults.format,
            bits=bits,
            group_size=self.group_size or defaults.group_size,
            symmetric=symmetric,
            activation_bits=8 if self.method == "smooth_quant" else None,
            static_input=self.activation_scales == "tensor",
            ignore=tuple(ignore),
            notes={"version": version},
        )

    def alpha(self, model_type: str) -> float:
        """The smoothing strength for a model family, its usual one where it is searched. 0 is a value, not "unset"."""
        if isinstance(self.smooth_alpha, float):
            return self.smooth_alpha
        return SMOOTH_ALPHA.get(model_type, SMOOTH_ALPHA[""])
