"""Workers as processes: the bytes of one for every method; a lost worker ends the run by name and leaves nothing."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.workers import other_worker

#: 6144 tokens in eight batches, so that some of them are not in the sample that every worker has.
MANY = {"samples": 96, "seqlen": 64}
NAME = "aiakq.quantizers.worker_process"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc"),
]


def worker_processes(parent: int) -> list[int]:
    """The workers among the children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if NAME.encode() in command and int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(int(folder.name))
    return sorted(found)


def digest(folder: Path) -> str:
    files = [folder / "model.safetensors", *folder.glob("aiakq/*")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize(
    ("method", "workers", "fields"),
    [
        ("weight_only_int8", 2, {}),
        ("smooth_quant", 2, {}),
        ("awq", 2, {"activation_memory": 0.0}),
        ("gptq", 2, {}),
        ("gptq", 3, {"gptaq": True, "awq_scaling": True, "layer": ("*.0.mlp.*=bits:8",)}),
        ("smooth_quant", 3, {"smooth_alpha": "auto", "activation_scales": "tensor", "gptq": True}),
    ],
    ids=["int8", "smooth_quant", "awq", "gptq", "gptaq", "static"],
)
def test_the_bytes_are_those_of_one_worker(
    method: str,
    workers: int,
    fields: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
) -> None:
    source = tiny_model("LlamaForCausalLM")
    threads = torch.get_num_threads()
    one = quantize(source, tmp_path / "one", method, **MANY, **fields)
    several = quantize(source, tmp_path / "several", method, workers=workers, **MANY, **fields)
    assert torch.get_num_threads() == threads
    assert digest(tmp_path / "one") == digest(tmp_path / "several")
    assert one.layers == several.layers and one.warnings == several.warnings and one.recipe == several.recipe
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "several"]
    assert not worker_processes(os.getpid())


def test_threads_do_not_change_the_bytes(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            quantize(tiny_model("LlamaForCausalLM", num_hidden_layers=1), tmp_path / str(threads), "gptq", samples=16)
            digests.add(digest(tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@pytest.mark.parametrize(("method", "fields"), [("awq", {}), ("gptq", {"awq_scaling": True}), ("gptq", {"bits": 3})])
def test_another_number_of_workers_resumes_a_run(
    method: str,
    fields: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
) -> None:
    source = tiny_model("LlamaForCausalLM")

    def stop(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == 1:
            raise KeyboardInterrupt

    def options(out: str, workers: int) -> QuantizeOptions:
        return QuantizeOptions(
            str(source), str(tmp_path / out), method, group_size=32, evaluate=False, device="cpu", resume=True,
            workers=workers, **MANY, **fields,
        )  # fmt: skip

    quantize_checkpoint(options("whole", 1))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(options("out", 2), stop)
    assert not worker_processes(os.getpid())
    assert quantize_checkpoint(options("out", 3)).resumed_from == 1
    assert digest(tmp_path / "whole") == digest(tmp_path / "out")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_lost_worker_is_named_and_nothing_is_left(
    sign: signal.Signals, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_worker, "TIME_LIMIT", 4.0)
    source = tiny_model("LlamaForCausalLM")
    resume = sign == signal.SIGKILL
    options = QuantizeOptions(
        str(source), str(tmp_path / "out"), "gptq", group_size=32, evaluate=False, device="cpu", workers=2,
        resume=resume, **MANY,
    )  # fmt: skip
    lost: list[int] = []

    def lose(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == 1 and not lost:
            lost.extend(worker_processes(os.getpid()))
            os.kill(lost[0], sign)

    began = time.monotonic()
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options, lose)
    assert time.monotonic() - began < 30
    if sign == signal.SIGKILL:
        assert caught.value.id == "worker_failed" and "Worker 1 failed: it was ended by SIGKILL." in str(caught.value)
    else:
        assert caught.value.id == "worker_late" and "Worker 1 sent no heartbeat for 4 s." in str(caught.value)
    assert not worker_processes(os.getpid()) and not Path(f"/proc/{lost[0]}").exists()
    if resume:
        assert quantize_checkpoint(options).resumed_from == 1
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    else:
        assert list(tmp_path.iterdir()) == []


def test_workers_end_with_the_process_that_started_them(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    words = ["quantize", "-i", str(tiny_model("LlamaForCausalLM")), "-o", str(tmp_path / "out"), "-quant_type", "gptq"]
    words += ["--group-size", "32", "--samples", "4096", "--seqlen", "128", "--workers", "3", "--device", "cpu"]
    command = [sys.executable, "-m", "aiakq", *words]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        workers: list[int] = []
        deadline = time.monotonic() + 60
        while len(workers) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            workers = worker_processes(parent.pid)
        assert len(workers) == 2
        time.sleep(0.5)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{number}").exists() for number in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [number for number in workers if Path(f"/proc/{number}").exists()]


def test_an_error_of_a_worker_is_that_of_the_run(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Every worker meets a model without one finite activation; the run ends with that, and once."""
    from safetensors.torch import load_file, save_file

    source = tmp_path / "in"
    source.mkdir()
    for path in tiny_model("LlamaForCausalLM").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.full_like(tensors["model.layers.1.mlp.up_proj.weight"], 3e38)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    options = QuantizeOptions(
        str(source), str(tmp_path / "out"), "gptq", group_size=32, evaluate=False, device="cpu", workers=2, **MANY
    )
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options)
    assert caught.value.id == "not_finite"
    assert not worker_processes(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_workers_without_a_meaning_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    for workers in (0, 9):
        with pytest.raises(AiakqError) as caught:
            QuantizeOptions(source, str(tmp_path / "out"), "gptq", workers=workers)
        assert caught.value.id == "bad_option"
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(QuantizeOptions(source, str(tmp_path / "out"), "gptq", workers=2, device="cpu,cpu"))
    assert caught.value.id == "option_conflict" and "--workers" in str(caught.value)


def test_the_command_shows_nothing_of_its_workers(
    tiny_model: Callable[..., Path], process: Callable[..., Any], tmp_path: Path
) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    words = ["-quant_type", "weight_only_int8", "--no-eval", "--device", "cpu", "--workers", "2"]
    ended = process("quantize", "-i", source, "-o", str(tmp_path / "out"), *words)
    assert ended.code == 0
    assert "worker" not in ended.err.lower() and "torch" not in ended.err
