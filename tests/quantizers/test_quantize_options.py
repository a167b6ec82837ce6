"""Options: what is refused before anything heavy is loaded, and what a model refuses before calibration."""

import subprocess
import sys
from typing import Any

import pytest

from aiakq import quantizers
from aiakq.errors import AiakqError
from aiakq.quantizers.options import METHOD_DEFAULTS, LinearShape, QuantizeOptions, check_model
from aiakq.spec import METHOD_NAMES

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4}


def options(method: str = "gptq", **fields: Any) -> QuantizeOptions:
    return QuantizeOptions("in", "out", method, **fields)


def layer(k: int = 4096, n: int = 4096, row: bool = True, name: str = "model.layers.0.mlp.down_proj") -> LinearShape:
    return LinearShape(name, n, k, row)


def test_every_method_is_registered_everywhere() -> None:
    assert set(quantizers.METHODS) == set(METHOD_DEFAULTS) == set(METHOD_NAMES)
    for name in quantizers.METHODS:
        assert callable(quantizers.load(name).quantize_block)


def test_options_import_nothing_heavy() -> None:
    script = "import sys, aiakq.quantizers.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_users_spelling_is_understood() -> None:
    assert options("gpt").method == "gptq"
    assert options("W8A8").method == "smooth_quant"


@pytest.mark.parametrize(
    ("fields", "id"),
    [
        ({"method": "gguf"}, "bad_option"),
        ({"tp": 0}, "bad_option"),
        ({"dtype": "int8"}, "bad_option"),
        ({"bits": 5}, "bad_option"),
        ({"method": "awq", "bits": 3}, "bad_option"),
        ({"group_size": 0}, "bad_option"),
        ({"group_size": -2}, "bad_option"),
        ({"samples": 0}, "bad_option"),
        ({"seqlen": 1}, "bad_option"),
        ({"damp": 0.0}, "bad_option"),
        ({"damp": float("nan")}, "bad_option"),
        ({"act_order": "yes"}, "bad_option"),
        ({"method": "smooth_quant", "smooth_alpha": 1.5}, "bad_option"),
        ({"method": "smooth_quant", "smooth_alpha": float("nan")}, "bad_option"),
        ({"smooth_alpha": 0.5}, "option_conflict"),
        ({"method": "awq", "act_order": "static"}, "option_conflict"),
        ({"method": "smooth_quant", "group_size": 128}, "option_conflict"),
        ({"method": "weight_only_int8", "symmetric": False}, "option_conflict"),
        ({"token_ids": "ids.txt", "calibration": "text.txt"}, "option_conflict"),
    ],
)
def test_impossible_options(fields: dict[str, Any], id: str) -> None:
    with pytest.raises(AiakqError) as caught:
        options(**fields)
    assert caught.value.id == id
    assert caught.value.exit_code == 2


def test_alpha() -> None:
    assert options("smooth_quant").alpha("llama") == 0.8
    assert options("smooth_quant").alpha("opt") == 0.5
    assert options("smooth_quant", smooth_alpha=0.0).alpha("opt") == 0.0  # 0 is a value, not "unset"


def test_formats_of_the_methods() -> None:
    specs = {name: options(name).spec("1") for name in METHOD_NAMES}
    assert {name: (spec.format, spec.describe()) for name, spec in specs.items()} == {
        "weight_only_int8": ("compressed-tensors", "w8a16 channel sym"),
        "smooth_quant": ("compressed-tensors", "w8a8 channel sym"),
        "awq": ("awq", "w4a16 g128 asym"),
        "gptq": ("gptq", "w4a16 g128 sym"),
    }
    assert options("gptq", symmetric=False).spec("1").format == "gptq_v2"


def refused(asked: QuantizeOptions, *layers: LinearShape, config: dict[str, Any] = CONFIG) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        check_model(asked, config, layers)
    return caught.value


def test_a_group_that_does_not_divide_lists_those_that_do() -> None:
    problem = refused(options(), layer(), layer(k=11008 + 32))
    assert problem.id == "group_size"
    assert "32, -1" in problem.remedy
    assert "64" not in problem.remedy
    check_model(options(group_size=32), CONFIG, [layer(k=11008 + 32)])
    check_model(options(group_size=-1), CONFIG, [layer(k=11008 + 32)])


def test_shapes_that_words_cannot_hold() -> None:
    assert refused(options(group_size=-1), layer(n=40)).id == "layer_shape"
    assert refused(options("awq", group_size=-1), layer(n=36)).id == "layer_shape"
    check_model(options("weight_only_int8"), CONFIG, [layer(n=37, k=41)])


def test_tensor_parallel() -> None:
    check_model(options(tp=4), CONFIG, [layer()])
    problem = refused(options(tp=3), layer())
    assert problem.id == "tensor_parallel"
    assert "8 attention heads" in str(problem)
    assert "1, 2, 4, 8" in problem.remedy
    # 29568 = 231 * 128: whole, but not over two GPUs (Qwen2.5-72B).
    problem = refused(options(tp=2), layer(k=29568))
    assert problem.id == "tensor_parallel"
    assert "groups of 128" in str(problem)
    assert refused(options(tp=8), layer(n=1056, row=False, name="q_proj")).id == "tensor_parallel"
    # Fewer key-value heads than GPUs are copied.
    check_model(options(tp=8), CONFIG, [layer(n=32 * 4, row=False, name="self_attn.k_proj")])
    assert refused(options(tp=4), layer(), config={"num_attention_heads": 12, "num_key_value_heads": 3}).id == (
        "tensor_parallel"
    )


def test_multi_query_mode() -> None:
    check_model(options(multi_query_mode=True), CONFIG, [layer()])
    assert refused(options(multi_query_mode=True), layer(), config={"num_attention_heads": 8}).id == "option_conflict"
