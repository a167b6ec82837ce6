"""Compare aiakq's answers from GGUF files with those of llama.cpp from the same files.

    python examples/gguf_equality.py F16.gguf --llama DIR --out DIR [--kinds Q8_0 Q4_K_M ...]

``F16.gguf`` is a model as llama.cpp's convert_hf_to_gguf.py writes it, and DIR of --llama holds llama-quantize and
llama-server. For each kind, llama-quantize writes a file, and every prompt is continued greedily by llama.cpp and by
aiakq, with activations rounded to 8 bits (``--cpu-math fast``, as llama.cpp does in its own way) and not
(``exact``). A third file holds the decoded values of the blocks as F32, which llama.cpp multiplies without rounding
activations: aiakq's exact answers from the blocks must be its answers.

For every kind, one line of Markdown: how many of the answers are alike, and the mean KL divergence of the next token
in nats, over the whole vocabulary and all steps up to the first that differs, and the largest difference of a log
probability above -8.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiakq import LLM, SamplingParams
from aiakq.formats.gguf.decoding import PLAIN, read_floats
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.kinds import Kind
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf

KINDS = ("Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "IQ4_XS", "Q2_K", "MXFP4")
HELD_OUT = Path(__file__).resolve().parent / "heldout.txt"
#: Log-probabilities below it say little, and are left out of the largest difference.
FLOOR = -8.0
#: What llama-quantize must be told for kinds that are no types of files: matrices of a dense model as MXFP4.
SPECIAL = {"MXFP4": ("--pure", "--tensor-type", ".*=mxfp4", "Q8_0")}


@dataclass
class Answer:
    """A greedy continuation.

    tokens    [T] ids.
    logprobs  [T, V] float64, of the next token before each.
    """

    tokens: list[int]
    logprobs: Tensor


@dataclass
class Difference:
    """How the answers of two engines differ; see the text at the top."""

    alike: int
    kl: float
    largest: float


def compare(theirs: Sequence[Answer], ours: Sequence[Answer]) -> Difference:
    """Compare answers to the same prompts."""
    alike, divergences, largest = 0, [], 0.0
    for one, other in zip(theirs, ours, strict=True):
        steps = len(one.tokens)
        same = next((i for i in range(steps) if one.tokens[i] != other.tokens[i]), steps)
        alike += same == steps
        for p, q in zip(one.logprobs[: same + 1], other.logprobs[: same + 1], strict=True):
            divergences.append(float((p.exp() * (p - q)).sum()))
            largest = max(largest, float((p - q).abs()[p > FLOOR].max()))
    return Difference(alike, math.fsum(divergences) / len(divergences), largest)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def quantize(programs: Path, source: Path, target: Path, kind: str) -> None:
    """Write ``target`` with llama-quantize. Raises CalledProcessError."""
    special = SPECIAL.get(kind)
    words = (
        [str(source), str(target), kind] if special is None else [*special[:-1], str(source), str(target), special[-1]]
    )
    subprocess.run([programs / "llama-quantize", *words, "1"], check=True, capture_output=True)


def decode(source: Path, target: Path) -> None:
    """Write ``target``, with the values of all blocks of ``source`` as F32."""
    file = GGUFFile.open(source)

    def values(name: str, kind: Kind) -> Tensor:
        return read_floats(file.read(name), kind, name, torch.float32).contiguous().view(torch.uint8)

    written = {
        name: WrittenTensor("F32", tensor.shape, lambda name=name, kind=tensor.kind: values(name, kind))
        for name, tensor in file.tensors.items()
    }
    assert all(tensor.kind.name not in PLAIN or tensor.kind.name[0] in "FB" for tensor in file.tensors.values())
    write_gguf(target, file.metadata, written)


@contextmanager
def server(programs: Path, model: Path) -> Iterator[str]:
    """Run llama-server with one thread and a cache of floats; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-t", "1", "-c", "512", "-np", "1", "--no-warmup", "-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    command = [programs / "llama-server", "-m", model, "--port", str(port), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/health").close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"llama-server ends with {process.returncode} for {model}") from None
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def post(url: str, document: dict[str, Any]) -> Any:
    """Return the JSON answer to a request."""
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(document).encode(), headers)) as answer:
        return json.load(answer)


def their_answers(programs: Path, model: Path, prompts: Sequence[list[int]], tokens: int, vocab: int) -> list[Answer]:
    """Return the greedy continuations of llama.cpp."""
    found = []
    with server(programs, model) as address:
        for prompt in prompts:
            words = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
            words |= {"n_probs": vocab, "ignore_eos": True, "return_tokens": True}
            answer = post(f"{address}/completion", words)
            logprobs = torch.full((tokens, vocab), -math.inf, dtype=torch.float64)
            for step, each in enumerate(answer["completion_probabilities"]):
                for token in each["top_logprobs"]:
                    logprobs[step, token["id"]] = token["logprob"]
            found.append(Answer(answer["tokens"], normalized(logprobs)))
    return found


def normalized(logprobs: Tensor) -> Tensor:
    """Return log probabilities [T, V] whose exponentials sum to 1: tokens without one get that of a tiny chance."""
    return torch.log_softmax(logprobs.clamp(min=-60), dim=1)


# --- aiakq ------------------------------------------------------------------------------------------------------------


def our_answers(model: Path, cpu_math: str, prompts: Sequence[list[int]], tokens: int, vocab: int) -> list[Answer]:
    """Return the greedy continuations of aiakq with ``cpu_math``."""
    llm = LLM(model=str(model), cpu_math=cpu_math, max_model_len=512, max_num_seqs=4, max_logprobs=-1)
    # Equal ends of sentences: all tokens may follow.
    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=vocab, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    found = []
    for output in outputs:
        logprobs = torch.full((tokens, vocab), -math.inf, dtype=torch.float64)
        for step, each in enumerate(output.outputs[0].logprobs or ()):
            for token, value in each.items():
                logprobs[step, token] = value.logprob
        found.append(Answer(list(output.outputs[0].token_ids), normalized(logprobs)))
    return found


def main() -> None:
    """Print a line for every kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vocab = GGUFFile.open(options.source).tensors["token_embd.weight"].shape[0]
    with server(options.llama, options.source) as address:
        ids = post(f"{address}/tokenize", {"content": HELD_OUT.read_text()[:8000], "add_special": False})["tokens"]
    prompts = [ids[24 * i : 24 * i + 16] for i in range(options.prompts)]
    print(
        "| file | alike, fast | KL, fast | alike, exact | KL, exact | decoded to F32: alike, KL, largest difference |"
    )
    print("|---|---|---|---|---|---|")
    for kind in options.kinds:
        blocks, floats = options.out / f"{kind}.gguf", options.out / f"{kind}-F32.gguf"
        if not blocks.exists():
            quantize(options.llama, options.source, blocks, kind)
        if not floats.exists():
            decode(blocks, floats)
        sizes = (prompts, options.tokens, vocab)
        theirs, decoded = (their_answers(options.llama, file, *sizes) for file in (blocks, floats))
        fast, exact = (our_answers(blocks, mode, *sizes) for mode in ("fast", "exact"))
        cells = [compare(theirs, fast), compare(theirs, exact), compare(decoded, exact)]
        count = options.prompts
        words = [f"{each.alike} of {count} | {each.kl:.1e}" for each in cells[:2]]
        last = f"{cells[2].alike} of {count}, {cells[2].kl:.1e}, {cells[2].largest:.1e}"
        print(f"| {kind} | {' | '.join(words)} | {last} |", flush=True)


if __name__ == "__main__":
    main()
