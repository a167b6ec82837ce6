"""The stage of a run that tunes the quantized model (``--tune``), between the last block and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.evaluation.wording import counted
from aiakq.formats.checkpoint_writer import CheckpointWriter
from aiakq.kernels.types import QWeight
from aiakq.quantizers.block.decoder_block import BlockPlan
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.numerics.deterministic import deterministic_gradients
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.quantizers.tuning.models import Student, StudentBlock, Teacher, needed_bytes
from aiakq.quantizers.tuning.tune import Tuned, Tuning, TuningBudget
from aiakq.quantizers.writing import decode, encode, verify
from aiakq.records import finite
from aiakq.runtime.device_memory import free_memory, release_memory

#: Name of the committed step.
_STEP = "tuned"


def check_tuning(prepared: Prepared) -> None:
    """Raise ``tuning`` if the model cannot be tuned here, before the work begins."""
    if prepared.options.tune is None:
        return
    samples = 0 if prepared.samples is None else len(prepared.samples.samples)
    if samples < 2:
        found = counted(samples, "calibration sample")
        hint = "Leave --tune away, or give more samples; a long one is split with a smaller --seqlen."
        raise error("tuning", reason=f"there is {found}, and one of at least two is held out", hint=hint)
    needed, free = needed_bytes(prepared), free_memory(prepared.device)
    if needed > free:
        reason = f"about {needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are free on {prepared.device}"
        hint = (
            "Leave --tune away, or give more memory; on a GPU, the codes and the output layer have to fit into its own."
        )
        raise error("tuning", reason=reason, hint=hint)


def tune_output(prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter, progress: OnProgress) -> Tuned | None:
    """Tune the unpublished output of ``writer``, whose blocks and other tensors are committed; None unless requested.

    Scales and gains of norms are replaced in one more step, unless an interrupted run has committed it. Raises
    ``unsupported`` if the model has an operation without a gradient.
    """
    options, model = prepared.options, prepared.model
    if options.tune is None or prepared.samples is None:
        return None
    if writer.steps[-1].name == _STEP:
        return Tuned(**writer.steps[-1].note["tuned"])
    hidden = HiddenStates((), prepared.activation_budget, writer.scratch)
    student = Student(model)
    teacher = Teacher(model, prepared.samples.samples, hidden, _reporter(progress, "tune: original"))
    student.share_outside(teacher)
    for index, block in enumerate(_blocks(prepared, plan, writer)):
        student.add(index, block)
    if prepared.head is not None:
        written = writer.read(writer.steps[len(model.blocks)])
        student.quantize_head(prepared.head, decode(prepared.head, plan.spec, written))
    dtypes = plan.scales, prepared.storage
    tuning = Tuning(teacher, student, *dtypes, options.seed, model.config.vocab_size)
    try:
        with deterministic_gradients():
            tuned = tuning.run(TuningBudget.of(str(options.tune)), _reporter(progress, "tune"))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        what = f"--tune with {type(model.model).__name__} ({' '.join(str(problem).split())[:200]})"
        raise error("unsupported", what=what, hint="Leave --tune away.") from problem
    teacher.close()
    _commit(prepared, plan, writer, student, tuned)
    del teacher, student, tuning
    release_memory()
    return tuned


def report_tuning(report: QuantizeReport, tuned: Tuned | None) -> None:
    """Add the outcome of the tuning to the report, and the number of steps to the recipe that repeats the run."""
    if tuned is None:
        return
    report.tuned = finite(tuned.document())
    report.recipe["tune"] = f"{tuned.planned}steps"
    steps, held_out = counted(tuned.steps, "step"), counted(tuned.held_out, "held-out calibration sample")
    if tuned.best_step:
        text = (
            f"Scales and norms were tuned end to end for {steps}; the KL divergence on {held_out} fell from "
            f"{tuned.kl_before:.4g} to {tuned.kl_after:.4g} nats per token."
        )
    else:
        text = f"Tuning for {steps} did not lower the KL divergence on {held_out}; nothing was changed."
    report.notes.append(f"{text} --tune {tuned.planned}steps repeats it.")


def _reporter(progress: OnProgress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(StageProgress(stage, done, total))


def _blocks(prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter) -> Iterator[StudentBlock]:
    """Yield what the output holds for each block."""
    for index in range(len(prepared.model.blocks)):
        step = writer.steps[index]
        written = writer.read(step)
        linears = {name: decode(name, plan.spec, written) for name in step.note["linears"]}
        yield StudentBlock(prepared.model.block_prefix(index), linears, written)


def _commit(prepared: Prepared, plan: BlockPlan, writer: CheckpointWriter, student: Student, tuned: Tuned) -> None:
    """Commit the tensors that tuning changed, and verify that they read back bit for bit."""
    changed: dict[str, QWeight] = {}
    before: dict[str, Tensor] = {}
    for block in _blocks(prepared, plan, writer) if tuned.best_step else ():
        for name, weight in block.linears.items():
            scales = student.linears[name].tuned().detach().to("cpu", plan.scales)
            changed[name] = replace(weight, scales=scales)
            for full, tensor in encode(name, changed[name], plan.spec, prepared.storage).items():
                old = block.tensors[full]
                if torch.equal(tensor, old):
                    before[full] = old
                else:
                    writer.replace(full, tensor)
    for name, gain in student.gains.items() if tuned.best_step else ():
        writer.replace(prepared.model.stored_name(name), gain.detach().to("cpu", prepared.storage))
    step = writer.commit(_STEP, {"tuned": tuned.document()})
    written = before | writer.read(step)
    for name, weight in changed.items():
        verify(name, weight, plan.spec, written)
