"""The parts of `make bench-cpu` without the other engines: the model, the rows, the section of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, EXAMPLES / "peers", EXAMPLES / "cpu_peers"):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model of the benchmark, but small."""
    import shape

    sizes = {"HIDDEN": 128, "LAYERS": 1, "INNER": 256, "VOCAB": 96}
    for name, size in sizes.items():
        monkeypatch.setattr(shape, name, size)
    linears = {
        name: (256 if n == 8192 else {2048: 128, 512: 64}[n], 256 if k == 8192 else 128)
        for name, (n, k) in shape.LINEARS.items()
    }
    monkeypatch.setattr(shape, "LINEARS", linears)
    fields = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields |= {"num_key_value_heads": 1, "vocab_size": 96}
    monkeypatch.setattr(shape, "CONFIG", shape.CONFIG | fields)
    return shape


@pytest.mark.parametrize("kind", ["source", "w4", "w4-awq", "w8", "w8a8"])
def test_model_of_every_kind_generates(small: Any, tmp_path: Path, kind: str) -> None:
    from aiakq import LLM, SamplingParams

    llm = LLM(str(small.folder(kind, tmp_path)), num_gpu_blocks_override=8, max_model_len=64)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    assert len(outputs[0].outputs[0].token_ids) == 3


def test_bytes_of_a_token_are_those_on_disk(small: Any, tmp_path: Path) -> None:
    """Bytes read per token are those of the files without norms, headers and unused tensors."""
    for kind in ("w4", "w4-awq", "w8", "w8a8"):
        files = small.folder(kind, tmp_path).glob("*.safetensors")
        stored = sum(path.stat().st_size for path in files)
        assert stored * 0.85 < small.bytes_per_token(kind, 0, 2) <= stored, kind


def test_rows_have_names_and_scripts_of_their_own() -> None:
    import contenders

    rows = contenders.rows()
    assert len({row.slug for row in rows}) == len(rows)
    for row in rows:
        assert (EXAMPLES / "cpu_peers" / f"speed_{row.tool.replace('.', '')}.py").is_file()
        assert row.kind in contenders.KINDS


def test_section_names_the_fastest_and_the_missing_rows() -> None:
    import contenders
    import cpu_page

    def row(slug: str, decode: float, failed: str | None = None) -> dict[str, Any]:
        found = next(row for row in contenders.rows() if row.slug == slug)
        cells = {name: [decode, decode + 2, 100.0] for name in cpu_page.COLUMNS}
        state = {"at": 1_700_000_000, "read_gbps": 20.0, "busy": 0.0, "commit": "abc", "versions": {"torch": "2"}}
        sample = {**state, "cells": cells, "load_s": 2.0, "rss_before": 5e8, "rss_peak": 2e9}
        kept = {"tool": found.tool, "name": found.name, "kind": found.kind, "weights": found.weights}
        kept |= {"bytes": 10**9, "disk": 10**9}
        return {**kept, "samples": [] if failed else [sample], "why_none": failed}

    slugs = {"aiakq-w4a16-g128": 18.0, "llama-cpp-q4-0": 9.0, "openvino-int4-g128": 19.0}
    found = {slug: row(slug, decode) for slug, decode in slugs.items()}
    found["vllm-awq-g128"] = row("vllm-awq-g128", 0.0, "no such kernel")
    cell = {"name": "aiakq W8A8", "m": 16, "ms": 1.0, "bytes": 16e6}
    table = {"samples": [{"table": [cell, {"name": "torch x", "failed": "no"}]}]}
    machine = {"cpu": "some CPU", "flags": ["avx2"], "threads": 2, "memory_gb": 24}
    section = cpu_page.section({"rows": found, "kernels": table, "machine": machine})
    # A limit of 20 tokens per second: 20 GB/s over 1 GB.
    assert "| aiakq | W4A16 g128 | 20.0 | 20.0 | 20.0 | 20.0 | 20.0 | 100 % | 2.0 | 2000 | 1500 | 20.0 |" in section
    assert "| decode, W4A16 over llama.cpp Q4_0 | 1.82 | 1.3 | reached |" in section
    assert "| decode, W8A8 over llama.cpp Q8_0 | not measured | 1.3 | |" in section
    assert "| memory, W4A16 g128 over its files and KV pages | 1.36 | at most 1.1 | not reached |" in section
    assert "| load of W4A16, s | 2.0 | below 5 | reached |" in section
    assert "| vllm | AWQ g128 | no such kernel |" in section
    assert "- 4-bit weights, openvino int4 g128: decode, 1: 21.0 against 20.0" in section
    assert "| aiakq W8A8 | 16.0 | 537 |" in section
    assert "Not measured: torch x: no." in section


def test_sections_of_a_page_leave_each_other_alone(tmp_path: Path) -> None:
    import sections

    page = tmp_path / "page.md"
    page.write_text("# Page\n\nfirst\n")
    sections.put(page, "one", "1")
    sections.put(page, "two", "2")
    sections.put(page, "one", "3 \\1")
    assert sections.get(page, "two") == "<!-- two: begin -->\n2\n<!-- two: end -->"
    text = page.read_text()
    assert text.startswith("# Page\n\nfirst\n") and "3 \\1" in text and "\n1\n" not in text


def test_samples_are_kept_until_what_they_depend_on_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_cpu

    monkeypatch.setattr(bench_cpu, "OUT", tmp_path)
    (tmp_path / "rows").mkdir()
    samples = [{"busy": 0.01}, {"busy": 0.5}, {"busy": 0.0, "failed": "no"}]
    bench_cpu.write("row", {"stamp": "a", "samples": samples})
    bench_cpu.discard_stale("row", "a", fresh=False)
    assert bench_cpu.samples_of("row", disturbed=False)["samples"] == samples[:1]
    assert bench_cpu.samples_of("row", disturbed=True)["samples"] == samples[:2]
    bench_cpu.discard_stale("row", "b", fresh=False)
    assert json.loads((tmp_path / "rows" / "row.json").read_text()) == {"stamp": "b", "samples": []}


def test_cpu_time_of_others_excludes_our_children() -> None:
    import bench_cpu

    before, now = bench_cpu.CpuTime(100.0, 10.0, 200.0), bench_cpu.CpuTime(118.0, 26.0, 220.0)
    assert now.others_share(before) == pytest.approx(0.1)
    assert bench_cpu.CpuTime.now().others_share(bench_cpu.CpuTime.now()) >= 0
