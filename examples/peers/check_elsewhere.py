"""Check that our checkpoints load in transformers and in vLLM's CPU build, with the same outputs.

    python examples/peers/check_elsewhere.py ORIGINAL FOLDER...

Sixteen prompts of 24 tokens, 32 greedy tokens each, in float32 where the engine supports it. Otherwise the engine's
log-probabilities of its own tokens are compared with those of our runtime in float32; the same difference for the
original model in that engine shows the rounding of the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import environments
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
TEXT = ROOT / "examples" / "heldout.txt"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 24, 32
#: Engine -> its environment and the dtypes to try; the first that it accepts is used.
ENGINES = {"transformers": ("gptqmodel", ("float32",)), "vllm": ("vllm", ("float32", "bfloat16"))}
#: vLLM has no 8-bit weight-only kernel for CPUs.
NO_KERNEL = {("vllm", "weight_only_int8"): "no 8-bit weight-only kernel for CPUs there"}


def main() -> None:
    original, *folders = map(Path, sys.argv[1:])
    rows = check(original, {folder.name: folder for folder in folders}, ROOT / "out" / "elsewhere")
    for line in table(rows):
        print(line)


def check(original: Path, folders: dict[str, Path], scratch: Path) -> list[dict[str, Any]]:
    """Run every engine on the original and every folder; return one row each, with results or the reason of failure."""
    scratch.mkdir(parents=True, exist_ok=True)
    prompts = prompts_for(original)
    rows = []
    for engine, (environment, dtypes) in ENGINES.items():
        python = environments.python_of(environment)
        rounding: dict[str, Any] = {}
        for name, folder in {"original": original, **folders}.items():
            why_not = python if isinstance(python, str) else NO_KERNEL.get((engine, name))
            answers = []
            for dtype in () if why_not else dtypes:
                answer = ask(python, engine, folder, dtype, prompts, scratch)
                if "failed" in answer:
                    why_not = answer["failed"]
                    continue
                compared = compare(folder, original, prompts, answer)
                answers.append({"dtype": dtype, "versions": answer["versions"], **compared})
                if name != "original":
                    answers[-1]["rounding"] = rounding.get(dtype)
                    break
                # The original shows how exact the engine is in every dtype; the others use the first dtype that works.
                rounding[dtype] = compared["gap"]
            for answer in answers or [{"failed": why_not}]:
                rows.append({"engine": engine, "name": name, **answer})
    return rows


def prompts_for(model: Path) -> list[list[int]]:
    """Pieces of the held-out book as token ids, evenly spread."""
    from aiakq.data.tokens import read_documents, tokenize
    from aiakq.runtime.text.tokenizer import Tokenizer

    ids = [token for piece in tokenize(read_documents(TEXT), Tokenizer.load(str(model)).hf) for token in piece]
    step = len(ids) // PROMPTS
    return [ids[i * step : i * step + PROMPT_TOKENS] for i in range(PROMPTS)]


def ask(python: Path, engine: str, folder: Path, dtype: str, prompts: list[list[int]], scratch: Path) -> dict[str, Any]:
    """Return what the script of the engine reports, or ``failed`` with its last line of output."""
    request, result, log = (
        scratch.resolve() / f"{engine}-{folder.name}-{dtype}.{end}" for end in ("ask", "json", "log")
    )
    result.unlink(missing_ok=True)
    fields = {"model": str(folder.resolve()), "dtype": dtype, "prompts": prompts, "max_tokens": NEW_TOKENS}
    request.write_text(json.dumps(fields))
    with log.open("w") as out:
        words = [str(python.absolute()), str(SCRIPTS / f"engine_{engine}.py"), str(request), str(result)]
        # Not in the root, because transformers would import the folder kernels/ as a package of that name.
        variables = environments.variables()
        try:
            subprocess.run(words, cwd=scratch, stdout=out, stderr=subprocess.STDOUT, timeout=1800, env=variables)
        except subprocess.TimeoutExpired:
            return {"failed": "no answer in 30 minutes"}
    if result.is_file():
        return json.loads(result.read_text())
    lines = [
        line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line or "error" in line
    ]
    return {"failed": (lines or ["it ended without a word"])[-1][:200]}


def compare(folder: Path, original: Path, prompts: list[list[int]], answer: dict[str, Any]) -> dict[str, Any]:
    """Compare the engine's outputs with those of our runtime in float32.

    same        prompts whose tokens all equal ours.
    gap, worst  mean and largest difference between the log-probabilities of the engine's tokens, there and here.
    call        at the first different token: how much more likely ours was here, the largest of all prompts.
    quantizing  mean difference of log-probabilities between this checkpoint and the original, both here.
    """
    from aiakq import LLM, SamplingParams
    from aiakq.evaluation.scoring import load_for_scoring

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm = LLM(str(folder), dtype="float32", cpu_math="exact")
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    ours = [list(output.outputs[0].token_ids) for output in outputs]
    texts = torch.tensor([prompt + tokens for prompt, tokens in zip(prompts, answer["tokens"], strict=True)])
    wanted = texts[:, PROMPT_TOKENS:]

    def scores(model: Path) -> torch.Tensor:
        logits = load_for_scoring(model, dtype="float32").logits(texts)[:, PROMPT_TOKENS - 1 : -1]
        return torch.log_softmax(logits, -1).cpu()

    here = scores(folder)
    known = here.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    gap = (known - torch.tensor(answer["logprobs"])).abs()
    apart = scores(original).gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - known
    calls = []
    for row, (mine, theirs) in enumerate(zip(ours, answer["tokens"], strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        if at is not None:
            calls.append(float(here[row, at, mine[at]] - here[row, at, theirs[at]]))
    return {
        "same": len(prompts) - len(calls),
        "prompts": len(prompts),
        "gap": float(gap.mean()),
        "worst": float(gap.max()),
        "call": max(calls, default=None),
        "quantizing": float(apart.abs().mean()),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a Markdown table."""
    lines = [
        "| engine | checkpoint | dtype | same tokens | closest call | log p differs (mean, worst) | its own rounding "
        "| quantizing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['engine']} | {row['name']} | | {row['failed']} | | | | |")
            continue
        own, call = (f"{row[key]:.1e}" if row.get(key) is not None else "" for key in ("rounding", "call"))
        lines.append(
            f"| {row['engine']} | {row['name']} | {row['dtype']} | {row['same']} of {row['prompts']} | {call} | "
            f"{row['gap']:.1e}, {row['worst']:.1e} | {own} | {row['quantizing']:.1e} |"
        )
    return lines


if __name__ == "__main__":
    main()
