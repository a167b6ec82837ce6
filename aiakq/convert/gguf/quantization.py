"""``aiakq quantize -quant_type gguf``: rounds a model to blocks with calibration, and writes a GGUF file.

The linears are rounded by the pipeline of all methods, to a folder beside the file that holds their blocks. Writing it
as a GGUF file moves these; the embedding and the output layer are rounded to nearest. The file is proved as that of a
conversion is, and then compared with the source.
"""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.gguf.block_plan import block_spec, block_type, blocks_folder
from aiakq.convert.gguf.conversion import GGUFConversion, checked_output
from aiakq.convert.gguf.file_types import FileType
from aiakq.convert.gguf.source import GGUFSource
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_prepared
from aiakq.quantizers.preparation import prepare
from aiakq.quantizers.prepared import Prepared
from aiakq.quantizers.progress import OnProgress, StageProgress
from aiakq.quantizers.quality import check_text, measure_quality
from aiakq.quantizers.report.records import QuantizeReport
from aiakq.runtime.config.model import ModelConfig


def quantize_to_gguf(options: QuantizeOptions, progress: OnProgress | None = None) -> QuantizeReport:
    """Quantize ``options.input`` to the GGUF file ``options.output`` and return the report.

    Raises what ``quantize_checkpoint`` raises, and ``gguf_not_written`` for what such files do not hold.
    """
    on_progress, began = progress or (lambda _: None), time.monotonic()
    wanted, blocks = block_type(options), blocks_folder(options)
    on_progress(StageProgress("load", 0, 1, options.input))
    with closing(Checkpoint.fetch(options.input, options.revision)) as checkpoint:
        output = checked_output(options.output, options.overwrite, checkpoint, "-o")
    prepared = prepare(blocks)
    folder = Path(prepared.options.output)
    check_text(replace(prepared, options=options))
    spec, _ = block_spec(prepared, wanted)
    on_progress(StageProgress("load", 1, 1))
    try:
        report = quantize_prepared(prepared, spec, on_progress)
        with closing(Checkpoint.open(folder)) as written:
            file, report.bytes_after = _write(options, written, prepared, wanted, output, on_progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.output, report.format = str(file), "gguf"
    report.scheme = f"{wanted.name}: {report.scheme}"
    report.command = report.command and report.command.replace(str(folder), options.output)
    if options.evaluate:
        from aiakq.formats.gguf_model.folder import gguf_folder

        measure_quality(report, gguf_folder(file), output.parent, replace(prepared, options=options), on_progress)
    report.record_cost(began)
    return report


def _write(
    options: QuantizeOptions,
    written: Checkpoint,
    prepared: Prepared,
    wanted: FileType,
    output: Path,
    progress: OnProgress,
) -> tuple[Path, int]:
    """Write the folder of blocks as a GGUF file, or several; return the path of the first, and all bytes."""
    name = prepared.checkpoint.named_path.name
    source = GGUFSource(written, ModelConfig.from_hf(written.config), lossy=False, name=name)
    arguments = ConvertArguments(
        input=str(written.path),
        output=str(output),
        to="gguf",
        gguf_type=wanted.name,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )

    def report(stage: str, done: int, total: int, detail: str) -> None:
        progress(StageProgress(stage, done, total, detail))

    done = GGUFConversion(arguments, source, wanted, output, report).run(time.monotonic())
    return Path(done.output), done.bytes_after
