"""``aiakq quantize --dry-run``: what a run would do, from the config and headers alone."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aiakq.errors import error
from aiakq.formats.hub import is_on_hub
from aiakq.formats.hub_headers import header_folder
from aiakq.quantizers.model.calibration_inputs import calibration_batches
from aiakq.quantizers.model.outer_layers import outside_modules
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.planning.duration import LeastTime, measured_rate, operations
from aiakq.quantizers.planning.memory import MemoryStage, QuantizationWork, block_groups, evaluation_stage
from aiakq.quantizers.planning.output_size import copied_bytes, linear_bytes
from aiakq.quantizers.preparation import prepare
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.quality import evaluation_windows, is_compared_whole
from aiakq.spec import QuantSpec
from aiakq.system.memory import release_host_memory, resident_bytes

_FLOAT = 4


@dataclass(frozen=True)
class SchemeCount:
    """Linear layers that are stored alike, and how many weights they have; ``scheme`` is None if they stay floats."""

    scheme: str | None
    layers: int
    weights: int


@dataclass
class DryRun:
    """What a run would do.

    schemes         what the linear layers become.
    download_bytes  weights that a run would fetch first; 0 for a folder.
    output_bytes    all tensors of the output.
    disk_bytes      free space beside the output that a run asks for, and the hidden states that it would store there.
    resident_bytes  memory of this process, which has imported and prepared all that a run does.
    stages          memory beside that of each stage, at its largest moment; empty if it is not known.
    memory_reason   why not.
    seconds_at_least, time_basis   a bound, and how it was obtained; None if there is none.
    """

    input: str
    output: str
    method: str
    scheme: str
    format: str
    dtype: str
    schemes: list[SchemeCount]
    bytes_before: int
    output_bytes: int
    bits_per_weight: float
    disk_bytes: int
    download_bytes: int = 0
    tokens: int = 0
    resident_bytes: int = 0
    stages: list[MemoryStage] = field(default_factory=list)
    memory_reason: str = ""
    seconds_at_least: float | None = None
    time_basis: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest amount of memory of the process; None if it is not known."""
        largest = max((stage.nbytes for stage in self.stages), default=None)
        return None if largest is None else self.resident_bytes + largest

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "peak_memory_bytes": self.peak_memory_bytes}


#: The spec of the linears of a file, and the bytes of its tensors.
PlanFile = Callable[[Prepared], tuple[QuantSpec, int]]


def dry_run(options: QuantizeOptions, plan_file: PlanFile | None = None) -> DryRun:
    """Return what ``quantize_checkpoint(options)`` would do. Of a model on the hub only headers are fetched.

    plan_file  plans a file that is made of the output.

    Raises what preparing a run raises, and ``option_conflict`` where widths are chosen by measuring.
    """
    if options.target_bpw is not None or options.max_kl is not None:
        reason = "the widths are chosen by measuring the error of every layer"
        other = "--target-bpw, --max-kl"
        raise error("option_conflict", option="--dry-run", other=other, reason=reason, hint="Leave --dry-run away.")
    if not is_on_hub(options.input):
        return _planned(options, options.input, 0, plan_file)
    with tempfile.TemporaryDirectory(prefix="aiakq-headers-") as folder:
        download = header_folder(options.input, Path(folder), options.revision)
        return _planned(replace(options, input=folder, revision=None), options.input, download, plan_file)


def _planned(options: QuantizeOptions, name: str, download: int, plan_file: PlanFile | None) -> DryRun:
    prepared, file_bytes = prepare(options), 0
    if plan_file is not None:
        spec, file_bytes = plan_file(prepared)
        prepared = replace(prepared, spec=spec)
    plan = _Plan(prepared)
    counts = Counter[str | None]()
    weights = Counter[str | None]()
    for shape in prepared.shapes:
        own = prepared.spec.for_layer(shape.name)
        scheme = None if own is None else own.describe()
        counts[scheme] += 1
        weights[scheme] += shape.n * shape.k
    result = DryRun(
        input=name,
        output=options.output,
        method=options.method,
        scheme=prepared.spec.describe(),
        format=prepared.spec.format,
        dtype=str(prepared.storage).removeprefix("torch."),
        schemes=[SchemeCount(scheme, count, weights[scheme]) for scheme, count in counts.most_common()],
        bytes_before=prepared.checkpoint.nbytes,
        output_bytes=file_bytes or plan.quantized_bytes + plan.rest_bytes,
        bits_per_weight=8 * plan.weight_bytes / sum(weights[each] for each in weights if each is not None),
        disk_bytes=plan.disk_bytes() + file_bytes,
        download_bytes=download,
        tokens=plan.work.tokens,
        warnings=[*prepared.remarks, *prepared.warnings],
    )
    result.memory_reason = plan.unknown_memory()
    if not result.memory_reason:
        result.stages = plan.stages()
        release_host_memory()
        result.resident_bytes = resident_bytes()
    if prepared.device.type == "cpu":
        rounder = vars(prepared.recipe.rounder)
        work = plan.work
        count = operations(
            block_groups(work), work.tokens, work.original_tokens, prepared.recipe, rounder.get("sweeps", 0)
        )
        least = LeastTime(count, measured_rate() * options.workers)
        result.seconds_at_least, result.time_basis = least.seconds, least.basis
    return result


class _Plan:
    """The sizes of one run."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        samples = None if prepared.samples is None else prepared.samples.samples
        model, storage = prepared.model, prepared.storage
        outside = [_FLOAT * sum(p.numel() for p in m.parameters(recurse=False)) for _, m in outside_modules(model)]
        self.outside = sum(outside)
        self.quantized_bytes = self.weight_bytes = 0
        quantized: set[str] = set()
        for shape in prepared.shapes:
            own = prepared.spec.for_layer(shape.name)
            if own is not None:
                bias = model.model.get_submodule(shape.name).bias is not None
                self.quantized_bytes += linear_bytes(shape.n, shape.k, own, storage, bias)
                self.weight_bytes += linear_bytes(shape.n, shape.k, own, storage)
                quantized |= model.stored_tensors(shape.name, bias)
        self._add_head(prepared.spec)
        left_out = {*quantized, *prepared.not_copied()}
        self.rest_bytes = copied_bytes(prepared.checkpoint.inventory, left_out, storage)
        self.rest_bytes += prepared.untied_weights * storage.itemsize
        self.work = QuantizationWork(
            blocks=list(model.blocks),
            prefixes=[model.block_prefix(index) for index in range(len(model.blocks))],
            outside=(self.outside - self._head_bytes, max(outside)),
            rest=self.rest_bytes,
            batches=[tuple(batch.shape) for batch in calibration_batches(samples, model.features)],
            hidden=model.hidden_width,
            budget=prepared.activation_budget,
            storage=storage,
            spec=prepared.spec,
            recipe=prepared.recipe,
        )

    def _add_head(self, spec: QuantSpec) -> None:
        prepared = self.prepared
        head = prepared.model.model.get_output_embeddings()
        tied = head is None or head.weight is prepared.model.model.get_input_embeddings().weight
        self._head_bytes = 0 if tied else _FLOAT * head.weight.numel()
        own = None if prepared.head is None else spec.for_layer(prepared.head)
        if own is not None:
            n, k = head.weight.shape
            self.quantized_bytes += linear_bytes(n, k, own, prepared.storage)

    def disk_bytes(self) -> int:
        """Return the free space that a run needs: its steps, the shards made from them, and hidden states."""
        output = max(self.quantized_bytes + self.rest_bytes, self.prepared.expected_bytes(self.prepared.spec))
        return int(2.02 * output) + self.work.spilled()

    def unknown_memory(self) -> str:
        """Return why the peak of memory is not known, or nothing."""
        options, prepared = self.prepared.options, self.prepared
        reasons: tuple[tuple[Callable[[], bool], str], ...] = (
            (lambda: prepared.device.type != "cpu", "it is counted for CPUs only"),
            (lambda: options.workers > 1, "it is counted for one process only (--workers)"),
            (lambda: options.tune is not None, "--tune holds the whole model, with gradients"),
            (lambda: options.rotate != "none", "--rotate is not counted"),
            (lambda: options.lora is not None, "--lora is not counted"),
            (lambda: prepared.recipe.weighs_tokens or prepared.recipe.weighs_rows, "--importance is not counted"),
            (lambda: self.work.unknown() is not None, f"{self.work.unknown()} comes from a package"),
        )
        return next((reason for holds, reason in reasons if holds()), "")

    def stages(self) -> list[MemoryStage]:
        stages = self.work.stages()
        evaluated = self._evaluation()
        return stages if evaluated is None else [*stages, evaluated]

    def _evaluation(self) -> MemoryStage | None:
        """Return the comparison with the source, if there will be one."""
        prepared = self.prepared
        windows = evaluation_windows(prepared)
        if windows is None:
            return None
        import aiakq.evaluation.scoring  # noqa: F401  # part of the process by then

        config = prepared.model.config
        weights = sum(math.prod(info.shape) for info in prepared.checkpoint.inventory.values())
        packed = self.quantized_bytes + self.rest_bytes * _FLOAT // prepared.storage.itemsize
        block = max(sum(p.numel() for p in block.parameters()) for block in prepared.model.blocks)
        copies = (_FLOAT * weights, packed) if is_compared_whole(prepared) else None
        width = prepared.model.hidden_width
        return evaluation_stage(copies, self.outside, _FLOAT * block, config.vocab_size, width, windows)
