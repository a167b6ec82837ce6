"""The whole way from a checkpoint to a quantized one, on tiny models, for every method."""

import json
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

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.types import QWeight
from aiakq.quantizers import METHODS
from aiakq.quantizers.numerics.rounding import Rounding, round_activations
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.run_report import REPORT_FILE

FAMILIES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}
QUICK = {"samples": 8, "seqlen": 64, "evaluate": False, "device": "cpu"}


def quantize(source: Path, output: Path, method: str, **fields: Any) -> Any:
    if method in ("awq", "gptq"):
        fields.setdefault("group_size", 32)
    return quantize_checkpoint(QuantizeOptions(str(source), str(output), method, **{**QUICK, **fields}))


def dense(weight: QWeight) -> Tensor:
    zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
    group = torch.arange(weight.k) // weight.group_size
    return (weight.codes.float() - zeros.float()[:, group]) * weight.scales.float()[:, group]


class Dequantized:
    """A quantized folder as a float32 transformers model; w8a8 rounds its activations."""

    def __init__(self, folder: Path) -> None:
        import transformers

        checkpoint = Checkpoint.open(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        state, own = {}, set()
        for prefix in checkpoint.quantized_linears() if checkpoint.spec else []:
            weight = checkpoint.read_linear(prefix)
            state[f"{prefix}.weight"] = dense(weight)
            if weight.bias is not None:
                state[f"{prefix}.bias"] = weight.bias.float()
            own.update(checkpoint.linear_tensors(prefix).values())
            if weight.scheme == "w8a8":
                self.model.get_submodule(prefix).register_forward_pre_hook(lambda _, args: round_activations(args[0]))
        state |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
        result = self.model.load_state_dict(state, strict=False)
        assert not result.unexpected_keys
        assert set(result.missing_keys) <= {"lm_head.weight"}
        self.model.tie_weights()

    def logits(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model(ids).logits


def some_ids(count: int = 48) -> Tensor:
    return torch.randint(3, 250, (2, count), generator=torch.Generator().manual_seed(0))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def quantized(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``quantized(family, method)`` -> (source, output, report), made once."""
    made: dict[tuple[str, str], Any] = {}

    def make(family: str, method: str) -> Any:
        if (family, method) not in made:
            source = tiny_model(FAMILIES[family])
            output = tmp_path_factory.mktemp("out") / f"{family}-{method}"
            made[family, method] = (source, output, quantize(source, output, method))
        return made[family, method]

    return make


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_output_is_a_checkpoint_close_to_its_source(quantized: Callable[..., Any], family: str, method: str) -> None:
    source, output, report = quantized(family, method)
    checkpoint = Checkpoint.open(output)
    assert checkpoint.spec is not None
    assert checkpoint.spec.method == method
    linears = checkpoint.quantized_linears()
    assert len(linears) == 2 * (6 if family == "opt" else 7)
    assert {layer.name for layer in report.layers} == set(linears)
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((output / REPORT_FILE).read_text())["method"] == method
    ids = some_ids()
    error = relative(Dequantized(output).logits(ids), Dequantized(source).logits(ids))
    assert error < {"weight_only_int8": 0.05, "smooth_quant": 0.1}.get(method, 0.7)  # random weights amplify errors
    # Each linear is about as wrong as its bits allow; a mix-up of scales or columns is wrong by 1.
    assert 0 < report.worst.error < {"weight_only_int8": 0.02, "smooth_quant": 0.05}.get(method, 0.25)
    expected = {"weight_only_int8": 8, "smooth_quant": 8}.get(method, 4)
    assert expected < report.bits_per_weight < expected + 2
    assert report.bytes_after == sum(info.nbytes for info in checkpoint.inventory.values()) < report.bytes_before


@pytest.mark.parametrize("method", sorted(METHODS))
def test_same_input_and_seed_give_the_same_bytes(quantized: Callable[..., Any], method: str, tmp_path: Path) -> None:
    source, output, _ = quantized("llama", method)
    quantize(source, tmp_path / "again", method)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["awq", "smooth_quant"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_smoothed_but_unrounded_is_the_same_function(
    family: str, method: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a method folds into the model must cost nothing before rounding."""
    from aiakq.quantizers.block.decoder_block import DecoderBlock

    kept: dict[str, Tensor] = {}
    folded: dict[str, Tensor] = {}
    finish = DecoderBlock.finish

    def note(block: DecoderBlock, name: str, rounding: Rounding) -> None:
        linear = block.linears[name]
        kept[f"{block.prefix}.{name}.weight"] = linear.weight.data.clone()
        if linear.bias is not None:
            kept[f"{block.prefix}.{name}.bias"] = linear.bias.data.clone()
        folded.update({f"{block.prefix}.{key}": value.clone() for key, value in block.folder.changed.items()})
        finish(block, name, rounding)

    monkeypatch.setattr(DecoderBlock, "finish", note)
    source = tiny_model(FAMILIES[family])
    quantize(source, tmp_path / "out", method)
    original, smoothed = Dequantized(source), Dequantized(source)
    assert folded
    smoothed.model.load_state_dict({**kept, **folded}, strict=False)
    changed = [name for name, value in smoothed.model.named_parameters()
               if not torch.equal(value, original.model.get_parameter(name))]  # fmt: skip
    assert len(changed) > 8
    ids = some_ids()
    assert relative(smoothed.logits(ids), original.logits(ids)) < 1e-5


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_runtime_computes_the_same(quantized: Callable[..., Any], family: str, method: str) -> None:
    from aiakq.evaluation.scoring import load_for_scoring

    _, output, _ = quantized(family, method)
    ids = some_ids()
    got, wanted = load_for_scoring(output, "float32", "cpu").logits(ids), Dequantized(output).logits(ids)
    # Rounding activations of inputs that differ in the last bit may move a code.
    assert relative(got, wanted) < (1e-2 if method == "smooth_quant" else 1e-5)


def plant_outliers(source: Path, target: Path, factor: float = 100.0) -> Path:
    """Make some channels of the first norm of each block huge and the next columns small: the same function."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for block in model.model.layers:
            for norm, linears in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight[5::32] *= factor
                for linear in linears:
                    linear.weight[:, 5::32] /= factor
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_smoothing_removes_outliers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    ids = some_ids()
    wanted = Dequantized(source).logits(ids)
    planted = plant_outliers(source, tmp_path / "planted")
    assert relative(Dequantized(planted).logits(ids), wanted) < 1e-5
    errors = {}
    for alpha in (0.0, 0.5, 0.8):
        quantize(planted, tmp_path / f"out-{alpha}", "smooth_quant", smooth_alpha=alpha)
        errors[alpha] = relative(Dequantized(tmp_path / f"out-{alpha}").logits(ids), wanted)
    quantize(source, tmp_path / "plain", "smooth_quant")
    plain = relative(Dequantized(tmp_path / "plain").logits(ids), wanted)
    assert min(errors.values()) < 1.5 * plain
    # Without smoothing the outliers own the scale of every token.
    unsmoothed = Dequantized(planted)
    from aiakq.quantizers.model.groups import block_linears
    from aiakq.quantizers.numerics.rounding import dequantize, round_weight

    for block in unsmoothed.model.model.layers:
        for linear in block_linears(block).values():
            rounded = round_weight(linear.weight.data, 8, -1, True, torch.float32)
            linear.weight.data = dequantize(*rounded, linear.in_features)
            linear.register_forward_pre_hook(lambda _, args: round_activations(args[0]))
    assert relative(unsmoothed.logits(ids), wanted) > 3 * min(errors.values())


def test_the_source_dtype_is_kept_unless_told(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    for asked, stored in ((None, "F32"), ("fp16", "F16"), ("bf16", "BF16")):
        output = tmp_path / str(asked)
        quantize(source, output, "weight_only_int8", dtype=asked)
        checkpoint = Checkpoint.open(output)
        assert checkpoint.inventory["model.norm.weight"].dtype == stored
        assert checkpoint.inventory["model.layers.0.self_attn.q_proj.weight_scale"].dtype == stored
        assert checkpoint.config["dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]


def test_overflow_in_fp16_names_the_tensor(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
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


def test_a_tied_head_stays_tied(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("Qwen2ForCausalLM")
    quantize(source, tmp_path / "out", "gptq")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config["tie_word_embeddings"]
    assert "lm_head.weight" not in checkpoint.inventory


@pytest.mark.parametrize(
    "fields", [{"act_order": "static"}, {"act_order": "group"}, {"symmetric": False}, {"bits": 8}, {"bits": 3}]
)
def test_gptq_variants(fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    report = quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", **fields)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.spec is not None
    assert checkpoint.spec.format == ("gptq_v2" if "symmetric" in fields else "gptq")
    assert checkpoint.config["quantization_config"]["desc_act"] is False
    for prefix in checkpoint.quantized_linears():
        g_idx = checkpoint.tensor(f"{prefix}.g_idx")
        assert torch.equal(g_idx, (torch.arange(len(g_idx)) // 32).int())
    bits = fields.get("bits", 4)
    assert report.mean_error < {3: 0.25, 4: 0.12, 8: 0.01}[bits]
    assert any("vLLM" in warning for warning in report.warnings) == ("symmetric" in fields)


def test_any_architecture_with_linears_can_be_quantized(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("GPTNeoXForCausalLM")
    for method in ("gptq", "awq", "smooth_quant", "weight_only_int8"):
        report = quantize(source, tmp_path / method, method)
        assert report.worst.error < 0.25


@pytest.mark.parametrize("method", ["gptq", "smooth_quant"])
def test_files_without_the_models_prefix(method: str, quantized: Callable[..., Any], tmp_path: Path) -> None:
    """Early OPT files say ``decoder.layers``; the output says what transformers says."""
    from safetensors.torch import load_file, save_file

    source, output, _ = quantized("opt", method)
    old = tmp_path / "in"
    old.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (old / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(tensors, old / "model.safetensors")
    quantize(old, tmp_path / "out", method)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


def test_token_ids_of_several_lengths(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    make = torch.Generator().manual_seed(0)
    lines = [torch.randint(3, 250, (length,), generator=make).tolist() for length in (17, 64, 64, 5, 100)]
    path = tmp_path / "token_ids.txt"
    path.write_text("\n".join(",".join(map(str, line)) for line in lines))
    report = quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", token_ids=path, seqlen=64)
    assert report.tokens == 250
    assert "token_ids.txt" in report.calibration
    assert report.calibration_sha256


def test_samples_longer_than_the_model_can_see_are_cut(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Learned positions end; asking for more must not crash in the embedding."""
    source = tiny_model("OPTForCausalLM", max_position_embeddings=48)
    report = quantize(source, tmp_path / "out", "gptq", samples=16, seqlen=64)
    assert report.tokens == 16 * 48
    assert any("48 tokens" in warning for warning in report.warnings)


def test_without_tokenizer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((tiny_model("LlamaForCausalLM") / name).read_bytes())
    report = quantize(source, tmp_path / "int8", "weight_only_int8")
    assert report.worst is None
    assert all(layer.weight_after for layer in report.layers)
    assert len(report.warnings) == 1
    with pytest.raises(AiakqError) as caught:
        quantize(source, tmp_path / "gptq", "gptq")
    assert caught.value.id == "calibration"
    ids = tmp_path / "ids.txt"
    ids.write_text("5 6 7 8 9 10 11 12\n" * 8)
    quantize(source, tmp_path / "gptq", "gptq", token_ids=ids)


def test_shards(tiny_model: Callable[..., Path], tmp_path: Path, quantized: Callable[..., Any]) -> None:
    """A source in several shards gives the same output as in one."""
    import transformers

    source, output, _ = quantized("llama", "gptq")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "in", max_shard_size="200KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "in" / name).write_bytes((source / name).read_bytes())
    quantize(tmp_path / "in", tmp_path / "out", "gptq")
    one, two = Checkpoint.open(output), Checkpoint.open(tmp_path / "out")
    assert set(one.inventory) == set(two.inventory)
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.inventory)


# --- refusals and failures --------------------------------------------------------------------------------------------


def test_refusals_come_before_the_work(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")

    def refused(id: str, output: str = "out", method: str = "gptq", source: Path = source, **fields: Any) -> str:
        stages: list[str] = []
        options = QuantizeOptions(str(source), str(tmp_path / output), method, **{**QUICK, **fields})
        with pytest.raises(AiakqError) as caught:
            quantize_checkpoint(options, lambda progress: stages.append(progress.stage))
        assert caught.value.id == id
        assert set(stages) <= {"load"}
        return str(caught.value)

    # 128 does not divide the 96 inputs of nothing here, but 100 divides none.
    assert "64" in refused("group_size", group_size=100)
    refused("tensor_parallel", group_size=32, tp=3)
    refused("option_conflict", source=tiny_model("OPTForCausalLM"), group_size=32, multi_query_mode=True)
    refused("model_missing", source=tmp_path / "nothing")
    refused("output_is_input", output=str(source))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    refused("output_exists", output="full", group_size=32)
    quantize(source, tmp_path / "once", "weight_only_int8")
    refused("already_quantized", source=tmp_path / "once")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "once"]


def test_unknown_architectures_and_remote_code(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "model.safetensors").write_bytes((tiny_model("LlamaForCausalLM") / "model.safetensors").read_bytes())
    for config, id in (
        ({"model_type": "nonesuch"}, "model_unsupported"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}}, "remote_code"),
        ({"model_type": "llama", "hidden_size": 128, "num_attention_heads": 0}, "model_unsupported"),
    ):
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(AiakqError) as caught:
            quantize(source, tmp_path / "out", "gptq")
        assert caught.value.id == id


def edited(source: Path, target: Path, edit: Callable[[Any], None]) -> Path:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        edit(model)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


def test_weights_that_are_not_finite_are_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")

    source = edited(tiny_model("LlamaForCausalLM"), tmp_path / "in", edit)
    for method in METHODS:
        with pytest.raises(AiakqError, match=r"layers\.1\.mlp\.up_proj\.weight") as caught:
            quantize(source, tmp_path / "out", method)
        assert caught.value.id == "not_finite"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_integers_that_nothing_explains_are_no_weights(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    import safetensors.torch

    source = tmp_path / "in"
    shutil.copytree(tiny_model("LlamaForCausalLM"), source)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int64)
    safetensors.torch.save_file(tensors, source / "model.safetensors")
    with pytest.raises(AiakqError, match=r"layers\.1\.mlp\.up_proj\.weight holds int64") as caught:
        quantize(source, tmp_path / "out", "weight_only_int8")
    assert caught.value.id == "tensor_mismatch"


def test_a_text_for_evaluation_is_read_before_the_work(tmp_path: Path, example_model: Path) -> None:
    with pytest.raises(AiakqError, match="no such file") as caught:
        quantize(example_model, tmp_path / "out", "gptq", evaluate=True, eval_text=tmp_path / "nothing.txt")
    assert caught.value.id == "evaluation_text"


@pytest.mark.parametrize("key, value", [("vocab_size", -5), ("num_attention_heads", 0), ("hidden_size", "wide")])
def test_a_config_of_no_model_is_refused(
    key: str, value: object, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "in"
    shutil.copytree(tiny_model("LlamaForCausalLM"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(AiakqError) as caught:
        quantize(source, tmp_path / "out", "weight_only_int8")
    assert caught.value.id == "model_unsupported"


@pytest.mark.parametrize("method", ["gptq", "awq", "smooth_quant"])
def test_activations_that_are_not_finite_are_left_out(
    method: str, tiny_model: Callable[..., Path], tmp_path: Path
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
    with pytest.raises(AiakqError, match="calibration input") as caught:
        quantize(source, tmp_path / "none", method, token_ids=ids)
    assert caught.value.id == "not_finite"
    assert not (tmp_path / "none").exists()


def test_dead_and_empty_rows_survive_every_method(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        block = model.model.layers[0]
        block.input_layernorm.weight[:5] = 0  # channels that never fire
        block.mlp.up_proj.weight[7] = 0  # an output that is always 0, so an input of down_proj that never fires
        block.self_attn.q_proj.weight[3] = 0
        block.self_attn.o_proj.weight.zero_()

    source = edited(tiny_model("LlamaForCausalLM"), tmp_path / "in", edit)
    ids = some_ids()
    wanted = Dequantized(source).logits(ids)
    for method in METHODS:
        quantize(source, tmp_path / method, method)
        got = Dequantized(tmp_path / method).logits(ids)
        assert relative(got, wanted) < 0.6, method


def test_a_failure_in_the_middle_leaves_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiakq.quantizers.rounders import gptq

    calls = []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(*args)

    real = gptq.gptq
    monkeypatch.setattr(gptq, "gptq", broken)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq")
    assert list(tmp_path.iterdir()) == []


def test_kill_in_the_middle_then_again(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
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


def test_progress_and_evaluation(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    seen: list[StageProgress] = []
    loaded: list[Path] = []

    def load(folder: Path) -> Dequantized:
        loaded.append(folder)
        return Dequantized(folder)

    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 40)
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "weight_only_int8", **{**QUICK, "evaluate": True},
        eval_text=text,
    )  # fmt: skip
    report = quantize_checkpoint(options, seen.append, load)
    assert loaded[1] == tiny_model("LlamaForCausalLM")
    assert not loaded[0].exists()  # it was measured before it was published
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.02)
    assert report.evaluation_text == "text.txt"
    assert report.evaluation_tokens > 500
    assert 0 <= report.kl < 0.01
    assert report.top1_agreement > 0.9
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["load", "calibrate", "quantize", "evaluate", "publish"]
    for stage in stages:
        steps = [progress for progress in seen if progress.stage == stage]
        assert [step.done for step in steps] == sorted(step.done for step in steps)
        assert steps[-1].done == steps[-1].total
    document = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert document["perplexity_after"] == report.perplexity_after
    assert document["worst_layer"]["name"] == report.worst.name


def test_the_runtime_measures_perplexity(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 20)
    report = quantize(
        tiny_model("LlamaForCausalLM"), tmp_path / "out", "smooth_quant", evaluate=True, eval_text=text
    )  # fmt: skip
    assert report.warnings == [] or "Calibration" in report.warnings[0]
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.05)
