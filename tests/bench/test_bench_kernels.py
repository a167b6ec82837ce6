"""``bench kernels``: what is timed, what is refused, and where tuned launch configurations go."""

from __future__ import annotations

import json

import pytest
import torch

from aiakq.bench import timing, tuning
from aiakq.bench.kernels import _row
from aiakq.bench.problem import Problem, Product
from aiakq.cli import main
from aiakq.kernels.triton import configs
from aiakq.kernels.triton import tuning as candidates
from aiakq.runtime.config.engine import EngineConfig
from aiakq.spec import Float8, LayerSpec


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """What is measured does not matter here; the user's own files are not looked at."""
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 1)
    monkeypatch.setattr(timing, "ROTATED", {"cpu": 2**16, "cuda": 2**16})
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    configs.table.cache_clear()
    yield
    configs.table.cache_clear()


def test_a_models_layers_attention_and_rows(tiny_model, capsys, tmp_path):
    path = tmp_path / "result.json"
    words = ["bench", "kernels", str(tiny_model("Qwen3ForCausalLM")), "--rows", "1,5", "--context", "40"]
    more = ["--dtype", "float32", "--device", "cpu", "--output", str(path), "--fail-if", "of_roofline<0"]
    assert main([*words, *more]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document == json.loads(path.read_text()) and document["kind"] == "kernels"
    rows = document["rows"]
    config = EngineConfig.from_args({"model": str(tiny_model("Qwen3ForCausalLM"))}).model
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = {f"{qkv}x{width}", f"{width}x{heads}", f"{2 * config.intermediate_size}x{width}"}
    shapes |= {f"{width}x{config.intermediate_size}", f"{config.vocab_size}x{width}"}
    assert {row["of"].split()[-1] for row in rows if row["kernel"] == "w16"} == shapes
    assert {row["rows"] for row in rows if row["kernel"] == "w16"} == {1, 5}
    named = {row["of"]: row for row in rows}
    assert named["decode, 40 tokens"]["kernel"] == "attention float32" and named["prefill"]["rows"] == 40
    assert {"norm with residual", "gate"} <= named.keys()
    assert all(row["us"] > 0 and row["roofline_us"] >= 0 and row["implementation"] for row in rows)
    assert named["decode, 40 tokens"]["layers"] == config.num_layers
    assert "roofline" in err and "decode, 40 tokens" in err


def test_the_slowest_kernel_has_a_share_of_the_roofline():
    """On a machine with other work; their mean is one of logarithms."""
    ceilings = {"float_tflops": 1.0, "gbps": 100.0}
    problem = Problem(torch.device("cpu"), torch.float32, [], ceilings=ceilings)
    row = _row(problem, "layer", "w16", 1, us=1e6, moved=1e5, work=1e3, integers=False)
    assert row["of_roofline"] == 1e-6


def test_given_shapes_in_given_schemes(capsys):
    words = ["bench", "kernels", "--shape", "96x256", "--shape", "64X100", "--scheme", "w4a16,w8a8", "--rows", "3"]
    assert main([*words, "--device", "cpu", "--group-size", "64"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(row["of"], row["kernel"]) for row in rows]
    # Inputs that are no whole groups have one scale for each output.
    assert found == [
        ("layer 96x256", "w4a16 g64"), ("layer 96x256", "w8a8"), ("layer 64x100", "w4a16"), ("layer 64x100", "w8a8")
    ]  # fmt: skip


def test_weights_with_tables_and_8_bit_floats(capsys):
    """Groups of a table are those of its format, whatever --group-size is."""
    words = ["bench", "kernels", "--shape", "32x128", "--scheme", "mxfp4,nf4,fp8a16,w6a16,w5a16", "--rows", "1"]
    assert main([*words, "--device", "cpu", "--dtype", "float32"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kernel"] for row in rows] == ["e2m1a16 g32", "nf4a16 g64", "fp8a16", "w6a16 g128", "w5a16 g128"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Neither a model nor a shape"),
        (["--shape", "96"], "--shape is '96'"),
        (["--shape", "96x0"], "--shape is '96x0'"),
        (["--shape", "8x8", "--rows", "1,a"], "--rows is 'a'"),
        (["--shape", "8x8", "--scheme", "w7a16"], "--scheme is 'w7a16'"),
        (["--shape", "8x8", "--device", "cpu", "--tune"], "--tune is not available: CPU kernels have"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(words, said, capsys):
    assert main(["bench", "kernels", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("kernel", "m"), [(k, m) for k in ("grouped", "integers") for m in candidates.BUCKETS[k]])
def test_every_candidate_is_a_launch_configuration(kernel, m):
    entries = candidates.candidates(kernel, m)
    assert len({json.dumps(entry) for entry in entries}) == len(entries)
    for entry in entries:
        config = configs.config_of(entry, torch.device("cpu"), 4096, 32, m)
        assert config.dense or config.bn % 64 == 0 and config.bm >= 8


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_candidate_is_one_for_attention(kernel):
    for m in candidates.BUCKETS[kernel]:
        entries = candidates.candidates(kernel, m)
        assert len({json.dumps(entry) for entry in entries}) == len(entries)
        for entry in entries:
            found = configs.attention_config_of(entry, 128)
            assert found.tile in (32, 64, 128) and found.warps in (2, 4, 8) and found.share


def test_tuning_writes_what_is_used_from_then_on(monkeypatch, tmp_path, example_model):
    """The quickest of every bucket, in a file of this GPU's name; what was not tuned stays as it was."""
    device = torch.device("cpu")
    monkeypatch.setattr(configs, "gpu", lambda device: configs.Gpu("nvidia-test", 4, 0))
    asked = []

    def took(benchmark, m, entry):
        asked.append((benchmark.k, m))
        if entry == "dense":
            return 5.0 if m >= 512 else 50.0
        bn, bm, warps, stages, *words = entry
        return float("inf") if stages == 5 else 10.0 + bn / 100 + bm / 1000 + warps + stages + len(words)

    def attended(benchmark, m, entry):
        assert benchmark.context == 77 and benchmark.config.cache.dtype == torch.float16
        tile, stages, warps, share = entry
        # The shortest sequences like other tiles than the rest.
        return abs(tile - (32 if m == 8 else 128)) + stages + warps + share / 100

    monkeypatch.setattr(tuning._LinearBenchmark, "__call__", took)
    monkeypatch.setattr(tuning._AttentionBenchmark, "__call__", attended)
    config = EngineConfig.from_args({"model": str(example_model), "kv_cache_dtype": "float16"})
    products = [Product("a", 64, 256, LayerSpec(4, 128)), Product("b", 64, 128, LayerSpec(3, 128), 2)]
    stages = []
    problem = Problem(device, torch.float16, products, config)
    file = tuning.tune(problem, 77, None, lambda *stage: stages.append(stage))
    assert file == tmp_path / "config" / "aiakq" / "launch" / "nvidia-test.json"
    assert {k for k, _ in asked} == {256, 128} and stages[-1][1] == stages[-1][2]
    table = json.loads(file.read_text())
    assert table == configs.table("nvidia-test")
    assert table["grouped"]["4"]["8"] == [64, 8, 2, 3] and table["grouped"]["4"]["2048"] == "dense"
    assert "512" not in table["grouped"]["4"], "the bucket after it says the same"
    assert table["grouped"]["8"] == configs.table("default")["grouped"]["8"]
    assert table["integers"] == configs.table("default")["integers"]
    assert table["decode"]["16"] == {"8": [32, 2, 2, 1], "2048": [128, 2, 2, 1]}
    assert table["prefill"]["16"] == {"8192": [128, 2, 4, 64]}
    assert table["decode"]["8"] == configs.table("default")["decode"]["8"]
    assert [configs.attention_config("decode", device, 2, 128, m).tile for m in (1, 8, 9, 10**6)] == [32, 32, 128, 128]
    assert configs.choose("grouped", device, 4, 4096, 32, 600).dense
    assert configs.choose("grouped", device, 4, 4096, 32, 3).stages == 3


def test_a_benchmark_runs_the_kernel_under_the_entry(monkeypatch):
    """On the GPU at hand, else in the interpreter; what cannot be launched is never the quickest."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    entry, fp8 = [64, 16, 4, 2], LayerSpec(8, activation_bits=8, float8=Float8())
    for spec, kernel in (
        (LayerSpec(4, 64), "grouped"),
        (LayerSpec(8, activation_bits=8), "integers"),
        *(((fp8, "fp8"),) if device.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9) else ()),
    ):
        assert tuning._group(spec)[0] == kernel
        benchmark = tuning._LinearBenchmark(spec, 64, 128, torch.float16, device)
        assert 0 < benchmark(3, entry) < float("inf")
        assert benchmark(3, [64, 16, 4, 2, "no such word"]) == float("inf")


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_a_benchmark_of_attention_runs_it_under_the_entry(kernel, example_model):
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = EngineConfig.from_args({"model": str(example_model), "kv_cache_dtype": "float16"})
    benchmark = tuning._AttentionBenchmark(kernel, config, Problem(device, torch.float16, [], config).ops(), 40)
    assert 0 < benchmark(8, [32, 2, 4, 64]) < float("inf")
    assert benchmark(8, [33, 2, 4, 64]) == float("inf"), "no tile has so many positions"


def test_a_file_of_before_lacks_nothing(monkeypatch, tmp_path):
    """Kernels that a user's file does not name have the entries of all GPUs."""
    folder = configs.users_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvidia-older.json").write_text('{"grouped": {"4": {"8": [64, 8, 2, 3]}}}')
    table = configs.table("nvidia-older")
    assert table["grouped"] == {"4": {"8": [64, 8, 2, 3]}}
    assert table["decode"] == configs.table("default")["decode"]


def test_a_gpu_without_a_file_has_the_entries_of_its_compute_capability():
    hopper, other = (configs.table("nvidia-unknown", capability) for capability in (90, 80))
    assert other == configs.table("default") != hopper
    assert hopper["grouped"]["4"] != other["grouped"]["4"] and hopper["decode"] == other["decode"]


def test_an_entry_says_among_how_many_programs_inputs_are_split(monkeypatch):
    monkeypatch.setattr(configs, "gpu", lambda device: configs.Gpu("some", 100, 0))
    device = torch.device("cpu")
    splits = [
        configs.config_of(entry, device, 640, 64, m).split
        for m in (64, 65)
        for entry in ([64, 64, 4, 3], [64, 64, 4, 3, 1], [64, 64, 4, 3, 2, "scale_first"])
    ]
    # Ten tiles of 64 outputs, and twenty for 65 rows: 4, 1 and 2 programs on each of 100 processors at most.
    assert splits == [16, 10, 16, 1, 5, 10]
    assert configs.config_of([64, 64, 4, 3, 2, "scale_first"], device, 640, 64, 3).scale_first


def test_tuning_splits_the_sums_of_the_fastest_tile():
    def cost(m, entry):
        return float("inf") if entry == "dense" else 100 + entry[0] - 3 * (entry[4:5] == [2])

    assert candidates.tuned("integers", cost)["256"][4] == 2
    assert not any(isinstance(word, int) for word in candidates.tuned("integers", cost)["2048"][4:])
