"""Makes every layer divisible by the tensor-parallel size, by choosing a group size or padding the MLP where necessary.

The checkpoint itself is not sharded: it is made so that every server can shard it. Linears are sharded along their
outputs, except row-parallel ones, whose outputs are reduced over GPUs: these are sharded along their inputs, and no
group of inputs that shares a scale may straddle a shard boundary. Two remedies, in this order:

1. without ``--group-size``, the largest usual group size that fits every linear is taken;
2. if none fits, or a group size was given, the width of the MLP is padded with zeros to the next multiple of
   ``tp * group``. Zero rows of gate and up give zeros that meet zero columns of down, so the function is unchanged.

What neither can fix is left as it is if aiakq serves the model itself: its ranks gather instead of reducing, so they
shard linears along their outputs only, and heads unevenly (docs/distributed.md). A note tells so. For other models it
is refused before the work starts. Both messages name the values of ``-tp`` that would work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiakq import formats
from aiakq.errors import AiakqError, error
from aiakq.formats import padded_widths
from aiakq.quantizers.model.groups import FUSED
from aiakq.quantizers.model.shapes import LinearShape
from aiakq.quantizers.options import QuantizeOptions
from aiakq.spec import QuantSpec

#: Group sizes supported by kernels, largest first: those offered, and the candidates if none was given.
_OFFERED = (256, 128, 64, 32)
_CHOSEN_FROM = (128, 64, 32)
#: Keys of config.json with the width of an MLP.
_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "ffn_hidden_size",
    "n_inner",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
#: Sizes that are tried to list those that work.
_TRIED = range(1, 65)
#: vLLM's fast kernels require outputs and inputs per GPU to be multiples of these.
_MARLIN = (64, 128)
_CUTLASS_INT8 = (16, 16)


@dataclass(frozen=True)
class TensorParallelPlan:
    """The settings that make the checkpoint divisible.

    group_size  of every layer without one of its own; -1 means one scale per output row.
    chosen      whether ``group_size`` is neither the one given nor the method's default.
    widths      key of config.json -> (width in the source, width in the output), for every padded MLP width.
    notes       what was changed and what may concern a server, one sentence each, for the report.
    elsewhere   sizes that work for servers which reduce partial sums, if ``tp`` is not one of them; else None.
    format      the format of the output, if that of the method cannot hold every layer; else None.
    """

    tp: int
    group_size: int
    chosen: bool = False
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    elsewhere: tuple[int, ...] | None = None
    format: str | None = None

    @property
    def parts(self) -> int:
        """The number of shards into which the inputs of linears may be split."""
        return self.tp if self.elsewhere is None else 1

    def fit(self, spec: QuantSpec) -> QuantSpec:
        """Return ``spec`` in this format, with this group size, also in layer overrides that had the spec's."""
        return _with_groups(replace(spec, format=self.format or spec.format), self.group_size)

    def record(self) -> dict[str, object]:
        """Return the entry for the output's config.json, under ``aiakq``."""
        entry: dict[str, Any] = {"tp": self.tp}
        if self.chosen:
            entry["group_size_chosen"] = self.group_size
        if self.widths:
            entry[padded_widths.KEY] = padded_widths.record_widths(self.widths)
        if self.elsewhere is not None:
            entry["tp_elsewhere"] = list(self.elsewhere)
        return entry

    def write_widths(self, config: dict[str, object]) -> None:
        """Write the padded widths to config.json, in its text model's part. ``config`` is modified."""
        inner = config.get("text_config")
        for key, (_, new) in self.widths.items():
            target = inner if isinstance(inner, dict) and key not in config else config
            target[key] = new


def plan_tensor_parallel(
    options: QuantizeOptions,
    config: Mapping[str, Any],
    shapes: Iterable[LinearShape],
    spec: QuantSpec | None = None,
    gathered: bool = False,
) -> TensorParallelPlan:
    """Determine the group size and the padded widths for these options and this model.

    ``config`` is config.json, or its text model's part; ``spec`` holds layer overrides, if any; ``gathered`` tells
    whether aiakq's own ranks can share the model. Raises ``group_size``, ``tensor_parallel``, ``layer_shape`` and
    ``option_conflict`` for what neither choosing nor padding can fix.
    """
    linears = list(shapes)
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if options.multi_query_mode and heads and kv_heads == heads:
        raise error(
            "option_conflict",
            option="--multi-query-mode",
            other="this model",
            reason=f"each of its {heads} heads has its own keys and values",
            hint="Leave it away: shared keys and values are found out from config.json.",
        )
    planner = _Planner(options, spec or options.spec(""), config, linears, heads, kv_heads)
    plan = planner.settle(options.tp)
    if isinstance(plan, TensorParallelPlan):
        return plan
    if options.tp == 1 or plan.id != "tensor_parallel":
        raise plan
    reason = plan.fields["reason"]
    works = tuple(tp for tp in _TRIED if heads % tp == 0 and isinstance(planner.settle(tp), TensorParallelPlan))
    whole = planner.settle(1) if gathered else None
    if isinstance(whole, AiakqError):
        raise whole
    if whole is None:
        choices = ", ".join(map(str, works)) or "none"
        raise error("tensor_parallel", tp=options.tp, reason=reason, choices=choices)
    note = (
        f"With -tp {options.tp} only aiakq serves it, on CPUs; other servers cannot split this model so ({reason}). "
        f"Values of -tp that work there: {', '.join(map(str, works))}."
    )
    return replace(whole, tp=options.tp, notes=(*whole.notes, note), elsewhere=works)


@dataclass
class _Planner:
    options: QuantizeOptions
    spec: QuantSpec
    config: Mapping[str, Any]
    linears: list[LinearShape]
    heads: int
    kv_heads: int

    def settle(self, tp: int) -> TensorParallelPlan | AiakqError:
        """Return the plan for ``tp`` GPUs, or the reason why there is none."""
        usual = self.options.preset.group_size
        asked = self.options.group_size
        free = asked is None and usual != -1
        sizes = (usual, *(size for size in _CHOSEN_FROM if size < usual)) if free else (asked or usual,)
        specs = [_with_groups(self.spec, size) for size in sizes]
        problems = []
        for spec in specs:
            problem = self._problem(tp, spec, self.linears)
            if problem is None:
                return self._plan(tp, spec, free and spec.group_size != usual, {})
            problems.append(problem)
        # A given group size on one GPU is not padded: other group sizes fit without changing the model.
        for spec in specs if free or tp > 1 else ():
            widths = self._widths(tp, spec)
            problem = self._problem(tp, spec, _padded(self.linears, widths)) if widths else None
            if widths and problem is None:
                return self._plan(tp, spec, free and spec.group_size != usual, widths)
            problems += [problem] if problem else []
        # The problem that remains after choosing and padding is the actual obstacle.
        remaining = next((one for one in reversed(problems) if one.id == "tensor_parallel"), problems[0])
        return self._in_another_format(tp, remaining) or remaining

    def _in_another_format(self, tp: int, problem: AiakqError) -> TensorParallelPlan | None:
        """Return the plan for the format that holds layers of every shape, or None if that does not help."""
        other = replace(self.spec, format=formats.FALLBACK)
        given = self.options.format is not None or self.spec.format in (formats.FALLBACK, "gguf")
        if problem.id != "layer_shape" or given or formats.supports(other) is not None:
            return None
        plan = replace(self, spec=other).settle(tp)
        if isinstance(plan, AiakqError):
            return None
        about = problem.fields
        note = f"Written as {other.format}: {about['reason']}, and {about['layer']} is {about['n']} x {about['k']}."
        return replace(plan, format=other.format, notes=(note, *plan.notes))

    def _problem(self, tp: int, spec: QuantSpec, linears: list[LinearShape]) -> AiakqError | None:
        """Return the first problem, or None."""
        for linear in linears:
            problem = _layout_problem(spec, linear) or _group_problem(spec, linear, linears)
            if problem is not None:
                return problem
        reason = _split_problem(tp, self.heads, self.kv_heads, spec, linears) if tp > 1 else None
        return error("tensor_parallel", tp=tp, reason=reason, choices="") if reason else None

    def _widths(self, tp: int, spec: QuantSpec) -> dict[str, tuple[int, int]]:
        """Return the MLP widths to pad, each to the next multiple that suits every linear inside that MLP."""
        widths: dict[str, tuple[int, int]] = {}
        for key in _WIDTHS:
            width = self.config.get(key)
            if not isinstance(width, int) or isinstance(width, bool):
                continue
            unit = tp * formats.width_multiple(spec)
            for linear in self.linears:
                own = spec.for_layer(linear.name)
                if _inside(linear, width) and linear.row_parallel and own is not None and own.group_size != -1:
                    unit = math.lcm(unit, tp * own.group_size)
            if width % unit and any(_inside(linear, width) for linear in self.linears):
                widths[key] = (width, -(-width // unit) * unit)
        return widths

    def _plan(self, tp: int, spec: QuantSpec, chosen: bool, widths: dict[str, tuple[int, int]]) -> TensorParallelPlan:
        notes = []
        on = f" on each of {tp} GPUs" if tp > 1 else ""
        if chosen:
            usual = self.options.preset.group_size
            notes.append(
                f"Groups have {spec.group_size} inputs: groups of {usual} do not divide the inputs of every layer{on}."
            )
        for key, (old, new) in widths.items():
            cut = f"cuts into whole groups of {spec.group_size}" if spec.group_size != -1 else "can be cut"
            notes.append(f"{key} was padded with zeros from {old} to {new}, which {cut}{on}; the function is the same.")
        notes += _kernel_note(tp, self.kv_heads, spec, _padded(self.linears, widths))
        return TensorParallelPlan(tp, spec.group_size, chosen, widths, tuple(notes))


def _with_groups(spec: QuantSpec, group_size: int) -> QuantSpec:
    layers = tuple(
        (pattern, replace(own, group_size=group_size) if own and own.group_size == spec.group_size else own)
        for pattern, own in spec.layers
    )
    return replace(spec, group_size=group_size, layers=layers)


# --- what fits --------------------------------------------------------------------------------------------------------


def _layout_problem(spec: QuantSpec, linear: LinearShape) -> AiakqError | None:
    """Return why the on-disk layout cannot hold a linear, or None."""
    own = spec.for_layer(linear.name)
    reason = None if own is None else formats.shape_problem(own, linear.n, linear.k)
    return error("layer_shape", layer=linear.name, n=linear.n, k=linear.k, reason=reason) if reason else None


def _group_problem(spec: QuantSpec, linear: LinearShape, linears: list[LinearShape]) -> AiakqError | None:
    own = spec.for_layer(linear.name)
    if own is None or own.group_size == -1 or not linear.k % own.group_size:
        return None
    works = [str(size) for size in _OFFERED if not any(other.k % size for other in linears)]
    choices = ", ".join([*works, "-1 (one scale per row)"])
    return error("group_size", group_size=own.group_size, k=linear.k, layer=linear.name, choices=choices)


def _split_problem(tp: int, heads: int, kv_heads: int, spec: QuantSpec, linears: list[LinearShape]) -> str | None:
    """Return why the model cannot be split over ``tp`` GPUs, or None."""
    if heads % tp:
        return f"{heads} attention heads"
    if kv_heads and kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} key-value heads"
    for linear in linears:
        own = spec.for_layer(linear.name)
        in_word, out_word = (1, 1) if own is None else formats.word_shape(own)
        if linear.row_parallel:
            share, rest = divmod(linear.k, tp)
            if rest:
                return f"{linear.k} inputs of {linear.name}"
            if own is not None and own.group_size != -1 and share % own.group_size:
                return f"{share} inputs of {linear.name} on each GPU do not divide into groups of {own.group_size}"
            if share % in_word:
                return f"{share} inputs of {linear.name} on each GPU do not fill words of {in_word}"
        elif linear.n % tp or linear.n // tp % out_word:
            # Key and value heads are replicated, not sharded, if there are fewer of them than GPUs.
            if not _copied(tp, kv_heads, linear):
                return f"{linear.n} outputs of {linear.name}"
    return None


def _copied(tp: int, kv_heads: int, linear: LinearShape) -> bool:
    return bool(kv_heads) and tp > kv_heads and linear.name.endswith(("k_proj", "v_proj"))


def _kernel_note(tp: int, kv_heads: int, spec: QuantSpec, linears: Sequence[LinearShape]) -> list[str]:
    """Return one sentence on linears that vLLM's fast kernels do not support, if there are any."""
    kernel, (n_unit, k_unit) = ("CUTLASS int8", _CUTLASS_INT8) if spec.activation_bits else ("Marlin", _MARLIN)
    misfits: dict[str, str] = {}
    for name, n, k in _vllm_layers(tp, kv_heads, [linear for linear in linears if spec.for_layer(linear.name)]):
        if n % n_unit or k % k_unit:
            kind = name.rpartition(".")[2]
            misfits.setdefault(kind, f"{kind} ({n} x {k})")
    if not misfits:
        return []
    on = f" on each of {tp} GPUs" if tp > 1 else ""
    return [
        f"vLLM's {kernel} kernel takes multiples of {n_unit} outputs and {k_unit} inputs{on}, "
        f"so it uses slower ones, or none, for {', '.join(misfits.values())}."
    ]


def _vllm_layers(tp: int, kv_heads: int, linears: Sequence[LinearShape]) -> Iterator[tuple[str, int, int]]:
    """Yield (name, N, K) per GPU, with linears that vLLM merges as one."""
    merged: dict[str, tuple[int, int]] = {}
    for linear in linears:
        parent, _, last = linear.name.rpartition(".")
        if linear.row_parallel:
            yield linear.name, linear.n, linear.k // tp
            continue
        parts = kv_heads if _copied(tp, kv_heads, linear) else tp
        family = next((names for names in FUSED if last in names), (last,))
        name = f"{parent}.{'+'.join(family)}"
        merged[name] = (merged.get(name, (0, 0))[0] + linear.n // parts, linear.k)
    for name, (n, k) in merged.items():
        yield name, n, k


# --- padding ----------------------------------------------------------------------------------------------------------


def _inside(linear: LinearShape, width: int) -> bool:
    """Whether a linear enters or leaves the inside of an MLP that is ``width`` wide."""
    *parents, last = linear.name.split(".")
    if any("attn" in part or "attention" in part for part in parents):
        return False
    if linear.row_parallel:
        return linear.k == width
    return linear.n == (2 * width if last == "gate_up_proj" else width)


def _padded(linears: Sequence[LinearShape], widths: Mapping[str, tuple[int, int]]) -> list[LinearShape]:
    """Return the shapes after padding."""
    result = []
    for linear in linears:
        for old, new in widths.values():
            if _inside(linear, old):
                if linear.row_parallel:
                    linear = replace(linear, k=new)
                else:
                    linear = replace(linear, n=linear.n // old * new)
                break
        result.append(linear)
    return result
