"""Compare aiakq's answers from GGUF files with llama.cpp's from the same files, and with those of float64.

    python examples/gguf_equality.py F16.gguf --llama DIR --out DIR [--kinds Q8_0 Q4_K_M ...]

``F16.gguf`` is a Llama as llama.cpp's convert_hf_to_gguf.py or ``aiakq convert --to gguf --gguf-type f16`` writes it,
and DIR of --llama holds llama-quantize and llama-server. The package ``gguf`` must be installed. For each kind,
llama-quantize writes a file, and every prompt is continued greedily by llama.cpp and by aiakq, with activations
rounded to 8 bits (``--cpu-math fast``, as llama.cpp does in its own way) and not (``exact``).

Where they differ, who is right? Two things are compared with aiakq's exact answers: a model in float64
(gguf_reference.py), whose weights ``gguf`` decodes, and llama.cpp itself on a file with the decoded values of the
blocks as F32, which it multiplies without rounding activations.

For every kind, one line of Markdown: how many of the answers are alike, and the mean KL divergence of the next token
in nats, over the whole vocabulary and all steps up to the first that differs; and the largest difference of
log-probabilities above -8.

A second table shows what is left: files in which only the output layer is of blocks, so that llama.cpp rounds
activations once. (In deeper products, the last digit of a sum decides how a value is rounded, and all that follows: no
two programs agree.) The model in float64 computes llama.cpp's tokens as the blocks say, and with activations rounded
to llama.cpp's blocks: KL divergence from llama.cpp, and the share of steps at which all log-probabilities above -8
agree within 1e-4 nats.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gguf_reference import Llama

KINDS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K"),
    *("Q3_K_M", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
HELD_OUT = Path(__file__).resolve().parent / "heldout.txt"
#: The output layer of models whose embeddings are tied.
HEAD = "token_embd.weight"
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


def quantize(programs: Path, source: Path, target: Path, kind: str, pure: bool = False) -> None:
    """Write ``target`` with llama-quantize; if ``pure``, all matrices with one kind of blocks. Raises
    CalledProcessError.
    """
    *options, name = SPECIAL.get(kind, ("--pure", kind) if pure else (kind,))
    words = [*options, str(source), str(target), name, "1"]
    subprocess.run([programs / "llama-quantize", *words], check=True, capture_output=True)


def decode(source: Path, target: Path, kept: Sequence[str] = ()) -> None:
    """Write ``target``, with the values of all blocks of ``source`` as F32, except those of the tensors ``kept``."""
    file = GGUFFile.open(source)

    def values(name: str, kind: Kind) -> Tensor:
        if name in kept:
            return file.read(name)
        return read_floats(file.read(name), kind, name, torch.float32).contiguous().view(torch.uint8)

    written = {
        name: WrittenTensor(
            tensor.kind.name if name in kept else "F32",
            tensor.shape,
            lambda name=name, kind=tensor.kind: values(name, kind),
        )
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
                top = each["top_logprobs"]
                values = torch.tensor([token["logprob"] for token in top], dtype=torch.float64)
                logprobs[step, [token["id"] for token in top]] = values
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
            values = torch.tensor([value.logprob for value in each.values()], dtype=torch.float64)
            logprobs[step, list(each)] = values
        found.append(Answer(list(output.outputs[0].token_ids), normalized(logprobs)))
    return found


# --- float64 ----------------------------------------------------------------------------------------------------------


def reference_answers(
    model: Llama, rounded: bool, prompts: Sequence[list[int]], answers: Sequence[Answer]
) -> list[Answer]:
    """Return what the model in float64 says at each step of ``answers``: its likeliest tokens and log-probabilities."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = model.logprobs(prompt + answer.tokens[:-1], rounded)[len(prompt) - 1 :]
        found.append(Answer(logprobs.argmax(-1).tolist(), logprobs))
    return found


def main() -> None:
    """Print a line for every kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vocab = GGUFFile.open(options.source).tensors["token_embd.weight"].shape[0]
    with server(options.llama, options.source) as address:
        ids = post(f"{address}/tokenize", {"content": HELD_OUT.read_text()[:8000], "add_special": False})["tokens"]
    prompts = [ids[24 * i : 24 * i + 16] for i in range(options.prompts)]
    print_table(
        ["file", "llama.cpp: fast", "exact", "float64: exact", "llama.cpp, decoded to F32: exact"],
        {kind: lambda kind=kind: whole(kind, options, prompts, vocab) for kind in options.kinds},
    )
    print_table(
        ["output layer", "as the blocks say: KL", "within 1e-4", "rounded as llama.cpp: KL", "within 1e-4"],
        {kind: lambda kind=kind: output_layer(kind, options, prompts, vocab) for kind in options.kinds},
    )


def print_table(columns: Sequence[str], rows: Mapping[str, Callable[[], list[str]]]) -> None:
    """Print a table in Markdown, row by row."""
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells()) + " |", flush=True)
    print()


def whole(kind: str, options: argparse.Namespace, prompts: Sequence[list[int]], vocab: int) -> list[str]:
    """Return what the first table says of one kind."""
    blocks, floats = options.out / f"{kind}.gguf", options.out / f"{kind}-F32.gguf"
    if not blocks.exists():
        quantize(options.llama, options.source, blocks, kind)
    if not floats.exists():
        decode(blocks, floats)
    sizes = (prompts, options.tokens, vocab)
    theirs, decoded = (their_answers(options.llama, file, *sizes) for file in (blocks, floats))
    fast, exact = (our_answers(blocks, mode, *sizes) for mode in ("fast", "exact"))
    found = [compare(theirs, fast), compare(theirs, exact)]
    found.append(compare(exact, reference_answers(Llama(blocks), False, prompts, exact)))
    found.append(compare(decoded, exact))
    return [f"{each.alike} of {options.prompts}, {each.kl:.1e}, {each.largest:.1e}" for each in found]


def output_layer(kind: str, options: argparse.Namespace, prompts: Sequence[list[int]], vocab: int) -> list[str]:
    """Return what the second table says of one kind."""
    blocks, head = options.out / f"{kind}-pure.gguf", options.out / f"{kind}-head.gguf"
    if not blocks.exists():
        quantize(options.llama, options.source, blocks, kind, pure=True)
    if not head.exists():
        decode(blocks, head, [HEAD])
    theirs, model = their_answers(options.llama, head, prompts, options.tokens, vocab), Llama(head)
    cells = []
    for rounded in (False, True):
        found = reference_answers(model, rounded, prompts, theirs)
        steps = [
            float((p - q).abs()[p > FLOOR].max())
            for one, other in zip(theirs, found, strict=True)
            for p, q in zip(one.logprobs, other.logprobs, strict=True)
        ]
        same = sum(step <= 1e-4 for step in steps) / len(steps)
        cells += [f"{compare(theirs, found).kl:.1e}", f"{same:.0%}"]
    return cells


if __name__ == "__main__":
    main()
