"""Write docs/models.md: tiny random models of many architectures, beside transformers and quantized, or refused.

``make models`` runs this, half an hour on two cores. Every row is measured: see tests/runtime/models/test_matrix.py.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import AiakqError

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests"))  # the cases are a module beside the tests
_METHODS = ("weight_only_int8", "smooth_quant", "awq", "gptq")
#: Options of quantize under which a tiny model takes a second or two.
_QUICK: dict[str, Any] = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}


def main() -> None:
    """Write the page; to measure some rows only, name their cases as arguments."""
    cases = list(_module("runtime/models/test_matrix.py").CASES)
    names = sys.argv[1:] or cases
    rows = _rows() if sys.argv[1:] else {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for name, row in zip(names, pool.map(_row, names), strict=True):
            rows[name] = row
            print(row, flush=True)
    (DOCS / "models.md").write_text(_page([rows[name] for name in cases if name in rows]), encoding="utf-8")


def _rows() -> dict[str, str]:
    """The rows of the page by case."""
    lines = (DOCS / "models.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    return {row.split("|")[1].strip(): row for row in rows}


@functools.cache
def _module(path: str) -> ModuleType:
    """A file of the tests."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS.parent / "tests" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _row(name: str) -> str:
    """One row of the table."""
    matrix, tokenizer = _module("runtime/models/test_matrix.py"), _module("conftest.py")._byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        matrix.save(name, source, tokenizer)
        try:
            outcome = matrix.examine(source)
        except Exception as problem:
            return f"| {name} | **fails** | {type(problem).__name__} | | |"
        if outcome.runs == "refused":
            reason = outcome.reason.partition("is not supported: ")[2] or outcome.reason
            return f"| {name} | refused | {reason.rstrip('.')} | | |"
        result = f"{outcome.difference:.0e} nats" if outcome.exact else f"**differs**, {outcome.difference:.2g} nats"
        bits = "" if outcome.same_bits else ", not bit for bit"
        methods = ", ".join(_quantized(source, matrix, name))
        return f"| {name} | {outcome.runs} | {result}{bits} | {methods} | {outcome.page_bytes} |"


def _quantized(source: Path, matrix: ModuleType, name: str) -> list[str]:
    """The methods whose output is served, each with the divergence from the model in ``source``; why not, if not."""
    if "," in name:  # a variant of another row
        return []
    from aiakq.evaluation.scoring import load_for_scoring

    ids = torch.tensor([matrix.prompts()[7]])
    exact = _log_probabilities(lambda: load_for_scoring(source, "float32", "cpu"), ids)
    told, refusals = [], []
    for method in _METHODS:
        output = source.parent / method
        try:
            _quantize(source, output, method)
            found = _log_probabilities(lambda output=output: load_for_scoring(output, "float32", "cpu"), ids)
        except AiakqError as problem:
            refusals.append(problem.message.removesuffix(" is not supported."))
            told.append(f"{method} refused ({problem.id})")
        except Exception as problem:
            told.append(f"{method} **fails** ({type(problem).__name__})")
        else:
            told.append(f"{method} {float((exact.exp() * (exact - found)).sum(-1).mean()):.1g}")
    return [f"refused: {refusals[0]}"] if len(refusals) == len(told) and len(set(refusals)) == 1 else told


def _quantize(source: Path, output: Path, method: str) -> None:
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    grouped = {"group_size": 32} if method in ("awq", "gptq") else {}
    quantize_checkpoint(QuantizeOptions(str(source), str(output), method, **_QUICK, **grouped))


def _log_probabilities(load: Callable[[], Any], ids: Tensor) -> Tensor:
    """Of ids [1, T] -> [1, T, V]."""
    result: Tensor = load().logits(ids).log_softmax(-1)
    return result


def _page(rows: list[str]) -> str:
    import transformers

    kinds = [row.split("|")[2].strip() for row in rows]
    counts = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in (
        ("native", "native"), ("transformers", "through transformers"), ("refused", "refused"),
    ))  # fmt: skip
    versions = f"transformers {transformers.__version__} (torch {torch.__version__.partition('+')[0]}, CPU, float32)"
    intro = f"""
        Written by `make models` from a run over {len(rows)} tiny random models ({counts}): log-probabilities of every
        position beside those of {versions}, as a batch and in chunks of 16 tokens; and what follows nine prompts, with
        prefixes cached and sequences preempted, beside what follows without. Native models are built from blocks of our
        own, and what they compute does not depend on other requests in the last bit. Others run through transformers'
        class with paged attention; they are compared with its own attention when they are loaded, and refused where
        they differ; where experts compute there, other requests may change the last bit. The text part of a multimodal
        checkpoint runs as the architecture of its `text_config`. With LongRoPE, a request
        whose prompt and `max_tokens` fit in the original context is rotated with the short factors, any other with the
        long ones from its first token on; transformers changes from one to the other within a text, and vLLM has one
        set for all."""
    columns = """
        methods: the mean KL divergence of the quantized model from its source, in nats, once served; random weights
        suffer more than trained ones, and where a router decides otherwise about a token, all of its numbers change.
        page: bytes of 16 tokens in a cache of 16-bit floats, states of recurrent layers included, of models with 2 or 4
        layers, 4 heads (2 for keys and values, where the architecture shares them) of 32 elements."""
    head = ["| architecture | runs | largest difference, or why not | methods | page |", "|---|---|---|---|---|"]
    texts = [textwrap.fill(" ".join(text.split()), 130) for text in (intro, columns)]
    return "\n".join(["# Models", "", texts[0], "", texts[1], "", *head, *rows, ""])


if __name__ == "__main__":
    main()
