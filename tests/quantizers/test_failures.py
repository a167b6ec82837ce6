"""What a run refuses or names, what is not finite, and what an interrupted run leaves."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import CONFLICT, NUMERIC, AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers import METHODS as ALL_METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

#: Methods whose output is a folder; gguf writes a file.
METHODS = sorted(set(ALL_METHODS) - {"gguf"})


def test_errors_are_raised_before_quantization_starts(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any], quick: dict[str, Any]
) -> None:
    source = tiny_model("LlamaForCausalLM")

    def refused(id: str, output: str = "out", method: str = "gptq", source: Path = source, **fields: Any) -> str:
        stages: list[str] = []
        options = QuantizeOptions(str(source), str(tmp_path / output), method, **{**quick, **fields})
        with pytest.raises(AiakqError) as caught:
            quantize_checkpoint(options, lambda progress: stages.append(progress.stage))
        assert caught.value.id == id
        assert set(stages) <= {"load"}
        return str(caught.value)

    # 128 does not divide the 96 inputs of nothing here, but 100 divides none.
    assert "64" in refused("group_size", group_size=100)
    # aiakq would share out this model among three ranks if it had code of its own for it.
    refused("tensor_parallel", source=tiny_model("GPTNeoXForCausalLM"), group_size=32, tp=3)
    refused("option_conflict", source=tiny_model("OPTForCausalLM"), group_size=32, multi_query_mode=True)
    refused("model_missing", source=tmp_path / "nothing")
    refused("output_is_input", output=str(source))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    refused("output_exists", output="full", group_size=32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_unknown_architectures_and_remote_code(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "model.safetensors").write_bytes((tiny_model("LlamaForCausalLM") / "model.safetensors").read_bytes())
    for config, id in (
        ({"model_type": "nonesuch"}, "unsupported"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}}, "remote_code"),
        ({"model_type": "llama", "hidden_size": 128, "num_attention_heads": 0}, "model_malformed"),
    ):
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(AiakqError) as caught:
            quantize(source, tmp_path / "out", "gptq")
        assert caught.value.id == id


@pytest.mark.parametrize("key, value", [("vocab_size", -5), ("num_attention_heads", 0), ("hidden_size", "wide")])
def test_an_invalid_model_config_is_refused(
    key: str, value: object, tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tmp_path / "in"
    shutil.copytree(tiny_model("LlamaForCausalLM"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(AiakqError) as caught:
        quantize(source, tmp_path / "out", "weight_only_int8")
    assert caught.value.id == ("unsupported" if key == "hidden_size" else "model_malformed")


def test_a_key_of_the_config_that_the_result_could_not_be_served_with_is_refused(
    example_model: Path, tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = shutil.copytree(example_model, tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "residual_multiplier": 0.22}))
    with pytest.raises(AiakqError, match="residual_multiplier = 0.22"):
        quantize(source, tmp_path / "out", "weight_only_int8")
    assert not (tmp_path / "out").exists()


def test_the_evaluation_text_is_read_before_quantization_starts(
    tmp_path: Path, example_model: Path, quantize: Callable[..., Any]
) -> None:
    with pytest.raises(AiakqError, match="no such file") as caught:
        quantize(example_model, tmp_path / "out", "gptq", evaluate=True, eval_text=tmp_path / "nothing.txt")
    assert caught.value.id == "evaluation_text"


def test_names_in_a_model_lead_to_no_file_outside_the_output(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """transformers saves every named template under its name; the names of what we write are our own."""
    source = Path(shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "models" / "in"))
    config = json.loads((source / "tokenizer_config.json").read_text())
    names = ["default", "../../escaped", "/tmp/aiakq-escaped", "..", "a/b", "a\0b", "\u2028", "x" * 300, "config.json"]
    templates = [{"name": name, "template": "{{ messages }}"} for name in names]
    extra = {"chat_template": templates, "name_or_path": "../../escaped", "tokenizer_file": "../../escaped"}
    (source / "tokenizer_config.json").write_text(json.dumps(config | extra))
    for name in ("additional_chat_templates/other.jinja", "additional_chat_templates/..jinja", "sub/tokenizer.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("escaped" if "other" not in name else "{{ messages }}")
    before = set(tmp_path.rglob("*"))
    output = tmp_path / "models" / "out"
    quantize(source, output, "weight_only_int8")
    templates = output / "additional_chat_templates"
    new = set(tmp_path.rglob("*")) - before - {output, templates}
    assert [path.name for path in templates.iterdir()] == ["other.jinja"]
    assert {path.parent for path in new} == {output, templates} and not Path("/tmp/aiakq-escaped").exists()
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", path.name) for path in new)
    assert not any(b"escaped" == path.read_bytes() for path in new)


def edited(source: Path, target: Path, edit: Callable[[Any], None]) -> Path:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        edit(model)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_weights_that_are_not_finite_are_named(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    def edit(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")

    source = edited(tiny_model("LlamaForCausalLM"), tmp_path / "in", edit)
    for method in METHODS:
        with pytest.raises(AiakqError, match=r"layers\.1\.mlp\.up_proj\.weight") as caught:
            quantize(source, tmp_path / "out", method)
        assert caught.value.id == "not_finite"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_integer_weights_without_a_scale_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    import safetensors.torch

    source = tmp_path / "in"
    shutil.copytree(tiny_model("LlamaForCausalLM"), source)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int64)
    safetensors.torch.save_file(tensors, source / "model.safetensors")
    with pytest.raises(AiakqError, match=r"layers\.1\.mlp\.up_proj\.weight +I64 .*without a scale") as caught:
        quantize(source, tmp_path / "out", "weight_only_int8")
    assert caught.value.id == "tensor_inventory"


def test_overflow_in_fp16_names_the_tensor(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("LlamaForCausalLM"), dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = 1e5
    model.save_pretrained(tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "in" / name).write_bytes((tiny_model("LlamaForCausalLM") / name).read_bytes())
    with pytest.raises(AiakqError, match=r"layers\.1\.post_attention_layernorm\.weight.*bf16") as caught:
        quantize(tmp_path / "in", tmp_path / "out", "gptq", dtype="fp16")
    assert caught.value.id == "not_finite"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "smooth_quant"])
def test_non_finite_activations_are_excluded(
    method: str, tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """One token whose embedding overflows poisons what attends to it; if everything is poisoned, that is an error."""

    def edit(model: Any) -> None:
        model.model.decoder.embed_tokens.weight[200] = 3e38  # its mean square overflows in a layer norm

    source = edited(tiny_model("OPTForCausalLM"), tmp_path / "in", edit)
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(" ".join(["5 6 7 8 9 10 11 12"] * 4) for _ in range(7)) + "\n200 200 200 200\n")
    report = quantize(source, tmp_path / "out", method, token_ids=ids)
    assert 0 < report.dropped_tokens <= 4
    assert any("not finite" in warning for warning in report.warnings)
    checkpoint = Checkpoint.open(tmp_path / "out")
    for prefix in checkpoint.quantized_linears():
        checkpoint.read_linear(prefix)
    ids.write_text("200 200 200 200\n" * 4)
    with pytest.raises(AiakqError, match=r"calibration input of (block 0|model\.decoder\.layers\.0\.)") as caught:
        quantize(source, tmp_path / "none", method, token_ids=ids)
    assert caught.value.id == "not_finite" and caught.value.exit_code == NUMERIC
    assert not (tmp_path / "none").exists()


def test_dead_inputs_and_rows_of_zeros_survive_every_method(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    quantize: Callable[..., Any],
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    def edit(model: Any) -> None:
        block = model.model.layers[0]
        block.input_layernorm.weight[:5] = 0  # channels that never fire
        block.mlp.up_proj.weight[7] = 0  # an output that is always 0, so an input of down_proj that never fires
        block.self_attn.q_proj.weight[3] = 0
        block.self_attn.o_proj.weight.zero_()

    source = edited(tiny_model("LlamaForCausalLM"), tmp_path / "in", edit)
    wanted = dequantized(source).logits(ids)
    for method in METHODS:
        quantize(source, tmp_path / method, method)
        got = dequantized(tmp_path / method).logits(ids)
        assert relative_error(got, wanted) < 0.6, method


def test_a_failure_in_the_middle_leaves_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Callable[..., Any]
) -> None:
    from aiakq.quantizers.rounders import gptq

    calls = []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(*args)

    real = gptq.GptqSolver
    monkeypatch.setattr(gptq, "GptqSolver", broken)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_kill_in_the_middle_then_again(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source, output = tiny_model("LlamaForCausalLM"), tmp_path / "out"
    script = (
        "import sys; from aiakq.quantizers.options import QuantizeOptions; "
        "from aiakq.quantizers.pipeline import quantize_checkpoint; "
        "quantize_checkpoint(QuantizeOptions(sys.argv[1], sys.argv[2], 'gptq', group_size=32, samples=64, seqlen=256, "
        "evaluate=False, device='cpu'), lambda p: print(p.stage, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(source), str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        if line.strip() == "quantize" or time.monotonic() > deadline:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not output.exists()
    assert len(list(tmp_path.iterdir())) == 2  # the partial folder and the lock
    quantize(source, output, "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    Checkpoint.open(output)


def _rewrite(path: Path) -> None:
    """In place: the size and the inode stay."""
    content = path.read_bytes()
    with open(path, "r+b") as stream:
        stream.write(content)


def _replace(path: Path) -> None:
    """The same bytes in another file, as a download puts them."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def _add(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize(
    ("file", "change", "resume"),
    [
        ("model.safetensors", _rewrite, True),
        ("model.safetensors", _replace, False),
        ("config.json", _replace, False),
        ("tokenizer.json", _rewrite, False),
        ("tokenizer_config.json", Path.unlink, False),
        ("added_tokens.json", _add, False),
    ],
)
def test_a_source_that_changes_meanwhile_is_not_published(
    file: str, change: Callable[[Path], None], resume: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "in"))

    def disturb(progress: Any) -> None:
        if progress.stage == "publish" and progress.done == 0:
            change(source / file)

    options = QuantizeOptions(
        str(source), str(tmp_path / "out"), "weight_only_int8", evaluate=False, device="cpu", resume=resume
    )
    with pytest.raises(AiakqError, match=file) as caught:
        quantize_checkpoint(options, disturb)
    assert (caught.value.id, caught.value.exit_code) == ("source_changed", CONFLICT)
    assert not (tmp_path / "out").exists()
    assert resume or [path.name for path in tmp_path.iterdir()] == ["in"]
    if resume:  # what it kept does not fit the new source, and goes
        quantize_checkpoint(options)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
