"""`make gpu` as far as it goes without a GPU: what it measures, on a CPU and small shapes, and the table it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parents[2] / "examples" / "gpu"
CEILINGS = {"gbps": 10.0, "float_tflops": 0.1, "int8_tops": 0.2}


@pytest.fixture
def script(monkeypatch):
    """The modules of the script, which is no package."""
    monkeypatch.syspath_prepend(str(HERE))
    import gpu
    import gpu_speed

    return gpu, gpu_speed


def plenty() -> float:
    return 1000.0


def test_whole_steps(script):
    _, speed = script
    config = speed.LLAMA | {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    found = speed.engine_speed(
        CEILINGS, plenty, config, (1, 3), 40, 8, device="cpu", dtype="float32", num_gpu_blocks_override=40
    )
    rows = found["rows"]
    assert [(row["format"], row["batch"]) for row in rows] == [("w4a16", 1), ("w4a16", 3), ("w8a8", 1), ("w8a8", 3)]
    positive = ("tokens_per_s", "roofline_ms", "step_ms", "one_after_another_ms")
    assert all(row[name] > 0 for row in rows for name in positive)
    assert "w4a16: " in found["notes"]["w4a16 runs"]
    assert not speed.engine_speed(CEILINGS, lambda: 1.0, config)["rows"], "nothing is begun without time"


def test_answers_with_and_without_asynchronous_scheduling(script):
    gpu, _ = script
    assert gpu.one_step_ahead_changes_no_token(device="cpu") == {"equal": 32}


def test_attention(script):
    _, speed = script
    found = speed.attention_speed(CEILINGS, plenty, ((2, 48),), (32,), torch.device("cpu"), torch.float32)
    names = [(row["case"], row["format"]) for row in found["rows"]]
    assert names == [
        ("decode 2 x 48", "ours, float32"), ("decode 2 x 48", "ours, int8"), ("decode 2 x 48", "ours, float8_e4m3fn"),
        ("prompt 32", "ours"),
    ]  # fmt: skip


def test_rooflines_and_ratios(script):
    _, speed = script
    measured = {"gbps": 4300.0, "float_tflops": 790.0, "int8_tops": 1580.0}
    # reference figures of an H200: 65 MB of 4-bit weights and scales, and a product that is bound by its units.
    assert speed.roofline_us(28672, 4096, 1, "w4a16", measured) == pytest.approx(14.5, abs=0.2)
    assert speed.roofline_us(28672, 4096, 4096, "torch bf16", measured) == pytest.approx(1218, abs=2)
    assert speed.step_floor_ms(speed.LLAMA, "w4a16", 1, 1024, measured) == pytest.approx(1.15, abs=0.03)
    rows = [
        {"layer": layer, "format": kind, "rows": 1, "us": us}
        for layer, ours, theirs in (("qkv", 1.0, 2.0), ("down", 1.0, 8.0))
        for kind, us in (("w4a16", ours), ("torch bf16", theirs))
    ]
    assert speed.ratios(rows) == {"w4a16 / torch bf16": {"1": pytest.approx(4.0)}}


def test_the_page(script):
    gpu, _ = script
    page = gpu.markdown(
        {
            "describe": {"gpu": "one"},
            "product_speed": {
                "rows": [{"layer": "qkv", "us": 3.14159, "reached": 0.5}],
                "times": {"w4a16 / torch bf16": {"1": 2.0, "16": 1.5}},
                "notes": {"gemlite w4a16": "ModuleNotFoundError"},
            },
            "sanitized": {"failed": "Traceback\nAssertionError: no"},
            "timings": {"not begun": "3 s are left"},
        }
    )
    for line in (
        "| layer | us | reached |", "| qkv | 3.142 | 0.5 |", "| w4a16 / torch bf16 | 2.00 | 1.50 |",
        "- gemlite w4a16: ModuleNotFoundError", "## sanitized: failed", "    AssertionError: no",
        "## timings: not begun",
    ):  # fmt: skip
        assert line in page.splitlines()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run for minutes")
def test_without_a_gpu_it_says_so(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "gpu.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 7 and "finds no NVIDIA GPU" in done.stderr
