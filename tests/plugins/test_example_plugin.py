"""What a package adds through entry points runs like what is built in: the same commands, the same tests."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from aiakq.kernels.ops import REGISTRIES
from aiakq.server.background import start_in_background

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("aiakq_example_plugin")
ARCHITECTURE = "ArceeForCausalLM"


def test_a_family_gives_the_tokens_of_transformers_and_counts_its_tensors(run_tests):
    suites = ["tests/runtime/engine/test_exactness.py", "tests/formats/test_inventory.py"]
    assert run_tests(*suites, "-k", ARCHITECTURE) == 2


def test_without_the_plugin_its_family_is_not_native(tiny_model, aiakq):
    folder = tiny_model(ARCHITECTURE)
    ended = aiakq("bench", "latency", str(folder), "--model-impl", "aiakq")
    assert ended.code == 3 and "ArceeForCausalLM is not supported" in ended.last


def test_messages_list_its_family(run, tiny_model):
    code = "from aiakq.runtime.models import FAMILIES; print(FAMILIES)"
    assert {"Arcee", "Llama"} <= set(run("-c", code).stdout.strip().split(", "))


def test_a_format_holds_what_the_formats_of_the_tree_hold(run_tests):
    """Writing and reading, bit for bit, and refusals, over the registry; weights drawn by hypothesis among them."""
    suites = ["tests/formats/test_layouts.py", "tests/formats/test_unusual_files.py", "tests/formats/test_fuzz.py"]
    cases = (
        "test_a_missing_tensor and unpacked or test_a_scale_of_zero and unpacked or test_write_then_read_is_bit_exact"
    )
    assert run_tests(*suites, "-k", cases) == 4


def test_a_kernel_of_linear_layers_gives_the_products_of_the_table(run_tests):
    assert run_tests("tests/kernels/ops/test_linear.py", "-k", "by_groups") == 16


@pytest.fixture(scope="module")
def quantized(run, example_model, heldout_text, tmp_path_factory) -> Path:
    """The example model, quantized by the plugin's method into the plugin's format."""
    folder = tmp_path_factory.mktemp("quantized")
    output, text = folder / "out", folder / "text.txt"
    text.write_text(heldout_text[:20_000])
    options = ["-quant_type", "trimmed_rtn", "--format", "unpacked", "-tp", "1", "-t", "fp16", "--eval-text", text]
    run("-m", "aiakq", "quantize", "-i", example_model, "-o", output, *options)
    return output


def test_a_method_quantizes_into_a_format_that_is_inspected(run, quantized):
    report = json.loads((quantized / "aiakq_report.json").read_text())
    assert (report["method"], report["format"]) == ("trimmed_rtn", "unpacked")
    # Four bits with a scale of 16 bits for 32 weights; perplexity would double if the files were misread.
    assert report["perplexity_after"] < 1.2 * report["perplexity_before"]
    tensors = load_file(quantized / "model.safetensors")
    codes, scales = (tensors[f"model.layers.0.self_attn.q_proj.{suffix}"] for suffix in ("codes", "scales"))
    assert codes.dtype == torch.uint8 and int(codes.max()) == 15
    weight = load_file(ROOT / "examples" / "tinybooks" / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ].float()
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1)
    assert torch.allclose(scales.float() * 7.5, 0.9 * largest, rtol=0.1)
    document = json.loads(run("-m", "aiakq", "inspect", quantized, "--json").stdout)
    assert document["quantization"]["format"] == "unpacked"


def test_its_output_is_served_with_a_route_of_the_plugin(plugin_folder, quantized, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(plugin_folder))
    arguments = {"model": str(quantized), "dtype": "float32", "num_gpu_blocks_override": 129}
    with (
        start_in_background(arguments, timeout=240) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
    ):
        text = "The whale"
        asked = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert http.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 8
        count = http.post("/count_tokens", json={"text": text}).json()["count"]
        assert count == len(http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"])
        token = http.post("/tokenize", json={"prompt": " the", "add_special_tokens": False}).json()["tokens"][0]
        banning = asked | {"logit_bias": {str(token): 100}, "vllm_xargs": {"ban": [token]}, "max_tokens": 1}
        for asked in (banning, banning | {"vllm_xargs": {}}):
            chosen = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
            assert (chosen == " the") == (not asked["vllm_xargs"])
        assert http.post("/ban_limit", json={"limit": 2}).status_code == 200
        refused = http.post("/count_tokens", json={"words": text})
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
        route = http.get("/openapi.json").json()["paths"]["/count_tokens"]["post"]
        assert route["summary"] == "The number of tokens of a text, without special tokens."
        assert "CountTokensRequest" in json.dumps(route["requestBody"])


def test_parsers_find_the_calls_and_the_reasoning_of_their_model(run):
    code = """
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS
parser = MessageParser(REASONING_PARSERS.load("brackets")(False), TOOL_PARSERS.load("shell")({}))
events = [event for piece in '((Hm.)) Well!\\n!f {"a": [1]}' for event in parser.feed(piece)] + parser.feed("", True)
message = message_of("assistant", events)
[call] = message.tool_calls
print(message.reasoning, message.content, call.function.name, call.function.arguments)
"""
    assert run("-c", code).stdout.strip() == 'Hm. Well! f {"a": [1]}'


def test_a_proposer_is_a_method_of_speculative_decoding(run, tiny_model):
    code = """
import sys
from aiakq import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias={5: 100})
outputs = []
for config in (None, {"method": "repeat", "num_speculative_tokens": 3}):
    llm = LLM(sys.argv[1], dtype="float32", speculative_config=config)
    outputs.append(llm.generate({"prompt_token_ids": [7, 8, 9]}, params, use_tqdm=False)[0].outputs[0].token_ids)
print(outputs[0] == outputs[1], llm.engine.stats.drafts.accepted > 10)
"""
    assert run("-c", code, tiny_model("LlamaForCausalLM")).stdout.split() == ["True", "True"]


def test_a_feature_changes_logits_limits_requests_and_has_a_command(run, tiny_model):
    code = """
import sys
from aiakq import LLM, SamplingParams
from aiakq.runtime.protocol.command import PluginCommand
llm = LLM(sys.argv[1], dtype="float32", max_num_seqs=4)
def params(**given):
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **given)
[free] = llm.generate({"prompt_token_ids": [7, 8, 9]}, params(), use_tqdm=False)
ban = sorted(set(free.outputs[0].token_ids))
inner, most = llm.engine.scheduler.schedule, []
def schedule(now):
    chunks = inner(now)
    most.append(len(chunks))
    return chunks
llm.engine.scheduler.schedule = schedule
for limit in (1, 3):
    llm.engine.step(0.0, [PluginCommand("bans", {"limit": limit})])
    most.clear()
    prompts = [{"prompt_token_ids": [7, 8, 9 + number]} for number in range(4)]
    found = llm.generate(prompts, params(extra_args={"ban": ban}), use_tqdm=False)
    print(max(most), any(set(one.outputs[0].token_ids) & set(ban) for one in found))
"""
    assert run("-c", code, tiny_model("LlamaForCausalLM")).stdout.split() == ["1", "False", "3", "False"]


def test_a_workload_is_measured_by_its_name(run, tiny_model):
    words = ["--workload", "shared-prefix", "--num-prompts", "6", "--input-len", "64", "--output-len", "3"]
    model = tiny_model("LlamaForCausalLM")
    engine = ["--dtype", "float32", "--block-size", "16", "--max-num-seqs", "1"]
    document = json.loads(run("-m", "aiakq", "bench", "throughput", model, *words, *engine).stdout)
    assert document["config"]["workload"] == "shared-prefix"
    assert (document["completed"], document["total_input_tokens"]) == (6, 6 * 64)
    assert document["prefix_cache"]["hits"] == 5 * 32 and document["warnings"] == []


def test_the_page_about_adding_things_names_every_registry_and_every_example():
    rows = [line for line in (ROOT / "docs" / "adding.md").read_text().splitlines() if line.startswith("|")]
    documented = {group for line in rows for group in re.findall(r"`(aiakq\.[a-z_.]+)`", line.split("|")[2])}
    sources = [*ROOT.glob("aiakq/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    declared = {group for path in sources for group in re.findall(r"= Registry\(\s*\"([a-z_.]+)\"", path.read_text())}
    assert documented == declared | {operation.group for operation in REGISTRIES.values()}
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert set(project["entry-points"]) <= documented
    examples = {file for line in rows for file in re.findall(r"`(\w+\.py)`", line.split("|")[5])}
    assert examples == {path.name for path in PLUGIN.glob("aiakq_example_plugin/*.py")} - {"__init__.py"}
