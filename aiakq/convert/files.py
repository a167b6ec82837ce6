"""The other files of a converted model: its config, its model card, and what is copied."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import aiakq
from aiakq import formats
from aiakq.convert.report import ConversionReport
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import config_without_quantization, source_record
from aiakq.formats.folded_scales import records_scales
from aiakq.formats.made_folder import model_path
from aiakq.formats.model_folder import (
    FOLDED_SCALES,
    SOURCE_KEY,
    VERBATIM_FILES,
    module_files,
    template_files,
    vocabulary_files,
)
from aiakq.html_report.numbers import percent
from aiakq.quantizers.prepared import DTYPE_WORDS
from aiakq.quantizers.report.card import inherited_entries
from aiakq.quantizers.run_report import PAGE_FILE, REPORT_FILE
from aiakq.spec import QuantSpec

CONVERSION_FILE = "aiakq_conversion.json"
#: Parts of a multimodal config that may have a dtype of their own.
_PARTS = ("text_config", "llm_config")


def config_json(checkpoint: Checkpoint, to: QuantSpec | torch.dtype) -> dict[str, Any]:
    """Return the config.json of the output, stored as ``to``: the source's, with another ``quantization_config``.

    Under ``aiakq`` it says from which format it was converted, and keeps what the source's says there.
    """
    config, record = config_without_quantization(checkpoint.config), source_record(checkpoint)
    own = config.get("aiakq")
    own = {key: value for key, value in own.items() if key != "method"} if isinstance(own, Mapping) else {}
    own |= {"version": aiakq.__version__, SOURCE_KEY: record}
    if isinstance(to, torch.dtype):
        _set_dtype(config, DTYPE_WORDS[to])
    else:
        own |= {"method": record["method"]} if "method" in record else {}
        config["quantization_config"] = quantization_config.write(to)
    return {**config, "aiakq": own}


def _set_dtype(config: dict[str, Any], word: str) -> None:
    for part in (config, *(config[name] for name in _PARTS if isinstance(config.get(name), dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part or (part is config and key == "dtype"):
                part[key] = word


def copied_files(checkpoint: Checkpoint) -> list[str]:
    """Return the files of the source that are copied unchanged: tokenizer, templates, licence, code, and reports."""
    folder = checkpoint.path
    names = [name for name in (*VERBATIM_FILES, REPORT_FILE, PAGE_FILE) if (folder / name).is_file()]
    names += [*module_files(folder), *template_files(folder)]
    names += [name for name in vocabulary_files(folder) if name not in names]
    names += [FOLDED_SCALES] if records_scales(checkpoint.config) and (folder / FOLDED_SCALES).is_file() else []
    return names + sorted(path.name for path in folder.glob("*.py"))


def card(report: ConversionReport, source: Path) -> str:
    """Return the model card of the output."""
    import yaml

    entries: dict[str, object] = {**inherited_entries(source), "library_name": "transformers"}
    entries["tags"] = [*(["quantized"] if report.to in formats.FORMATS else []), report.to.replace("_", "-"), "aiakq"]
    front = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
    worst = report.worst
    if report.exact:
        changed = "Every weight is the same number, bit for bit."
    elif worst is None:
        changed = "Every weight is the same number, bit for bit; activations are no longer rounded."
    else:
        changed = (
            f"The weights were rounded: their relative error is {percent(report.mean_error)} on average, and "
            f"{percent(worst.relative_error)} at worst (`{worst.name}`)."
        )
    name = model_path(source.resolve()).name
    lines = [
        f"---\n{front}---\n",
        f"# {name}, {report.to}\n",
        f"Converted by aiakq {report.version} from {report.source_format} ({report.source_scheme}) to {report.to} "
        f"({report.scheme}). {changed} {CONVERSION_FILE} lists every layer.\n",
        *(f"{note}\n" for note in report.notes),
    ]
    return "\n".join(lines)
