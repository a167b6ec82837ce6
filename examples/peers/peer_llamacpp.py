"""llama.cpp: an importance matrix of the samples, then a mix of K-quants. ``kind`` in the request is the mix.

Its programs are those of the folder $LLAMA_CPP. Embeddings and the output layer stay in 16 bits, as with other tools.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import job
from transformers import AutoTokenizer

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint


def quantize(request: dict[str, Any]) -> None:
    programs, output = Path(os.environ["LLAMA_CPP"]), Path(request["output"])
    output.mkdir(parents=True)
    whole, samples, matrix = (output.with_name(f"{output.name}.{end}") for end in ("f16.gguf", "txt", "imatrix.gguf"))
    convert_checkpoint(
        ConvertArguments(input=request["model"], output=str(whole), to="gguf", gguf_type="f16", overwrite=True)
    )
    tokenizer, ids = AutoTokenizer.from_pretrained(request["model"]), job.calibration(request)
    samples.write_text("\n".join(tokenizer.decode(sample, skip_special_tokens=True) for sample in ids))
    threads = str(request["threads"])
    words = [
        programs / "llama-imatrix",
        "-m",
        whole,
        "-f",
        samples,
        "-o",
        matrix,
        "-c",
        str(len(ids[0])),
        "-t",
        threads,
    ]
    subprocess.run([*words, "--no-ppl"], check=True)
    kept = ["--token-embedding-type", "f16", "--output-tensor-type", "f16"]
    words = [
        programs / "llama-quantize",
        "--imatrix",
        matrix,
        *kept,
        whole,
        output / "model.gguf",
        request["kind"],
        threads,
    ]
    subprocess.run(words, check=True)
    for path in (whole, samples, matrix):
        path.unlink()


if __name__ == "__main__":
    job.run(("torch", "transformers"), quantize)
