"""The model card: README.md of the output folder.

It contains nothing specific to this machine and no time, so that two runs write the same card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiakq import formats
from aiakq.data.documents import sources
from aiakq.errors import AiakqError
from aiakq.evaluation.wording import DECIDES, figure_rows
from aiakq.formats.compatibility import Readers
from aiakq.formats.made_folder import model_path
from aiakq.formats.model_folder import open_file
from aiakq.formats.yaml_text import InvalidYaml, parse_yaml
from aiakq.html_report.numbers import percent, size
from aiakq.quantizers.calibration.samples import title_of
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.report.records import QuantizeReport, command_line

CARD_FILE = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Entries that a quantized model inherits from the card of its source.
_INHERITED = ("license", "license_name", "license_link", "language")
#: The hub's word for what models without towers do.
_TEXT_ONLY = "text-generation"
#: What a model does -> transformers' classes for it; others read more than text.
_CLASSES = {
    _TEXT_ONLY: ("AutoModelForCausalLM", "AutoTokenizer"),
    "text-classification": ("AutoModelForSequenceClassification", "AutoTokenizer"),
    "feature-extraction": ("AutoModel", "AutoTokenizer"),
}
#: Maximum bytes of a card that are read; front matter that does not end within them is ignored.
_MAX_BYTES = 1 << 16


def text(
    report: QuantizeReport,
    options: QuantizeOptions,
    source: Path,
    inherited: Mapping[str, Any] | None = None,
    tag: str = _TEXT_ONLY,
) -> str:
    """Return the card.

    source     the folder of the original.
    inherited  entries of its card that this one inherits, see ``inherited_entries``.
    tag        the hub's word for what the model does.
    """
    hub = _HUB_NAME.fullmatch(options.input) is not None and not Path(options.input).exists()
    name = options.input.rpartition("/")[2] if hub else model_path(source.resolve()).name
    front: dict[str, object] = dict(inherited or {})
    if hub:
        front |= {"base_model": options.input, "base_model_relation": "quantized"}
    front |= {"library_name": "transformers", "pipeline_tag": tag}
    bits = sorted({layer.bits for layer in report.layers if layer.bits})
    tags = ["quantized", report.method, *(f"{b}-bit" for b in bits), report.format.replace("_", "-"), "aiakq"]
    front["tags"] = list(dict.fromkeys(tags))
    parts = [
        f"---\n{_yaml(front)}---\n",
        f"# {_plain(name)}, {report.method}\n",
        f"{_original(name, hub, options)} quantized by aiakq {report.version}: "
        f"{report.scheme}, {report.bits_per_weight:.2f} bits per weight in quantized layers, scales included. "
        f"{options.preset.summary}\n",
        _quality(report),
        _making(report, options, name if not hub else options.input),
        _loading(report, bits, tag),
    ]
    return "\n".join(part for part in parts if part)


def inherited_entries(folder: Path) -> dict[str, object]:
    """Return the entries of the model card in ``folder`` that a quantized model inherits; empty if it has none.

    The front matter is the YAML between a line ``---`` at the top and the next one.
    """
    try:
        with open_file(folder, CARD_FILE) as stream:
            top = stream.read(_MAX_BYTES)
    except (AiakqError, OSError):
        return {}
    first, *rest = top.decode("utf-8-sig", "replace").splitlines() or [""]
    if first.rstrip() != "---":
        return {}
    end = next((number for number, line in enumerate(rest) if line.rstrip() == "---"), None)
    if end is None:
        return {}
    try:
        entries = parse_yaml("\n".join(rest[:end]))
    except InvalidYaml:
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: value for key, value in entries.items() if key in _INHERITED and _short(value)}


def _short(value: object) -> bool:
    """Whether a value from a foreign card is short enough to be copied."""
    if isinstance(value, list):
        return len(value) <= 100 and all(isinstance(item, str) and len(item) <= 100 for item in value)
    return isinstance(value, str) and len(value) <= 1000


def _yaml(value: dict[str, object]) -> str:
    import yaml

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text


def _plain(name: str) -> str:
    """Remove characters from a name that Markdown would interpret."""
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", name)


def _original(name: str, hub: bool, options: QuantizeOptions) -> str:
    return f"[{_plain(options.input)}](https://huggingface.co/{options.input})" if hub else _plain(name)


def _quality(report: QuantizeReport) -> str:
    before, after = report.perplexity_before, report.perplexity_after
    rows = [["size of the weights", size(report.bytes_before), size(report.bytes_after)]]
    if report.kl is not None:
        rows.append(["KL divergence, nats per token", "0", f"{report.kl:.2g}"])
    if report.top1_agreement is not None:
        rows.append(["top-1 agreement", "100%", f"{report.top1_agreement:.1%}"])
    if before is not None and after is not None:
        rows.append(["perplexity", f"{before:.4g}", f"{after:.4g}"])
    table = _table(["", "original", "this model"], rows)
    lines = ["## Quality\n", f"{table}\n"]
    if report.evaluations:
        names = [_plain(text["name"]) for text in report.evaluations]
        measured = _table(["", *names], [list(row) for row in figure_rows(report.evaluations)])
        lines += [f"{DECIDES}\n", f"{measured}\n"]
        lines += [_plain(text["remark"]) for text in report.evaluations if text["remark"]]
        lines.append("The intervals are of a block bootstrap; aiakq_report.html shows the tokens that changed most.")
    if report.evaluation_text is not None:
        texts = [text["text"] for text in report.evaluations] or [report.evaluation_text]
        of = f"{report.evaluation_tokens:,} tokens of " if len(texts) == 1 else ""
        lines.append(f"Measured on {of}{_plain(', '.join(texts))}.")
    if report.mean_error is not None and report.worst is not None:
        lines.append(
            f"Error of a layer's output on calibration inputs: {percent(report.mean_error)} on average, "
            f"{percent(report.worst.error)} at worst (`{report.worst.name}`)."
        )
    return "\n".join(lines) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _making(report: QuantizeReport, options: QuantizeOptions, source: str) -> str:
    files = {
        key: Path(str(getattr(options, key))).name for key in ("token_ids", "recipe", "lora") if getattr(options, key)
    }
    if options.eval_text is not None:
        files["eval_text"] = ",".join(Path(str(name)).name for name in sources(options.eval_text))
    if options.calibration is not None:
        files["calibration"] = ",".join(title_of(name) for name in sources(options.calibration) if name is not None)
    # Without options that do not affect the result.
    same = replace(options, overwrite=False, resume=False, device="auto", activation_memory=None)
    command = command_line(same, input=source, output="DIR", **files)
    lines = ["## How it was made", f"```\n{command}\n```"]
    if options.recipe is not None:
        lines.append(f"with this recipe:\n\n```yaml\n{_yaml(report.recipe)}```")
    if report.calibration is not None:
        lines.append(
            f"Calibrated on {report.tokens:,} tokens of {_plain(report.calibration)} "
            f"(sha256 of the samples: `{report.calibration_sha256}`)."
        )
    remarks = [text["remark"] for text in report.evaluations]  # which stand with the figures
    lines += [_plain(note) for note in report.notes if note not in remarks]
    lines.append("Everything else about it, layer by layer, is in aiakq_report.html and aiakq_report.json.")
    return "\n\n".join(lines) + "\n"


def _loading(report: QuantizeReport, bits: list[int], tag: str) -> str:
    """Describe how each supporting program loads the model."""
    parallel = f" --tensor-parallel-size {report.tp}" if report.tp > 1 else ""
    kind, _, activations = report.scheme.split()[0].rpartition("a")
    letters = kind.rstrip("0123456789")
    schemes = {f"{letters}{width}a{activations}" for width in bits} or {report.scheme}
    readers = formats.readers(report.format, schemes, bool(report.experts))
    command = f"```\nvllm serve path/to/this/folder{parallel}\n```" if readers.vllm else ""
    vllm = "\n\n".join(filter(None, (command, readers.vllm_note)))
    vllm = f"{report.not_in_vllm}." if report.not_in_vllm else vllm
    return f"""\
## Loading it

With aiakq, on a GPU or a CPU:

```
aiakq serve path/to/this/folder
```

{"" if report.not_in_transformers else _transformers(readers, tag)}With vLLM:

{vllm}
"""


def _transformers(readers: Readers, tag: str) -> str:
    """Describe how transformers loads the model; empty if it does not."""
    if readers.packages is None:
        return ""
    note = f"\n{readers.transformers_note}\n" if readers.transformers_note else ""
    model, inputs = _CLASSES.get(tag, ("AutoModelForMultimodalLM", "AutoProcessor"))
    return f"""\
With transformers (`pip install {readers.packages}`):

```python
from transformers import {model}, {inputs}

model = {model}.from_pretrained("path/to/this/folder")
{inputs[4:].lower()} = {inputs}.from_pretrained("path/to/this/folder")
```
{note}
"""
