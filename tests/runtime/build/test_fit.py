"""Whether a model fits a machine: sizes and names of machines, the engine's own rule, and the exit code."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aiakq.cli import app
from aiakq.errors import AiakqError
from aiakq.runtime.build.fit import fit
from aiakq.runtime.build.machines import machine
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.executor import kv_cache
from aiakq.runtime.executor.kv_cache import count_pages
from aiakq.runtime.loader.memory_check import weight_bytes


@pytest.mark.parametrize(
    ("word", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 gb", 1_500_000_000),
        (".5GB", 500_000_000),
        ("8G", 8 * 10**9),
        ("2.t", 2 * 10**12),
        ("512MiB", 512 * 2**20),
        ("here", 7),
        ("H100", 80 * 10**9),
        ("NVIDIA A100-40GB", 40 * 10**9),
        ("rtx4090", 24 * 10**9),
        ("GeForce RTX 4090", 24 * 10**9),
    ],
)
def test_machines_are_sizes_or_names(word: str, nbytes: int) -> None:
    assert machine(word, here=7).nbytes == nbytes


@pytest.mark.parametrize(
    "word", ["", "0GB", "-1GB", "H1000", "24", "GB", "1e9GB", ".GB", "8GBB", "8k", "8kB", "1234567G"]
)
def test_other_words_are_refused_with_the_names_that_are_known(word: str) -> None:
    with pytest.raises(AiakqError, match="H100") as caught:
        machine(word, here=7)
    assert caught.value.id == "bad_option"


def test_pages_are_those_that_the_engine_would_have(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    report = fit(source, "40MB", device="cpu")
    config = EngineConfig.from_args({"model": source, "device": "cpu"})
    from aiakq.runtime.build.model_loader import load_model

    model, _ = load_model(config)
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 40_000_000 - weight_bytes(config))
    pages = count_pages(config, model)
    most = config.scheduler.max_num_seqs * -(-config.max_model_len // config.cache.block_size)
    assert min(report.rows[0].tokens // config.cache.block_size, most) == pages - 1
    assert report.rows[0].weights == weight_bytes(config)
    assert report.fits and report.rows[0].sequences >= 1


def test_smaller_weights_leave_more_tokens_and_long_sequences_do_not_fit(tiny_model) -> None:
    source = str(tiny_model("LlamaForCausalLM"))
    report = fit(source, "40MB", device="cpu")
    sizes = [row.weights for row in report.rows]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3
    assert [row.tokens for row in report.rows] == sorted(row.tokens for row in report.rows)
    assert not fit(source, "1MB", device="cpu").fits
    with pytest.raises(AiakqError, match="fit-context"):
        fit(source, "1GB", wanted=10**6, device="cpu")


def test_a_quantized_model_is_shown_as_it_is(quantized_tiny: Path) -> None:
    assert [row.scheme for row in fit(str(quantized_tiny), "1GB", device="cpu").rows] == ["as it is"]


@pytest.fixture
def quantized_tiny(tiny_model, tmp_path: Path) -> Path:
    from aiakq.quantizers.options import QuantizeOptions
    from aiakq.quantizers.pipeline import quantize_checkpoint

    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out"
    quick = {"samples": 4, "seqlen": 32, "evaluate": False, "device": "cpu"}
    quantize_checkpoint(QuantizeOptions(str(source), str(output), "weight_only_int8", **quick))
    return output


@pytest.mark.parametrize(("machine", "code"), [("1GB", 0), ("1MB", 5)])
def test_the_exit_code_says_whether_it_fits(tiny_model, machine: str, code: int) -> None:
    from aiakq.terminal.options import add_options

    add_options(["inspect"])
    words = ["inspect", str(tiny_model("LlamaForCausalLM")), "--fit", machine, "--device", "cpu", "--json"]
    assert CliRunner().invoke(app, words).exit_code == code
