"""`make gpu` without a GPU: its steps rehearsed on the CPU, and the table that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aiakq.kernels.triton import self_test

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


def rehearse(tmp_path: Path, *names: str, **environment: str) -> tuple[int, dict]:
    """The exit status and the results of ``make gpu`` on the CPU."""
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu.py"), "--rehearse", *names],
        env=os.environ | {"OUT": str(tmp_path)} | environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (tmp_path / "gpu.md").read_text().startswith("# make gpu"), done.stderr
    return done.returncode, json.loads((tmp_path / "gpu.json").read_text())


def test_a_rehearsal_runs_everything_but_the_hardware(tmp_path):
    names = (
        "describe", "kernels: norm", "kernels: activation", "kernels: gated norm", "graphs_replay",
        "tokens_match_the_cpu", "asynchronous_scheduling", "draft_tokens", "engine: w8a16", "families: part 0",
        "ceilings",
        "attention_speed", "latent_speed", "recurrent_speed", "chunk_variants", "engine_speed", "verification_speed",
        "tuning",
    )  # fmt: skip
    code, results = rehearse(tmp_path, *names)
    assert code == 0 and list(results) == list(names)
    assert results["kernels: norm"]["error"] < 0.02
    assert results["tokens_match_the_cpu"] == {"equal": 32, "near_ties": 0}
    assert results["asynchronous_scheduling"] == {"equal": 32}
    assert all(results["draft_tokens"][method]["equal"] == 5 for method in ("ngram", "suffix"))
    assert all(results["engine: w8a16"][mode].startswith("5 of 5") for mode in ("eager", "graphs", "asynchronous"))
    assert all(row["right"] for row in results["families: part 0"]["rows"])
    steps = {row["method"]: row["steps"] for row in results["verification_speed"]["rows"]}
    assert steps["none"] > max(steps["ngram"], steps["suffix"])
    assert results["graphs_replay"] == results["tuning"] == results["chunk_variants"] == {"not begun": "it needs a GPU"}
    rows = results["latent_speed"]["rows"]
    stored = [f"ours, {name}" for name in ("float32", "int8", "float8_e4m3fn")]
    assert [row["case"] for row in rows] == ["decode 2 x 48"] * 3 + ["prompt 20"] * 3
    assert [row["format"] for row in rows] == 2 * stored and all(row["reached"] > 0 for row in rows)
    rows = results["recurrent_speed"]["rows"]
    assert [row["case"] for row in rows] == ["small, decode 2"] * 3 + ["small, prompt 1 x 20"] * 3
    assert [row["format"] for row in rows] == 2 * ["convolution", "recurrence", "gated norm"]
    rows = results["engine_speed"]["rows"]
    made = [(name, batch) for name in ("w4a16", "w8a8", "fp8", "fp8 blocks", "bf16") for batch in (1, 3)]
    assert [(row["format"], row["batch"]) for row in rows] == made
    positive = ("tokens_per_s", "roofline_ms", "step_ms", "synchronous_ms")
    assert all(row[name] > 0 for row in rows for name in positive)


def test_steps_over_two_ranks_run_without_a_gpu(tmp_path):
    names = ("ranks_agree", "meeting_times", "ceilings", "rank_speed")
    code, results = rehearse(tmp_path, *names)
    assert code == 0 and results["ranks_agree"]["exact"] == 32
    rows = results["meeting_times"]["rows"]
    assert [row["operation"] for row in rows] == ["all-reduce", "gather"] * 4 and all(row["us"] > 0 for row in rows)
    rows = results["rank_speed"]["rows"]
    modes = [(row["ranks"], row["math"]) for row in rows if row["format"] == "w8a8" and row["batch"] == 3]
    assert modes == [(1, "fast"), (2, "fast"), (2, "exact")] and all(row["tokens_per_s"] > 0 for row in rows)


def test_steps_over_two_ranks_say_when_there_is_one_gpu(script, monkeypatch):
    import gpu_ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(gpu_ranks.NeedsGpuError, match="it needs 2 GPUs, and 1 can be seen"):
        gpu_ranks.ranks_agree(gpu_ranks.Machine("cuda"))


def test_every_family_of_kernels_has_a_step(script):
    gpu, _ = script
    assert gpu.FAMILIES == tuple(self_test.FAMILIES)


def test_a_step_that_crashes_or_hangs_costs_only_itself(tmp_path, script, monkeypatch):
    gpu, _ = script
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    program = tmp_path / "broken.py"
    program.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import gpu\n"
        "gpu.__file__ = __file__\n"
        "def crash(given): given.save({'rows': [{'first': 1}]}); os.abort()\n"
        "def hang(given): given.save({'rows': [{'first': 2}]}); time.sleep(600)\n"
        "def wrong(given): raise AssertionError('off by 50 %')\n"
        "gpu.__dict__['__file__'] = __file__\n"
        "gpu.STEPS = {'crash': gpu.Step(crash, 60), 'hang': gpu.Step(hang, 8), 'wrong': gpu.Step(wrong, 60)}\n"
        f"gpu.OUT = gpu.Path({str(tmp_path)!r})\n"
        "sys.exit(gpu.main(sys.argv[1:]))\n"
    )
    done = subprocess.run([sys.executable, str(program), "--rehearse"], capture_output=True, text=True, timeout=100)
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 1, done.stderr
    assert [row["first"] for name in ("crash", "hang") for row in results[name]["rows"]] == [1, 2], "kept"
    assert "exit status -6" in results["crash"]["failed"]
    assert "ended after 8 s" in results["hang"]["failed"]
    assert "AssertionError: off by 50 %" in results["wrong"]["failed"]


def test_answers_part_only_at_near_ties(script):
    import gpu_checks

    def answer(tokens: list[int], other: float) -> SimpleNamespace:
        chosen = [{token: SimpleNamespace(logprob=-1.0), 9: SimpleNamespace(logprob=other)} for token in tokens]
        return SimpleNamespace(token_ids=tokens, logprobs=chosen)

    assert not gpu_checks.parts_at_a_tie(answer([1, 2], -5), answer([1, 2], -5))
    assert gpu_checks.parts_at_a_tie(answer([1, 2], -1.001), answer([1, 9], -5))
    with pytest.raises(AssertionError, match="token 1: 2 expected, 9 found"):
        gpu_checks.parts_at_a_tie(answer([1, 2], -2), answer([1, 9], -5))


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
    import gpu_steps

    measured = {"gbps": 4300.0, "float_tflops": 790.0, "int8_tops": 1580.0}
    # reference figures of an H200: 65 MB of 4-bit weights and scales, and a product that is bound by its units.
    assert speed.roofline_us(28672, 4096, 1, "w4a16", measured) == pytest.approx(14.5, abs=0.2)
    assert speed.roofline_us(28672, 4096, 4096, "torch bf16", measured) == pytest.approx(1218, abs=2)
    assert gpu_steps.step_floor_ms(speed.LLAMA, "w4a16", 1, 1024, measured) == pytest.approx(1.15, abs=0.03)
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
def test_without_a_gpu_a_message_says_so(tmp_path):
    done = subprocess.run([sys.executable, str(HERE / "gpu.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 7 and "finds no NVIDIA GPU" in done.stderr
