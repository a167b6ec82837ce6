"""``aiakq inspect``: what it says about real checkpoints, without touching their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight
from aiakq.runtime.inspect.inspection import Layer, collapse, inspect_checkpoint
from aiakq.spec import QuantSpec
from tests.format_names import INTEGERS

FIXTURES = Path(__file__).parents[2] / "formats" / "fixtures"
N, K = 64, 256
#: format -> how a layer of it is made.
SPECS = {
    "gptq": QuantSpec("gptq", "gptq", 4, 128),
    "gptq_v2": QuantSpec("gptq", "gptq_v2", 3, 64, symmetric=False),
    "awq": QuantSpec("awq", "awq", 4, 128, symmetric=False),
    "awq-gemv": QuantSpec("awq", "awq_gemv", 4, 128, symmetric=False),
    "awq-gemv-fast": QuantSpec("awq", "awq_gemv_fast", 4, 128, symmetric=False),
    "compressed-tensors": QuantSpec("weight_only_int8", "compressed-tensors", 8),
    "compressed-tensors-w4": QuantSpec("gptq", "compressed-tensors", 4, 32),
    "compressed-tensors-w8a8": QuantSpec("smooth_quant", "compressed-tensors", 8, activation_bits=8),
}


def save_layer(folder, spec: QuantSpec) -> None:
    """A folder that holds one quantized linear, written by the format itself."""
    group = K if spec.group_size == -1 else spec.group_size
    generator = torch.Generator().manual_seed(0)
    weight = QWeight(
        scheme=spec.scheme,
        codes=torch.randint(0, 2**spec.bits, (N, K), generator=generator, dtype=torch.uint8),
        scales=torch.rand(N, K // group, generator=generator) + 0.1,
        zeros=None if spec.symmetric else torch.ones(N, K // group, dtype=torch.uint8),
        group_size=group,
    )
    tensors = formats.load(spec.format).write(weight, spec, torch.float16)
    folder.mkdir()
    named = {f"model.layers.0.mlp.up_proj.{suffix}": tensor for suffix, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization_config.write(spec)}
    (folder / "config.json").write_text(json.dumps(config))


def test_every_format_of_integers_has_a_case():
    assert {spec.format for spec in SPECS.values()} == set(INTEGERS)


@pytest.mark.parametrize("name", SPECS)
def test_shapes_come_from_headers_alone(tmp_path, name):
    spec = SPECS[name]
    save_layer(tmp_path / "model", spec)
    (layer,) = inspect_checkpoint(str(tmp_path / "model"), device="cpu").layers
    assert (layer.name, layer.kind, layer.scheme) == ("model.layers.0.mlp.up_proj", "linear", spec.scheme)
    assert (layer.n, layer.k) == (N, K)
    assert layer.group_size == (K if spec.group_size == -1 else spec.group_size)
    assert layer.implementation in ("dequantized", "reference") or layer.implementation


@pytest.mark.parametrize("name", SPECS)
def test_weights_are_not_read(tmp_path, name, monkeypatch):
    from aiakq.formats.checkpoint import Checkpoint

    def refuse(self, tensor):
        raise AssertionError(f"{tensor} was read")

    save_layer(tmp_path / "model", SPECS[name])
    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    inspect_checkpoint(str(tmp_path / "model"))


def test_the_example_model(example_model):
    found = inspect_checkpoint(str(example_model), device="cpu", dtype="float32")
    assert (found.architecture, found.support, found.spec) == ("LlamaForCausalLM", "native", None)
    assert found.parameters == 5_770_496 and found.nbytes == 2 * found.parameters
    assert found.bits_per_weight() == 16.0 and found.bits_per_weight(quantized_only=True) is None
    assert found.context == 1024 and found.tied_embeddings
    assert (found.device, found.dtype) == ("cpu", "float32")
    assert {layer.scheme for layer in found.layers} == {"w16"}
    rows = collapse(found.layers)
    counts = {row.name: row.count for row in rows if row.kind != "other"}
    assert counts["model.layers.{0-5}.mlp.down_proj"] == 6
    assert len(counts) == 1 + 7
    assert sum(row.nbytes * row.count for row in rows) == found.nbytes


@pytest.mark.parametrize("name", ["quanto-int2", "quanto-int4"])
def test_shapes_that_a_file_does_not_tell_are_those_of_the_model(name):
    found = inspect_checkpoint(str(FIXTURES / name), None, "cpu", "auto")
    shapes = {layer.name: (layer.n, layer.k) for layer in found.layers}
    assert shapes["model.layers.0.self_attn.q_proj"] == (64, 160) and found.differences == ()


def test_the_cache_of_a_token_is_that_of_the_family(tiny_model):
    """Keys and values of two heads; latents of 32 elements and 16 rotated ones."""
    for architecture, elements in (("LlamaForCausalLM", 2 * 2 * 32), ("DeepseekV3ForCausalLM", 32 + 16)):
        found = inspect_checkpoint(str(tiny_model(architecture)), device="cpu", dtype="float32")
        assert found.kv_bytes_per_token == found.document()["kv_bytes_per_token"] == 2 * elements * 4


def test_an_architecture_without_a_model_of_our_own(tiny_model):
    found = inspect_checkpoint(str(tiny_model("GPTNeoXForCausalLM")))
    assert found.kv_bytes_per_token is None
    assert "transformers" in found.support
    assert {layer.kind for layer in found.layers} == {"embedding", "linear", "other"}


def test_a_model_that_classifies(tiny_classifier):
    found = inspect_checkpoint(str(tiny_classifier("LlamaForCausalLM", 3)))
    assert (found.architecture, found.support, found.differences) == ("LlamaForSequenceClassification", "native", ())
    scores = next(layer for layer in found.layers if layer.name == "score")
    assert (scores.n, scores.k) == (3, 128)


def test_layers_that_differ_keep_rows_of_their_own():
    def layer(number: int, scheme: str = "w4a16") -> Layer:
        return Layer(f"model.layers.{number}.up", "linear", scheme, 2, 2, 2, 8)

    rows = collapse([layer(0, "w16"), layer(1), layer(2), layer(3), layer(5), layer(4, "w16")])
    assert [(row.name, row.scheme, row.count) for row in rows] == [
        ("model.layers.{0,4}.up", "w16", 2),
        ("model.layers.{1-3,5}.up", "w4a16", 4),
    ]


def test_experts_are_joined_over_both_numbers():
    layers = [Layer(f"layers.{i}.experts.{j}.up", "linear", "w4a16", 2, 2, 2, 8) for i in range(2) for j in range(4)]
    (row,) = collapse(layers)
    assert (row.name, row.count) == ("layers.{0-1}.experts.{0-3}.up", 8)


# --- the command ---------------------------------------------------------------------------------------------------


def test_command_joins_equal_layers_and_all_lists_each(aiakq, example_model):
    joined = aiakq("inspect", example_model)
    assert joined.code == 0
    assert "{0-5}.mlp.down_proj" in joined.out and "model.layers.3.mlp.down_proj" not in joined.out
    assert "model.layers.3.mlp.down_proj" in aiakq("inspect", example_model, "--all").out


def test_command_fits_80_columns(aiakq, example_model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = aiakq("inspect", example_model).out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "{0-5}.self_attn.q_proj " in shown


def test_document_lists_every_layer(aiakq, example_model):
    document = json.loads(aiakq("inspect", example_model, "--json").out)
    assert (document["schema_version"], document["kind"]) == (1, "inspect")
    assert len(document["layers"]) == 1 + 6 * 7 + 6 * 2 + 1
    assert sum(layer["bytes"] for layer in document["layers"]) == document["bytes"]


@pytest.mark.parametrize(
    ("damage", "id"),
    [
        (lambda folder: shutil.rmtree(folder), "model_missing"),
        (lambda folder: (folder / "config.json").unlink(), "model_incomplete"),
        (lambda folder: (folder / "config.json").write_text("{"), "model_malformed"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model_incomplete"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "model_malformed"),
        (lambda folder: _configure(folder, quantization_config={"quant_method": "bitsandbytes"}), "format_unsupported"),
        (lambda folder: _configure(folder, quantization_config=None), "format_unsupported"),
    ],
)
def test_a_damaged_folder_is_one_line(aiakq, tmp_path, damage, id):
    folder = tmp_path / "model"
    save_layer(folder, SPECS["awq"])
    damage(folder)
    ended = aiakq("inspect", folder)
    assert ended.code == 3 and ended.err.count("\n") == 1
    assert f"error[{id}]" in ended.err


def _configure(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "said"),
    [("vptq", "VPTQ's weights are vectors"), ("hqq-3bit-axis0", "run across outputs"), ("quanto-int4", "of 16 bits")],
)
def test_layers_that_are_decoded_at_load_name_no_kernel_of_codes(name, said):
    """The start-up table says the same."""
    found = inspect_checkpoint(str(FIXTURES / name), device="cpu", dtype="float32")
    layer = next(layer for layer in found.layers if "up_proj" in layer.name)
    assert layer.passed_over[0][0] == "codes" and said in layer.passed_over[0][1]
    assert layer.implementation == next(each.implementation for each in found.layers if each.name == "lm_head")
    kept = inspect_checkpoint(str(FIXTURES / "hqq-4bit"), device="cpu", dtype="float32").layers
    assert not any(name == "codes" for layer in kept for name, _ in layer.passed_over)


def test_blocks_that_end_within_rows_are_decoded(tmp_path):
    """As reading the file finds: 96 inputs hold one and a half blocks of 64."""
    from aiakq.formats import bitsandbytes
    from aiakq.formats.safetensors_file import TensorInfo

    headers = {"weight.absmax": TensorInfo("F32", (9,), "f")}
    assert bitsandbytes.decoded(headers, QuantSpec("bitsandbytes", "bitsandbytes", 4, 64), 6, 96) is None
    headers = {"weight.absmax": TensorInfo("F32", (3,), "f")}
    reason = bitsandbytes.decoded(headers, QuantSpec("bitsandbytes", "bitsandbytes", 4, 64), 4, 36)
    assert reason == "blocks of 64 weights end within rows of 36"


def test_what_transformers_cannot_serve_is_said(tmp_path):
    """With the decision that loading takes: BioGPT's attention cannot be replaced, GPT-NeoX's can."""
    from transformers import BioGptConfig, BioGptForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

    from aiakq.errors import AiakqError
    from aiakq.runtime.build.model_loader import load_model
    from aiakq.runtime.config.engine import EngineConfig
    from aiakq.runtime.hf.transformers_fallback import refusal

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 64}
    BioGptForCausalLM(BioGptConfig(**sizes)).save_pretrained(tmp_path / "refused")
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path / "served")
    found = inspect_checkpoint(str(tmp_path / "refused"), device="cpu", refusal=refusal)
    with pytest.raises(AiakqError) as caught:
        load_model(EngineConfig.from_args({"model": str(tmp_path / "refused"), "device": "cpu"}))
    assert found.support == f"not served: {caught.value.fields['reason']}"
    assert inspect_checkpoint(str(tmp_path / "served"), device="cpu", refusal=refusal).support.startswith("through")
