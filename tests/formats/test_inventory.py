"""The tensor inventory: every missing, extra and misshapen tensor at once, before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.formats import hqq
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.inventory import Difference, RequiredTensors, compare, refusal, table
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.inspect.inspection import collapse_differences, inspect_checkpoint
from aiakq.runtime.loader.required import required_tensors
from aiakq.runtime.models import ARCHITECTURES

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir())


def differences(folder: Path) -> list[Difference]:
    checkpoint = Checkpoint.open(folder)
    return compare(checkpoint, required_tensors(ModelConfig.from_hf(checkpoint.config), checkpoint))


def changed(source: Path, target: Path, change: Any, **config: Any) -> Path:
    """A copy of a one-file model after ``change(tensors)``, its config.json updated."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_whole_checkpoints_have_no_difference(folder):
    assert differences(folder) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whole_models_of_every_family(tiny_model, architecture):
    assert differences(tiny_model(architecture)) == []


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_layers_that_predict_further_tokens_are_left_out(tiny_model, tmp_path, architecture):
    source = tiny_model(architecture)
    layer = f"model.layers.{json.loads((source / 'config.json').read_text())['num_hidden_layers']}"

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"{layer}.eh_proj.weight"] = torch.zeros(128, 256)
        tensors[f"{layer}.mlp.up_proj.weight"] = torch.zeros(128, 256)

    def add_plain(tensors: dict[str, Any]) -> None:
        tensors[f"{layer}.mlp.up_proj.weight"] = torch.zeros(128, 256)

    for stated in (1, None, 0):
        folder = changed(source, tmp_path / str(stated), add, num_nextn_predict_layers=stated)
        assert differences(folder) == [] and layer in "".join(inspect_checkpoint(str(folder)).left_out)
    plain = changed(source, tmp_path / "plain", add_plain, num_nextn_predict_layers=1)
    assert [each.kind for each in differences(plain)] == ["extra"]


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("GPT2LMHeadModel", {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}),
        ("BloomForCausalLM", {}),
        ("FalconForCausalLM", {"h.0.self_attention.maybe_rotary.inv_freq": torch.ones(8)}),
        ("Mamba2ForCausalLM", {}),
    ],
)
def test_files_may_lack_the_outermost_module_and_hold_masks(tiny_model, tmp_path, architecture, extra):
    """openai-community/gpt2 and bigscience/bloom-560m were written without the output layer."""

    def strip(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.").removeprefix("backbone.")] = tensors.pop(name)
        tensors |= extra

    source = tiny_model(architecture)
    folder = changed(source, tmp_path / "model", strip)
    assert differences(folder) == []
    bias = changed(source, tmp_path / "bias", lambda tensors: tensors.update({"model.x.attn.bias": torch.ones(8)}))
    assert [each.kind for each in differences(bias)] == ["extra"]


def test_factors_of_an_activation_function_are_refused_unless_all_are_one(tiny_model, tmp_path):
    """AutoAWQ divides the outputs of some activation functions by them."""

    def add(value: float) -> Any:
        return lambda tensors: tensors.update({"model.layers.0.mlp.act.scales": torch.full((256,), value)})

    assert Checkpoint.open(changed(tiny_model("LlamaForCausalLM"), tmp_path / "ones", add(1.0))).spec is None
    with pytest.raises(AiakqError, match="act.scales") as caught:
        _ = Checkpoint.open(changed(tiny_model("LlamaForCausalLM"), tmp_path / "twos", add(2.0))).spec
    assert caught.value.id == "format_unsupported"


#: Tensors that repeat what others say, or are not used.
RECORDS = {*hqq._RECORDS, "weight_format", "input_scale", "output_scale"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_inventory_checks_every_tensor_of_a_quantized_linear(folder, tmp_path):
    """Without any one tensor of a linear, or with one row less of it, that tensor is named, unless the tensor is one
    that may be absent, or a text.
    """
    inventory = Checkpoint.open(folder).inventory
    linears = ("model.layers.0.self_attn.k_proj.", "transformer.h.0.attn.c_attn.")
    prefix = next(prefix for prefix in linears if any(name.startswith(prefix) for name in inventory))
    suffixes = [name.removeprefix(prefix) for name in inventory if name.startswith(prefix)]
    assert len(suffixes) > 1
    for suffix in suffixes:
        name = prefix + suffix
        if suffix in RECORDS:
            continue
        if suffix.startswith("_weight_"):  # torchao's metadata list them
            without = changed(folder, tmp_path / f"no {suffix}", lambda tensors, name=name: tensors.pop(name))
            with pytest.raises(AiakqError, match=f"without {name}"):
                differences(without)
        elif suffix != "g_idx":
            found = differences(
                changed(folder, tmp_path / f"no {suffix}", lambda tensors, name=name: tensors.pop(name))
            )
            # Without its codes the linear is none, and what is left of it is too much.
            names = {each.name for each in found if each.kind == "missing"}
            assert names <= {name, prefix.rstrip(".")} and found
        if suffix.startswith("weight.quant_state") or not Checkpoint.open(folder).inventory[name].shape:
            continue
        cut = changed(
            folder, tmp_path / f"cut {suffix}", lambda tensors, name=name: tensors.update({name: tensors[name][:-1]})
        )
        found = differences(cut)
        assert any(each.name == name and each.kind == "shape" for each in found), (name, found)


@pytest.mark.parametrize(("name", "n"), [("gq-w8", 256), ("quanto-int8", 64), ("ao-int8-g32", 64), ("bnb-nf4", 64)])
def test_a_bias_that_the_model_has_not_is_refused_unless_it_is_zero(name, n, tmp_path):
    def loaded(value: float) -> None:
        linear = "model.layers.0.self_attn.q_proj"
        bias = {f"{linear}.bias": torch.full((n,), value, dtype=torch.float16)}
        folder = changed(FIXTURES / name, tmp_path / str(value), lambda tensors: tensors.update(bias))
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu", "skip_tokenizer_init": True}))

    loaded(0.0)
    with pytest.raises(AiakqError, match=r"q_proj.bias is not zero, and the model of config.json has no such bias"):
        loaded(0.5)


def test_one_error_lists_all_differences(tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.0.mlp.up_proj.scales"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1]
        tensors["model.layers.0.extra"] = torch.ones(2, 3)

    folder = changed(FIXTURES / "gq-w3", tmp_path / "model", change)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    problem = caught.value
    assert problem.id == "tensor_inventory" and problem.exit_code == 3
    assert "4 tensors (2 missing, 1 of another shape, 1 without a place in the model)" in problem.message
    rows = problem.details.splitlines()
    assert [row.split() for row in rows[:3]] == [
        ["tensor", "found", "expected"],
        ["model.norm.weight", "-", "[256]"],
        ["model.layers.0.mlp.up_proj.scales", "-", "[4,", "512]"],
    ]
    assert rows[3].split()[0] == "lm_head.weight" and "[32, 255]  [32, 256]" in rows[3]
    assert rows[4].split() == ["model.layers.0.extra", "[2,", "3]", "-"]
    assert str(problem).endswith(problem.details)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.e_score_correction_bias", "model.norm.weight"])
def test_vectors_that_are_not_finite_are_refused(tiny_model, tmp_path, name, value):
    """With a correction of NaN, a router selects any experts, and nothing shows in the logits."""
    folder = changed(
        tiny_model("DeepseekV3ForCausalLM"), tmp_path / "model", lambda tensors: tensors[name].fill_(value)
    )
    with pytest.raises(AiakqError, match=name) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert caught.value.id == "not_finite"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_attention_sinks_may_be_minus_infinity_and_nothing_else_that_is_not_finite(tiny_model, tmp_path, value):
    name = "model.layers.0.self_attn.sinks"
    folder = changed(tiny_model("GptOssForCausalLM"), tmp_path / "model", lambda tensors: tensors[name].fill_(value))
    if value < 0:
        assert torch.equal(Checkpoint.open(folder).checked_tensor(name), torch.full((4,), value))
    else:
        with pytest.raises(AiakqError, match=name):
            Checkpoint.open(folder).checked_tensor(name)


def test_missing_tensors_come_with_the_files_that_were_not_read(tiny_model, tmp_path):
    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight"))
    save_file({"lm_head.weight": torch.ones(320, 128)}, folder / "head.safetensors")
    with pytest.raises(AiakqError, match="not read, because model.safetensors holds the model: head.safetensors"):
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))


def test_the_inventory_reads_no_weights(tmp_path, monkeypatch):
    folder = changed(FIXTURES / "aawq", tmp_path / "model", lambda tensors: tensors.pop("model.norm.weight"))

    def refuse(self: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert caught.value.id == "tensor_inventory"


def test_the_table_of_differences_is_truncated():
    rows = table([Difference(f"t{number}", "-", "[1]") for number in range(70)]).splitlines()
    assert len(rows) == 22 and rows[-1] == "  and 50 more"


def test_tensors_that_transformers_does_not_use_are_named(tiny_model, tmp_path, caplog):
    extra = {"gpt_neox.layers.0.attention.gate.weight": torch.ones(2)}
    folder = changed(tiny_model("GPTNeoXForCausalLM"), tmp_path / "model", lambda tensors: tensors.update(extra))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert "1 tensors of the checkpoint that transformers' model does not use" in caplog.text
    assert "gpt_neox.layers.0.attention.gate.weight" in caplog.text


def test_the_inventory_covers_the_transformers_fallback(tiny_model, tmp_path):
    source = tiny_model("GPTNeoXForCausalLM")
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["gpt_neox.final_layer_norm.weight"]
        tensors[name] = tensors[name][:-1]

    folder = changed(source, tmp_path / "model", change)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert caught.value.id == "tensor_inventory"
    assert "gpt_neox.final_layer_norm.weight" in caught.value.details and name in caught.value.details


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 2**30},
        {"hidden_size": 2**30},
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 1},
        {"num_attention_heads": 2**20, "num_key_value_heads": 2**20},
    ],
    ids=str,
)
def test_absurd_configs_are_refused_quickly(tmp_path, config):
    folder = changed(FIXTURES / "aawq", tmp_path / "model", lambda tensors: None, **config)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert caught.value.id in ("tensor_inventory", "model_malformed")


def test_tensors_that_are_computed_again_may_be_there(tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)  # AutoGPTQ writes them for every linear

    assert differences(changed(FIXTURES / "gq-w3", tmp_path / "model", change)) == []


def test_masks_that_codegen_stores_may_be_there(tiny_model, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.attn.causal_mask"] = torch.ones(1, 1, 512, 512, dtype=torch.bool)

    folder = changed(tiny_model("CodeGenForCausalLM"), tmp_path / "model", change)
    load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))


def test_inventory_of_arbitrary_names_and_shapes():
    """What a caller without a model of its own uses."""
    checkpoint = Checkpoint.open(FIXTURES / "gq-w3")
    shapes = {"model.norm.weight": (256,), "norm.weight": (256,), "model.other": (3, 4)}
    found = compare(
        checkpoint, RequiredTensors(tensors=shapes, linears={"model.layers.0.mlp.up_proj": (512, 256, False)})
    )
    assert [each.name for each in found if each.kind == "missing"] == ["model.other"]
    assert not [each for each in found if each.kind == "shape"] and refusal("x", []) is None


def test_inspect_shows_differences_by_kind(tmp_path, capsys):
    from aiakq.cli import main
    from aiakq.terminal import console

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            del tensors[f"model.layers.{layer}.input_layernorm.weight"]

    folder = changed(FIXTURES / "gq-dyn", tmp_path / "model", change)
    found = inspect_checkpoint(str(folder), device="cpu")
    assert found.differences is not None and len(found.differences) == 2
    ((row, count),) = collapse_differences(found.differences)
    assert (row.name, row.found, row.expected, count) == ("model.layers.{0-1}.input_layernorm.weight", "-", "[256]", 2)
    assert main(["inspect", str(folder), "--json"]) == 0
    shown = capsys.readouterr()
    inventory = json.loads(shown.out)["inventory"]
    assert inventory[0] == {
        "kind": "missing",
        "name": "model.layers.0.input_layernorm.weight",
        "found": "-",
        "expected": "[256]",
    }
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr()
    assert "{0-1}.input_layernorm.weight" in shown.out and "missing" in shown.err
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    console.failure(caught.value)
    lines = capsys.readouterr().err.splitlines()
    assert "error[tensor_inventory]" in lines[-1] and any("[256]" in line for line in lines[:-1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_integers_where_floats_belong_are_refused_by_name(tiny_model, tmp_path, name, dtype):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "model", change)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert name in f"{caught.value} {caught.value.details}"
    assert caught.value.id in ("tensor_inventory", "format_unsupported")


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("Qwen2ForCausalLM", "layers.0.self_attn.q_proj.bias"),
        ("Qwen3MoeForCausalLM", "layers.0.mlp.gate.weight"),
        ("Mamba2ForCausalLM", "layers.0.mixer.A_log"),
        ("Mamba2ForCausalLM", "layers.0.mixer.conv1d.weight"),
        ("OPTForCausalLM", "embed_positions.weight"),
    ],
)
def test_integers_are_refused_in_every_kind_of_tensor(tiny_model, tmp_path, architecture, part):
    found = []

    def change(tensors: dict[str, torch.Tensor]) -> None:
        [name] = [each for each in tensors if each.endswith(part)]
        found.append(name)
        tensors[name] = tensors[name].to(torch.int8)

    [difference] = differences(changed(tiny_model(architecture), tmp_path / "model", change))
    assert difference.name == found[0] and difference.kind == "dtype" and difference.found.startswith("I8")


def test_scales_of_a_cache_and_heads_for_training_are_left_out_with_a_note(tiny_model, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])
        tensors["v_head.summary.weight"] = torch.zeros(1, 128)

    folder = changed(tiny_model("LlamaForCausalLM"), tmp_path / "model", change)
    _, facts = load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert "scales of a quantized KV cache" in facts["left out"] and "v_head" in facts["left out"]
    report = inspect_checkpoint(str(folder))
    assert report.left_out == ("model.layers.0.self_attn.k_scale", "v_head.summary.weight") and not report.differences


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"weight._data": torch.int8, "weight._scale": torch.float16}, "quanto"),
        ({"weight": torch.uint32, "scales": torch.float16, "biases": torch.float16}, "MLX"),
        ({"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32}, "bitsandbytes"),
        ({"weight": torch.int8, "SCB": torch.float32}, "bitsandbytes"),
        ({"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}, "FP8"),
        ({"weight_packed": torch.uint8, "weight_scale": torch.float8_e4m3fn}, "FP4|quantized embedding"),
        ({"weight_packed": torch.uint8, "weight_scale": torch.uint8}, "FP4|quantized embedding"),
        (
            {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
            "FP4|embedding",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("module", ["model.layers.0.mlp.up_proj", "model.embed_tokens"])
def test_formats_that_config_json_does_not_name_are_named_from_their_tensors(tmp_path, module, tensors, said):
    stored = {f"{module}.{name}": torch.zeros(8, 4).to(dtype) for name, dtype in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AiakqError, match=said) as caught:
        _ = Checkpoint.open(tmp_path).spec
    assert caught.value.id == "format_unsupported"


def test_a_quantized_embedding_of_compressed_tensors_is_named(tmp_path):
    stored = {"weight_packed": torch.zeros(8, 4, dtype=torch.int32), "weight_scale": torch.zeros(8, 1)}
    save_file({f"model.embed_tokens.{name}": each for name, each in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AiakqError, match="quantized embedding"):
        _ = Checkpoint.open(tmp_path).spec


def test_integers_are_refused_in_models_that_run_through_transformers(tiny_model, tmp_path):
    name = "gpt_neox.embed_in.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    folder = changed(tiny_model("GPTNeoXForCausalLM"), tmp_path / "model", change)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert caught.value.id == "tensor_inventory" and name in caught.value.details and "I8" in caught.value.details
