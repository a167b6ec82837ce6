"""The comparison of launch configurations of `make gpu`, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from aiakq.kernels.triton import configs

FOLDER = Path(__file__).parents[2] / "examples" / "gpu"
GPU = configs.Gpu("nvidia-h200", 132, 90)


@pytest.fixture
def variants(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import gpu_variants

    return gpu_variants


def row(bits, rows, entry, mean, **more) -> dict:
    speeds = {"qkv": mean, "output": mean, "mean": mean} if "problem" not in more else {}
    return {"bits": bits, "used": False, "rows": rows, "entry": json.dumps(entry), "error": 0.0} | speeds | more


def test_every_entry_is_a_configuration_and_the_one_in_use_comes_first(variants):
    switches = {field.name for field in fields(configs.Config)}
    for bits in variants.TRIED:
        for rows in variants.ORDER:
            used, *tried = variants.entries_for(bits, rows, GPU)
            assert used == configs.entry_for(GPU, "grouped", bits, rows) and used not in tried
            for entry in tried:
                words = [] if entry == "dense" else entry[5:]
                assert set(words) <= switches, entry


def test_the_fastest_entries_that_are_right_become_the_launch_file(variants):
    fast, wrong = [128, 64, 8, 4, 1, "scale_first", "joined"], [64, 64, 4, 4, 2, "joined"]
    table = [
        row(4, 64, [128, 64, 8, 4, 2, "scale_first"], 1.0, used=True),
        row(4, 64, fast, 1.5),
        row(4, 64, wrong, 2.0, problem="differs by 0.3"),
        row(4, 512, fast, 0.9),
        row(4, 1024, "dense", 0.8),
    ]
    file = json.loads(variants.launch_file(table, GPU))
    given = json.loads((configs.FOLDER / "sm_90.json").read_text())
    grouped = file["grouped"]["4"]
    assert grouped["64"] == grouped["512"] == fast and grouped["1024"] == "dense"
    assert list(grouped.items())[:3] == list(given["grouped"]["4"].items())[:3], "rows that were not timed"
    assert grouped["256"] == given["grouped"]["4"]["256"]
    assert file["integers"] == given["integers"] and file["grouped"]["2"] == given["grouped"]["2"]
    text = variants.text(table, {64: {"qkv": 10.0, "output": 8.0}}, {"compiled": "all"})
    assert text.splitlines() == [
        "compiled: all",
        "64 rows, torch us: qkv 10.0, output 8.0",
        " w4 1.500 (1.50 1.50) [128, 64, 8, 4, 1, scale_first, joined]",
        " w4 1.000 (1.00 1.00) *[128, 64, 8, 4, 2, scale_first]",
        " w4 failed: [64, 64, 4, 4, 2, joined]: differs by 0.3",
    ]


def test_entries_that_fail_or_differ_are_named(variants):
    class Product:
        k, device = 16, torch.device("cpu")

        def microseconds(self, x, entry):
            if entry == "broken":
                raise RuntimeError("out of resource\nmore")
            return 4.0, 0.5 if entry == "wrong" else 0.001

    products, torch_us = {"qkv": Product(), "output": Product()}, {"qkv": 8.0, "output": 2.0}
    found = variants.measure("good", 2, products, torch_us)
    assert found["mean"] == pytest.approx(1.0) and found["qkv"] == 2 and "problem" not in found
    assert variants.measure("wrong", 2, products, torch_us)["problem"] == "differs by 0.5"
    assert variants.measure("broken", 2, products, torch_us)["problem"] == "RuntimeError: out of resource"


@pytest.mark.timeout(120)
def test_launches_are_compiled_without_a_gpu(tmp_path):
    words = ["--gpu", json.dumps(GPU), "--shapes", json.dumps({"qkv": (128, 256)}), "--part", "0", "500"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu_variants.py"), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr
    assert len(list(tmp_path.rglob("grouped_kernel.cubin"))) == 1
