"""The names of --quantization cover what vLLM has and had, and lead to containers that readers know."""

from __future__ import annotations

import pytest

from aiakq.formats import modules, quantization_names, unread_formats
from aiakq.formats.quantization_config import DIALECTS, method_of
from aiakq.formats.quantization_names import NAMES

#: Values of vLLM's --quantization by version, as they are written there.
VLLM = {
    "0.4.0": "awq gptq squeezellm marlin",
    "0.6.3": "aqlm awq deepspeedfp tpu_int8 fp8 fbgemm_fp8 modelopt marlin gguf gptq_marlin_24 gptq_marlin awq_marlin "
    "gptq compressed-tensors bitsandbytes qqq experts_int8 neuron_quant ipex",
    "0.7.3": "hqq quark moe_wna16 ptpc_fp8 nvfp4",
    "0.10.0": "modelopt_fp4 bitblas gptq_bitblas auto-round rtn inc torchao petit_nvfp4 mxfp4",
    "0.33.0": "awq auto_awq fp8 fbgemm_fp8 fp_quant modelopt modelopt_fp4 modelopt_mxfp8 modelopt_mixed auto_gptq gptq "
    "gptq_marlin awq_marlin humming compressed-tensors experts_int8 quark moe_wna16 torchao inc mxfp4 gpt_oss_mxfp4 "
    "deepseek_v4_fp8 online fp8_per_tensor fp8_per_block fp8_per_channel int8_per_channel_weight_only nvfp4_per_token "
    "mxfp8",
}


@pytest.mark.parametrize("version", VLLM)
def test_every_name_of_vllm_is_known(version):
    assert [name for name in VLLM[version].split() if quantization_names.find(name) is None] == []


def test_names_that_vllm_dropped_are_marked():
    current = {name.replace("-", "_") for name in VLLM["0.33.0"].split()}
    assert {name for name, row in NAMES.items() if not row.gone} == current | {"weight_only_int8", "int8", "int4"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_leads_to_a_container_or_to_a_rounding(name):
    row = NAMES[name]
    assert row.containers or row.rounding
    assert row.rounding in (None, "int8", "fp8", "int4")
    read = {method for module in modules() for method in module.QUANT_METHODS} | set(DIALECTS)
    for container in row.containers:
        assert method_of({"quant_method": container}) == container, "readers spell it differently"
        assert container in read | unread_formats.METHODS.keys()


@pytest.mark.parametrize("spelled", ["GPTQ_Marlin", " gptq-marlin "])
def test_case_and_dashes_do_not_matter(spelled):
    assert quantization_names.find(spelled) is NAMES["gptq_marlin"]
    assert quantization_names.find("gptq_marlin2") is None
