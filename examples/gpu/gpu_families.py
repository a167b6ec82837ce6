"""``make gpu``: every native family on the GPU beside the CPU, as tiny random models; see gpu.py.

Log-probabilities of prompts and of greedy tokens, in 16 bits: the GPU's may differ from float32 on the CPU by a few
times as much as 16 bits on the CPU do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_checks import Machine

ROOT = Path(__file__).resolve().parents[2]
#: Times the difference of 16 bits on the CPU, and nats beside it, up to which a GPU may differ from float32.
FACTOR, NEAR = 4.0, 0.03
#: Nats in float32, where devices sum in another order; and where activations are rounded, some of which lie between two
#: codes.
NEAR_32, NEAR_ROUNDED = 2e-3, 0.1
PARTS = 6
#: Families whose experts are quantized too, and how.
MIXTURES = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Qwen3_5MoeForCausalLM")
METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"samples": 2, "seqlen": 32},
    "weight_only_int8": {},
    "smooth_quant": {"samples": 2, "seqlen": 32},
}
Made = Callable[[Path], Path]


def families_agree(part: int, machine: Machine) -> dict:
    """Compare every ``PARTS``-th case, one in a rehearsal; one that fails does not keep others from being compared."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    cases = list(_cases())[part::PARTS]
    for name, make in cases[-1:] if machine.rehearsed else cases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append({"case": name} | _compare(make(Path(folder, "model")), name, machine))
            except Exception as problem:
                notes[name] = f"{type(problem).__name__}: {str(problem).strip()[-300:]}"
    wrong = [row["case"] for row in rows if not row["right"]]
    return {"rows": rows, "notes": notes} | ({"failed": f"differ: {wrong}; {notes}"} if wrong or notes else {})


def _cases() -> Iterator[tuple[str, Made]]:
    from formats.test_float4 import PUBLISHED as FLOAT4
    from formats.test_fp8 import PUBLISHED as FLOAT8
    from tiny_models import TINY
    from vision_models import PLACEHOLDERS

    for family in TINY:
        yield family, lambda folder, family=family: saved(family, folder)
    for kind in PLACEHOLDERS:
        yield f"images: {kind}", lambda folder, kind=kind: _vision(kind, folder)
    for name, published in [*FLOAT8.items(), *FLOAT4.items()]:
        yield f"layout: {name}", lambda folder, published=published: _published(published, folder)
    yield "layout: GPT-OSS in MXFP4", _mxfp4_experts
    for family in MIXTURES:
        for method in METHODS:
            yield f"{family} {method}", lambda folder, f=family, m=method: _quantized(f, m, folder)


def saved(family: str, folder: Path) -> Path:
    """Write a random model of a family of tests/tiny_models.py, with weights as spread as trained ones are."""
    import torch
    from tiny_models import TINY
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, numbers = TINY[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **numbers), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def _vision(kind: str, folder: Path) -> Path:
    from vision_models import save_vision_model

    return save_vision_model(kind, folder)


def _published(published: Any, folder: Path) -> Path:
    from tests.fp8_files import publish

    publish(saved("LlamaForCausalLM", folder.with_name("floats")), folder, published)
    return folder


def _mxfp4_experts(folder: Path) -> Path:
    from checkpoint_copies import with_mxfp4_experts

    return with_mxfp4_experts(saved("GptOssForCausalLM", folder.with_name("floats")), folder)


def _quantized(family: str, method: str, folder: Path) -> Path:
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source = saved(family, folder.with_name("floats"))
    options = METHODS[method]
    if options:
        from vision_models import tokenizer_of

        tokenizer_of("llava").save_pretrained(source)
        options = options | {"calibration": str(ROOT / "examples" / "heldout.txt")}
    quantize_checkpoint(
        QuantizeOptions(input=str(source), output=str(folder), method=method, evaluate=False, **options)
    )
    return folder


def _requests(name: str) -> list[dict[str, Any]]:
    if name.startswith("images: "):
        from vision_models import PLACEHOLDERS, random_image

        mark = PLACEHOLDERS[name.removeprefix("images: ")]
        pair = {"image": [random_image(1), random_image(2, 24, 40)]}
        return [{"prompt": f"see {mark} and {mark}?", "multi_modal_data": pair}, {"prompt": "no image, but text"}]
    return [{"prompt_token_ids": [(n * 37 + t * t * 11) % 310 + 3 for t in range(n)]} for n in (1, 2, 17, 60, 90, 200)]


def _compare(folder: Path, name: str, machine: Machine) -> dict[str, Any]:
    exact = _answers(folder, name, "cpu", "float32")
    rounded = _difference(exact, _answers(folder, name, "cpu", "bfloat16"))
    found = {
        "float32": _difference(exact, _answers(folder, name, machine.device, "float32")),
        "bfloat16": _difference(exact, _answers(folder, name, machine.device, "bfloat16")),
        "on the CPU": rounded,
    }
    near = NEAR_ROUNDED if name.startswith("layout: ") or name.endswith("smooth_quant") else NEAR_32
    return found | {"right": found["float32"] < near and found["bfloat16"] < FACTOR * rounded + NEAR}


def _answers(folder: Path, name: str, device: str, dtype: str) -> list[tuple[list[int], list[float]]]:
    """Tokens of prompts and greedy ones after them, with the log-probability of each but the first."""
    import torch

    from aiakq import LLM, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    llm = LLM(
        str(folder), device=device, dtype=dtype, max_model_len=256, num_gpu_blocks_override=100,
        skip_tokenizer_init=not name.startswith("images: "), **({"max_num_seqs": 8} if device != "cpu" else {}),
    )  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    answers = []
    for output in llm.generate(_requests(name), params, use_tqdm=False):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        answers.append((ids, [step[token].logprob for token, step in zip(ids[1:], steps, strict=True)]))
    llm.engine.check()
    return answers


def _difference(expected: list, found: list) -> float:
    """The mean difference of log-probabilities, up to the first token that differs, of the worst request."""
    worst = 0.0
    for (ids, logprobs), (other_ids, others) in zip(expected, found, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(ids, other_ids, strict=True)) if a != b), len(ids))
        gaps = [abs(a - b) for a, b in zip(logprobs[: same - 1], others[: same - 1], strict=True)]
        assert all(gap == gap for gap in gaps), "nan"
        worst = max(worst, sum(gaps) / max(1, len(gaps)))
    return worst
