"""Work that is interrupted at any moment: the output is absent or whole, the input untouched, and it can be resumed."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.run_report import REPORT_FILE

QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}
#: Times the work is killed. More with AIAKQ_KILLS=200, which takes minutes.
KILLS = int(os.environ.get("AIAKQ_KILLS", "50"))


def options(source: Path, output: Path, method: str, **fields: Any) -> QuantizeOptions:
    if method in ("awq", "gptq"):
        fields.setdefault("group_size", 32)
    return QuantizeOptions(str(source), str(output), method, **{**QUICK, **fields})


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file that must not differ between runs: all but the report, which holds times."""
    names = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json"))
    kept = [path for path in names if path.name not in (REPORT_FILE, "aiakq_manifest.json")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}


def stop_at(block: int) -> Callable[[StageProgress], None]:
    def tell(progress: StageProgress) -> None:
        if progress.stage == "quantize" and progress.done == block:
            raise KeyboardInterrupt

    return tell


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        *((method, {}) for method in ("weight_only_int8", "smooth_quant", "awq", "gptq")),
        ("gptq", {"importance": "gradient", "rotate": "hadamard"}),
        ("gptq", {"importance": "gradient-rows", "bits": 2}),
        ("awq", {"targets": "original", "rotate": "learned"}),
        ("fp8", {"activation_scales": "tensor"}),
        ("mxfp4", {"gptq": True}),
        ("nvfp4", {"gptq": True, "activation_bits": 4}),
    ],
)
def test_a_resumed_run_gives_the_same_bytes(
    method: str, fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("LlamaForCausalLM")
    quantize_checkpoint(options(source, tmp_path / "whole", method, **fields))
    wanted = options(source, tmp_path / "out", method, resume=True, **fields)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(wanted, stop_at(1))
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(wanted)
    assert report.resumed_from == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    first, second = (json.loads((tmp_path / name / REPORT_FILE).read_text()) for name in ("whole", "out"))
    assert first["layers"] == second["layers"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_mixed_precision_runs_with_folding_are_resumed(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("Qwen2ForCausalLM")
    fields = {
        "layer": ("*.0.mlp.*=bits:8,group:-1",),
        "skip": ("*o_proj",),
        "lm_head": 8,
        "awq_scaling": True,
        "activation_memory": 0.0,
    }
    quantize_checkpoint(options(source, tmp_path / "whole", "gptq", **fields))
    wanted = options(source, tmp_path / "out", "gptq", resume=True, **fields)
    for moment in (stop_at(1), stop_at(2)):
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(wanted, moment)
    assert quantize_checkpoint(wanted).resumed_from == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_run_interrupted_while_measuring_quantizes_nothing_again(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Everything is on disk by then, so nothing is quantized again."""
    source = tiny_model("LlamaForCausalLM")
    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 20)
    wanted = options(source, tmp_path / "out", "gptq", resume=True, evaluate=True, eval_text=text)

    def tell(progress: StageProgress) -> None:
        if progress.stage == "evaluate":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(wanted, tell)
    seen: list[str] = []
    report = quantize_checkpoint(wanted, lambda progress: seen.append(progress.stage))
    assert "calibrate" not in seen
    assert report.kl is not None


@pytest.mark.parametrize("change", ["seed", "source"])
def test_a_different_run_is_not_resumed(change: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for path in tiny_model("LlamaForCausalLM").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(options(source, tmp_path / "out", "gptq", resume=True), stop_at(1))
    if change == "source":
        os.utime(source / "model.safetensors", (1, 1))
    fields = {"seed": 1} if change == "seed" else {}
    assert quantize_checkpoint(options(source, tmp_path / "out", "gptq", resume=True, **fields)).resumed_from == 0


def test_a_damaged_step_is_repeated(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    wanted = options(source, tmp_path / "out", "gptq", resume=True)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(wanted, stop_at(2))
    step = next(tmp_path.glob(".out*/step-00001.safetensors"))
    data = bytearray(step.read_bytes())
    data[-5] ^= 1
    step.write_bytes(data)
    assert quantize_checkpoint(wanted).resumed_from == 1


def test_without_resume_nothing_is_kept_or_taken_over(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(options(source, tmp_path / "out", "gptq"), stop_at(1))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(options(source, tmp_path / "out", "gptq", resume=True), stop_at(1))
    assert quantize_checkpoint(options(source, tmp_path / "out", "gptq")).resumed_from == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_layer_that_fails_read_back_is_not_published(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiakq.formats import gptq

    real = gptq.write

    def broken(*args: Any) -> Any:
        tensors = real(*args)
        tensors["qweight"][0, 0] ^= 1
        return tensors

    monkeypatch.setattr(gptq, "write", broken)
    with pytest.raises(AiakqError) as caught:
        quantize_checkpoint(options(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq"))
    assert caught.value.id == "not_as_written"
    assert list(tmp_path.iterdir()) == []


#: Forks a child per line of input; forking happens before torch starts threads, which would not survive it.
ZYGOTE = textwrap.dedent(
    """
    import os, sys
    import torch
    torch.set_num_threads(1)
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    def work(source, output, resume):
        quantize_checkpoint(QuantizeOptions(source, output, "gptq", group_size=32, samples=4, seqlen=32, evaluate=False,
                                            device="cpu", overwrite=True, resume=resume))

    work(sys.argv[1], sys.argv[2], False)  # imports what it needs, once for all
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            work(sys.argv[1], sys.argv[2], line.strip() == "resume")
            os._exit(0)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)
    """
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """kill -9 again and again: never half an output, never a changed input; the work gets done, byte for byte."""
    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out"
    before = contents(source)
    words = [sys.executable, "-c", ZYGOTE, str(source), str(output)]
    zygote = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert zygote.stdin is not None and zygote.stdout is not None

    def run(resume: bool, seconds: float | None) -> bool:
        """Whether it ended by itself before ``seconds``."""
        assert zygote.stdin is not None and zygote.stdout is not None
        zygote.stdin.write("resume\n" if resume else "afresh\n")
        zygote.stdin.flush()
        child = int(zygote.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = int(zygote.stdout.readline())
        assert status in (0, signal.SIGKILL), status
        return status == 0

    try:
        assert zygote.stdout.readline().strip() == "ready"
        began = time.monotonic()
        assert run(False, None)
        longest = time.monotonic() - began
        wanted = contents(output)
        chance = random.Random(0)
        for number in range(KILLS):
            resume = number % 3 > 0
            run(resume, chance.random() * longest)
            # The first run's output is replaced in one step, by the same bytes, or not at all.
            assert contents(output) == wanted, number
            assert contents(source) == before, number
        assert run(True, None)
        assert contents(output) == wanted
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        Checkpoint.open(output)
    finally:
        zygote.stdin.close()
        zygote.wait(30)
        zygote.stdout.close()
