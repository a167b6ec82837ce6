"""QuantizeOptions: what the user asked for, checked in one place.

Refused here is what no model could satisfy; what one model cannot is refused by tensor_parallel.py, before any
calibration. The command line builds the options before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.formats import FORMATS
from aiakq.spec import QuantSpec, canonical_method

#: Spellings of -t, and the safetensors dtype each means.
DTYPES = {
    "fp16": "F16",
    "float16": "F16",
    "half": "F16",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp32": "F32",
    "float32": "F32",
}
ACT_ORDERS = ("none", "static", "group")
SCALE_SEARCHES = ("minmax", "mse")
ACTIVATION_SCALES = ("token", "tensor")


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
class QuantizeOptions:
    """Everything ``aiakq quantize`` can be told; None means the method's or the model's own choice.

    input, output   a folder or hub name; a folder.
    dtype           of everything not quantized; the source's if None.
    smooth_alpha    0 .. 1, smooth_quant only; ``auto`` searches it for every place where scales are folded.
    token_ids       a file of calibration token ids; replaces ``calibration``.
    calibration     a text file, or the name of a data set on the hub; the bundled text if None.
    samples, seqlen how many calibration sequences, of how many tokens.
    act_order       gptq: ``static`` processes inputs by importance, ``group`` (if None) inside and between groups;
                    neither leaves a trace in the file.
    damp            gptq: part of the mean diagonal added to the Hessian.
    scale_search    ``minmax`` takes whole ranges, ``mse`` also smaller ones, by the error they leave; the method's own
                    choice if None.
    sweeps          gptq: how often all columns are gone over again once they are rounded; 0 as published, 2 if None.
    gptaq           gptq: also make up for what the layers before have changed in the inputs (GPTAQ).
    awq_scaling     gptq: fold the scales of awq first.
    gptq            smooth_quant: round the weights as gptq does.
    activation_scales   smooth_quant: ``token`` computes one per token when serving, ``tensor`` stores one per layer.
    eval_text       a text file for perplexity before and after; the bundled held-out text if None.
    layer           overrides like ``model.layers.0.*=bits:8,group:64``; see layers.py.
    skip            globs of linears that stay as they are.
    lm_head         bits of the output layer, which stays as it is if None.
    format          the layout on disk; one that every reader knows, if None.
    target_bpw      choose bits and groups per layer, for at most so many bits per weight on average.
    max_kl          choose them for at most so much divergence from the original, in nats per token.
    resume          continue the work of an earlier, interrupted run with the same options, and keep what a failure
                    leaves.
    activation_memory   gigabytes of hidden states held in memory; more goes to disk. A quarter of what is free if None.
    """

    input: str
    output: str
    method: str
    tp: int = 1
    dtype: str | None = None
    smooth_alpha: float | str | None = None
    token_ids: str | Path | None = None
    multi_query_mode: bool = False
    bits: int | None = None
    group_size: int | None = None
    calibration: str | Path | None = None
    samples: int = 128
    seqlen: int = 512
    seed: int = 0
    device: str = "auto"
    overwrite: bool = False
    act_order: str | None = None
    damp: float = 0.01
    symmetric: bool | None = None
    evaluate: bool = True
    eval_text: str | Path | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    layer: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    lm_head: int | None = None
    format: str | None = None
    target_bpw: float | None = None
    max_kl: float | None = None
    resume: bool = False
    activation_memory: float | None = None
    scale_search: str | None = None
    sweeps: int | None = None
    gptaq: bool = False
    awq_scaling: bool = False
    gptq: bool = False
    activation_scales: str = "token"

    def __post_init__(self) -> None:
        """Raises ``bad_option`` and ``option_conflict``."""
        object.__setattr__(self, "method", canonical_method(self.method))
        object.__setattr__(self, "smooth_alpha", _alpha(self.smooth_alpha))
        self._check_values()
        self._check_pairs()

    def _check_values(self) -> None:
        def need(fine: bool, option: str, value: Any, expected: str, hint: str = "") -> None:
            if not fine:
                raise error("bad_option", option=option, value=value, expected=expected, hint=hint)

        defaults = METHOD_DEFAULTS[self.method]
        need(1 <= self.tp <= 1024, "-tp", self.tp, "a number of GPUs", "Without it nothing is cut.")
        need(self.dtype is None or self.dtype in DTYPES, "-t", self.dtype, "fp16 or bf16")
        alpha = self.smooth_alpha
        need(
            alpha in (None, "auto") or (isinstance(alpha, float) and 0.0 <= alpha <= 1.0),
            "-sq",
            alpha,
            "between 0 and 1, or auto",
            "0.5 and 0.8 are usual.",
        )
        need(
            self.bits is None or self.bits in defaults.bits,
            "--bits",
            self.bits,
            f"one of {', '.join(map(str, sorted(defaults.bits)))}, which {self.method} offers",
        )
        size = self.group_size
        need(size is None or size == -1 or size > 0, "--group-size", size, "a positive number, or -1 for whole rows")
        need(self.samples >= 1, "--samples", self.samples, "at least 1")
        need(self.seqlen >= 2, "--seqlen", self.seqlen, "at least 2")
        need(0 <= self.seed < 2**63, "--seed", self.seed, "between 0 and 2^63")
        need(self.act_order in (None, *ACT_ORDERS), "--act-order", self.act_order, "one of " + ", ".join(ACT_ORDERS))
        searches, scales = ", ".join(SCALE_SEARCHES), ", ".join(ACTIVATION_SCALES)
        need(self.scale_search in (None, *SCALE_SEARCHES), "--scale-search", self.scale_search, f"one of {searches}")
        need(
            self.activation_scales in ACTIVATION_SCALES,
            "--activation-scales",
            self.activation_scales,
            f"one of {scales}",
        )
        need(self.lm_head in (None, 4, 8), "--lm-head", self.lm_head, "4 or 8 bits", "Without it the head stays.")
        need(self.format in (None, *FORMATS), "--format", self.format, "one of " + ", ".join(FORMATS))
        bpw, kl, memory = self.target_bpw, self.max_kl, self.activation_memory
        need(bpw is None or 2.0 < bpw <= 8.5, "--target-bpw", bpw, "above 2 and at most 8.5", "4.5 is usual.")
        need(kl is None or kl > 0, "--max-kl", kl, "above 0", "0.01 nats per token is little, 0.05 can be noticed.")
        need(memory is None or memory >= 0, "--activation-memory", memory, "a number of gigabytes")
        need(self.sweeps is None or 0 <= self.sweeps <= 100, "--sweeps", self.sweeps, "between 0 and 100")
        need(0.0 < self.damp <= 1.0, "--damp", self.damp, "above 0 and at most 1", "0.01 is usual.")

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


def _alpha(given: float | str | None) -> float | str | None:
    """-sq as a number where it is one."""
    try:
        return given if given is None else float(given)
    except ValueError:
        return str(given).strip().lower()
