"""Write docs/models.md: tiny random models of many architectures, compared with transformers or refused.

``make models`` runs this; it takes minutes. Every row is measured: log-probabilities of every position of nine prompts,
as a batch and in chunks of 16 tokens, in float32 with ``--cpu-math exact``.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from aiakq.errors import AiakqError
from aiakq.runtime.models import ARCHITECTURES

DOCS = Path(__file__).resolve().parent
_SMALL = {"vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 2}
_SMALL |= {"intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 1}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32,
}  # fmt: skip
#: model_type of what has no family here -> what its tiny config has besides.
_OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {}, "codegen": {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16}, "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT, "diffllama": {}, "doge": {}, "ernie4_5": {}, "gpt_neo": {}, "helium": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32}, "jamba": {}, "mamba": {}, "nanochat": {},
    "nemotron": {}, "olmo": {}, "persimmon": {}, "seed_oss": {"head_dim": 32}, "stablelm": {},
}  # fmt: skip


def main() -> None:
    """Write the page; the architectures to measure may be named as arguments."""
    shared, families = _module("conftest.py"), _module("runtime/models/test_families.py")
    native = [(name, shared.TINY[name]) for name in ARCHITECTURES if name in shared.TINY]
    cases = [*native, *((f"{kind} (model_type)", (kind, {**_SMALL, **more})) for kind, more in _OTHERS.items())]
    shared.TINY.update(cases)
    rows = []
    for name, _ in cases:
        if len(sys.argv) < 2 or name in sys.argv[1:]:
            rows.append(_row(name, shared, families))
            print(rows[-1], flush=True)
    if len(sys.argv) < 2:
        (DOCS / "models.md").write_text(_page(rows), encoding="utf-8")


def _module(path: str) -> ModuleType:
    """A file of the tests."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS.parent / "tests" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(name: str, shared: ModuleType, families: ModuleType) -> str:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        how = "native" if name in ARCHITECTURES else "transformers"
        try:
            model = shared._save_tiny(name, {}, Path(folder) / "model")
            expected = families.of_transformers(model)
        except Exception as problem:
            return f"| {name} | - | not measured: transformers raises {type(problem).__name__} |"
        try:
            found = [families.ours(model, **families.MODES[mode]) for mode in ("batch", "chunks")]
        except AiakqError as problem:
            return f"| {name} | {how} | refused: {problem.message} |"
        except Exception as problem:
            return f"| {name} | {how} | **fails**: {type(problem).__name__} |"
        worst = max(families.largest_difference(each, expected) for each in found)
        result = "exact" if worst < families.TOLERANCES.get(name, families.TOLERANCE) else "**differs**"
        return f"| {name} | {how} | {result}, {worst:.0e} nats |"


def _page(rows: list[str]) -> str:
    import transformers

    versions = f"transformers {transformers.__version__} (torch {torch.__version__.partition('+')[0]}, CPU, float32)"
    intro = f"""
        Written by `make models` from a run over tiny random models: log-probabilities of every position beside those of
        {versions}, as a batch and in chunks of 16 tokens, with `--cpu-math exact`. Native models are built from blocks
        of our own. Others run through transformers' class with paged attention; they are compared with its own
        attention when they are loaded, and refused where they differ. The text part of a multimodal checkpoint runs as
        the architecture of its `text_config`."""
    head = ["| architecture | runs | result: largest difference, or why not |", "|---|---|---|"]
    return "\n".join(["# Models", "", textwrap.fill(" ".join(intro.split()), 130), "", *head, *rows, ""])


if __name__ == "__main__":
    main()
