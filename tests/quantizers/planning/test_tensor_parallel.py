"""-tp: what is refused, what is chosen, what is padded, and that every shard then holds whole groups and words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.kernels.cpu import library
from aiakq.quantizers.model.shapes import LinearShape
from aiakq.quantizers.model.source import SourceModel
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.planning.tensor_parallel import TensorParallelPlan, plan_tensor_parallel
from aiakq.spec import LayerSpec

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4}


def options(method: str = "gptq", **fields: Any) -> QuantizeOptions:
    return QuantizeOptions("in", "out", method, **fields)


def layer(k: int = 4096, n: int = 4096, row: bool = True, name: str = "model.layers.0.mlp.down_proj") -> LinearShape:
    return LinearShape(name, n, k, row)


def plan(asked: QuantizeOptions, *layers: LinearShape, config: dict[str, Any] = CONFIG) -> TensorParallelPlan:
    return plan_tensor_parallel(asked, config, layers)


def refused(asked: QuantizeOptions, *layers: LinearShape, config: dict[str, Any] = CONFIG) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        plan(asked, *layers, config=config)
    return caught.value


def llama_shapes(hidden: int, inside: int, heads: int, kv_heads: int, head_dim: int = 128) -> list[LinearShape]:
    mlp, attention = "model.layers.0.mlp.", "model.layers.0.self_attn."
    return [
        layer(hidden, heads * head_dim, False, attention + "q_proj"),
        layer(hidden, kv_heads * head_dim, False, attention + "k_proj"),
        layer(hidden, kv_heads * head_dim, False, attention + "v_proj"),
        layer(heads * head_dim, hidden, True, attention + "o_proj"),
        layer(hidden, inside, False, mlp + "gate_proj"),
        layer(hidden, inside, False, mlp + "up_proj"),
        layer(inside, hidden, True, mlp + "down_proj"),
    ]


QWEN2_72B = llama_shapes(8192, 29568, 64, 8)
QWEN2_72B_CONFIG = {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568}


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_group_that_does_not_divide_lists_those_that_do() -> None:
    problem = refused(options(group_size=128), layer(), layer(k=11008 + 32))
    assert problem.id == "group_size"
    assert "32, -1" in problem.remedy
    assert "64" not in problem.remedy
    assert plan(options(group_size=32), layer(k=11008 + 32)).group_size == 32
    assert plan(options(group_size=-1), layer(k=11008 + 32)).group_size == -1


def test_shapes_that_do_not_fill_packed_words_are_written_as_another_format() -> None:
    assert refused(options(group_size=-1, format="gptq"), layer(n=40)).id == "layer_shape"
    assert refused(options("awq", group_size=-1, format="awq"), layer(n=36)).id == "layer_shape"
    for asked, n in ((options(), 40), (options("awq"), 36)):
        found = plan(asked, layer(n=n), layer(name="other"))
        assert found.fit(asked.spec("0")).format == "compressed-tensors" and found.group_size == 128
        assert "mlp.down_proj is" in found.notes[0] and f"{n} x 4096" in found.notes[0]
        assert plan(asked, layer()).format is None
    assert plan(options("weight_only_int8"), layer(n=37, k=41)).group_size == -1


def test_an_impossible_tp_lists_the_possible_ones() -> None:
    assert not plan(options(tp=4), layer()).widths
    problem = refused(options(tp=3), layer())
    assert problem.id == "tensor_parallel"
    assert "8 attention heads" in str(problem)
    assert "1, 2, 4, 8." in problem.remedy
    assert refused(options(tp=8), layer(n=1056, row=False, name="self_attn.q_proj")).id == "tensor_parallel"
    # Fewer key-value heads than GPUs are copied.
    plan(options(tp=8), layer(n=32 * 4, row=False, name="self_attn.k_proj"))
    problem = refused(options(tp=4), layer(), config={"num_attention_heads": 12, "num_key_value_heads": 3})
    assert problem.id == "tensor_parallel"
    assert "1, 3, 6, 12." not in problem.remedy  # 4096 inputs do not divide by 3
    problem = refused(options(tp=4), layer(k=3 * 4096), config={"num_attention_heads": 12, "num_key_value_heads": 3})
    assert "1, 3, 6, 12." in problem.remedy


def test_the_obstacle_to_tp_is_named_even_if_the_default_group_does_not_fit() -> None:
    config = {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 352}
    found = refused(options(tp=3), *llama_shapes(128, 352, 4, 2, 32), config=config)
    assert found.id == "tensor_parallel" and "4 attention heads" in str(found) and "1, 2, 4" in str(found)


def test_what_only_gathering_ranks_can_serve_is_planned_with_a_note() -> None:
    asked = options(tp=3, group_size=128)
    found = plan_tensor_parallel(asked, CONFIG, [layer()], gathered=True)
    assert (found.tp, found.group_size, found.elsewhere, found.parts) == (3, 128, (1, 2, 4, 8), 1)
    assert found.record() == {"tp": 3, "tp_elsewhere": [1, 2, 4, 8]}
    assert "only aiakq serves it, on CPUs" in found.notes[-1] and "(8 attention heads)" in found.notes[-1]
    assert "1, 2, 4, 8." in found.notes[-1]
    # Groups that straddle a cut of the inputs: attention cannot be padded.
    shape = layer(k=1600, n=1600, name="model.layers.0.self_attn.o_proj")
    found = plan_tensor_parallel(options(tp=8, group_size=64), CONFIG, [shape], gathered=True)
    assert (found.tp, found.group_size) == (8, 64) and "do not divide into groups of 64" in found.notes[-1]
    # Where every server can, nothing changes; and what cannot be quantized at all is refused as ever.
    assert plan_tensor_parallel(options(tp=4), CONFIG, [layer()], gathered=True) == plan(options(tp=4), layer())
    with pytest.raises(AiakqError) as caught:
        plan_tensor_parallel(options(tp=3, group_size=128), CONFIG, [layer(k=4096 + 32)], gathered=True)
    assert caught.value.id == "group_size"


def test_attention_is_never_padded() -> None:
    """The output projection is as wide as the heads; only an MLP can be made wider without changing the function."""
    shape = layer(k=1600, n=1600, name="model.layers.0.self_attn.o_proj")
    problem = refused(options(tp=8, group_size=128), shape, config={**CONFIG, "intermediate_size": 1600})
    assert "groups of 128" in str(problem) or problem.id == "group_size"


def test_multi_query_mode() -> None:
    plan(options(multi_query_mode=True), layer())
    assert refused(options(multi_query_mode=True), layer(), config={"num_attention_heads": 8}).id == "option_conflict"


# --- chosen and padded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "group"), [(1, 128), (2, 64), (4, 32)])
def test_the_largest_usual_group_that_fits_is_chosen(tp: int, group: int) -> None:
    found = plan_tensor_parallel(options("awq", tp=tp), QWEN2_72B_CONFIG, QWEN2_72B)
    assert (found.group_size, found.chosen, dict(found.widths)) == (group, group != 128, {})
    assert found.record() == ({"tp": tp} if tp == 1 else {"tp": tp, "group_size_chosen": group})
    assert any(f"Groups have {group} inputs" in note for note in found.notes) == found.chosen


@pytest.mark.parametrize("asked", [{"tp": 8}, {"tp": 8, "group_size": 128}, {"tp": 2, "group_size": 128}])
def test_where_no_group_fits_the_mlp_is_padded(asked: dict[str, int]) -> None:
    """Qwen's own advice for the 72B models: 29568 becomes 29696 for 8 GPUs and groups of 128."""
    found = plan_tensor_parallel(options(**asked), QWEN2_72B_CONFIG, QWEN2_72B)
    assert found.group_size == 128
    assert not found.chosen
    assert found.widths == {"intermediate_size": (29568, 29696)}
    assert found.record()["padded"] == {"intermediate_size": {"from": 29568, "to": 29696}}
    assert any("padded with zeros from 29568 to 29696" in note for note in found.notes)
    wider = [replace(shape, k=29696) if shape.k == 29568 else shape for shape in QWEN2_72B]
    wider = [replace(shape, n=29696) if shape.n == 29568 else shape for shape in wider]
    again = plan_tensor_parallel(options(**asked), {**QWEN2_72B_CONFIG, "intermediate_size": 29696}, wider)
    assert not again.widths


def test_int8_is_padded_where_rows_cannot_be_split() -> None:
    found = plan_tensor_parallel(
        options("smooth_quant", tp=8),
        {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1004},
        llama_shapes(1024, 1004, 8, 8),
    )
    assert found.widths == {"intermediate_size": (1004, 1024)}
    assert found.group_size == -1


def test_layer_overrides_use_their_own_group_size() -> None:
    asked = options(tp=2, group_size=64)
    spec = replace(asked.spec(""), layers=(("model.layers.0.mlp.down_proj", LayerSpec(4, 128)),))
    found = plan_tensor_parallel(asked, QWEN2_72B_CONFIG, QWEN2_72B, spec)
    assert found.widths == {"intermediate_size": (29568, 29696)}
    untouched = replace(spec, layers=(("re:.*mlp.*", None),))
    assert not plan_tensor_parallel(asked, QWEN2_72B_CONFIG, QWEN2_72B, untouched).widths


def test_layer_overrides_without_a_group_size_use_the_chosen_one() -> None:
    """``--layer '*=bits:8'`` says nothing of groups, so it has the model's."""
    asked = options(tp=2)
    base = asked.spec("")
    spec = replace(base, layers=(("re:.*mlp.*", LayerSpec(8, 128)), ("re:.*q_proj", LayerSpec(4, 32)), ("x", None)))
    found = plan_tensor_parallel(asked, QWEN2_72B_CONFIG, QWEN2_72B, spec)
    assert (found.group_size, dict(found.widths)) == (64, {})
    assert [own and own.group_size for _, own in found.fit(spec).layers] == [64, 32, None]
    assert found.fit(base).group_size == 64


def test_layers_without_fast_kernels_are_reported_in_one_sentence() -> None:
    found = plan_tensor_parallel(options("awq", tp=4, group_size=32), CONFIG, llama_shapes(1024, 1536, 8, 4, 32))
    notes = [note for note in found.notes if "Marlin" in note]
    assert len(notes) == 1
    # 8 query heads and 4 key and value heads of 32 each, over 4 GPUs, computed as one.
    assert "o_proj (1024 x 64)" in notes[0]
    assert "q_proj+k_proj+v_proj" not in notes[0]
    assert "down_proj" not in notes[0]
    assert not plan_tensor_parallel(options("awq", tp=4), QWEN2_72B_CONFIG, llama_shapes(8192, 28672, 64, 8)).notes


def test_any_number_of_ranks_serves_what_was_planned_for_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Three ranks for four heads: refused before, because other servers cannot."""
    from aiakq import LLM, SamplingParams

    reason = library.unavailable()
    if reason is not None:
        pytest.skip(reason)
    source = tiny_model("LlamaForCausalLM")
    report = quantize_checkpoint(
        QuantizeOptions(
            str(source), str(tmp_path / "out"), "awq", tp=3, group_size=32, samples=8, seqlen=64, evaluate=False,
            device="cpu",
        )
    )  # fmt: skip
    assert report.tp == 3 and any("With -tp 3 only aiakq serves it" in note for note in report.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aiakq"]["tp"] == 3 and config["aiakq"]["tp_elsewhere"] == [1, 2, 4]
    answers, facts = [], []
    for size in (1, 3):
        llm = LLM(str(tmp_path / "out"), tensor_parallel_size=size, max_model_len=64)
        answers.append(llm.generate("abc", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids)
        facts.append(llm.engine.facts.get("ranks"))
        del llm
    assert answers[0] == answers[1]
    assert facts[0] == "served with -tp 1, quantized for -tp 3"
    assert facts[1].startswith("3 processes share each layer") and "quantized" not in facts[1]


# --- the whole way ----------------------------------------------------------------------------------------------------


def shards(folder: Path, tp: int) -> None:
    """Every quantized linear cut ``tp`` ways as servers cut it: all shards hold whole groups and words."""
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(name)
        tensors = {suffix: checkpoint.tensor(full) for suffix, full in checkpoint.linear_tensors(name).items()}
        row = name.endswith(("o_proj", "out_proj", "down_proj", "fc2", "w2"))
        if row:
            assert weight.k % (tp * weight.group_size) == 0 or weight.group_size == weight.k
        else:
            assert weight.n % tp == 0
        for suffix, tensor in tensors.items():
            if suffix in ("bias", "g_idx", "weight_shape"):
                continue
            along = {"qweight": 0, "qzeros": 0, "scales": 0}.get(suffix, 1) if row else (
                1 if suffix in ("qweight", "qzeros", "scales") else 0
            )  # fmt: skip
            if tensor.shape[along] > 1:  # one scale per row is copied
                assert tensor.shape[along] % tp == 0, (name, suffix, tuple(tensor.shape))


@pytest.mark.parametrize(("method", "tp"), [("gptq", 4), ("gptq", 8), ("awq", 4), ("awq", 8)])
def test_a_padded_model_is_the_same_function(
    method: str, tp: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from aiakq.evaluation.scoring import load_for_scoring

    inside = 232  # 29 * 8
    source = tiny_model(
        "LlamaForCausalLM", hidden_size=256, num_attention_heads=8, num_key_value_heads=4, intermediate_size=inside
    )
    report = quantize_checkpoint(
        QuantizeOptions(
            str(source), str(tmp_path / "out"), method, tp=tp, samples=8, seqlen=64, evaluate=False, device="cpu"
        )
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wide = 256
    assert config["intermediate_size"] == wide
    assert config["aiakq"]["tp"] == tp
    assert config["aiakq"]["padded"] == {"intermediate_size": {"from": inside, "to": wide}}
    assert report.tp == tp
    shards(tmp_path / "out", tp)
    # What was padded stays zero, so the columns and rows of the source are all that counts.
    checkpoint = Checkpoint.open(tmp_path / "out")
    narrow = load_for_scoring(_cut_back(tmp_path, checkpoint, inside), "float32", "cpu")
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    got = load_for_scoring(tmp_path / "out", "float32", "cpu").logits(ids)
    wanted = narrow.logits(ids)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "widths"),
    [
        ("OPTForCausalLM", {"ffn_dim": 232}),
        ("MixtralForCausalLM", {"intermediate_size": 232}),
        ("Qwen2MoeForCausalLM", {"moe_intermediate_size": 116, "shared_expert_intermediate_size": 232}),
    ],
)
def test_other_families_are_padded(
    architecture: str, widths: dict[str, int], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(architecture, **widths)
    report = quantize_checkpoint(
        QuantizeOptions(
            str(source), str(tmp_path / "out"), "gptq", tp=2, samples=8, seqlen=64, evaluate=False, device="cpu"
        )
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for key, width in widths.items():
        assert config[key] == -(-width // 128) * 128
        assert report.padded[key] == (width, config[key])
    assert report.worst is not None and report.worst.error is not None and report.worst.error < 0.25
    shards(tmp_path / "out", 2)


@pytest.mark.parametrize(("method", "blocks"), [("weight_only_int8", 2), ("smooth_quant", 1)])
def test_padding_changes_no_code_of_whole_rows(
    method: str, blocks: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """236 = 59 * 4 is not cut 8 ways; zeros at the end of a row move neither its scale nor an activation's.

    A wider sum may be rounded elsewhere in its last bit. Where activations are rounded to codes, one that lies between
    two then moves by a whole step, and blocks after it are calibrated on that: only the first block says what padding
    does.
    """
    from aiakq.evaluation.scoring import load_for_scoring

    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 236}
    source = tiny_model("LlamaForCausalLM", **sizes, num_hidden_layers=blocks)
    ids = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(0))
    logits, linears = [], []
    for tp in (1, 8):
        folder = tmp_path / str(tp)
        quantize_checkpoint(
            QuantizeOptions(str(source), str(folder), method, tp=tp, samples=8, seqlen=64, evaluate=False, device="cpu")
        )
        logits.append(load_for_scoring(folder, "float32", "cpu").logits(ids))
        checkpoint = Checkpoint.open(folder)
        linears.append({name: checkpoint.read_linear(name) for name in checkpoint.quantized_linears()})
    shards(folder, 8)
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < (1e-3 if method == "smooth_quant" else 1e-5)
    for name, narrow in linears[0].items():
        wide = linears[1][name]
        rows, columns = narrow.codes.shape
        assert wide.codes.shape == tuple(256 if size == 236 else size for size in narrow.codes.shape)
        torch.testing.assert_close(wide.scales[:rows], narrow.scales, rtol=1e-6, atol=0)
        moved = (wide.codes[:rows, :columns] != narrow.codes).float().mean()
        assert moved == 0 if method == "weight_only_int8" else moved < 1e-4


def _cut_back(tmp_path: Path, checkpoint: Checkpoint, width: int) -> Path:
    """The dequantized output without its padding, as an ordinary model."""
    import safetensors.torch

    folder = tmp_path / "narrow"
    folder.mkdir()
    state, own = {}, set()
    for name in checkpoint.quantized_linears():
        weight = checkpoint.read_linear(name)
        zeros = weight.zeros if weight.zeros is not None else torch.full_like(weight.scales, 2 ** (weight.bits - 1))
        group = torch.arange(weight.k) // weight.group_size
        dense = (weight.codes.float() - zeros.float()[:, group]) * weight.scales.float()[:, group]
        if ".mlp." in name:
            if name.endswith("down_proj"):
                assert not dense[:, width:].any()
                dense = dense[:, :width].contiguous()
            else:
                assert not dense[width:].any()
                dense = dense[:width].contiguous()
        state[f"{name}.weight"] = dense
        own.update(checkpoint.linear_tensors(name).values())
    state |= {name: checkpoint.tensor(name).float() for name in checkpoint.inventory if name not in own}
    safetensors.torch.save_file(state, folder / "model.safetensors")
    config = {key: value for key, value in checkpoint.config.items() if key not in ("quantization_config", "aiakq")}
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": width, "dtype": "float32"}))
    return folder


def test_the_source_is_loaded_padded(tiny_model: Callable[..., Path]) -> None:
    source = Checkpoint.open(tiny_model("LlamaForCausalLM", intermediate_size=232))
    model = SourceModel(source, None, torch.device("cpu"), widths={"intermediate_size": (232, 256)})
    shapes = {shape.name.rpartition(".")[2]: (shape.n, shape.k) for shape in model.linear_shapes()}
    assert shapes["gate_proj"] == (256, 128)
    assert shapes["down_proj"] == (128, 256)
    rest = {name: tuple(tensor.shape) for name, tensor in model.rest(set())}
    assert rest["model.layers.0.mlp.down_proj.weight"] == (128, 256)
    assert rest["model.norm.weight"] == (128,)
    block = model.blocks[0]
    model.load(block, model.block_prefix(0))
    assert not block.mlp.down_proj.weight[:, 232:].any()
    assert not block.mlp.gate_proj.weight[232:].any()
